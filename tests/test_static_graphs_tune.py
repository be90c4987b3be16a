"""How products of few rows are cut: the rule, what is measured instead, the file that keeps it, and who reads it."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_tune.py", allow_module_level=True)

from static_graphs import tiling_table, tune
from static_graphs.fuse import fuse
from static_graphs.model import LoadedModel, model_from_config
from static_graphs.tiling_table import Stamp, UnusableTable, read_table, tilings_for, write_table
from static_graphs.tilings import RULE, Measured, Product, Tiling, Tilings, bucket, choose, shared_bytes
from static_graphs.trials import Limits, Trial, best, candidates, kernels_of, rule_of
from support.packed_runs import PackedRun
from support.tiny_models import tiny

STAMP = Stamp("NVIDIA H200", "9.0", "2.13.0", "3.9.0")
H200 = Limits(shared_bytes=227 << 10, multiprocessors=132, l2_bytes=50 << 20)
DOWN = Product(4096, 14336)
RIVAL = Tiling(128, 128, warps=8, stages=3)
SPLIT = Tiling(64, 64, parts=4)
MANY_BYTES_S = 1e30
"""A bandwidth at which nothing that is read counts."""


def decide(us: dict[Tiling | None, float | None], of: Product = DOWN, *, copy_bytes_s: float = MANY_BYTES_S) -> object:
    return best(of, [8], us, lambda _, tiling: us[tiling], copy_bytes_s).tiling


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 1), (2, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 256)]
)
def test_a_bucket_is_what_a_kernel_pads_rows_to(rows: int, expected: int) -> None:
    assert bucket(rows) == expected


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (1024, 3072), (128256, 4096), (200, 328), (32, 64)])
def test_the_rule_chooses_alike_in_all_of_a_bucket(width: int, depth: int, gated: bool) -> None:
    for rows in range(1, 129):
        assert choose(rows, width, depth, gated=gated) == choose(bucket(rows), width, depth, gated=gated)


def test_what_beats_the_rule_by_more_than_three_percent_is_chosen() -> None:
    rule = rule_of(DOWN, 8)
    assert decide({rule: 100.0, None: 120.0, RIVAL: 96.9}) == RIVAL
    assert decide({rule: 100.0, None: 120.0, RIVAL: 97.0}) == rule
    assert decide({rule: 100.0, None: 90.0, RIVAL: 95.0}) is None
    assert decide({rule: 100.0, None: 120.0}) == rule


def test_what_wins_only_once_is_not_chosen() -> None:
    rule = rule_of(DOWN, 8)
    times = {rule: iter((100.0, 100.0)), RIVAL: iter((90.0, 99.0))}
    choice = best(DOWN, [8], times, lambda _, tiling: next(times[tiling]), MANY_BYTES_S)
    assert (choice.tiling, choice.us, choice.rule_us) == (rule, 100.0, 100.0)


def test_the_parts_that_a_reader_adds_up_count_as_time() -> None:
    whole = Product(128256, 4096)  # so wide that the rule does not cut K
    rule = rule_of(whole, 8)
    reading_us = 4 * 8 * whole.width * 4 / 1e12 * 1e6
    us = {rule: 100.0, SPLIT: 96.0 - reading_us}
    assert decide(us, whole, copy_bytes_s=1e12) == SPLIT
    assert decide(us | {SPLIT: 98.0 - reading_us}, whole, copy_bytes_s=1e12) == rule
    assert decide(us | {SPLIT: 96.0}, whole, copy_bytes_s=1e12) == rule


def test_candidates_that_fail_are_left_out_and_so_is_a_rule_that_does() -> None:
    rule = rule_of(DOWN, 8)
    assert decide({rule: 100.0, None: 120.0, RIVAL: None}) == rule
    assert decide({rule: None, None: 120.0, RIVAL: 119.0}) == RIVAL
    with pytest.raises(RuntimeError, match=r"nothing computes .*4096.* of \[8\] rows"):
        decide({rule: None, None: None})


def test_a_buckets_time_is_the_mean_over_its_row_counts() -> None:
    us = {(24, None): 50.0, (32, None): 150.0, (24, RIVAL): 90.0, (32, RIVAL): 90.0}
    choice = best(Product(32, 64), [24, 32], [None, RIVAL], lambda rows, tiling: us[rows, tiling], MANY_BYTES_S)
    assert (choice.tiling, choice.us, choice.rule, choice.rule_us) == (RIVAL, 90.0, None, 100.0)


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(
    "of",
    [
        DOWN,
        Product(1024, 3072),
        Product(14336, 4096, True, True),
        Product(200, 328),
        Product(151936, 1024, False, True),
    ],
)
def test_candidates_hold_the_rules_choice_and_cublas_and_fit_the_device(of: Product, rows: int) -> None:
    found = candidates(of, rows, H200)
    assert found[0] == rule_of(of, rows)
    assert None in found
    assert len(set(found)) == len(found) > 4
    table = {Measured(of.width, of.depth, of.is_gated, rows): tiling for tiling in found}
    assert len(table) == 1
    for tiling in found:
        if tiling is None:
            continue
        assert shared_bytes(tiling, rows, gated=of.is_gated) <= H200.shared_bytes
        assert tiling.parts == 1 or not of.is_whole
        assert tiling.is_dot or rows == 1
        row = Measured(of.width, of.depth, of.is_gated, rows)._asdict() | {"tiling": asdict(tiling)}
        assert tiling_table._choice(row)[1] == tiling  # what is written can be read
    small = candidates(of, rows, replace(H200, shared_bytes=99 << 10))
    assert set(small) <= {*found, rule_of(of, rows)}


def test_jobs_of_one_kernel_are_compiled_once() -> None:
    jobs = [(DOWN, 8, Tiling(64, 64, parts)) for parts in (1, 2, 4)] + [(Product(2048, 4096), 2, Tiling(64, 64, 2))]
    assert kernels_of(jobs) == [jobs[0], jobs[3]]
    assert len(kernels_of([*jobs, (DOWN, 16, Tiling(64, 64))])) == 3


@pytest.mark.parametrize("gated", [False, True])
def test_a_trial_times_what_is_right_and_leaves_out_what_is_wrong_or_fails(gated: bool) -> None:
    of = Product(64, 128, gated, gated)
    timed: list[object] = []

    def clock_us(run: object) -> float:
        timed.append(run)
        return 6.0

    trial = Trial(of, torch.device("cpu"), clock_us, dtype=torch.float32)
    assert trial.time_us(2, None) == 6.0
    assert trial.time_us(2, Tiling(32, 32)) == 6.0
    assert trial.time_us(2, Tiling(32, 32, is_dot=False)) is None  # one row's: the second is left out
    assert trial.time_us(2, Tiling(24, 32)) is None  # no power of two
    assert len(timed) == 2


def test_a_trial_has_more_weights_than_the_l2_cache_holds() -> None:
    calls: list[int] = []
    of = Product(64, 128)
    trial = Trial(of, torch.device("cpu"), lambda run: calls.append(1) or 96.0, dtype=torch.float32, l2_bytes=1 << 16)
    assert (len(trial.weights), trial.passes) == (8, 2)
    assert trial.time_us(2, None) == 6.0


def test_a_file_keeps_what_was_measured_and_the_shapes_that_were_there(cache_home: Path) -> None:
    assert read_table(STAMP) == {}
    first = {Measured(4096, 1024, False, 64): SPLIT, Measured(3072, 1024, True, 1): Tiling(2, 512, is_dot=False)}
    assert write_table(STAMP, first) == cache_home / "cellserve" / "tilings-nvidia-h200-sm90.json"
    assert read_table(STAMP) == first
    both = {**read_table(STAMP), Measured(4096, 1024, False, 128): None}
    write_table(STAMP, both)
    assert read_table(STAMP) == both
    assert read_table(replace(STAMP, gpu="NVIDIA L4", capability="8.9")) == {}


def test_a_relative_cache_folder_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert STAMP.path.parent == Path.home() / ".cache" / "cellserve"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache_home: Path) -> None:
    key = Measured(4096, 1024, False, 64)
    path = write_table(STAMP, {key: SPLIT})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # as a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_table(STAMP, {key: None})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_table(STAMP) == {key: SPLIT}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("field", ["gpu", "capability", "torch_version", "triton_version"])
def test_a_table_of_another_gpu_torch_or_triton_is_not_used_and_said_why(cache_home: Path, field: str) -> None:
    path = write_table(STAMP, {Measured(4096, 1024, False, 64): SPLIT})
    other = replace(STAMP, **{field: "another"})
    other.path.write_bytes(path.read_bytes())
    with pytest.raises(UnusableTable, match=rf"{field} '.*', here it is 'another'"):
        read_table(other)


GOOD = {"width": 4096, "depth": 1024, "gated": False, "rows": 64, "tiling": asdict(SPLIT)}


@pytest.mark.parametrize(
    "change",
    [
        {"width": -1},
        {"depth": "1024"},
        {"rows": 48},
        {"gated": 1},
        {"gated": True},
        {"tiling": {}},
        {"tiling": 7},
        {"tiling": asdict(SPLIT) | {"block_m": 64}},
        {"tiling": asdict(SPLIT) | {"block_n": 48}},
        {"tiling": asdict(SPLIT) | {"block_k": 8}},
        {"tiling": asdict(SPLIT) | {"block_k": 1024}},
        {"tiling": asdict(SPLIT) | {"parts": 0}},
        {"tiling": asdict(SPLIT) | {"parts": 17}},
        {"tiling": asdict(SPLIT) | {"warps": 64}},
        {"tiling": asdict(SPLIT) | {"stages": True}},
        {"tiling": asdict(SPLIT) | {"is_dot": False}},
    ],
    ids=str,
)
def test_a_choice_that_no_kernel_could_be_told_damages_the_table(cache_home: Path, change: dict[str, object]) -> None:
    path = write_table(STAMP, {})
    path.write_text(json.dumps(asdict(STAMP) | {"choices": [GOOD]}))
    assert len(read_table(STAMP)) == 1
    path.write_text(json.dumps(asdict(STAMP) | {"choices": [GOOD | change]}))
    with pytest.raises(UnusableTable, match="is damaged"):
        read_table(STAMP)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"choices": 7}', b"\xff\xfe", b"[" * 100_000, b'{"gpu": "x"}'])
def test_a_file_that_is_no_table_is_told_not_raised_as_it_comes(cache_home: Path, content: bytes) -> None:
    write_table(STAMP, {}).write_bytes(content)
    with pytest.raises(UnusableTable, match=r"tilings-nvidia-h200-sm90\.json (is damaged|cannot be read)"):
        read_table(STAMP)


def test_measured_choices_come_first_and_the_rule_decides_the_rest() -> None:
    tilings = Tilings({Measured(4096, 1024, False, 64): None, Measured(4096, 1024, True, 128): SPLIT})
    assert choose(40, 4096, 1024) is not None
    assert tilings.choose(40, 4096, 1024) is None
    assert tilings.choose(65, 4096, 1024, gated=True) == SPLIT
    for rows in (1, 8, 32, 128, 200):
        assert tilings.choose(rows, 4096, 1024) == RULE.choose(rows, 4096, 1024) == choose(rows, 4096, 1024)


def test_tables_of_the_same_choices_have_one_record_and_the_rule_has_none() -> None:
    first, second = Measured(4096, 1024, False, 64), Measured(4096, 1024, True, 16)
    one = Tilings({first: None, second: SPLIT})
    assert one.record == Tilings({second: SPLIT, first: None}).record
    assert len({one.record, Tilings({first: SPLIT, second: SPLIT}).record, RULE.record}) == 3
    assert RULE.record == ""


def test_without_cuda_the_rule_decides_and_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tilings_for(torch.device("cpu"), torch.bfloat16) is RULE
    assert tune.main(["--shapes", "0.6b", "--rows", "64,128"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "7b"], "there is no shape '7b': give some of 8b, 0.6b"),
        (["--rows", "0,8"], "row counts are from 1 to 128"),
        (["--rows", "129"], "row counts are from 1 to 128"),
        (["--shapes", "8b", "a-model"], "give a model or --shapes, not both"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_shape_that_anything_needs_whole_is_tuned_whole() -> None:
    assert tune.merged([Product(64, 32), Product(64, 32, False, True), Product(64, 32, True, True)]) == [
        Product(64, 32, False, True),
        Product(64, 32, True, True),
    ]
    assert tune.by_bucket([128, 1, 2, 16, 72, 2]) == {1: [1], 16: [2, 16], 128: [72, 128]}
    assert list(tune.by_bucket(tune.ROWS)) == [1, 16, 32, 64, 128]


def logits(model: LoadedModel) -> torch.Tensor:
    run = PackedRun(model, seed=0)
    a, b = run.open(), run.open()
    return torch.cat([run.step([(a, 5), (a, 9), (b, 40)], width=3), run.step([(b, 12)], width=1)])


def test_a_fused_model_names_its_products_and_computes_the_same_however_they_are_cut() -> None:
    config = tiny("qwen3", num_hidden_layers=1)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    products = [
        Product(heads + 2 * config.num_key_value_heads * config.head_dim, hidden),
        Product(hidden, heads),
        Product(hidden, inner),
        Product(inner, hidden, is_gated=True, is_whole=True),
        Product(config.vocab_size, hidden, is_whole=True),
    ]
    odd: dict[Measured, Tiling | None] = {}
    for number, of in enumerate(products):
        for rows in (1, 16):
            cut = Tiling(32, 16, 1 if of.is_whole else 2 + number % 2, is_dot=rows > 1 or number % 2 == 0)
            odd[Measured(of.width, of.depth, of.is_gated, rows)] = cut
    assert all(choose(key.rows, key.width, key.depth, gated=key.gated) != cut for key, cut in odd.items())
    expected = logits(model_from_config(config, seed=3))
    model = model_from_config(config, seed=3)
    assert fuse(model, Tilings(odd)).products == set(products)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)
