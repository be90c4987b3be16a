"""What someone who looks at an engine sees of its cells, its sessions and its last steps."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from engine.client import InProcessClient
from engine.errors import EngineUnavailable
from engine.loop import EngineLoop
from engine.recent import KEPT_STEPS
from engine.types import GenerateRequest, SamplingParams
from engine.view import CLAIMED, FIRST_SESSION, FREE, KEPT, MAX_WAITING_SHOWN, SHARED, View
from engine.wire import Look, Seen, decode_from_engine, decode_to_engine, encode
from support.scripted import ScriptedExecutor, scripted_client, scripted_info, scripted_loop
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
ALL = 1 << 20


def request(name: str, *prompt: int, new: int = 50, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, prompt, n=n, sampling=SamplingParams(temperature=0.0), max_new_tokens=new)


def codes(view: View) -> list[int]:
    """Of all cells shown, the free ones at the end included."""
    shown = np.frombuffer(view.cells.codes, "<u2").tolist()
    return shown + [FREE] * (-(-view.cells.total // view.cells.stride) - len(shown))


def started(executor: ScriptedExecutor, *requests: GenerateRequest, steps: int = 2) -> EngineLoop:
    """A loop that has taken `steps` steps with them."""
    loop = scripted_loop(executor, scripted_info(kv_cells=executor.total_cells))
    for each in requests:
        loop.submit(each)
    for _ in range(steps):
        loop.step()
    return loop


def test_an_empty_pool_is_free_and_says_so_in_no_bytes() -> None:
    view = started(ScriptedExecutor(cells=64), steps=0).view(ALL, 0)
    assert (view.cells.total, view.cells.codes) == (64, b"")
    assert view.cells.kept == view.cells.claimed == view.cells.private == view.cells.shared == 0
    assert view.sessions == view.steps == view.waiting == ()


def test_each_cell_of_a_running_session_has_its_code() -> None:
    executor = ScriptedExecutor(cells=64)
    view = started(executor, request("a", *PROMPT), request("b", 50, 51, 52)).view(ALL, 0)
    drawn = codes(view)
    for index, session in enumerate(view.sessions):
        assert [cell for cell, code in enumerate(drawn) if code == FIRST_SESSION + index] == sorted(
            executor.sessions[session.id].cells
        )
    assert view.cells.private == 8 + 3 + 2
    assert [(s.prompt_tokens, s.computed_tokens, s.generated_tokens) for s in view.sessions] == [(8, 9, 2), (3, 4, 2)]
    assert all(session.is_decoding for session in view.sessions)


def test_cells_that_sessions_share_are_marked_with_and_without_a_tree() -> None:
    for prefix_cache in (True, False):
        executor = ScriptedExecutor(cells=64)
        loop = EngineLoop(
            executor, scripted_loop(executor, scripted_info())._scheduler.limits, prefix_cache=prefix_cache
        )
        loop.submit(request("forked", *PROMPT, n=3))
        for _ in range(3):
            loop.step()
        view = loop.view(ALL, 0)
        assert len(view.sessions) == 3
        shared = [cell for cell, code in enumerate(codes(view)) if code & SHARED]
        assert shared == list(range(8))
        assert view.cells.shared == 8
        assert view.cells.private == 3 * 2


def test_what_an_ended_session_leaves_is_the_trees() -> None:
    loop = started(ScriptedExecutor(cells=64), request("a", *PROMPT, new=3), steps=3)
    view = loop.view(ALL, 0)
    assert Counter(codes(view)) == {KEPT: 10, FREE: 54}
    assert view.cells.kept == 10
    loop.submit(request("b", *PROMPT, 99))
    loop.step()
    view = loop.view(ALL, 0)
    assert view.cells.private == 9
    assert view.cells.kept == 2
    [session] = view.sessions
    assert session.cached_tokens == 8


def test_cells_of_a_step_in_flight_are_claimed() -> None:
    loop = started(ScriptedExecutor(cells=64, overlaps=True), request("a", *PROMPT), steps=1)
    view = loop.view(ALL, 0)
    assert Counter(codes(view)) == {CLAIMED: 8, FREE: 56}
    assert view.cells.claimed == 8


def test_the_counts_agree_with_the_table_of_a_real_cache() -> None:
    executor = toy_executor(ToyDecoder())
    loop = EngineLoop(executor, scripted_loop(ScriptedExecutor(), scripted_info())._scheduler.limits)
    for i in range(4):
        loop.submit(request(f"r{i}", 1, 2, 3, 4, 5, i, new=9, n=2))
    for _ in range(40):
        loop.step()
        view = loop.view(ALL, 0)
        cells = view.cells
        held = cells.kept + cells.claimed + cells.private + cells.shared
        assert cells.total - held == executor.free_cells
        assert cells.private + cells.shared + cells.claimed == view.stats.cells_used
        assert max(codes(view)) < SHARED + FIRST_SESSION + len(view.sessions)
        if not loop.has_work():
            break
    assert view.stats.running == 0
    forwards = [forward for step in view.steps for forward in step.forwards]
    assert sum(rows - tokens for _, tokens, rows in forwards) == executor.padding_rows
    assert Counter(method for method, _, _ in forwards) == Counter(
        {method: calls for method, calls in executor.method_calls() if calls}
    )


def test_a_large_pool_is_shown_by_every_nth_cell() -> None:
    loop = started(ScriptedExecutor(cells=1000), request("a", *range(1, 401)), steps=4)
    whole, coarse = loop.view(ALL, 0), loop.view(100, 0)
    assert coarse.cells.stride == 10
    assert codes(coarse) == codes(whole)[::10]
    assert coarse.cells.private == whole.cells.private > 400


def test_steps_are_told_once_and_only_the_last_are_kept() -> None:
    loop = started(ScriptedExecutor(), request("a", *PROMPT), request("b", 50, 51, 52), steps=KEPT_STEPS + 5)
    steps = loop.view(ALL, 0).steps
    assert [step.number for step in steps] == list(range(6, KEPT_STEPS + 6))
    assert loop.view(ALL, steps[-1].number).steps == ()
    loop.step()
    [step] = loop.view(ALL, steps[-1].number).steps
    assert (step.sessions, step.counts, step.num_decodes) == ((1, 2), (1, 1), 2)
    assert step.forwards == (("forward_others", 2, 2),)


def test_a_look_says_what_it_cost() -> None:
    times = iter(range(100))
    executor = ScriptedExecutor(cells=64)
    limits = scripted_loop(executor, scripted_info())._scheduler.limits
    loop = EngineLoop(executor, limits, clock=lambda: float(next(times)))
    assert loop.view(ALL, 0).cost_s == 1.0


def test_what_waits_is_told_in_its_order_and_bounded() -> None:
    executor = ScriptedExecutor(cells=1 << 14, max_sessions=1)
    loop = EngineLoop(executor, scripted_loop(executor, scripted_info(max_num_seqs=1))._scheduler.limits)
    for i in range(MAX_WAITING_SHOWN + 9):
        loop.submit(request(f"r{i}", *range(1, 3 + i % 5)))
    loop.step()
    view = loop.view(ALL, 0)
    assert len(view.waiting) == MAX_WAITING_SHOWN
    assert view.waiting[:4] == (3, 4, 5, 6)
    assert view.stats.waiting == MAX_WAITING_SHOWN + 8


def test_a_look_survives_the_wire() -> None:
    view = started(ScriptedExecutor(cells=64), request("a", *PROMPT)).view(ALL, 0)
    assert decode_to_engine(encode(Look(7, 100, 3))) == Look(7, 100, 3)
    assert decode_from_engine(encode(Seen(7, view))) == Seen(7, view)


def test_looks_are_answered_while_idle_and_refused_where_nothing_runs() -> None:
    async def life() -> None:
        client = scripted_client(ScriptedExecutor(cells=64))
        with pytest.raises(EngineUnavailable):
            await client.look(max_codes=10, behind_step=0)
        await client.start()
        await client.wait_ready()
        first, second = await asyncio.gather(*(client.look(max_codes=n, behind_step=0) for n in (10, 64)))
        assert (first.cells.stride, second.cells.stride) == (7, 1)
        await client.close()
        with pytest.raises(EngineUnavailable):
            await client.look(max_codes=10, behind_step=0)

    asyncio.run(life())


def test_a_look_at_an_engine_that_dies_ends() -> None:
    async def life() -> None:
        executor = ScriptedExecutor(cells=64)
        client: InProcessClient = scripted_client(executor)
        await client.start()
        await client.wait_ready()
        executor.fail_step(1, MemoryError("the device is gone"))
        executor.hold()
        client.submit(request("a", 5))
        await asyncio.to_thread(executor.wait_held)
        looking = asyncio.ensure_future(client.look(max_codes=10, behind_step=0))
        await asyncio.sleep(0)
        executor.release()
        with pytest.raises(EngineUnavailable):
            await looking
        await client.close()

    asyncio.run(life())


def test_stats_count_the_cells_that_sessions_share() -> None:
    loop = started(
        ScriptedExecutor(cells=64), request("a", *PROMPT, n=3, new=4), request("b", *PROMPT, 99, new=9), steps=3
    )
    assert loop.stats().cells_shared == loop.view(ALL, 0).cells.shared == 8
    while loop.has_work():
        loop.step()
    assert loop.stats().cells_shared == 0


def test_the_wait_for_a_place_is_told_once_with_the_first_news() -> None:
    """MET-1."""
    now = 100.0
    executor = ScriptedExecutor(max_sessions=1)
    limits = scripted_loop(executor, scripted_info(max_num_seqs=1))._scheduler.limits
    loop = EngineLoop(executor, limits, clock=lambda: now)
    for name in "ab":
        loop.submit(request(name, *PROMPT, new=3))
    told: dict[str, list[float | None]] = {"a": [], "b": []}
    while loop.has_work():
        for update in loop.step():
            told[update.request_id].append(update.queued_s)
        now += 2.0
    assert told == {"a": [0.0, None, None], "b": [6.0, None, None]}


def test_a_request_that_never_ran_has_no_wait() -> None:
    loop = started(ScriptedExecutor(max_sessions=1), request("a", *PROMPT), request("b", *PROMPT), steps=0)
    loop.cancel("b")
    assert [(u.request_id, u.queued_s) for u in loop.step() if u.request_id == "b"] == [("b", None)]


def test_a_cache_of_one_sequence_is_shown_too() -> None:
    executor = toy_executor(ToyDecoder(), cache_kind="single", max_sessions=1)
    limits = scripted_loop(ScriptedExecutor(), scripted_info(max_num_seqs=1))._scheduler.limits
    loop = EngineLoop(executor, limits, prefix_cache=False)
    loop.submit(request("a", 1, 2, 3, 4, new=6))
    for _ in range(3):
        loop.step()
    view = loop.view(ALL, 0)
    assert codes(view)[:7] == [FIRST_SESSION] * 6 + [FREE]
    assert view.cells.private == 6


def test_a_view_that_cannot_be_made_is_empty_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedExecutor):
        def cell_references(self) -> npt.NDArray[np.int32]:
            raise ZeroDivisionError("by zero")

    async def life() -> None:
        client = scripted_client(Broken())
        await client.start()
        await client.wait_ready()
        assert await client.look(max_codes=10, behind_step=0) == View()
        stream = client.submit(request("a", 5, new=2))
        assert [update.finish async for update in stream][-1] == "length"
        await client.close()

    asyncio.run(life())
    assert "the engine could not be shown" in caplog.text
