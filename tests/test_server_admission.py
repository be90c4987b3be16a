"""Slots are reserved before any work, all or none, and come back on every way out."""

from __future__ import annotations

import contextlib
import random

import pytest

from server.admission import Admission
from server.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refusal(admission: Admission, slots: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.reserve(slots)
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


def test_retry_after_follows_the_rate_of_releases() -> None:
    clock = Clock()
    admission = Admission(8, clock=clock, jitter=lambda: 1.0)
    held = [admission.reserve(1) for _ in range(8)]
    for reservation in held[:4]:
        clock.now_s += 2.0
        reservation.release()
    # Four slots came back in the six seconds since the first of them did.
    assert admission.retry_after_s(2) == pytest.approx(2 / (4 / 6))


def test_retry_after_stays_between_1_and_30_seconds() -> None:
    clock = Clock()
    admission = Admission(8, clock=clock)
    assert admission.retry_after_s() == 1.0
    admission.reserve(1).release()
    assert admission.retry_after_s() == 1.0
    clock.now_s += 3600
    assert admission.retry_after_s(8) == 30.0


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
