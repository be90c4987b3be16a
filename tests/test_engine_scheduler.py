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


def next_admissible(queue, free):
    return next(queue.admissible(lambda: free), None)


def test_sch_13_prompts_take_turns_and_a_lone_one_takes_several():
    """SCH-7."""
    queue = scheduler(seqs=2, prefill=10, mixed=10, chunk=4)
    run(queue, session(10, 16, max_new=1), session(20, 8, max_new=1))
    assert [step(queue) for _ in range(3)] == [[(10, 6), (20, 4)], [(10, 6), (20, 4)], [(10, 4)]]


def test_sch_13_what_does_not_fit_is_cut_and_goes_on_first_in_the_next_step():
    """SCH-5, which skips it."""
    queue = scheduler(prefill=9, mixed=12, chunk=4)
    run(queue, *(session(a, size, max_new=1) for a, size in [(10, 4), (20, 3), (30, 4), (40, 2), (50, 4)]))
    assert step(queue) == [(10, 4), (20, 3), (30, 2)]
    assert step(queue) == [(30, 2), (40, 2), (50, 4)]


def test_sch_5_a_cut_turn_goes_on_with_its_rest_alone_whatever_cut_it():
    queue = scheduler(prefill=6, mixed=12, chunk=4)
    run(queue, *(session(a, 60, max_new=1) for a in (10, 20)))
    assert step(queue) == [(10, 4), (20, 2)]
    assert step(queue, free=1) == [(20, 1)]
    assert step(queue, free=0) == []
    assert step(queue) == [(20, 2), (10, 4)]


def test_sch_5_a_turn_that_ends_with_the_step_is_over():
    queue = scheduler(prefill=4, mixed=12, chunk=4)
    run(queue, *(session(a, 60, max_new=1) for a in (10, 20)))
    assert [step(queue) for _ in range(3)] == [[(10, 4)], [(20, 4)], [(10, 4)]]


def test_sch_5_a_turn_may_be_longer_than_a_step_and_a_long_prompt_gives_way_behind_it():
    queue = scheduler(prefill=6, mixed=10, chunk=9)
    run(queue, session(10, 100), session(20, 3, max_new=1), session(30, 12, max_new=1))
    assert [step(queue) for _ in range(3)] == [[(10, 6)], [(10, 3), (20, 3)], [(30, 6)]]
    assert [step(queue) for _ in range(3)] == [[(30, 3), (10, 3)], [(10, 6)], [(30, 3), (10, 3)]]


def test_sch_9_who_leaves_within_a_turn_has_a_new_one_at_the_tail_when_it_comes_back():
    queue = scheduler(prefill=6, mixed=12, chunk=4)
    first, cut = session(10, 60), session(20, 60)
    run(queue, first, cut)
    assert step(queue) == [(10, 4), (20, 2)]
    assert queue.preempt() is cut
    cut.requeue()
    assert step(queue) == [(10, 6)]
    run(queue, cut)
    assert [step(queue) for _ in range(3)] == [[(10, 2), (20, 4)], [(10, 4), (20, 2)], [(20, 2), (10, 4)]]


def test_a_turn_ends_with_the_last_token_but_one_of_who_was_preempted_for_the_last_is_a_decode():
    queue = scheduler(seqs=2, prefill=6, mixed=8, chunk=9)
    again = session(10, 4)
    again.tokens += [0, 0, 0]
    run(queue, again, session(20, 20))
    assert step(queue) == [(10, 6)]
    assert step(queue) == [(10, 1), (20, 7)]
    assert step(queue) == [(10, 1), (20, 7)]


def test_r10_a_suspect_leaves_the_turn_of_another_as_it_was():
    queue = scheduler(prefill=6, mixed=12, chunk=4)
    run(queue, session(10, 60), session(20, 60))
    assert step(queue) == [(10, 4), (20, 2)]
    suspect = session(30, 9)
    suspect.is_suspect = True
    run(queue, suspect)
    assert [step(queue) for _ in range(3)] == [[(30, 6)], [(20, 2), (10, 4)], [(30, 3)]]


