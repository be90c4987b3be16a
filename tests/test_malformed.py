"""Malformed requests against a whole server beside eight well-behaved streams (G2, S13, S20).

A smoke of them runs always, all 10,300 with --full: `python -m pytest tests/test_malformed.py --full`.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live_server import TIMEOUT_S
from support.malformed import Malformed, Verdict, ask, made_by_hand, made_by_mutation
from support.sse import post_stream
from support.toy_process import serving_toy

SMOKE = 300
FULL = 10_000
AT_ONCE = 4

BYSTANDERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 40, "temperature": 0}),
    ("/v1/completions", {"prompt": "123 x", "max_tokens": 40, "temperature": 1, "seed": 7}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "presence_penalty": 1.0}),
    ("/v1/completions", {"prompt": [9, 8], "max_tokens": 30, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": "true", "max_tokens": 40, "seed": 3, "stop": ["zzz", "9:"]}),
    ("/v1/completions", {"prompt": "[", "max_tokens": 30, "temperature": 0, "structured_outputs": {"regex": "[abc]*"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 40, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "seed": 5, "n": 1}),
]
TOLD_ANEW = ("id", "created")
"""Of each answer; everything else is the same each time."""


@dataclass
class Bystanders:
    """Eight streams that begin anew until told to stop, each compared with what it said alone."""

    url: str
    expected: list[list[dict[str, Any]]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    rounds: Counter[int] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        with self._client() as http:
            self.expected = [self._said(http, number) for number in range(len(BYSTANDERS))]
        assert all(len(said) > 5 for said in self.expected), "streams too short to be disturbed"

    def run(self, number: int) -> None:
        with self._client() as http:
            while not self._stop.is_set():
                try:
                    said = self._said(http, number)
                except (AssertionError, httpx.HTTPError) as error:
                    self.changed.append(f"{number}: {error!r:.500}")
                    return
                if not _same(said, self.expected[number]):
                    self.changed.append(f"{number}: {said!r:.500}")
                    return
                self.rounds[number] += 1

    def stop(self) -> None:
        self._stop.set()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=TIMEOUT_S)

    def _said(self, http: httpx.Client, number: int) -> list[dict[str, Any]]:
        path, body = BYSTANDERS[number]
        return [
            {name: value for name, value in event.items() if name not in TOLD_ANEW}
            for event in post_stream(http, path, body)
        ]


def _same(said: Any, expected: Any) -> bool:
    """Equal; log probabilities to the last digits, which depend on how many rows a step has."""
    if isinstance(said, float) and isinstance(expected, float):
        return math.isclose(said, expected, abs_tol=1e-4)
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(_same(value, expected[key]) for key, value in said.items())
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_same, said, expected))
    return bool(said == expected)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    # Places enough that nobody is refused for want of one, for that would hide what is tested.
    with serving_toy(tmp_path, "--no-access-log", "--max-waiting", "64", "--served-model-name", "toy") as (url, _):
        yield url


def verdicts(url: str, requests: Iterator[Malformed]) -> Iterator[tuple[Malformed, Verdict]]:
    """In order, `AT_ONCE` at a time."""
    host, _, port = url.removeprefix("http://").partition(":")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda request: (request, ask(host, int(port), request)), requests)


def run_beside_bystanders(url: str, requests: list[Malformed]) -> Counter[int]:
    """How often each status came. Every answer must be in order, and every bystander's stream as it was alone."""
    bystanders = Bystanders(url)
    statuses: Counter[int] = Counter()
    faults = []
    with ThreadPoolExecutor(len(BYSTANDERS)) as streams:
        running = [streams.submit(bystanders.run, number) for number in range(len(BYSTANDERS))]
        try:
            for request, verdict in verdicts(url, iter(requests)):
                statuses[verdict.status] += 1
                if verdict.fault is not None:
                    faults.append(f"{request.name}: {verdict.fault}\n    {request.data[-400:]!r}")
        finally:
            bystanders.stop()
        for stream in running:
            stream.result()
    assert faults == [], "\n".join(faults[:20])
    assert bystanders.changed == []
    assert min(bystanders.rounds[number] for number in range(len(BYSTANDERS))) >= 1, "they ran beside it"
    with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) as http:
        assert http.get("/health").status_code == 200
        metrics = http.get("/metrics").text
        assert 'status="500"' not in metrics
        assert http.get("/load").json() == {"server_load": 0}, "nothing of theirs still runs"
    return statuses


def check_all(url: str, count: int, tmp_path: Path) -> None:
    by_hand = list(made_by_hand())
    assert len(by_hand) >= 300
    smoke = count < FULL
    requests = (by_hand[:: len(by_hand) // SMOKE or 1] if smoke else by_hand) + list(made_by_mutation(count))
    statuses = run_beside_bystanders(url, requests)
    print(json.dumps({"malformed": len(requests), "statuses": dict(sorted(statuses.items()))}))
    assert statuses[400] > len(requests) / 3, "most of them are wrong"
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log[-3000:]


def test_malformed_requests_are_refused_and_disturb_nobody(server: str, tmp_path: Path) -> None:
    """G2, S20: no 500, no hang, one shape of errors that tell nothing of our insides, no bystander changed."""
    check_all(server, SMOKE, tmp_path)


@pytest.mark.full
def test_all_malformed_requests_are_refused_and_disturb_nobody(server: str, tmp_path: Path) -> None:
    """G2, S13, S20."""
    check_all(server, FULL, tmp_path)


def test_the_corpus_is_the_same_every_time() -> None:
    first, again = ([request.data for request in made_by_mutation(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 50
    assert [request.data for request in made_by_mutation(10)] == first[:10]
