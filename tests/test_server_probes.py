"""Live, ready, healthy: three questions with three answers, and the books that balance."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engine.client import EngineLives, InProcessClient
from engine.dispatch import EngineClient
from engine.errors import ModelError
from engine.loop import EngineLoop
from engine.thread import ProgressCallback
from engine.types import EngineInfo, EngineStats, GenerateRequest, Update
from server.lifecycle import Lifecycle, StepTimes
from server.metrics import Metrics
from server.settings import Settings
from support.live_server import TIMEOUT_S, LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client, scripted_info, scripted_loop

QUIET = Settings(access_log=False)


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def server(executor: ScriptedExecutor) -> Iterator[LiveServer]:
    with live_server(scripted_client(executor), QUIET) as server:
        yield server


class SlowLoad:
    """An engine that loads until a test lets it; `fail` makes the load end badly."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.fail: Exception | None = None

    def build(self, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
        progress("capturing graphs", 17, 35)
        assert self.go_on.wait(20)
        if self.fail is not None:
            raise self.fail
        return scripted_loop(ScriptedExecutor(), scripted_info()), scripted_info()


def test_while_loading_it_lives_is_not_ready_and_says_what_it_does() -> None:
    load = SlowLoad()
    with live_server(InProcessClient(load.build), QUIET, is_ready=False) as server:
        assert server.http.get("/live").json() == {"status": "ok"}
        until(lambda: "done" in server.http.get("/ready").json())
        body = server.http.get("/ready").json()
        assert {key: body[key] for key in ("phase", "done", "of")} == {
            "phase": "capturing graphs",
            "done": 17,
            "of": 35,
        }
        answers = [server.http.get(path) for path in ("/ready", "/health", "/v1/models", "/v1/completions")]
        assert [answer.status_code for answer in answers] == [503] * 4
        assert {answer.json()["error"]["code"] for answer in answers} == {"loading"}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers)
        assert server.metric("vllm:admission_rejections_total", reason="loading") == 2
        assert server.http.get("/version").status_code == 200
        load.go_on.set()
        server.wait_ready()
        assert server.http.get("/ready").json() == {"phase": "ready"}


def test_a_loaded_engine_takes_nothing_before_what_needs_the_model_is_prepared() -> None:
    async def start() -> None:
        is_preparing, go_on = asyncio.Event(), asyncio.Event()

        async def prepare(info: EngineInfo) -> None:
            is_preparing.set()
            await go_on.wait()

        client = scripted_client()
        lifecycle = Lifecycle(client, prepare)
        running = asyncio.create_task(lifecycle.run())
        async with asyncio.timeout(TIMEOUT_S):
            await is_preparing.wait()
            assert client.phase.name == "ready"
            refusal = lifecycle.refusal()
            assert refusal is not None
            assert refusal.code == "loading"
            assert lifecycle.progress() == {"phase": "loading the tokenizer"}
            go_on.set()
            await lifecycle.wait_loaded()
            assert lifecycle.refusal() is None
        running.cancel()
        await asyncio.wait([running])
        await client.close()

    asyncio.run(start())


