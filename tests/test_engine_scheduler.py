"""DESIGN D10 and SCH-*: what runs in the next step."""

import pytest

from engine.errors import ConfigError
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sessions import Session
from engine.types import GenerateRequest

PLENTY = 10**6


def session(arrival, prompt=4, *, n=1, priority=0, max_new=8):
    request = GenerateRequest(str(arrival), tuple(range(prompt)), n=n, priority=priority, max_new_tokens=max_new)
    return Session(request, 0, arrival, 0, n, list(request.prompt_token_ids))


def scheduler(*, seqs=8, prefill=10, mixed=12, chunk=4):
    return Scheduler(
        SchedulerLimits(max_num_seqs=seqs, prefill_budget=prefill, mixed_budget=mixed, prefill_chunk=chunk)
    )


def run(scheduler, *sessions):
    for one in sessions:
        scheduler.add_waiting(one)
        scheduler.admit(one)
        one.executor_id = one.arrival


def step(scheduler, free=PLENTY):
    """One step: (arrival, tokens) in batch order; every draw is answered with token 0."""
    takes = scheduler.next_takes(free)
    chunks = [take.session.take(take.count) for take in takes]
    for take, chunk in zip(takes, chunks, strict=True):
        if chunk.draws:
            take.session.accept(0)
    return [(take.session.arrival, take.count) for take in takes]


def test_sch_13_chunks_rotate_and_a_lone_session_takes_several():
    """SCH-7."""
    queue = scheduler(seqs=2, prefill=10, mixed=10, chunk=4)
    run(queue, session(10, 16, max_new=1), session(20, 8, max_new=1))
    assert [step(queue) for _ in range(3)] == [[(10, 4), (20, 4)], [(10, 4), (20, 4)], [(10, 8)]]


def test_sch_13_a_chunk_that_does_not_fit_is_skipped_and_comes_first_next_time():
    """SCH-5."""
    queue = scheduler(prefill=9, mixed=12, chunk=4)
    run(queue, *(session(a, size, max_new=1) for a, size in [(10, 4), (20, 3), (30, 4), (40, 2), (50, 4)]))
    assert step(queue) == [(10, 4), (20, 3), (40, 2)]
    assert step(queue) == [(30, 4), (50, 4)]


def test_sch_6_who_was_not_reached_comes_first_so_that_all_are_served_alike():
    queue = scheduler(prefill=8, mixed=12, chunk=4)
    run(queue, *(session(a, 60, max_new=1) for a in (10, 20, 30)))
    assert step(queue) == [(10, 4), (20, 4)]
    assert step(queue) == [(30, 4), (10, 4)]
    served = [arrival for _ in range(7) for arrival, _ in step(queue)] + [10, 20, 30, 10]
    assert [served.count(arrival) for arrival in (10, 20, 30)] == [6, 6, 6]


def test_sch_12_decodes_are_never_delayed_by_prefill_and_a_chunk_always_fits_beside_them():
    queue = scheduler(seqs=8, mixed=12, chunk=4)
    decoding = [session(a, 1) for a in range(8)]
    run(queue, *decoding)
    step(queue)
    run(queue, session(9, 40))
    assert step(queue) == [*((a, 1) for a in range(8)), (9, 4)]


def test_sch_8_decodes_come_first():
    queue = scheduler()
    run(queue, session(1, 12), session(2, 1))
    assert step(queue) == [(1, 8), (2, 1)]
    assert step(queue) == [(2, 1), (1, 4)]


def test_sch_4_each_session_decodes_once_a_step_in_order_of_admission():
    queue = scheduler()
    run(queue, session(2, 1), session(1, 1), session(3, 1))
    step(queue)
    assert [step(queue) for _ in range(2)] == [[(2, 1), (1, 1), (3, 1)]] * 2


def test_a_step_without_decodes_has_the_wider_budget():
    queue = scheduler(seqs=2, prefill=64, mixed=6, chunk=4)
    run(queue, session(1, 100), session(2, 1))
    assert step(queue) == [(1, 60), (2, 1)]
    assert step(queue) == [(2, 1), (1, 4)]


def test_run_14_a_prompt_of_one_token_is_prefill():
    """SCH-3."""
    one = session(1, 1)
    assert not one.is_decoding


