"""Engines that hang or die under a server: ended, followed by another one, and when that is no use, the end of it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from test_server_probes import SilentClient, silent_client

from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.types import EngineInfo, EngineStats
from server import errors
from server.answers import Told
from server.errors import ApiError
from server.generation import News
from server.lifecycle import Lifecycle, Patience
from server.settings import Settings
from support.live_server import TIMEOUT_S, LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client
from support.scripted_server import ServerProcess
from support.sse import events
from support.tiny_tokenizer import write_byte_level

HASTY: dict[str, Any] = {"access_log": False, "step_timeout": 0.5, "warm_up_timeout": 0.5}
PATH = "/v1/completions"


@contextmanager
def scene(name: str, **options: Any) -> Iterator[tuple[LiveServer, ProcessClient]]:
    """A server in this process over a scripted engine in its own."""
    client = ProcessClient(EngineConfig(model=name), module="support.scripted_process")
    with live_server(client, Settings(**(HASTY | options))) as server:
        yield server, client


def in_background(call: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
    """Start it, and return what waits for its result."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()

    def result() -> httpx.Response:
        thread.join(TIMEOUT_S)
        return answers[0]

    return result


def test_r15_g10_a_step_that_hangs_ends_the_engine_and_another_one_takes_over() -> None:
    """Until then /health says 503 from the progress clock; who was told nothing gets the same answer a little later."""
    with scene("hang-once") as (server, client):
        first_pid = client.pid
        answer = in_background(lambda: server.http.post(PATH, json={"prompt": [5], "max_tokens": 4, "seed": 1}))
        until(lambda: server.http.get("/health").status_code == 503)
        until(lambda: server.metric("cellserve:engine_hung_total") == 1)
        assert answer().json()["choices"][0]["finish_reason"] == "length"
        assert client.pid != first_pid
        assert server.http.get("/health").status_code == 200
        assert server.metric("cellserve:engine_restarts_total") == 1


def test_r15_a_stopped_engine_process_is_a_hung_one() -> None:
    with scene("plain") as (server, client):
        assert server.http.post(PATH, json={"prompt": [5]}).status_code == 200
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        answer = server.http.post(PATH, json={"prompt": [5], "max_tokens": 2, "return_token_ids": True})
        assert answer.json()["choices"][0]["token_ids"] == [6, 7]
        assert server.metric("cellserve:engine_hung_total") == 1


def test_a_stream_that_was_told_something_gets_an_error_event_and_the_books_balance() -> None:
    with scene("hang") as (server, client):
        body = {"prompt": [5], "max_tokens": 50, "stream": True, "return_token_ids": True}
        with server.http.stream("POST", PATH, json=body) as answer:
            assert client.pid is not None
            told = []
            for event in events(answer.iter_lines()):
                if not told:
                    os.kill(client.pid, signal.SIGKILL)
                told.append(event)
        assert told[0]["choices"][0]["token_ids"] == [6]
        assert told[-1]["error"]["code"] == "engine_unavailable"
        assert [event for event in told[1:-1] if "error" in event] == []
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.metric("vllm:request_success_total", finished_reason="error") == 1
        assert server.metric("cellserve:choices_started_total") == 1


def test_steps_that_may_compile_are_given_their_time_and_later_ones_are_not() -> None:
    async def nothing(info: EngineInfo) -> None: ...

    patience = Patience(step_s=30.0, warm_up_s=300.0)
    for steps, silence_s, is_stalled, is_hung in (
        (0, 299.0, False, False),
        (15, 301.0, True, True),
        (16, 21.0, True, False),
        (16, 31.0, True, True),
    ):
        client = silent_client(silence_s)
        client.steps = steps
        lifecycle = Lifecycle(client, nothing, patience)
        assert lifecycle.is_stalled() is is_stalled
        assert lifecycle.is_hung() is is_hung


def test_a_machine_whose_steps_are_slow_is_not_taken_for_a_hung_one() -> None:
    async def nothing(info: EngineInfo) -> None: ...

    client = silent_client(100.0)
    lifecycle = Lifecycle(client, nothing, Patience(step_s=30.0))
    lifecycle.step_times.observe(EngineStats(steps=20, step_time_s=20 * 11.0))
    assert not lifecycle.is_hung()