def test_a_failed_load_stays_not_ready_without_telling_clients_why() -> None:
    load = SlowLoad()
    load.fail = ModelError("no config.json in /srv/models/secret")
    load.go_on.set()
    with live_server(InProcessClient(load.build), QUIET, is_ready=False) as server:
        with pytest.raises(ModelError, match="no config"):
            server.wait_ready()
        for path in ("/ready", "/health", "/v1/models"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "secret" not in answer.text
        assert server.http.get("/live").status_code == 200


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping"])
def test_probes_answer_get_and_head(server: LiveServer, path: str) -> None:
    assert server.http.get(path).status_code == 200
    assert server.http.head(path).status_code == 200


def test_draining_is_not_ready_but_healthy_and_takes_nothing_new(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    executor.hold()
    stream = server.call(lambda: client_of(server).submit(GenerateRequest("r", (5,), max_new_tokens=2)))
    drain = threading.Thread(target=lambda: server.run(server.app.state.lifecycle.drain(10.0)))
    drain.start()
    until(lambda: server.http.get("/ready").status_code == 503)
    ready, refused = server.http.get("/ready"), server.http.get("/v1/models")
    assert ready.json()["phase"] == "draining"
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["Connection"] == "close"
    assert server.http.get("/health").status_code == 200
    executor.release()
    drain.join(20)
    assert [update.finish for update in server.run(collect(stream))][-1] == "length"


def test_a_dead_engine_is_unhealthy_until_another_one_runs_which_takes_over_its_requests() -> None:
    dying, go_on = ScriptedExecutor(), threading.Event()
    dying.fail_step(1, RuntimeError("a fault that nobody handles"))
    executors = [dying, ScriptedExecutor()]

    def build(progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
        assert len(executors) == 2 or go_on.wait(20)
        return scripted_loop(executors.pop(0), scripted_info()), scripted_info()

    with live_server(InProcessClient(build), QUIET) as server:
        stream = server.call(lambda: client_of(server).submit(GenerateRequest("r", (5,))))
        until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/live").status_code == 200
        go_on.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.http.get("/health").status_code == 200
        updates = server.run(collect(stream))
        assert [token for update in updates for token in update.token_ids] == list(range(6, 22))
        assert server.metric("cellserve:engine_restarts_total") == server.metric("cellserve:requests_rerun_total") == 1


class SilentClient(InProcessClient):
    """Says of itself whatever silence a test wants."""

    silence_s = 0.0
    steps = 1000

    @property
    def stalled_s(self) -> float:
        return self.silence_s

    @property
    def num_steps(self) -> int:
        return self.steps


def silent_client(silence_s: float) -> SilentClient:
    client = SilentClient(lambda progress: (scripted_loop(ScriptedExecutor(), scripted_info()), scripted_info()))
    client.silence_s = silence_s
    return client


@pytest.mark.parametrize(("slowest_step_s", "silence_s", "is_stalled"), [
    (0.01, 0.0, False),
    (0.01, 19.9, False),
    (0.01, 20.1, True),
    (3.0, 29.9, False),
    (3.0, 30.1, True),
])  # fmt: skip
def test_a_stall_is_20_seconds_or_10_of_the_slowest_steps(
    slowest_step_s: float, silence_s: float, is_stalled: bool
) -> None:
    async def nothing(info: EngineInfo) -> None: ...

    lifecycle = Lifecycle(silent_client(silence_s), nothing)
    lifecycle.step_times.observe(EngineStats(steps=1, step_time_s=slowest_step_s))
    assert lifecycle.is_stalled() is is_stalled


def test_slowest_step_is_the_largest_recent_mean_and_survives_a_restart() -> None:
    times = StepTimes()
    for steps, total_s in ((10, 1.0), (12, 3.0), (12, 3.0), (14, 3.2), (1, 0.5)):
        times.observe(EngineStats(steps=steps, step_time_s=total_s))
    assert times.slowest_s == pytest.approx(1.0)


def test_health_says_503_when_work_waits_and_nothing_moves() -> None:
    with live_server(silent_client(21.0), QUIET) as server:
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert server.http.get("/ready").status_code == 200


# Metrics.


def test_gauges_follow_the_engine_and_fall_back_to_zero(server: LiveServer, executor: ScriptedExecutor) -> None:
    """MET-4."""
    requests = [GenerateRequest(f"r{index}", (5, 6), max_new_tokens=8) for index in range(3)]
    executor.hold()
    streams = [server.call(lambda request=request: client_of(server).submit(request)) for request in requests]
    executor.release(3)
    executor.wait_held()
    until(lambda: server.metric("vllm:num_requests_running") == 3)
    assert server.metric("vllm:kv_cache_usage_perc") == server.metric("cellserve:cells_used") / 4096 > 0
    executor.release()
    for stream in streams:
        server.run(collect(stream))
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("cellserve:engine_generated_tokens_total") == 24
    assert server.metric("cellserve:method_calls_total", method="forward_others") == len(executor.batches)
    assert server.metric("vllm:cache_config_info", block_size="1", num_gpu_blocks="4096") == 1


def test_metrics_are_text_that_every_scraper_reads(server: LiveServer) -> None:
    """MET-7."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for name in (
        "process_resident_memory_bytes",
        "python_gc_collections_total",
        "vllm:time_to_first_token_seconds_bucket",
    ):
        assert name in answer.text


REASONS = ("stop", "length", "abort", "error")


class Engine:
    stats = EngineStats()
    lives = EngineLives()


def values(metrics: Metrics) -> dict[str, float]:
    """Series without their common labels -> value."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#") and "_bucket" not in line:
            series, _, value = line.rpartition(" ")
            found[series.replace('engine="0",', "").replace('model_name="m"', "").replace("{}", "")] = float(value)
    return found


def test_the_books_balance_to_the_token() -> None:
    """MET-2, MET-5."""
    metrics = Metrics("m", Engine())
    metrics.request_started(prompt_tokens=7, n=3, max_tokens=16)
    metrics.prompt_looked_up(prompt_tokens=7, cached_tokens=4)
    for tokens, reason in ((5, "stop"), (1, "length"), (0, "cancelled")):
        if tokens:
            metrics.first_token(0.1)
        if tokens > 1:
            metrics.token_gap(0.2)
            metrics.token_gap(0.3, tokens - 2)
        metrics.finished(reason, generated_tokens=tokens, e2e_s=1.0, decode_s=0.5 if tokens else None)
    found = values(metrics)
    assert found["vllm:prompt_tokens_total"] == 7
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prompt_tokens_cached_total"] == 4
    assert found["vllm:generation_tokens_total"] == 6
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 4
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.5)
    assert found["vllm:request_time_per_output_token_seconds_count"] == 1
    assert found["vllm:request_params_n_sum"] == found["cellserve:choices_started_total"] == 3
    reasons = {reason: found[f'vllm:request_success_total{{finished_reason="{reason}",}}'] for reason in REASONS}
    assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert found["vllm:e2e_request_latency_seconds_count"] == 3


def client_of(server: LiveServer) -> EngineClient:
    client: EngineClient = server.app.state.serving.client
    return client


async def collect(stream: object) -> list[Update]:
    return [update async for update in stream]  # type: ignore[attr-defined]
