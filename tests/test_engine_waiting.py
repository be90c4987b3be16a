"""Whose turn is next: clients of one priority take turns, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.sessions import Session
from engine.types import GenerateRequest
from engine.waiting import WaitingLine
from support.scripted import ScriptedExecutor
from support.slow_line import SlowLine

ARRIVALS = iter(range(10**9))


def session(client: str = "", *, priority: int = 0, n: int = 1, ran: bool = False) -> Session:
    arrival = next(ARRIVALS)
    request = GenerateRequest(str(arrival), (1, 2), n=n, priority=priority, client=client)
    return Session(request, 0, arrival, 0, n, [1, 2], cached_tokens=0 if ran else None)


def line_of(*sessions: Session) -> WaitingLine:
    line = WaitingLine()
    for one in sessions:
        line.add(one)
    return line


def clients(line: WaitingLine) -> str:
    return "".join(one.request.client for one in line)


def take_next(line: WaitingLine) -> str:
    one = next(iter(line))
    line.take(one)
    return one.request.client


def test_a_client_with_a_thousand_requests_does_not_starve_another() -> None:
    line = line_of(*(session("a") for _ in range(1000)))
    for _ in range(500):
        take_next(line)
    line.add(session("b"))
    assert clients(line)[:3] == "aba"


def test_clients_take_turns_and_each_ones_requests_stay_in_order() -> None:
    sessions = [session(client) for client in "aaaabbc"]
    line = line_of(*sessions)
    assert clients(line) == "abcabaa"
    assert [one.arrival for one in line if one.request.client == "a"] == [one.arrival for one in sessions[:4]]


def test_one_client_alone_is_served_in_order_of_arrival() -> None:
    sessions = [session() for _ in range(5)]
    assert list(line_of(*sessions)) == sessions


def test_a_turn_is_a_choice_so_many_choices_are_many_turns() -> None:
    line = line_of(session("a", n=3), session("a"), *(session("b") for _ in range(4)))
    assert clients(line) == "abbbab"


def test_coming_back_does_not_wipe_out_the_turns_one_has_had() -> None:
    line = line_of(session("a", n=8), *(session("b") for _ in range(20)))
    assert take_next(line) == "a"
    line.add(session("a", n=8))
    assert clients(line)[:10] == "b" * 9 + "a"


def test_having_been_away_is_no_credit() -> None:
    line = line_of(session("b"), *(session("a") for _ in range(20)))
    for _ in range(11):
        take_next(line)
    for _ in range(3):
        line.add(session("b"))
    assert clients(line)[:6] == "ababab"


def test_priorities_come_before_turns() -> None:
    line = line_of(session("a"), session("a"), session("b"), session("a", priority=-1), session("b", priority=1))
    assert [(one.request.priority, one.request.client) for one in line] == [
        (-1, "a"),
        (0, "a"),
        (0, "b"),
        (0, "a"),
        (1, "b"),
    ]


def test_what_ran_before_comes_first_and_costs_no_turn() -> None:
    line = line_of(session("b"), session("a"), session("a", ran=True), session("b"))
    assert clients(line) == "abab"
    assert take_next(line) == "a"
    assert clients(line) == "bab"


def test_who_is_next_is_not_overtaken_by_clients_that_come_later() -> None:
    before, first = session("a"), session("a")
    line = line_of(before, first)
    take_next(line)
    for number in range(50):
        line.add(session(f"new{number}"))
    assert next(iter(line)) is first


def test_a_line_that_was_empty_remembers_nobody() -> None:
    line = line_of(session("a", n=50))
    take_next(line)
    assert (len(line), list(line), line.num_choices) == (0, [], 0)
    for client in "ab":
        line.add(session(client))
    assert clients(line) == "ab"


@pytest.mark.parametrize("seed", range(40))
def test_the_line_equals_its_slow_oracle_under_random_verbs(seed: int) -> None:
    draw = random.Random(seed)
    line, slow = WaitingLine(), SlowLine()
    here: list[Session] = []
    gone: list[Session] = []
    for _ in range(150):
        verb = draw.choice(("add", "add", "take next", "take any", "discard", "come again", "leave twice"))
        if verb == "add":
            here.append(session(draw.choice("abcd"), priority=draw.randint(-1, 1), n=draw.randint(1, 4)))
            line.add(here[-1])
            slow.add(here[-1])
        elif verb == "come again" and gone:
            one = gone.pop(draw.randrange(len(gone)))
            one.cached_tokens = 0
            here.append(one)
            line.add(one)
            slow.add(one)
        elif verb == "leave twice" and gone:
            line.discard(gone[-1])
            slow.discard(gone[-1])
        elif here and verb in ("take next", "take any", "discard"):
            one = slow.order()[0] if verb == "take next" else draw.choice(here)
            here.remove(one)
            gone.append(one)
            (line.discard if verb == "discard" else line.take)(one)
            (slow.discard if verb == "discard" else slow.take)(one)
        assert list(line) == slow.order()
        assert (len(line), line.num_choices) == (len(here), sum(one.draws for one in here))


def test_in_the_loop_a_second_client_runs_after_one_more_of_the_first_ones() -> None:
    limits = SchedulerLimits(max_num_seqs=1, prefill_budget=8, mixed_budget=8, prefill_chunk=4)
    loop = EngineLoop(ScriptedExecutor(max_sessions=1), limits, prefix_cache=False)
    for number in range(6):
        loop.submit(GenerateRequest(f"a{number}", (number + 1,), max_new_tokens=2, client="a"))
    finished: list[str] = []
    while loop.has_work():
        finished += [update.request_id for update in loop.step() if update.finish is not None]
        if finished == ["a0"] and "b0" not in loop._requests:
            loop.submit(GenerateRequest("b0", (50,), max_new_tokens=2, client="b"))
    assert finished.index("b0") <= 2
    assert [name for name in finished if name != "b0"] == [f"a{number}" for number in range(6)]
