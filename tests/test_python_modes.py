"""R40: a server says the same without asserts, under any seed of hashes and in Python's development mode.

What is compared is the toy decoder's answers, and how malformed requests are refused; only with --full, for without
asserts every module is compiled anew. A check that is an `assert`, an
order that is a set's, a coroutine that nobody awaits, a file that nobody closes would show.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.live_server import TIMEOUT_S
from support.malformed import ask, made_by_hand
from support.toy_process import serving_toy

ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": "abc", "max_tokens": 40, "temperature": 0, "logprobs": 5},
    {"prompt": "true", "max_tokens": 40, "seed": 3, "n": 3, "stop": ["zzz", "9:"]},
    {"prompt": [1, 2, 3], "max_tokens": 30, "seed": 5, "logit_bias": {"7": 3, "9": 3}, "presence_penalty": 1.0},
    {"prompt": ["abc", "abd"], "max_tokens": 20, "seed": 1, "structured_outputs": {"regex": "[abc]*"}},
)
MODES = {
    "all of them": {"PYTHONOPTIMIZE": "1", "PYTHONHASHSEED": "1", "PYTHONDEVMODE": "1"},
    "-O": {"PYTHONOPTIMIZE": "1"},
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed random": {"PYTHONHASHSEED": "random"},
    "-X dev": {"PYTHONDEVMODE": "1"},
}
EVERY = 10
"""Of the malformed requests by hand, one in so many."""
COMPLAINTS = re.compile(r"never awaited|\w+Warning|Traceback|unclosed|was destroyed but it is pending")


def said(folder: Path, **variables: str) -> dict[str, Any]:
    """Everything that such a server answers."""
    folder.mkdir()
    with serving_toy(folder, "--no-access-log", "--served-model-name", "toy", **variables) as (url, _):
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        found: dict[str, Any] = {}
        with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) as http:
            for body in ASKED:
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                found[json.dumps(body)] = [answer.json()["choices"], answer.json()["usage"]]
        for malformed in list(made_by_hand())[::EVERY]:
            verdict = ask(address.hostname, address.port, malformed)
            assert verdict.fault is None, (malformed.name, verdict)
            found[malformed.name] = [verdict.status, verdict.message]
    log = (folder / "log").read_text()
    assert not COMPLAINTS.search(log), log[-3000:]
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return said(tmp_path_factory.mktemp("usual") / "server")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_r40_a_server_says_the_same_in_every_mode_of_python(tmp_path: Path, usual: dict[str, Any], mode: str) -> None:
    assert said(tmp_path / "server", **MODES[mode]) == usual
