"""Ending a request from another connection, by any of its names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client
from support.sse import events

PATH = "/v1/completions"
KEYS = Settings(access_log=False, api_key="a,b")


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def server(executor: ScriptedExecutor) -> Iterator[LiveServer]:
    with live_server(scripted_client(executor), KEYS) as live:
        live.http.headers["Authorization"] = "Bearer a"
        yield live
        executor.release()


def cancel(server: LiveServer, name: str, key: str = "a") -> httpx.Response:
    return server.http.delete(f"/v1/requests/{name}", headers={"Authorization": f"Bearer {key}"})


def in_use(server: LiveServer) -> int:
    return server.call(lambda: int(server.app.state.serving.admission.in_use))


def test_a_waiting_caller_is_told_that_its_request_was_cancelled(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    executor.hold()
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": [5], "n": 2, "max_tokens": 400}
        answers.append(server.http.post(PATH, json=body, headers={"X-Request-Id": "mine"}))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: in_use(server) == 2)
    assert cancel(server, "mine").json() == {"id": "mine", "object": "request", "cancelled": True}
    executor.release()
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "request_cancelled")
    # The openai client would send a 409 again.
    assert answers[0].headers["x-should-retry"] == "false"
    assert in_use(server) == 0
    assert cancel(server, "mine").status_code == 404
    until(lambda: not executor.sessions)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_a_stream_is_cancelled_by_the_id_in_its_chunks(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.release(2)
    said: list[dict[str, Any]] = []
    with server.http.stream("POST", PATH, json={"prompt": [5], "max_tokens": 400, "stream": True}) as answer:
        for chunk in events(answer.iter_lines()):
            if not said:
                assert cancel(server, chunk["id"]).status_code == 200
                executor.release()
            said.append(chunk)
    assert said[-1]["error"]["code"] == "request_cancelled"
    assert len(said) < 10


def test_another_key_cannot_end_it_nor_learn_that_it_runs(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.hold()
    body = {"prompt": [5], "max_tokens": 3}
    answers: list[httpx.Response] = []
    headers = {"X-Request-Id": "mine"}
    thread = threading.Thread(target=lambda: answers.append(server.http.post(PATH, json=body, headers=headers)))
    thread.start()
    until(lambda: in_use(server) == 1)
    other = cancel(server, "mine", key="b")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "request_not_found")
    executor.release()
    thread.join()
    assert answers[0].status_code == 200


def test_no_name_is_kept_behind_its_request(server: LiveServer) -> None:
    for _ in range(3):
        assert server.http.post(PATH, json={"prompt": [5]}).status_code == 200
    assert server.call(lambda: server.app.state.serving.running._by_name) == {}
