"""Slots are reserved before any work, all or none, and come back on every way out."""

from __future__ import annotations

import contextlib
import random

import pytest

from server.admission import Admission, Reservation, default_queued_tokens, estimated_tokens
from server.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refusal(admission: Admission, slots: int, *, tokens: int = 0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.reserve(slots, tokens=tokens)
    return caught.value


def test_slots_come_back_when_the_block_ends_well_or_badly() -> None:
    admission = Admission(4)
    with admission.reserve(3):
        assert admission.in_use == 3
    assert admission.in_use == 0
    with pytest.raises(ZeroDivisionError), admission.reserve(4):
        raise ZeroDivisionError
    assert admission.in_use == 0


def test_releasing_twice_gives_back_once() -> None:
    admission = Admission(4)
    with admission.reserve(2) as first, admission.reserve(2):
        first.release()
        first.release()
        assert admission.in_use == 2
    assert admission.in_use == 0


def test_a_reservation_is_all_or_none() -> None:
    admission = Admission(4)
    with admission.reserve(3):
        assert refusal(admission, 2).code == "queue_full"
        assert admission.in_use == 3
        with admission.reserve(1):
            assert admission.in_use == 4


def test_a_full_server_is_a_429_that_says_how_full() -> None:
    admission = Admission(4)
    admission.reserve(4)
    error = refusal(admission, 1)
    assert error.status == 429
    assert error.message == "the server is full: 4 of 4 sequences are taken, 1 more asked for"
    assert error.headers["Retry-After"] == "1"


def test_the_overload_status_may_be_503() -> None:
    admission = Admission(1, overload_status=503)
    admission.reserve(1)
    assert refusal(admission, 1).status == 503


def test_what_could_never_fit_is_a_400_at_once() -> None:
    error = refusal(Admission(4), 5)
    assert (error.status, error.code) == (400, "request_too_large")
    assert error.headers["x-should-retry"] == "false"


def test_refusals_are_counted_by_reason() -> None:
    reasons: list[str] = []
    admission = Admission(1, on_refused=reasons.append)
    admission.reserve(1)
    refusal(admission, 1)
    refusal(admission, 2)
    assert reasons == ["queue_full", "request_too_large"]


def told_ms(admission: Admission, slots: int = 1) -> int:
    return int(refusal(admission, slots).headers["retry-after-ms"])


def test_retry_after_is_how_long_places_are_held_by_how_many_are() -> None:
    clock = Clock()
    admission = Admission(8, clock=clock, jitter=lambda: 1.0)
    held = [admission.reserve(1) for _ in range(8)]
    for reservation in held[:4]:
        clock.now_s += 2.0
        reservation.release()
    # Held for 5 s in the mean, and four are held now: one comes free every 1.25 s.
    assert admission.retry_after_s(2) == pytest.approx(2.5)


def test_retry_after_stays_between_1_and_30_seconds() -> None:
    clock = Clock()
    admission = Admission(8, clock=clock)
    assert 0.9 <= admission.retry_after_s() <= 1.0
    admission.reserve(1).release()
    assert 0.9 <= admission.retry_after_s() <= 1.0
    with admission.reserve(1):
        clock.now_s += 3600
    assert 27.0 <= admission.retry_after_s(8) <= 30.0


def test_an_idle_hour_makes_nobody_wait_longer() -> None:
    clock = Clock()
    admission = Admission(1, clock=clock)
    with admission.reserve(1):
        clock.now_s += 2.0
    clock.now_s += 3600
    with admission.reserve(1):
        assert 2000 <= told_ms(admission) <= 2200


def test_those_who_are_refused_are_told_to_come_one_after_another_as_places_come_free() -> None:
    clock = Clock()
    admission = Admission(4, clock=clock, jitter=lambda: 1.0)
    for _ in range(4):
        with admission.reserve(1):
            clock.now_s += 2.0
    for _ in range(4):
        admission.reserve(1)
    assert [told_ms(admission) for _ in range(5)] == [900, 1400, 1900, 2400, 2900]
    clock.now_s += 1.0
    assert [told_ms(admission), told_ms(admission, 2), told_ms(admission)] == [2400, 3400, 3900]


def test_turns_that_nobody_took_are_forgotten_once_half_of_the_places_are_free() -> None:
    clock = Clock()
    admission = Admission(4, clock=clock, jitter=lambda: 1.0)
    with admission.reserve(1):
        clock.now_s += 40.0
    held = [admission.reserve(1) for _ in range(4)]
    assert [told_ms(admission) for _ in range(4)][1:] == [20_000, 27_273, 27_273]
    for reservation in held:
        reservation.release()
    for _ in range(4):
        admission.reserve(1)
    assert told_ms(admission) < 3000


def test_books_balance_over_random_reservations() -> None:
    rng = random.Random(7)
    admission = Admission(16)
    held = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        else:
            with contextlib.suppress(ApiError):
                held.append(admission.reserve(rng.randint(1, 6)))
        assert admission.in_use == sum(reservation.slots for reservation in held) <= 16


def test_4_8_tokens_are_reserved_with_the_places_all_or_none() -> None:
    admission = Admission(4, max_queued_tokens=100)
    with admission.reserve(1, tokens=70):
        error = refusal(admission, 1, tokens=31)
        assert (error.status, error.code) == (429, "queue_full")
        assert error.message == "the queue is full: 70 of 100 prompt tokens wait to be run, 31 more asked for"
        assert (admission.in_use, admission.queued_tokens) == (1, 70)
        with admission.reserve(1, tokens=30):
            assert admission.queued_tokens == 100
    assert (admission.in_use, admission.queued_tokens) == (0, 0)


def test_4_8_an_estimate_is_a_third_of_the_bytes_and_is_corrected_when_the_prompt_is_tokenised() -> None:
    assert [estimated_tokens(text) for text in ("", "ab", "abcdef", "日本語", "\ud800")] == [1, 1, 3, 4, 2]
    admission = Admission(4, max_queued_tokens=100)
    with admission.reserve(1, tokens=60) as reservation:
        reservation.correct(20)
        assert admission.queued_tokens == 20
        reservation.correct(90)
        assert admission.queued_tokens == 90
        with admission.reserve(1, tokens=10) as other:
            with pytest.raises(ApiError) as caught:
                other.correct(11)
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            assert admission.queued_tokens == 100
    assert admission.queued_tokens == 0


def test_4_8_an_estimate_beyond_the_whole_queue_gets_in_when_it_is_empty_and_a_true_number_never() -> None:
    reasons: list[str] = []
    admission = Admission(4, max_queued_tokens=100, on_refused=reasons.append)
    with admission.reserve(1, tokens=1000) as reservation:
        assert admission.queued_tokens == 100
        assert refusal(admission, 1, tokens=1).status == 429
        with pytest.raises(ApiError) as caught:
            reservation.correct(101)
        assert (caught.value.status, caught.value.code) == (400, "request_too_large")
        assert "--max-queued-tokens" in caught.value.message
        reservation.correct(99)
    assert reasons == ["queue_full", "request_too_large"]
    assert admission.queued_tokens == 0


def test_4_8_a_prompt_leaves_the_queue_when_it_was_run_and_its_place_when_the_answer_ends() -> None:
    admission = Admission(4, max_queued_tokens=100)
    with admission.reserve(2, tokens=80) as reservation:
        reservation.computed(50)
        assert (admission.in_use, admission.queued_tokens) == (2, 30)
        reservation.computed(50)
        assert (admission.in_use, admission.queued_tokens) == (2, 0)
    assert (admission.in_use, admission.queued_tokens) == (0, 0)
    reservation.computed(9)
    reservation.correct(9)
    assert (admission.in_use, admission.queued_tokens) == (0, 0)


def test_4_8_retry_after_is_the_queued_tokens_over_the_tokens_a_second() -> None:
    clock = Clock()
    admission = Admission(8, max_queued_tokens=1000, clock=clock, jitter=lambda: 1.0)
    busy = admission.reserve(1, tokens=1000)
    assert refusal(admission, 1, tokens=1).headers["Retry-After"] == "1"
    clock.now_s += 4
    busy.computed(200)  # 50 tokens a second
    assert refusal(admission, 1, tokens=900).headers["retry-after-ms"] == "16000"
    busy.release()
    clock.now_s += 3600  # idleness is no slowness
    with admission.reserve(1, tokens=500):
        assert refusal(admission, 1, tokens=900).headers["Retry-After"] == "10"


def test_the_queues_default_is_four_pools_and_512_tokens_for_each_place_at_least() -> None:
    assert default_queued_tokens(1_000_000, 512) == 4_000_000
    assert default_queued_tokens(4096, 16) == 16384
    assert default_queued_tokens(64, 16) == 8192


def test_4_8_the_books_balance_over_random_requests_with_leavers_and_faults() -> None:
    rng = random.Random(11)
    admission = Admission(16, max_queued_tokens=500)
    held: list[Reservation] = []
    for _ in range(5000):
        verb = rng.randrange(5)
        with contextlib.suppress(ApiError):
            if verb == 0 or not held:
                held.append(admission.reserve(rng.randint(1, 4), tokens=rng.randint(0, 300)))
            elif verb == 1:
                rng.choice(held).correct(rng.randint(0, 300))
            elif verb in (2, 3):
                rng.choice(held).computed(rng.randint(1, 100))
            else:
                held.pop(rng.randrange(len(held))).release()
        assert admission.queued_tokens == sum(reservation.tokens for reservation in held) <= 500
        assert admission.in_use == sum(reservation.slots for reservation in held) <= 16
    for reservation in held:
        reservation.release()
    assert (admission.in_use, admission.queued_tokens) == (0, 0)