def test_an_engine_that_is_only_loading_is_never_ended_for_it() -> None:
    client: SilentClient = silent_client(0.0)

    async def nothing(info: EngineInfo) -> None: ...

    assert client.phase.name == "starting"
    assert not Lifecycle(client, nothing, Patience(step_s=0.001, warm_up_s=0.001)).is_hung()


def test_restarts_are_counted_and_the_process_ends_with_a_line_that_says_why() -> None:
    with ServerProcess("die-in-every-step", "--max-restarts", "1") as server:
        server.ready_line()
        answer = server.complete(prompt=[5])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        code, output, complaint = server.ended()
    assert (code, output) == (3, "")
    last = complaint.strip().splitlines()[-1]
    assert last.startswith("cellserve: the engine stopped 2 times within 600 s, and --max-restarts is 1: no other one")
    assert "SIGKILL" in last
    assert "Traceback" not in complaint


def test_deaths_outside_the_window_are_forgotten() -> None:
    with scene("die-in-every-step", max_restarts=1, restart_window=0.001) as (server, _):
        for _ in range(3):
            assert server.http.post(PATH, json={"prompt": [5]}).status_code == 503
            until(lambda: server.http.get("/ready").status_code == 200)


def test_while_it_drains_it_says_how_far_it_is() -> None:
    executor = ScriptedExecutor()
    with live_server(scripted_client(executor), Settings(access_log=False)) as server:
        executor.hold()
        answer = in_background(lambda: server.http.post(PATH, json={"prompt": [5], "n": 2, "max_tokens": 3, "seed": 1}))
        executor.wait_held()
        draining = threading.Thread(target=lambda: server.run(server.app.state.lifecycle.drain(10)))
        draining.start()
        until(lambda: server.http.get("/ready").status_code == 503)
        body = server.http.get("/ready").json()
        assert (body["phase"], body["done"], body["of"]) == ("draining", 0, 2)
        executor.release()
        assert answer().status_code == 200
        draining.join(TIMEOUT_S)
        assert server.http.get("/ready").json()["done"] == 2


@pytest.mark.parametrize(("own", "limit"), [(None, 0.05), (0.05, 600.0), (600.0, 0.05)])
def test_a_request_has_its_own_deadline_or_the_servers_whichever_is_shorter(own: float | None, limit: float) -> None:
    executor = ScriptedExecutor()
    executor.hold()
    with live_server(scripted_client(executor), Settings(access_log=False, request_timeout=limit)) as server:
        body = {"prompt": [5], "max_tokens": 400} | ({} if own is None else {"timeout": own})
        answer = in_background(lambda: server.http.post(PATH, json=body))
        executor.wait_held()
        threading.Event().wait(0.06)  # the deadline itself, not a wait for something
        executor.release()
        assert (answer().status_code, answer().json()["error"]["code"]) == (504, "deadline_exceeded")


def test_requests_that_wait_for_the_next_engine_end_with_a_drain() -> None:
    with ServerProcess("die-in-every-step", "--max-restarts", "50", "--drain-timeout", "30") as server:
        server.ready_line()
        answers = [server.complete_later(prompt=[5 + index], max_tokens=3) for index in range(8)]
        server.wait_for_stderr("starts again")
        server.signal(signal.SIGTERM)
        assert all(answer.result().status_code == 503 for answer in answers)
        assert server.ended()[0] == 0


def test_what_the_next_engine_takes_over_can_still_be_ended_by_its_name() -> None:
    """Slots, names and limits of requests outlive the engine that they came with."""
    with scene("hang-once") as (server, _):
        before = server.call(lambda: server.app.state.serving.running)
        headers = {"X-Request-Id": "mine"}
        body = {"prompt": [5], "max_tokens": 90_000}
        answer = in_background(lambda: server.http.post(PATH, json=body, headers=headers))
        until(lambda: server.metric("cellserve:requests_rerun_total") == 1)
        until(lambda: server.http.get("/ready").status_code == 200)  # a turn of the loop behind it
        assert server.call(lambda: server.app.state.serving.running) is before
        assert server.http.delete("/v1/requests/mine").status_code == 200
        assert (answer().status_code, answer().json()["error"]["code"]) == (409, "request_cancelled")
        until(lambda: server.call(lambda: server.app.state.serving.admission.in_use) == 0)


