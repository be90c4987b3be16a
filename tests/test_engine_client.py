"""The client in process: admission, streams, cancelling, draining, an engine that dies. Real threads, no model."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.client import EngineClient, InProcessClient, RequestStream
from engine.errors import (
    ConfigError,
    Draining,
    EngineUnavailable,
    ModelError,
    QueueFull,
    RequestRefused,
    RequestTooLarge,
    RequestTooLong,
)
from engine.streams import TAKEN_TOKENS
from engine.thread import run_engine
from engine.types import SamplingParams, TokenLogprobs, Update
from engine.wire import FromEngine, Ready, Step, Stop, Submit, ToEngine
from support.running import TIMEOUT_S, asyncio_test, read, request
from support.scripted import ScriptedExecutor, from_script, scripted_client, scripted_info, scripted_loop


@asynccontextmanager
async def ready(client: EngineClient) -> AsyncIterator[EngineClient]:
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


async def held(executor: ScriptedExecutor) -> None:
    await asyncio.to_thread(executor.wait_held)


# --- answers


@asyncio_test
@pytest.mark.parametrize("overlaps", [False, True])
async def test_a_request_gets_its_tokens_in_order_and_ends_once(overlaps: bool) -> None:
    """RUN-8."""
    executor = ScriptedExecutor(overlaps=overlaps)
    async with ready(scripted_client(executor)) as client:
        answer = (await read(client.submit(request(prompt=(5, 6)))))[0]
        assert answer.token_ids == (7, 8, 9, 10)
        assert answer.finish == "length"
        assert client.num_outstanding == 0
        assert client.stats.generated_tokens == 4
    assert executor.opened == executor.closed == 1
    assert executor.session_cells == 0


@asyncio_test
async def test_every_choice_of_a_request_ends_once() -> None:
    """RUN-24."""
    executor = ScriptedExecutor(lambda prompt, generated, seed: 100 * seed + len(generated))
    async with ready(scripted_client(executor)) as client:
        choices = await read(client.submit(request(n=3, sampling=SamplingParams(seed=1))))
        assert {index: choice.token_ids for index, choice in choices.items()} == {
            0: (100, 101, 102, 103),
            1: (200, 201, 202, 203),
            2: (300, 301, 302, 303),
        }
        assert client.num_outstanding == 0
    assert executor.session_cells == 0


@asyncio_test
async def test_a_stop_token_ends_a_choice_and_is_named() -> None:
    executor = ScriptedExecutor(from_script({(5,): (11, 12, 0)}))
    async with ready(scripted_client(executor)) as client:
        stop = SamplingParams(stop_token_ids=(0,))
        answer = (await read(client.submit(request(sampling=stop, max_new_tokens=9))))[0]
        assert (answer.token_ids, answer.finish, answer.stop_token_id) == ((11, 12, 0), "stop", 0)


@asyncio_test
async def test_many_requests_at_once_keep_their_news_apart() -> None:
    async with ready(scripted_client(max_waiting=100)) as client:
        streams = [client.submit(request(f"r{i}", (10 * i + 1,))) for i in range(40)]
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        assert [answer[0].token_ids for answer in answers] == [
            tuple(10 * i + k for k in (2, 3, 4, 5)) for i in range(40)
        ]


@asyncio_test
async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    executor = ScriptedExecutor()
    executor.fail_steps_with((9,))
    async with ready(scripted_client(executor)) as client:
        failed = (await read(client.submit(request("a", (9,)))))[0]
        assert (failed.token_ids, failed.finish, failed.error_code) == ((), "failed", "step_failed")
        assert (await read(client.submit(request("b"))))[0].finish == "length"
        assert client.stats.steps_failed == 2, "the second time alone"
        assert client.phase.name == "ready"


@asyncio_test
async def test_one_poisoned_session_leaves_its_neighbours_alone() -> None:
    executor = ScriptedExecutor()
    executor.fail_session((9, 9))
    executor.hold()
    async with ready(scripted_client(executor)) as client:
        streams = [client.submit(request("good", (5,))), client.submit(request("bad", (9, 9)))]
        executor.release()
        good, bad = await asyncio.gather(*(read(stream) for stream in streams))
        assert good[0].token_ids == (6, 7, 8, 9)
        assert bad[0].finish == "failed"


# --- streams


def no_cancel(request_id: str, index: int | None) -> None:
    raise AssertionError("nobody cancelled")


@asyncio_test
async def test_what_a_slow_reader_missed_is_one_update_a_choice() -> None:
    stream = RequestStream("r", 2, no_cancel)
    for token in range(1000):
        stream.push(
            Update("r", 0, (token,), logprobs=(TokenLogprobs(token, -1.0),), cached_tokens=3 if token == 0 else None)
        )
        stream.push(Update("r", 1, (token,)))
    stream.push(Update("r", 0, (1000,), logprobs=(TokenLogprobs(1000, -1.0),), finish="stop", stop_token_id=1000))
    stream.push(Update("r", 1, finish="failed", error="late", error_code="step_failed"))
    first, second = [update async for update in stream]
    assert first.token_ids == tuple(range(1001))
    assert first.logprobs is not None
    assert [entry.token_id for entry in first.logprobs] == list(range(1001))
    assert (first.cached_tokens, first.finish, first.stop_token_id) == (3, "stop", 1000)
    assert second == Update("r", 1, tuple(range(1000)), finish="failed", error="late", error_code="step_failed")


@asyncio_test
async def test_a_choice_that_has_ended_takes_no_more_news() -> None:
    """RUN-26."""
    stream = RequestStream("r", 1, no_cancel)
    assert stream.push(Update("r", 0, (1,), finish="length"))
    assert not stream.push(Update("r", 0, (2,), finish="cancelled"))
    assert [update.token_ids async for update in stream] == [(1,)]


@asyncio_test
async def test_a_wait_that_times_out_loses_nothing() -> None:
    stream = RequestStream("r", 1, no_cancel)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    stream.push(Update("r", 0, (1,), finish="length"))
    assert (await anext(stream)).token_ids == (1,)


@asyncio_test
async def test_leaving_a_finished_stream_cancels_nothing() -> None:
    async with RequestStream("r", 1, no_cancel) as stream:
        stream.push(Update("r", 0, (1,), finish="length"))


@asyncio_test
async def test_a_reader_wakes_when_its_stream_is_left_by_another_task() -> None:
    stream = RequestStream("r", 1, lambda request_id, index: None)
    reader = asyncio.create_task(read_ids(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader == []


async def read_ids(stream: RequestStream) -> list[int]:
    return [token async for update in stream for token in update.token_ids]


# --- cancelling


@asyncio_test
async def test_leaving_a_stream_early_frees_its_cells_behind_the_step_in_flight() -> None:
    """RUN-5."""
    executor = ScriptedExecutor()
    async with ready(scripted_client(executor)) as client:
        executor.release(1)
        async with client.submit(request("left", max_new_tokens=400)) as stream:
            assert (await anext(stream)).token_ids == (6,)
            await held(executor)
        launched = len(executor.batches)
        executor.release()
        assert (await read(client.submit(request("next", (50,)))))[0].token_ids == (51, 52, 53, 54)
        assert all(chunk.session_id != 1 for batch in executor.batches[launched:] for chunk in batch.chunks)
        assert client.num_outstanding == 0
    assert executor.session_cells == 0


@asyncio_test
async def test_a_cancelled_request_ends_once_for_every_choice_however_often_it_is_cancelled() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    async with ready(scripted_client(executor)) as client:
        stream = client.submit(request(n=3))
        await held(executor)
        for _ in range(3):
            stream.cancel()
            client.cancel("r")
        executor.release()
        choices = await read(stream)
        assert [choices[index].finish for index in range(3)] == ["cancelled"] * 3
        client.cancel("r")
        client.cancel("never seen")


@asyncio_test
async def test_one_choice_can_be_cancelled_and_the_others_go_on() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    async with ready(scripted_client(executor)) as client:
        stream = client.submit(request(n=3))
        await held(executor)
        for _ in range(3):
            stream.cancel(1)
        client.cancel("r", 9)
        executor.release()
        choices = await read(stream)
        assert [choices[index].finish for index in range(3)] == ["length", "cancelled", "length"]
        client.cancel("r", 0)
    assert executor.session_cells == 0


@asyncio_test
async def test_a_request_that_still_waits_can_be_cancelled() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    async with ready(scripted_client(executor, max_num_seqs=1)) as client:
        running, waiting = client.submit(request("a")), client.submit(request("b"))
        await held(executor)
        waiting.cancel()
        executor.release()
        assert (await read(waiting))[0] == Update("b", finish="cancelled", cached_tokens=0)
        assert (await read(running))[0].finish == "length"
    assert executor.opened == 1


@asyncio_test
async def test_a_task_that_is_cancelled_inside_a_stream_cancels_the_request() -> None:
    """RUN-28."""
    executor = ScriptedExecutor()

    async def consume(client: EngineClient) -> None:
        async with client.submit(request(max_new_tokens=400)) as stream:
            async for _ in stream:
                pass

    async with ready(scripted_client(executor)) as client:
        executor.release(2)
        task = asyncio.create_task(consume(client))
        await asyncio.sleep(0)
        await held(executor)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        executor.release()
        await read(client.submit(request("next")))
        assert client.num_outstanding == 0


# --- admission


@asyncio_test
async def test_a_request_that_can_never_run_is_refused_and_leaves_no_trace() -> None:
    """RUN-9, RUN-10."""
    executor = ScriptedExecutor(cells=100)
    async with ready(scripted_client(executor, max_model_len=200, max_num_seqs=4)) as client:
        for impossible, error in [
            (request(prompt=(1,) * 150, max_new_tokens=51), RequestTooLong),
            (request(prompt=(1,) * 90, max_new_tokens=11), RequestTooLarge),
            (request(n=5), RequestTooLarge),
            (request(prompt=()), RequestTooLarge),
        ]:
            with pytest.raises(error):
                client.submit(impossible)
        assert client.num_outstanding == 0
        assert (await read(client.submit(request())))[0].finish == "length"
    assert executor.opened == 1


@asyncio_test
async def test_the_queue_is_bounded_in_choices_and_opens_again_when_some_end() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    async with ready(scripted_client(executor, max_num_seqs=2, max_waiting=1)) as client:
        first = client.submit(request("a", n=2))
        with pytest.raises(QueueFull, match="2 of 3 sequences are running or queued: 2 more do not fit"):
            client.submit(request("b", n=2))
        second = client.submit(request("c"))
        with pytest.raises(QueueFull):
            client.submit(request("d"))
        executor.release()
        await asyncio.gather(read(first), read(second))
        assert (await read(client.submit(request("e", n=2))))[1].finish == "length"


@asyncio_test
async def test_work_without_a_sign_of_life_is_a_stall_and_idleness_is_not() -> None:
    executor = ScriptedExecutor()
    async with ready(scripted_client(executor)) as client:
        assert client.stalled_s == 0.0
        executor.hold()
        stream = client.submit(request())
        await held(executor)
        before = client.stalled_s
        assert 0.0 < before < client.stalled_s < TIMEOUT_S
        executor.release()
        await read(stream)
        assert client.stalled_s == 0.0


@asyncio_test
async def test_a_request_behind_a_long_silence_is_no_stall_from_its_start() -> None:
    executor = ScriptedExecutor()
    async with ready(scripted_client(executor)) as client:
        await read(client.submit(request("a")))
        executor.hold()
        submitted_s = time.monotonic()
        stream = client.submit(request("b"))
        assert client.stalled_s <= time.monotonic() - submitted_s
        executor.release()
        await read(stream)


# --- the engine thread


class ScriptedInbox:
    """Hands out `letters` one take at a time, and notes which takes were ready to sleep."""

    def __init__(self, *letters: list[ToEngine]) -> None:
        self._letters = list(letters)
        self.waits: list[bool] = []

    def take(self, *, wait: bool) -> list[ToEngine]:
        self.waits.append(wait)
        if not wait and len(self._letters) == 1:
            return []  # the last letter waits until there is nothing to do
        return self._letters.pop(0)


def test_the_engine_thread_sleeps_when_there_is_nothing_to_do_and_sends_once_a_step() -> None:
    """SCH-10, RUN-1, RUN-2."""
    executor, info, sent = ScriptedExecutor(), scripted_info(), list[FromEngine]()
    inbox = ScriptedInbox([Submit(request(max_new_tokens=2)), Submit(request("s", max_new_tokens=3))], [], [Stop()])
    assert run_engine(lambda progress: (scripted_loop(executor, info), info), inbox, sent.append)
    assert inbox.waits == [True, False, False, True]
    assert [type(message) for message in sent] == [Ready, Step, Step, Step]
    assert [len(message.updates) for message in sent if isinstance(message, Step)] == [2, 2, 1]


# --- start


@asyncio_test
async def test_a_start_tells_how_far_it_is_and_refuses_until_it_is_there() -> None:
    """RUN-3."""
    go_on = threading.Event()
    seen = asyncio.Event()
    asyncio_loop = asyncio.get_running_loop()
    info = scripted_info()

    def build(progress: Callable[[str, int, int], None]) -> Any:
        progress("reading weights", 3, 7)
        asyncio_loop.call_soon_threadsafe(seen.set)
        assert go_on.wait(TIMEOUT_S)
        return scripted_loop(ScriptedExecutor(), info), info

    client = InProcessClient(build)
    with pytest.raises(EngineUnavailable, match="loading"):
        client.submit(request())
    await client.start()
    await seen.wait()
    phase = client.phase
    assert (phase.name, phase.text, phase.done, phase.of) == ("starting", "reading weights", 3, 7)
    with pytest.raises(EngineUnavailable, match="loading"):
        client.submit(request())
    with pytest.raises(EngineUnavailable):
        _ = client.info
    go_on.set()
    assert await client.wait_ready() == client.info == info
    assert client.phase.name == "ready"
    await client.close()


@asyncio_test
@pytest.mark.parametrize("error", [ConfigError("two and two"), ModelError("no such model")])
async def test_a_load_that_is_refused_says_so_in_its_own_words(error: Exception) -> None:
    def build(progress: Callable[[str, int, int], None]) -> Any:
        raise error

    client = InProcessClient(build)
    await client.start()
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            await client.wait_ready()
    assert (client.phase.name, client.phase.reason) == ("dead", str(error))
    with pytest.raises(EngineUnavailable):
        client.submit(request())
    await client.close()


@asyncio_test
async def test_a_load_that_crashes_is_an_engine_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """RUN-3."""

    def build(progress: Callable[[str, int, int], None]) -> Any:
        raise ZeroDivisionError("by zero")

    client = InProcessClient(build)
    with caplog.at_level(logging.CRITICAL):
        await client.start()
        with pytest.raises(EngineUnavailable, match="ZeroDivisionError: by zero"):
            await client.wait_ready()
    await client.close()


# --- death and end


@asyncio_test
async def test_an_engine_that_dies_fails_every_open_stream_once_and_can_be_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = ScriptedExecutor()
    executor.fail_step(2, MemoryError("the device is gone"))
    client = scripted_client(executor)
    async with ready(client):
        streams = [client.submit(request("a", n=2)), client.submit(request("b"))]
        choices = [choice for stream in streams for choice in (await read(stream)).values()]
        assert [(choice.finish, choice.error_code) for choice in choices] == [("failed", "engine_unavailable")] * 3
        assert all(choice.error == "the engine has stopped" for choice in choices)
        assert client.phase.name == "dead"
        assert client.phase.reason == "a step failed with MemoryError: the device is gone"
        assert client.num_outstanding == 0
        with pytest.raises(EngineUnavailable, match="has stopped"):
            client.submit(request("c"))
        assert "the device is gone" in caplog.text
        await client.start()
        await client.wait_ready()
        assert (await read(client.submit(request("d"))))[0].finish == "length"


@asyncio_test
async def test_a_drain_refuses_new_requests_and_lets_the_running_ones_finish() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    client = scripted_client(executor)
    async with ready(client):
        stream = client.submit(request())
        await held(executor)
        closing = asyncio.create_task(client.close(drain_s=TIMEOUT_S))
        await asyncio.sleep(0)
        assert client.phase.name == "draining"
        with pytest.raises(Draining):
            client.submit(request("late"))
        executor.release()
        assert (await read(stream))[0].finish == "length"
        await closing
        assert (client.phase.name, client.phase.reason) == ("dead", "shut down")
        with pytest.raises(EngineUnavailable):
            client.submit(request("later"))
        with pytest.raises(EngineUnavailable):
            await client.start()


@asyncio_test
async def test_what_a_drain_does_not_reach_fails_with_a_word_about_it() -> None:
    """RUN-6."""
    executor = ScriptedExecutor()
    client = scripted_client(executor)
    async with ready(client):
        executor.release(1)
        stream = client.submit(request(n=2))
        await held(executor)
        closing = asyncio.create_task(client.close(drain_s=0.0))
        choices = await read(stream)
        assert {choice.error_code for choice in choices.values()} == {"shutting_down"}
        executor.release()
        await closing


@asyncio_test
async def test_a_second_close_cuts_a_long_drain_short() -> None:
    """RUN-6."""
    executor = ScriptedExecutor()
    executor.hold()
    client = scripted_client(executor)
    async with ready(client):
        stream = client.submit(request())
        await held(executor)
        patient = asyncio.create_task(client.close(drain_s=3600.0))
        await asyncio.sleep(0)
        hasty = asyncio.create_task(client.close(drain_s=0.0))
        assert (await read(stream))[0].error_code == "shutting_down"
        executor.release()
        await asyncio.gather(patient, hasty)


@asyncio_test
async def test_a_client_that_never_started_closes() -> None:
    client = scripted_client()
    await client.close(drain_s=TIMEOUT_S)
    with pytest.raises(RequestRefused):
        client.submit(request())
    with pytest.raises(EngineUnavailable):
        await client.wait_ready()


def test_an_asyncio_loop_closed_over_a_running_engine_ends_the_engine_thread() -> None:
    executor = ScriptedExecutor()
    executor.hold()

    async def leave_without_closing() -> None:
        client = scripted_client(executor)
        await client.start()
        await client.wait_ready()
        client.submit(request(max_new_tokens=400))
        await held(executor)

    asyncio.run(leave_without_closing())
    (engine,) = (thread for thread in threading.enumerate() if thread.name == "engine")
    executor.release()
    engine.join(TIMEOUT_S)
    assert not engine.is_alive()


@asyncio_test
async def test_no_phase_is_lost_to_a_reader_that_comes_late() -> None:
    def build(progress: Callable[[str, int, int], None]) -> Any:
        for done in range(3):
            progress("reading weights", done, 3)
        return scripted_loop(ScriptedExecutor(), scripted_info()), scripted_info()

    client = InProcessClient(build)
    phases = client.phases()
    await client.start()
    await client.wait_ready()
    seen = [await anext(phases) for _ in range(5)]
    assert [phase.text or phase.name for phase in seen] == ["loading", *["reading weights"] * 3, "ready"]
    assert [phase.done for phase in seen[1:4]] == [0, 1, 2]
    await client.close()


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_backlog_is_taken_in_pieces_that_together_are_all_of_it(has_logprobs: bool) -> None:
    stream = RequestStream("r", 1, no_cancel)
    tokens = tuple(range(3 * TAKEN_TOKENS + 5))
    for token in tokens:
        logprobs = (TokenLogprobs(token, -1.0, ((token, -1.0),)),) if has_logprobs else None
        stream.push(Update("r", token_ids=(token,), logprobs=logprobs, cached_tokens=7 if token == 0 else None))
    stream.push(Update("r", finish="length"))
    assert stream.num_unread == len(tokens) * (2 if has_logprobs else 1)
    pieces = []
    while (piece := stream.take()) is not None:
        pieces.append(piece)
    assert sum((piece.token_ids for piece in pieces), ()) == tokens
    assert [len(piece.token_ids) for piece in pieces] == [TAKEN_TOKENS] * 3 + [5]
    assert [piece.cached_tokens for piece in pieces] == [7, None, None, None]
    assert [piece.finish for piece in pieces] == [None, None, None, "length"]
    if has_logprobs:
        assert [entry.token_id for piece in pieces for entry in piece.logprobs or ()] == list(tokens)
    assert (stream.has_unread, stream.num_unread) == (False, 0)
