"""Faults that servers of this kind have had (B15 to B37), as a client meets them, where no other test has the input.

tests/API_RULES.md names the tests of all of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.metrics import Metrics
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client
from support.sse import events, joined_choices, post_stream
from support.tiny_tokenizer import write_byte_level

PATH = "/v1/completions"
QUIET = Settings(access_log=False)


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor(cells=20_000, max_sessions=128)


@pytest.fixture
def server(executor: ScriptedExecutor) -> Iterator[LiveServer]:
    with live_server(scripted_client(executor, max_num_seqs=128), QUIET) as live:
        yield live
        executor.release()


def test_b15_what_never_fits_is_a_400_and_the_next_request_runs() -> None:
    executor = ScriptedExecutor(cells=4096, max_session_tokens=16384)
    with live_server(scripted_client(executor, max_model_len=16384), QUIET) as server:
        for body in ({"prompt": [5] * 5000, "max_tokens": 1}, {"prompt": [5] * 4000, "max_tokens": 4000}):
            answer = server.http.post(PATH, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
            assert answer.headers["x-should-retry"] == "false"
        assert server.http.post(PATH, json={"prompt": [5] * 10, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"role": "user", "content": "x" * 27_000_000}], 413),
        ([{"role": "user", "content": "x" * 270}] * 100_000, 413),
        ([{"role": "user", "content": "x"}] * 100_000, 400),
    ],
)
def test_b29_a_huge_chat_is_refused_and_others_go_on(tmp_path: Any, messages: Any, status: int) -> None:
    tiny = write_byte_level(tmp_path)
    known = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size}
    executor = ScriptedExecutor(lambda prompt, generated, seed: 120)
    with live_server(scripted_client(executor, **known), QUIET) as server:
        executor.release(1)
        with server.http.stream("POST", PATH, json={"prompt": "q", "max_tokens": 9, "stream": True}) as bystander:
            executor.wait_held()
            with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as other:
                answer = other.post("/v1/chat/completions", content=json.dumps({"messages": messages}))
                assert answer.status_code == status
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert other.get("/health").status_code == 200
            executor.release()
            text = joined_choices(list(events(bystander.iter_lines())))[0]["text"]
        assert text == "x" * 9
        assert executor.opened == 1


def test_b34_books_and_gauges_are_right_when_everybody_has_gone_and_nobody_comes(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    executor.hold()
    opened = threading.Semaphore(0)
    leave = threading.Event()

    def come_and_go(number: int) -> None:
        body = {"prompt": [number, 5, 6], "max_tokens": 400, "stream": True}
        with (
            httpx.Client(base_url=server.url, trust_env=False, verify=False, timeout=20) as http,
            http.stream("POST", PATH, json=body) as answer,
        ):
            assert answer.status_code == 200
            next(answer.iter_raw())
            opened.release()
            leave.wait(20)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    until(lambda: server.call(lambda: server.app.state.serving.client.num_outstanding) == 100)
    executor.release(4)
    for _ in threads:
        assert opened.acquire(timeout=20)
    leave.set()
    for thread in threads:
        thread.join()
    # Before the engine goes on: it could come to the end of answers whose readers' leaving was not seen yet.
    until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == 100)
    executor.release()
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("cellserve:cells_cached") > 0
    assert not executor.sessions


class Broken:
    """A series that takes nothing."""

    def inc(self, amount: float = 1) -> None:
        raise ValueError("counters can only be incremented by non-negative amounts")

    def observe(self, amount: float) -> None:
        raise RuntimeError("the exporter is broken")


def test_b35_what_goes_wrong_in_the_metrics_is_counted_and_harms_no_answer(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "n": 2, "seed": 1, "return_token_ids": True}
    whole = server.http.post(PATH, json=body).json()["choices"]
    metrics: Metrics = server.app.state.metrics

    def spoil() -> None:
        for name in ("_prefix_hits", "_ttft", "_e2e", "_request_n", "_queue", "_http_duration"):
            setattr(metrics, name, Broken())

    before = server.metric("vllm:prefix_cache_hits_total")
    server.call(spoil)
    assert server.http.post(PATH, json=body).json()["choices"] == whole
    streamed = joined_choices(post_stream(server.http, PATH, body))
    assert [streamed[index]["token_ids"] for index in (0, 1)] == [choice["token_ids"] for choice in whole]
    assert server.metric("cellserve:metrics_errors_total") >= 8
    assert server.metric("vllm:prefix_cache_hits_total") == before
    assert caplog.text.count("first_token could not be written into the metrics") == 1
    assert server.call(lambda: server.app.state.serving.admission.in_use) == 0


def test_b35_a_difference_that_is_negative_is_not_counted() -> None:
    client = scripted_client()
    metrics = Metrics("m", client)
    metrics.prompt_looked_up(prompt_tokens=9, cached_tokens=-5)
    text = metrics.render().decode()
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0' in text
    assert 'cellserve:metrics_errors_total{engine="0",model_name="m"} 1.0' in text