def test_sch_6_who_was_not_reached_comes_first_so_that_all_are_served_alike():
    queue = scheduler(prefill=8, mixed=12, chunk=4)
    run(queue, *(session(a, 60, max_new=1) for a in (10, 20, 30)))
    assert step(queue) == [(10, 4), (20, 4)]
    assert step(queue) == [(30, 4), (10, 4)]
    served = [arrival for _ in range(7) for arrival, _ in step(queue)] + [10, 20, 30, 10]
    assert [served.count(arrival) for arrival in (10, 20, 30)] == [6, 6, 6]


def test_sch_12_decodes_are_never_delayed_by_prefill_and_a_token_of_a_prompt_always_fits_beside_them():
    queue = scheduler(seqs=8, mixed=9, chunk=4)
    decoding = [session(a, 1) for a in range(8)]
    run(queue, *decoding)
    step(queue)
    run(queue, session(9, 40))
    assert step(queue) == [*((a, 1) for a in range(8)), (9, 1)]


def test_sch_8_decodes_come_first():
    queue = scheduler()
    run(queue, session(1, 12), session(2, 1))
    assert step(queue) == [(1, 9), (2, 1)]
    assert step(queue) == [(2, 1), (1, 3)]


def test_sch_4_each_session_decodes_once_a_step_in_order_of_admission():
    queue = scheduler()
    run(queue, session(2, 1), session(1, 1), session(3, 1))
    step(queue)
    assert [step(queue) for _ in range(2)] == [[(2, 1), (1, 1), (3, 1)]] * 2


def test_a_step_without_decodes_has_the_wider_budget():
    queue = scheduler(seqs=2, prefill=64, mixed=6, chunk=4)
    run(queue, session(1, 100), session(2, 1))
    assert step(queue) == [(1, 63), (2, 1)]
    assert step(queue) == [(2, 1), (1, 5)]


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
    assert next_admissible(queue, 20) is urgent
    queue.admit(urgent)
    assert next_admissible(queue, 20) is None  # big is first and does not fit; small stays behind it
    assert next_admissible(queue, 100) is big


def test_admission_counts_the_forks_that_are_still_to_come():
    """RUN-4."""
    queue = scheduler(seqs=4)
    run(queue, session(1, 2, n=3))
    queue.add_waiting(session(2, 2, n=2))
    assert next_admissible(queue, PLENTY) is None


def test_admission_leaves_room_for_what_running_prompts_still_need():
    queue = scheduler()
    run(queue, session(1, 100))
    queue.add_waiting(session(2, 10))
    assert next_admissible(queue, 109) is None
    assert next_admissible(queue, 110) is not None


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
    assert next_admissible(queue, PLENTY) is second
    assert second.remaining == 3  # its prompt and its token are computed again


def test_a_session_with_a_token_in_flight_is_not_admitted_before_the_token_is_known():
    queue = scheduler()
    one = session(1, 2)
    run(queue, one)
    one.take(2)
    assert queue.preempt() is one
    one.requeue()
    assert next_admissible(queue, PLENTY) is None
    one.accept(7)
    assert next_admissible(queue, PLENTY) is one


def test_nothing_is_scheduled_past_the_last_token_while_it_is_in_flight():
    queue = scheduler()
    one = session(1, 2, max_new=2)
    run(queue, one)
    assert queue.next_takes(PLENTY)[0].count == 2
    one.take(2)
    assert [take.count for take in queue.next_takes(PLENTY)] == [1]
    assert one.take(1).tokens == (-1,)
    assert queue.next_takes(PLENTY) == []


def test_sch_1_the_mixed_budget_must_hold_the_decodes_and_one_token_of_a_prompt():
    assert scheduler(seqs=8, mixed=9, chunk=40).is_empty
    with pytest.raises(ConfigError, match=r"mixed_budget is 8: .* 8 of them \(max_num_seqs\) .* at least 9"):
        scheduler(seqs=8, mixed=8, chunk=4)


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
