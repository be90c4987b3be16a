"""`cellserve bench`: the arithmetic on made-up outcomes, the sending against a scripted server on real sockets."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import bench
from server.bench_client import Outcome, Status, retry_after_s
from support.fake_llm import FakeLLM, serving


@pytest.fixture
def fake() -> Iterator[FakeLLM]:
    with serving(FakeLLM()) as fake:
        yield fake


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def run_bench(fake: FakeLLM, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = bench.run(options("--url", fake.url, "--warmup", "0", "--json", str(out), *flags))
    return code, json.loads(out.read_text())


def completed(*frames_s: float, sent_s: float = 0.0, tokens: int | None = None, inputs: int = 10) -> Outcome:
    return Outcome(
        sent_s=sent_s,
        status=Status.COMPLETED,
        frames_s=list(frames_s),
        ended_s=frames_s[-1],
        input_tokens=inputs,
        output_tokens=len(frames_s) if tokens is None else tokens,
    )


def test_throughputs_divide_completed_work_by_the_duration() -> None:
    failed = Outcome(sent_s=0.0, ended_s=1.0, output_tokens=99, error="boom")
    summary = bench.summarize([completed(1.0, 2.0), completed(1.0, 2.0, 3.0), failed], 4.0, {})
    assert summary["completed"] == 2
    assert summary["failed"] == 1
    assert summary["request_throughput"] == 0.5
    assert summary["output_throughput"] == 5 / 4
    assert summary["total_token_throughput"] == 25 / 4


def test_latencies_are_milliseconds_and_itl_has_one_value_a_gap() -> None:
    summary = bench.summarize([completed(1.5, 2.0, 4.0, sent_s=1.0), completed(3.0, 3.5, sent_s=2.0)], 4.0, {})
    assert summary["mean_ttft_ms"] == pytest.approx(750)
    assert summary["mean_tpot_ms"] == pytest.approx((1250 + 500) / 2)
    assert summary["mean_itl_ms"] == pytest.approx((500 + 2000 + 500) / 3)
    assert summary["median_itl_ms"] == pytest.approx(500)
    assert summary["mean_e2el_ms"] == pytest.approx((3000 + 1500) / 2)


def test_tpot_counts_tokens_and_not_frames() -> None:
    """Three tokens in the second frame: 1 s for 3 tokens after the first."""
    assert bench.summarize([completed(1.0, 2.0, tokens=4)], 2.0, {})["mean_tpot_ms"] == pytest.approx(1000 / 3)


def test_a_single_token_has_no_time_per_further_token() -> None:
    summary = bench.summarize([completed(1.0)], 1.0, {})
    assert summary["mean_tpot_ms"] is None
    assert summary["p99_itl_ms"] is None


def test_percentiles_are_linear_between_neighbours() -> None:
    values = [float(value) for value in range(101)]
    assert bench.percentile(values, 0.99) == 99.0
    assert bench.percentile([1.0, 2.0], 0.5) == statistics.median([1.0, 2.0])
    assert bench.percentile([1.0, 3.0], 0.99) == pytest.approx(2.98)
    assert bench.percentile([7.0], 0.99) == 7.0


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    outcomes = [completed(0.1, 0.2), completed(0.1, 0.9), completed(0.5, 0.6)]
    summary = bench.summarize(outcomes, 2.0, {"ttft_ms": 200.0, "itl_ms": 200.0})
    assert summary["request_goodput"] == 0.5


def test_poisson_arrivals_keep_the_rate_and_the_seed() -> None:
    arrivals_s = bench.poisson_arrivals(50.0, 5001, seed=0)
    assert arrivals_s == bench.poisson_arrivals(50.0, 5001, seed=0)
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] == pytest.approx(100.0, rel=0.05)


def test_prompts_repeat_with_the_seed_and_share_the_prefix() -> None:
    args = options("--num-requests", "4", "--input-tokens", "3-9", "--prefix-tokens", "5", "--seed", "1")
    prompts = bench.make_prompts(args)
    assert prompts == bench.make_prompts(args)
    ids = [prompt.content["prompt"] for prompt in prompts]
    assert all(8 <= len(prompt) <= 14 for prompt in ids)
    assert len({tuple(prompt[:5]) for prompt in ids}) == 1
    assert len({tuple(prompt) for prompt in ids}) == 4


def test_retry_after_is_bounded_and_defaults_to_a_second() -> None:
    assert retry_after_s({"retry-after": "0.5"}) == 0.5
    assert retry_after_s({}) == 1.0
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 1.0
    assert retry_after_s({"retry-after": "86400"}) == 60.0


def test_closed_loop_keeps_no_more_than_the_streams_open(fake: FakeLLM, tmp_path: Path) -> None:
    code, result = run_bench(fake, tmp_path, "--streams", "3", "--num-requests", "12", "--output-tokens", "5")
    assert code == 0
    assert result["completed"] == len(fake.bodies) == 12
    assert result["total_output_tokens"] == 60
    assert result["model_id"] == "fake"
    assert 1 <= fake.most_open <= 3
    body = fake.bodies[0]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 128


def test_open_loop_sends_everything_at_the_rate(fake: FakeLLM, tmp_path: Path) -> None:
    code, result = run_bench(fake, tmp_path, "--rate", "200", "--num-requests", "20", "--output-tokens", "2")
    assert code == 0
    assert result["completed"] == 20
    assert result["duration"] >= bench.poisson_arrivals(200.0, 20, seed=0)[-1]


def test_refusals_are_counted_apart_waited_out_and_tried_again(fake: FakeLLM, tmp_path: Path) -> None:
    fake.refusals = [429, 429, 503]
    code, result = run_bench(fake, tmp_path, "--streams", "1", "--num-requests", "2")
    assert code == 0
    assert (result["refused_429"], result["refused_503"]) == (2, 1)
    assert (result["completed"], result["failed"], result["given_up"]) == (2, 0, 0)
    assert result["duration"] >= 3 * 0.02, "Retry-After was not honoured"


def test_a_request_refused_too_often_is_given_up_not_failed(fake: FakeLLM, tmp_path: Path) -> None:
    fake.refuse_always = 429
    code, result = run_bench(fake, tmp_path, "--num-requests", "1", "--max-retries", "2")
    assert code == 1
    assert (result["given_up"], result["failed"], result["refused_429"]) == (1, 0, 3)


def test_broken_streams_are_failures(fake: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.breaks = ["error", "silent"]
    code, result = run_bench(fake, tmp_path, "--streams", "1", "--num-requests", "3")
    assert code == 1
    assert (result["completed"], result["failed"]) == (1, 2)
    printed = capsys.readouterr().out
    assert "the step failed" in printed
    assert "without [DONE]" in printed


def test_a_dataset_of_texts_ids_and_chats_is_sent_as_it_is(fake: FakeLLM, tmp_path: Path) -> None:
    rows = [
        {"prompt": "once", "output_tokens": 3},
        {"prompt": [4, 5]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ("--dataset", str(dataset), "--output-tokens", "2", "--streams", "1")
    code, result = run_bench(fake, tmp_path, *flags)
    assert code == 0
    assert [body["max_tokens"] for body in fake.bodies] == [3, 2, 2]
    assert fake.bodies[2]["messages"] == rows[2]["messages"]
    assert result["total_output_tokens"] == 7


def test_a_dataset_row_that_asks_nothing_is_named(
    fake: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert bench.run(options("--url", fake.url, "--dataset", str(dataset))) == 2
    assert "row 2" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(options("--url", "http://127.0.0.1:9")) == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("flags", [
    ("--warmup", "-1"),
    ("--max-retries", "-1"),
    ("--prefix-tokens", "-1"),
    ("--input-tokens", "few"),
    ("--input-tokens", "8-4"),
])  # fmt: skip
def test_a_number_that_cannot_be_is_refused_by_its_option(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*flags)
    said = capsys.readouterr().err
    assert f"argument {flags[0]}: " in said
    assert "invalid _" not in said


def test_a_file_that_cannot_be_written_is_found_out_before_the_run(
    fake: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(options("--url", fake.url, "--json", str(tmp_path / "nowhere" / "figures.json"))) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
