"""The live view's stream: what it says, whom it serves, and that it costs nothing while nobody looks."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from engine.view import FIRST_SESSION
from server.live import MAX_VIEWERS
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client

PROMPT = [5, 6, 7, 8]


class CountingExecutor(ScriptedExecutor):
    """Knows how often its pool was drawn."""

    looks = 0

    def cell_references(self) -> Any:
        self.looks += 1
        return super().cell_references()


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor(cells=256)


@pytest.fixture
def server(executor: CountingExecutor) -> Iterator[LiveServer]:
    with live_server(scripted_client(executor), Settings(access_log=False)) as server:
        yield server


def frames(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def codes(frame: dict[str, Any]) -> list[int]:
    raw = base64.b64decode(frame["cells"]["codes"])
    return list(struct.unpack(f"<{len(raw) // 2}H", raw))


def viewers(server: LiveServer) -> int:
    return server.call(lambda: server.app.state.live.num_viewers)


def wait_asked(server: LiveServer) -> None:
    """Until the engine has a question that it will find behind its frozen step."""
    until(lambda: server.call(lambda: bool(server.app.state.live._client._questions._open)))


def test_frames_tell_of_cells_sessions_and_steps(server: LiveServer, executor: CountingExecutor) -> None:
    executor.release(3)
    with ExitStack() as open_streams:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        open_streams.enter_context(server.http.stream("POST", "/v1/completions", json=body))
        executor.wait_held()
        looking = open_streams.enter_context(server.http.stream("GET", "/v1/live"))
        assert looking.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert looking.headers["cache-control"] == "no-store"
        wait_asked(server)
        executor.release(2)
        coming = frames(looking)
        frame = next(coming)
        assert frame["cells"]["total"] == 256
        own = frame["cells"]["private"]
        assert codes(frame)[:own] == [FIRST_SESSION] * own
        [[_, prompt_tokens, cached_tokens, computed_tokens, generated_tokens, is_decoding]] = frame["sessions"]
        assert (prompt_tokens, cached_tokens, is_decoding) == (4, 0, True)
        assert computed_tokens == own == prompt_tokens + generated_tokens - 1
        first = frame["steps"][0]
        assert (first["number"], first["counts"], first["decodes"]) == (1, [4], 0)
        assert first["forwards"] == [["forward_others", 4, 4]]
        executor.release()
        later = next(coming)
        assert {step["number"] for step in later["steps"]}.isdisjoint(step["number"] for step in frame["steps"])
        assert later["at"] > frame["at"]


def whole_numbers(value: object) -> Iterator[int]:
    """All that a frame holds, but for times: their digits are any."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from whole_numbers(each)
    elif isinstance(value, int):
        yield value


def test_no_token_and_no_name_of_a_caller_is_told(server: LiveServer, executor: CountingExecutor) -> None:
    executor.release(1)
    with ExitStack() as open_streams:
        body = {"prompt": [977, 978, 979], "max_tokens": 9, "stream": True, "user": "mallory"}
        headers = {"X-Request-Id": "an-id-of-mine"}
        open_streams.enter_context(server.http.stream("POST", "/v1/completions", json=body, headers=headers))
        executor.wait_held()
        looking = open_streams.enter_context(server.http.stream("GET", "/v1/live"))
        wait_asked(server)
        executor.release(1)
        frame = next(frames(looking))
        executor.release()
    assert len(frame["sessions"]) == 1
    assert not {977, 978, 979}.intersection(whole_numbers(frame))
    assert not any(secret in json.dumps(frame) for secret in ("mallory", "an-id-of-mine"))


def test_the_engine_is_asked_only_while_somebody_looks(server: LiveServer, executor: CountingExecutor) -> None:
    server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50}).raise_for_status()
    assert executor.looks == 0
    with server.http.stream("GET", "/v1/live") as first, server.http.stream("GET", "/v1/live") as second:
        both = frames(first), frames(second)
        assert all(next(coming)["cells"] for coming in both)
        assert viewers(server) == 2
    until(lambda: viewers(server) == 0)
    until(lambda: server.call(lambda: server.app.state.live._asking) is None)
    looks = executor.looks
    server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50}).raise_for_status()
    assert executor.looks == looks


def test_too_many_viewers_are_refused(server: LiveServer) -> None:
    with ExitStack() as open_streams:
        http = open_streams.enter_context(
            httpx.Client(base_url=server.url, timeout=20, trust_env=False, limits=httpx.Limits(max_connections=64))
        )
        looking = [frames(open_streams.enter_context(http.stream("GET", "/v1/live"))) for _ in range(MAX_VIEWERS)]
        assert all(next(coming)["cells"] for coming in looking)
        refused = http.get("/v1/live")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert "Retry-After" in refused.headers
    until(lambda: viewers(server) == 0)
    with server.http.stream("GET", "/v1/live") as again:
        next(frames(again))


def test_the_stream_ends_with_an_engine_that_dies_unanswered(server: LiveServer, executor: CountingExecutor) -> None:
    executor.release(1)
    executor.fail_step(2, MemoryError("the device is gone"))
    with ExitStack() as open_streams:
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        open_streams.enter_context(server.http.stream("POST", "/v1/completions", json=body))
        executor.wait_held()
        looking = open_streams.enter_context(server.http.stream("GET", "/v1/live"))
        wait_asked(server)
        executor.release()
        assert list(frames(looking)) == []
    until(lambda: viewers(server) == 0)


def test_a_draining_server_waits_for_no_viewer(server: LiveServer, executor: CountingExecutor) -> None:
    with server.http.stream("GET", "/v1/live") as watched:
        coming = frames(watched)
        next(coming)
        server.run(server.app.state.lifecycle.drain(0))
        for _ in coming:
            pass


def test_the_view_is_behind_the_key() -> None:
    with live_server(scripted_client(), Settings(access_log=False, api_key=(SecretStr("first"),))) as server:
        assert server.http.get("/v1/live").status_code == 401
        with server.http.stream("GET", "/v1/live", headers={"Authorization": "Bearer first"}) as watched:
            next(frames(watched))
