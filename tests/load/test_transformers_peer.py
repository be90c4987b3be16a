"""The peer that ours is held against, on a tiny model: it runs, counts what was generated and says where it stopped."""

from __future__ import annotations

import json
import re

import pytest
import torch

from engine.bench import Workload
from tests.load import transformers_peer

TINY = ("--shape", "tiny", "--device", "cpu", "--requests", "2")


def test_a_stopped_run_counts_the_tokens_so_far_and_says_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert transformers_peer.main([*TINY, "--limit-s", "0.4"]) == 0
    told = capsys.readouterr()
    figure = json.loads(told.out)
    assert figure["unit"] == "output tok/s"
    assert figure["case"].startswith("tiny bfloat16: 2 of nano: ")
    assert re.search(r" \(of 2 requests, stopped at \d+ s\)$", figure["case"])
    tokens, duration_s = re.search(r"(\d+) tokens, \d requests finished, (.+) s", told.err).groups()  # type: ignore[union-attr]
    assert 0 < int(tokens) < 1157
    assert figure["value"] == pytest.approx(int(tokens) / float(duration_s), rel=0.2)


def test_all_tokens_of_all_requests_come_and_no_others() -> None:
    model = transformers_peer.random_model(transformers_peer.TINY, torch.device("cpu"))
    requests = (((3,) * 40, 5), ((4,) * 9, 2))
    work = Workload("", requests, streams=2)
    heard: list[int] = []
    with transformers_peer.serving(model, transformers_peer.choose(work, model.device, {})) as manager:
        result = transformers_peer.run(manager, requests, "run", 30.0, heard.append)
    assert (result.tokens, result.finished) == (7, 2)
    assert heard[-1] == 7
    assert transformers_peer.ended(result, work) == ""


def test_a_setting_that_the_library_lacks_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match=r"--set pagesize: transformers .* has .*num_blocks"):
        transformers_peer.main([*TINY, "--set", "pagesize=4"])
