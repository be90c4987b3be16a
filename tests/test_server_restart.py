"""The same request gives the same tokens across restarts, of the engine under a server and of the server: real ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.served import serving_tiny_model

PROMPT = [5, 9, 40, 2, 33, 17, 8]
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "logprobs": 2},
    {"prompt": [PROMPT, [7, 1]], "seed": -(2**63), "n": 3, "temperature": 1.3, "top_p": 0.9, "max_tokens": 24},
    {"prompt": PROMPT, "seed": 7, "temperature": 0.8, "top_k": 9, "min_p": 0.01, "frequency_penalty": 0.5},
)
START_S = 120.0


def answers(url: str) -> list[Any]:
    """What a request says of tokens, for each body; a neighbour without a seed runs beside them."""
    with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as http:
        told: list[Any] = []
        for body in BODIES:
            http.post("/v1/completions", json={"prompt": PROMPT[:4], "max_tokens": 3}).raise_for_status()
            answer = http.post("/v1/completions", json=body | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            told.append([(choice["token_ids"], choice["logprobs"]) for choice in answer.json()["choices"]])
        embedded = http.post("/v1/embeddings", json={"input": [PROMPT, [3]]})
        assert embedded.status_code == 200, embedded.text
        told.append(embedded.json()["data"])
    return told


def kill_engine() -> None:
    """With SIGKILL, as a machine short of memory would."""
    engines = [
        child for child in psutil.Process().children(recursive=True) if "engine.process" in " ".join(child.cmdline())
    ]
    assert len(engines) == 1
    os.kill(engines[0].pid, signal.SIGKILL)


def wait_for_another_engine(url: str, before: int) -> None:
    deadline_s = time.monotonic() + START_S
    with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as http:
        while time.monotonic() < deadline_s:
            # The death may be noticed between a probe that found the engine ready and this.
            models = http.get("/v1/models")
            if models.status_code == 200 and models.json()["data"][0]["created"] > before:
                return
    raise AssertionError("no other engine came")


def created(url: str) -> int:
    (card,) = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return int(card["created"])


def test_4_3_the_same_request_gives_the_same_tokens_across_an_engine_restart_and_a_server_restart(
    tmp_path: Path,
) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    with serving_tiny_model(tmp_path / "first", "--seed", "3", "--kv-cells", "1024") as url:
        first = answers(url)
        before = created(url)
        kill_engine()
        wait_for_another_engine(url, before)
        assert answers(url) == first
    with serving_tiny_model(tmp_path / "second", "--seed", "3", "--kv-cells", "2048", "--max-num-seqs", "4") as url:
        second = answers(url)
    assert second == first
    # Not because all answers are one: another seed, and every choice, says something else.
    drawn = [tuple(token_ids) for token_ids, _ in first[1]]
    assert len(set(drawn)) == 6