def test_an_engine_in_this_process_that_hangs_ends_the_server_by_name() -> None:
    """A thread cannot be ended: what waits for it is told, and there is nothing to start anew."""
    executor = ScriptedExecutor()
    with live_server(scripted_client(executor), Settings(**HASTY, max_restarts=0)) as server:
        executor.hold()
        answer = server.http.post(PATH, json={"prompt": [5]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        said = str(server.run(server.app.state.lifecycle.wait_given_up()))
        assert re.search(r"no step has finished for \d\.\d s", said)
        executor.release()
        assert json.loads(server.http.get("/health").text)["error"]["code"] == "engine_unavailable"


def test_an_engine_that_hangs_does_not_hold_up_a_drain() -> None:
    with scene("hang") as (server, _):
        answer = in_background(lambda: server.http.post(PATH, json={"prompt": [5], "max_tokens": 50}))
        until(lambda: server.metric("cellserve:choices_started_total") == 1)
        server.run(server.app.state.lifecycle.drain(600))
        assert (answer().status_code, answer().json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize(
    ("path", "body"), [(PATH, {"prompt": "x" * 9000, "max_tokens": 2}), ("/v1/embeddings", {"input": "x" * 9000})]
)
def test_f24_a_tokenizer_that_hangs_is_within_the_requests_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    tiny = write_byte_level(tmp_path)
    client = scripted_client(tokenizer_dir=str(tmp_path), vocab_size=tiny.vocab_size, max_model_len=512)
    is_over = threading.Event()
    monkeypatch.setattr(
        "server.faults.time", SimpleNamespace(time=time.time, sleep=lambda s: is_over.wait(2 * TIMEOUT_S))
    )
    with live_server(client, Settings(access_log=False, request_timeout=0.3, test_faults=True)) as server:
        armed = server.http.post("/test/faults", json={"point": "api.tokenizer.slow", "s": 1})
        assert armed.status_code == 200
        answer = server.http.post(path, json=body | {"truncate_prompt_tokens": 8})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert server.call(lambda: server.app.state.serving.admission.in_use) == 0
        is_over.set()
        assert server.http.post(path, json=body | {"truncate_prompt_tokens": 8}).status_code == 200


class FailsBehindASilentChoice:
    """A generation whose first news make no text and whose second are a failure: both come in one look."""

    def __init__(self, *held_back: str) -> None:
        self.choices = [SilentChoice(text) for text in held_back]
        self.is_over = False
        self._news = iter([[SilentChoice("")]])

    def told_update(self) -> list[SilentChoice]:
        for news in self._news:
            return news
        raise errors.engine_unavailable()

    def when_news(self, call: Callable[[], None]) -> None: ...

    def commit(self) -> None: ...


class SilentChoice:
    index = 1
    is_worth_telling = False

    def __init__(self, held_back: str) -> None:
        self.news = News()
        self.news.text = held_back

    def take(self) -> News:
        return self.news


def told_of(generation: FailsBehindASilentChoice) -> Told:
    return Told(generation, lambda choice: b"", lambda choice, news: news.text.encode(), None)  # type: ignore[arg-type]


def test_a_failure_behind_news_that_make_no_text_is_told_at_once() -> None:
    """Nothing else would come that could bring it out: the client would wait for ever."""
    with pytest.raises(ApiError):
        told_of(FailsBehindASilentChoice()).take()


def test_a_failure_behind_what_was_held_back_waits_for_no_news() -> None:
    """Whoever writes as news come must know that there is something left to take."""
    frames = told_of(FailsBehindASilentChoice("a tail"))
    assert (frames.take(), frames.is_over) == (b"a tail", True)
    with pytest.raises(ApiError):
        frames.take()
