"""What an operator sees of K/V: /v1/kv/status, metrics, `cellserve kv status`; and what can be told to be forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine.client import InProcessClient
from engine.dispatch import EngineClient
from engine.errors import EngineUnavailable
from engine.loop import EngineLoop
from server import cli
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.running import asyncio_test, request
from support.scripted import ScriptedExecutor, scripted_client, scripted_info, scripted_loop
from support.tier_chunks import FakeTier
from support.tiered import CHUNK, Tiered, tokens
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder

PROMPT = tokens(1, 40)
QUIET = {"access_log": False}


def client_of(loop: EngineLoop) -> InProcessClient:
    info = scripted_info(max_model_len=CONTEXT, vocab_size=VOCAB, kv_cells=255, eos_token_ids=())
    return InProcessClient(lambda progress: (loop, info))


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def engine(tier: FakeTier) -> Tiered:
    return Tiered(ToyDecoder(), tier)


@pytest.fixture
def server(engine: Tiered) -> Iterator[LiveServer]:
    with live_server(client_of(engine.loop), Settings(**QUIET)) as server:
        yield server
    engine.objects.close()


def ask(server: LiveServer, prompt: list[int] = PROMPT) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def status(server: LiveServer) -> dict:
    answer = server.http.get("/v1/kv/status")
    assert answer.status_code == 200, answer.text
    return answer.json()


def settled(server: LiveServer) -> dict:
    """The status once nothing is under way any more."""
    until(lambda: not any(status(server)["below"]["in_flight"].values()))
    return status(server)


def test_the_status_follows_a_prefix_down_to_the_tiers_and_up_again(server: LiveServer, tier: FakeTier) -> None:
    ask(server)
    below = settled(server)["below"]
    host, fake = below["tiers"]
    assert (below["chunk"]["tokens"], host["name"], fake["name"]) == (CHUNK, "host", "fake")
    assert (host["entries"], fake["entries"], host["held"]) == (2, 2, 0)
    assert host["used_bytes"] == host["stored_bytes"] == 2 * below["chunk"]["bytes"]
    assert fake["stored_bytes"] == 2 * below["chunk"]["bytes"]
    assert server.http.post("/reset_prefix_cache").json() == {
        "object": "prefix_cache.reset",
        "freed_cells": 41,
        "kept_cells": 0,
        "tiers_kept": ["host", "fake"],
    }
    assert status(server)["tree"] == {"cells": 0, "nodes": 0, "leases": 0}
    ask(server)
    seen = settled(server)
    host = seen["below"]["tiers"][0]
    assert (host["hits"], host["loaded_bytes"]) == (2, 2 * below["chunk"]["bytes"])
    assert (seen["below"]["lookup_tokens"], seen["below"]["loaded_tokens"]) == (64, 32)
    assert seen["pool"]["cells"] == seen["pool"]["free"] + seen["pool"]["evictable"] + seen["pool"]["running"] == 255
    assert seen["tree"]["cells"] == 41


def test_metrics_tell_each_tier_apart_and_count_what_went_wrong(server: LiveServer, tier: FakeTier) -> None:
    ask(server)
    settled(server)
    assert server.metric("cellserve:kv_tier_entries", tier="host") == 2
    assert server.metric("cellserve:kv_tier_stored_bytes_total", tier="fake") > 0
    assert server.metric("cellserve:kv_tier_breaker_open", tier="fake") == 0
    assert server.metric("cellserve:prefix_tree_cells") == 41
    assert server.metric("cellserve:kv_in_flight", what="loads") == 0
    tier.fault = "gone"
    for number in range(3):
        ask(server, tokens(10 + number, 40))
    until(lambda: server.metric("cellserve:kv_tier_breaker_open", tier="fake") == 1)
    assert server.metric("cellserve:kv_tier_errors_total", tier="fake") >= 3
    assert server.metric("cellserve:kv_tier_events_total", tier="fake", event="fault") >= 3


def test_the_command_prints_the_tables_and_fails_when_a_tier_is_given_up(
    server: LiveServer, tier: FakeTier, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server)
    settled(server)
    assert cli.main(["kv", "status", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("host", "fake", "prefix tree", "yes", "16 tokens"))
    assert cli.main(["kv", "status", "--url", server.url, "--json"]) == 0
    assert '"object": "kv.status"' in capsys.readouterr().out
    tier.fault = "gone"
    for number in range(3):
        ask(server, tokens(20 + number, 40))
    until(lambda: status(server)["below"]["tiers"][1]["breaker"] == "open")
    assert cli.main(["kv", "status", "--url", server.url]) == 1
    assert cli.main(["kv", "status", "--url", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_a_tier_slower_than_computing_says_so(server: LiveServer, engine: Tiered) -> None:
    for _ in range(8):
        engine.store.tiers[0].pace.measured(30.0)
    engine.loop._prompt_tokens, engine.loop._step_time_s = 10_000, 1.0
    ask(server)
    below = settled(server)["below"]
    host, fake = below["tiers"]
    assert (host["asked"], fake["asked"], fake["chunk_s"]) == ("yes", "no: slower than computing", 30.0)
    assert below["worth_chunk_s"] == pytest.approx(0.8 * CHUNK * 1e-4)
    assert server.metric("cellserve:kv_tier_events_total", tier="fake", event="slower than computing") == 1
    assert server.metric("cellserve:kv_tier_hits_total", tier="fake") == 0


def test_without_tiers_there_is_a_pool_and_a_tree_to_see(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(scripted_client(), Settings(**QUIET)) as server:
        seen = status(server)
        assert (seen["below"], seen["prefix_cache"], seen["pool"]["free"]) == (None, True, 4096)
        assert cli.main(["kv", "status", "--url", server.url]) == 0
        assert "--kv-host-gib" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/kv/status"), ("POST", "/reset_prefix_cache")])
def test_both_routes_are_behind_the_key(method: str, path: str) -> None:
    with live_server(scripted_client(), Settings(api_key=("secret",), **QUIET)) as server:
        assert server.http.request(method, path).status_code == 401
        answer = server.http.request(method, path, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200, answer.text
        assert cli.main(["kv", "status", "--url", server.url]) == 1
        assert cli.main(["kv", "status", "--url", server.url, "--api-key", "secret"]) == 0


@pytest.mark.parametrize(
    ("query", "code", "said"),
    [
        ("reset_running_requests=true", "unsupported_parameter", "cancel them first"),
        ("reset_external=true", "unsupported_parameter", "stop the server and delete its folder"),
        ("everything=1", "unknown_parameter", "everything"),
    ],
)
def test_what_cannot_be_reset_is_refused_by_name(query: str, code: str, said: str) -> None:
    with live_server(scripted_client(), Settings(**QUIET)) as server:
        answer = server.http.post(f"/reset_prefix_cache?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert said in answer.json()["error"]["message"]
        assert server.http.post("/reset_prefix_cache?reset_external=false").status_code == 200


def test_a_server_without_a_prefix_cache_says_so() -> None:
    executor, info = ScriptedExecutor(), scripted_info()
    loop = scripted_loop(executor, info)
    bare = EngineLoop(executor, loop._scheduler.limits, prefix_cache=False)
    with live_server(InProcessClient(lambda progress: (bare, info)), Settings(**QUIET)) as server:
        answer = server.http.post("/reset_prefix_cache")
        assert answer.status_code == 400
        assert "--no-prefix-cache" in answer.json()["error"]["message"]


def test_cells_that_run_are_kept_by_a_reset_and_named() -> None:
    executor = ScriptedExecutor()
    with live_server(scripted_client(executor), Settings(**QUIET)) as server:
        client: EngineClient = server.app.state.serving.client

        async def reset_beside_a_request() -> tuple[int, int]:
            async with client.submit(request("warm", tuple(range(8)), max_new_tokens=4)) as stream:
                async for _ in stream:
                    pass
            executor.hold()
            async with client.submit(request("runs", (*range(8), 9), max_new_tokens=4)):
                await asyncio.to_thread(executor.wait_held)
                asked = asyncio.create_task(client.reset_prefix_cache())
                await asyncio.sleep(0)  # it is on its way: the engine comes to it behind the step that is held
                executor.release(1)
                reset = await asked
                executor.release()
                return reset.freed_cells, reset.kept_cells

        assert server.run(reset_beside_a_request()) == (3, 8)


@asyncio_test
async def test_an_engine_that_ends_answers_nobody_and_keeps_nobody_waiting() -> None:
    executor = ScriptedExecutor()
    client = scripted_client(executor)
    with pytest.raises(EngineUnavailable, match="not running"):
        await client.kv_report()
    await client.start()
    await client.wait_ready()
    report = await client.kv_report()
    assert report.cells_free == report.cells_total
    await client.close()
    with pytest.raises(EngineUnavailable):
        await client.kv_report()