def test_no_step_takes_more_tokens_than_there_are_cells():
    queue = scheduler()
    run(queue, session(1, 12))
    assert step(queue, free=3) == [(1, 3)]
    assert step(queue, free=0) == []


def test_waiting_sessions_are_admitted_by_priority_then_arrival_and_never_overtaken():
    queue = scheduler()
    big, small, urgent = session(1, 50), session(2, 2), session(3, 5, priority=-1)
    for one in (big, small, urgent):
        queue.add_waiting(one)
    assert queue.next_admissible(20) is urgent
    queue.admit(urgent)
    assert queue.next_admissible(20) is None  # big is first and does not fit; small stays behind it
    assert queue.next_admissible(100) is big


def test_admission_counts_the_forks_that_are_still_to_come():
    """RUN-4."""
    queue = scheduler(seqs=4)
    run(queue, session(1, 2, n=3))
    queue.add_waiting(session(2, 2, n=2))
    assert queue.next_admissible(PLENTY) is None


def test_admission_leaves_room_for_what_running_prompts_still_need():
    queue = scheduler()
    run(queue, session(1, 100))
    queue.add_waiting(session(2, 10))
    assert queue.next_admissible(109) is None
    assert queue.next_admissible(110) is not None


def test_the_least_urgent_latest_session_is_preempted_and_comes_back_before_later_ones():
    queue = scheduler()
    first, second, idle = session(1, 2), session(2, 2), session(3, 2, priority=-5)
    run(queue, first, second, idle)
    step(queue)
    assert queue.must_preempt(2)
    assert not queue.must_preempt(3)
    assert queue.preempt() is second
    second.requeue()
    queue.add_waiting(session(4, 2))
    assert queue.next_admissible(PLENTY) is second
    assert second.remaining == 3  # its prompt and its token are computed again


def test_a_session_with_a_token_in_flight_is_not_admitted_before_the_token_is_known():
    queue = scheduler()
    one = session(1, 2)
    run(queue, one)
    one.take(2)
    assert queue.preempt() is one
    one.requeue()
    assert queue.next_admissible(PLENTY) is None
    one.accept(7)
    assert queue.next_admissible(PLENTY) is one


def test_nothing_is_scheduled_past_the_last_token_while_it_is_in_flight():
    queue = scheduler()
    one = session(1, 2, max_new=2)
    run(queue, one)
    assert queue.next_takes(PLENTY)[0].count == 2
    one.take(2)
    assert [take.count for take in queue.next_takes(PLENTY)] == [1]
    assert one.take(1).tokens == (-1,)
    assert queue.next_takes(PLENTY) == []


def test_sch_1_the_mixed_budget_must_hold_the_decodes_and_one_chunk():
    assert scheduler(seqs=8, mixed=12, chunk=4).is_empty
    with pytest.raises(ConfigError, match="max_num_seqs"):
        scheduler(seqs=8, mixed=11, chunk=4)


def test_r10_a_suspect_runs_alone_and_others_have_every_other_step():
    queue = scheduler(prefill=10, mixed=12, chunk=4)
    run(queue, session(1, 4))
    step(queue)
    suspect = session(2, 24)
    suspect.is_suspect = True
    run(queue, suspect, session(3, 8))
    steps = []
    while suspect.num_generated == 0:
        steps.append(step(queue))
    assert [taken for taken in steps if dict(taken).get(2)] == [[(2, 10)], [(2, 10)], [(2, 4)]]
    assert [taken for taken in steps if not dict(taken).get(2)] == [[(1, 1), (3, 8)], [(1, 1), (3, 1)]]
    suspect.is_suspect = False
    assert step(queue) == [(1, 1), (2, 1), (3, 1)]


def test_r10_a_suspect_whose_draw_is_on_its_way_holds_up_nobody():
    queue = scheduler()
    run(queue, session(1, 4))
    step(queue)
    suspect = session(2, 4, max_new=1)
    suspect.is_suspect = True
    run(queue, suspect)
    (take,) = queue.next_takes(PLENTY)
    take.session.take(take.count)
    assert (take.session, suspect.remaining) == (suspect, 0)
    assert [step(queue) for _ in range(2)] == [[(1, 1)], [(1, 1)]]
