"""An engine dies under its requests: what nobody was told of runs again with the same tokens, the rest is failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.client import InProcessClient
from engine.loop import EngineLoop
from engine.streams import RequestStream
from engine.thread import ProgressCallback
from engine.types import EngineInfo, SamplingParams, TokenLogprobs, Update
from support.running import asyncio_test, read, request
from support.scripted import ScriptedExecutor, scripted_info, scripted_loop


def by_seed(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
    """Any other token before this one, or another seed, makes another token."""
    return 1 + hash((prompt, generated, seed)) % 900


class Lives:
    """A supervised client, and the executor of each of its engines: `dies_at` is the step that ends it."""

    def __init__(self, *dies_at: int | None, **info: Any) -> None:
        self.executors = [ScriptedExecutor(by_seed) for _ in dies_at]
        for executor, step in zip(self.executors, dies_at, strict=True):
            if step is not None:
                executor.fail_step(step, MemoryError("the device is gone"))
        self._left = list(self.executors)
        self._info = scripted_info(**info)
        self.client = InProcessClient(self._build)
        self.client.supervise()

    def _build(self, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
        return scripted_loop(self._left.pop(0), self._info), self._info

    async def next_life(self) -> None:
        while self.client.phase.name != "dead":
            await self.client.next_phase()
        await self.client.start()
        await self.client.wait_ready()


@asynccontextmanager
async def lives(*dies_at: int | None, **info: Any) -> AsyncIterator[Lives]:
    each = Lives(*dies_at, **info)
    await each.client.start()
    try:
        await each.client.wait_ready()
        yield each
    finally:
        await each.client.close()


async def undisturbed(seed: int | None, n: int, new: int) -> list[tuple[int, ...]]:
    async with lives(None) as alone:
        answer = alone.client.submit(request(n=n, max_new_tokens=new, sampling=SamplingParams(seed=seed)))
        choices = await read(answer)
        return [choices[index].token_ids for index in range(n)]


@asyncio_test
@pytest.mark.parametrize("dies_at", range(1, 8))
async def test_what_nobody_was_told_of_runs_again_and_gives_the_same_tokens(dies_at: int) -> None:
    expected = await undisturbed(7, 2, 8)
    async with lives(dies_at, None) as each:
        reading = asyncio.create_task(
            read(each.client.submit(request(n=2, max_new_tokens=8, sampling=SamplingParams(seed=7, logprobs=1))))
        )
        await each.next_life()
        choices = await reading
        assert [choices[index].token_ids for index in (0, 1)] == expected
        assert [choices[index].finish for index in (0, 1)] == ["length", "length"]
        assert (each.client.num_outstanding, each.client.lives.restarts, each.client.lives.requests_rerun) == (0, 1, 1)


@asyncio_test
async def test_a_request_without_a_seed_draws_the_same_in_its_second_run() -> None:
    async with lives(4, None) as each:
        stream = each.client.submit(request(max_new_tokens=8))
        before = (await anext(stream)).token_ids
        await each.next_life()
        rest = (await read(stream))[0]
        assert rest.finish == "length"
        tokens = before + rest.token_ids
        assert len(tokens) == 8
        assert each.executors[1].batches[0].chunks[0].tokens == (5,), "the second run begins with the prompt"


@asyncio_test
async def test_what_has_left_for_its_caller_fails_and_its_neighbour_runs_again() -> None:
    async with lives(3, None) as each:
        each.executors[0].release(1)
        told, untold = each.client.submit(request("told")), each.client.submit(request("untold"))
        assert (await anext(told)).token_ids
        told.commit()
        each.executors[0].release()
        reading = asyncio.create_task(read(untold))
        failed = (await read(told))[0]
        assert (failed.finish, failed.error_code) == ("failed", "engine_unavailable")
        await each.next_life()
        assert (await reading)[0].finish == "length"
        assert each.client.num_outstanding == 0


@asyncio_test
async def test_what_leaves_for_its_caller_behind_the_engines_death_fails_with_the_next_engine() -> None:
    async with lives(3, None) as each:
        told, untold = each.client.submit(request("told")), each.client.submit(request("untold"))
        while each.client.phase.name != "dead":
            await each.client.next_phase()
        told.commit()  # its caller was late to take what had come
        reading = asyncio.create_task(read(told))
        await each.next_life()
        failed = (await reading)[0]
        assert (failed.finish, failed.error_code) == ("failed", "engine_unavailable")
        assert (await read(untold))[0].finish == "length"
        assert each.client.num_outstanding == 0


@asyncio_test
async def test_a_request_that_two_engines_died_of_fails() -> None:
    async with lives(1, 1, None) as each:
        reading = asyncio.create_task(read(each.client.submit(request())))
        await each.next_life()
        assert (await reading)[0].error_code == "engine_unavailable"
        await each.next_life()
        assert (await read(each.client.submit(request("next"))))[0].finish == "length"


@asyncio_test
async def test_a_second_run_that_goes_another_way_is_an_error_and_never_a_mixed_answer() -> None:
    async with lives(4, None) as each:
        each.executors[1].answer = lambda prompt, generated, seed: 950
        stream = each.client.submit(request(max_new_tokens=8))
        assert (await anext(stream)).token_ids != (950,)
        await each.next_life()
        failed = (await read(stream))[0]
        assert (failed.finish, failed.error_code) == ("failed", "engine_unavailable")
        assert 950 not in failed.token_ids
        assert each.client.num_outstanding == 0


@asyncio_test
async def test_a_second_run_that_goes_another_way_is_ended_in_the_engine_too() -> None:
    async with lives(4, None) as each:
        each.executors[1].answer = lambda prompt, generated, seed: 950
        each.executors[1].release(1)
        stream = each.client.submit(request(max_new_tokens=400))
        await anext(stream)
        await each.next_life()
        assert (await read(stream))[0].finish == "failed"
        after = each.client.submit(request("after", (6,)))
        each.executors[1].release()
        await read(after)
        assert len(each.executors[1].batches[-1].chunks) == 1


@asyncio_test
async def test_a_choice_that_has_ended_or_was_cancelled_stays_ended() -> None:
    async with lives(5, None) as each:
        stream = each.client.submit(request(n=3, max_new_tokens=8))
        await anext(stream)
        each.client.cancel("r", 1)
        await each.next_life()
        choices = await read(stream)
        assert [choices[index].finish for index in range(3)] == ["length", "cancelled", "length"]


@asyncio_test
async def test_what_waits_for_the_next_engine_can_be_cancelled_and_has_its_deadline() -> None:
    async with lives(1, None) as each:
        left = each.client.submit(request("left"))
        late = each.client.submit(request("late", deadline_s=0.05))
        while each.client.phase.name != "dead":
            await each.client.next_phase()
        each.client.cancel("left")
        assert (await read(left))[0].finish == "cancelled"
        assert (await read(late))[0].error_code == "deadline_exceeded"
        await each.client.start()
        await each.client.wait_ready()
        assert each.client.num_outstanding == 0
        assert not each.executors[1].batches


@asyncio_test
@pytest.mark.parametrize("ending", ["given up", "closed"])
async def test_without_a_next_engine_what_waited_is_told(ending: str) -> None:
    async with lives(1) as each:
        stream = each.client.submit(request())
        while each.client.phase.name != "dead":
            await each.client.next_phase()
        if ending == "closed":
            await each.client.close(drain_s=60)
        else:
            each.client.give_up()
        code = (await read(stream))[0].error_code
        assert code == ("shutting_down" if ending == "closed" else "engine_unavailable")


@asyncio_test
async def test_a_smaller_next_engine_fails_what_it_cannot_hold() -> None:
    async with lives(1, None) as each:
        stream = each.client.submit(request(max_new_tokens=400))
        while each.client.phase.name != "dead":
            await each.client.next_phase()
        each._info = scripted_info(max_model_len=100)
        await each.next_life()
        assert (await read(stream))[0].error_code == "engine_unavailable"


@asyncio_test
async def test_sums_go_on_over_engines_and_gauges_fall_to_zero() -> None:
    async with lives(6, None) as each:
        await read(each.client.submit(request("a")))
        before = each.client.stats
        stream = each.client.submit(request("b", max_new_tokens=8))
        while each.client.phase.name != "dead":
            await each.client.next_phase()
        assert (each.client.stats.running, each.client.stats.cells_used) == (0, 0)
        await each.next_life()
        await read(stream)
        assert each.client.stats.generated_tokens >= before.generated_tokens + 8
        assert dict(each.client.stats.method_calls)["forward_others"] > each.client.num_steps


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0)


def test_a_second_runs_update_may_hold_old_and_new_tokens_and_what_comes_once_comes_once() -> None:
    stream = RequestStream("r", 1, lambda name, index: None, may_rerun=True)
    first = Update("r", token_ids=(5, 6), logprobs=(entry(5), entry(6)), cached_tokens=3, prompt_logprobs=(None,))
    stream.push(first)
    stream.begin_again()
    stream.push(Update("r", token_ids=(5,), logprobs=(entry(5),), cached_tokens=1, prompt_logprobs=(None,)))
    stream.push(Update("r", token_ids=(6, 7), logprobs=(entry(6), entry(7)), finish="length"))
    told = asyncio.run(_next(stream))
    assert told == Update(
        "r",
        token_ids=(5, 6, 7),
        logprobs=(entry(5), entry(6), entry(7)),
        prompt_logprobs=(None,),
        cached_tokens=3,
        finish="length",
    )


async def _next(stream: RequestStream) -> Update:
    return await anext(stream)
