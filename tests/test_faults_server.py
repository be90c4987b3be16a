"""Faults around and inside a whole server, beside eight streams that must not notice (F01 .. F27, F42 .. F48).

Every kind is one entry of `KINDS`. Behind each, everything was given back, the books balance and the next request is
served right. tests/FAULTS.md has the kinds and where each of them is tested.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server import settings
from server.settings import Settings
from support.faulty import BYSTANDERS, Act, Ask, Bench, FaultyServer, Told, ask, beside
from support.live_server import TIMEOUT_S, live_server
from support.scripted import scripted_client
from support.scripted_server import child_environment

FLAGS = (
    *("--max-num-seqs", "24", "--max-waiting", "300", "--max-restarts", "1000", "--slow-reader-timeout", "1"),
    *("--step-timeout", "1", "--warm-up-timeout", "1", "--restart-window", "0.001"),
)
PATIENT = (*FLAGS, "--step-timeout", "30", "--warm-up-timeout", "30")
"""For what ends the engine once: on a busy machine its follower may be silent for a second without being hung."""
LONG = Ask("leaves", 9, max_tokens=3000)
WHOLE = Ask("is waited for", 9, max_tokens=300)
SHORT = Ask("victim", 99, max_tokens=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path_factory.mktemp("faulty"), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def patient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path_factory.mktemp("patient"), *PATIENT) as server:
        yield server


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of a goodbye."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# --- clients ----------------------------------------------------------------------------------------------------------


async def leave_while_queued(bench: Bench) -> None:
    body = LONG.body(stream=False)
    running = [await bench.server.raw(bench.server.request({**body, "seed": number})) for number in range(44)]

    async def is_queued() -> bool:
        return await bench.metric("vllm:num_requests_waiting") >= 10

    await bench.until(is_queued)
    for _, writer in reversed(running):  # those that wait leave first
        writer.close()


async def leave_in_prefill(bench: Bench) -> None:
    for number in range(5):
        _, writer = await bench.server.raw(bench.server.request(Ask("p" * 3000, number, 3).body()))
        await asyncio.sleep(0.002 * number)
        writer.close()


async def leave_before_the_first_token(bench: Bench) -> None:
    for _ in range(5):
        _, writer = await bench.server.raw(bench.server.request(LONG.body()))
        writer.close()


async def leave_in_mid_stream(bench: Bench) -> None:
    for size in (200, 1000, 5000):
        reader, writer = await bench.server.raw(bench.server.request(LONG.body()))
        await reader.readexactly(size)
        writer.close()


async def leave_a_whole_answer(bench: Bench) -> None:
    for pause_s in (0.0, 0.05):
        _, writer = await bench.server.raw(bench.server.request(LONG.body(stream=False)))
        await asyncio.sleep(pause_s)
        writer.close()


async def reset_in_mid_stream(bench: Bench) -> None:
    for size in (0, 200, 3000):
        reader, writer = await bench.server.raw(bench.server.request(LONG.body()))
        await reader.readexactly(size)
        reset(writer)


async def close_half(bench: Bench) -> None:
    for body in (SHORT.body(), LONG.body(), SHORT.body(stream=False)):
        reader, writer = await bench.server.raw(bench.server.request(body))
        writer.write_eof()
        await reader.read()
        writer.close()


async def never_read(bench: Bench) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (bench.server.host, bench.server.port))
    await loop.sock_sendall(connection, bench.server.request(Ask("stalls", 3, 60_000).body()))

    async def is_left() -> bool:
        return await bench.metric("cellserve:slow_readers_left_total") > before

    before = await bench.metric("cellserve:slow_readers_left_total")
    await bench.until(is_left)
    connection.close()


async def read_byte_by_byte(bench: Bench) -> None:
    reader, writer = await bench.server.raw(bench.server.request(SHORT.body(), "Connection: close"))
    received = b""
    for _ in range(40):
        received += await reader.read(1)
        await asyncio.sleep(0.01)
    received += await reader.read()
    writer.close()
    frames = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(each)["choices"][0]["text"] for each in frames) == SHORT.expected()[0][0]


async def send_half_a_header(bench: Bench) -> None:
    for part in (b"P", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"):
        _, writer = await bench.server.raw(part)
        await asyncio.sleep(0.02)
        writer.close()


async def send_half_a_body(bench: Bench) -> None:
    for ends_it in (True, False):
        reader, writer = await bench.server.raw(bench.server.request(SHORT.body(), length=5000))
        if ends_it:
            writer.write_eof()
            await reader.read()
        writer.close()


async def leave_all_at_once(bench: Bench) -> None:
    request = bench.server.request(LONG.body())
    connections = [await bench.server.raw(request) for _ in range(150)]
    for number, (_, writer) in enumerate(connections):
        if number % 2:
            writer.close()
        else:
            reset(writer)


# --- the engine -------------------------------------------------------------------------------------------------------


async def fail_the_opening(bench: Bench) -> None:
    await bench.arm("open.raise")
    assert (await bench.victim()).error == "internal_error"


async def hold_rows_that_are_no_numbers(bench: Bench) -> None:
    """One after another until a victim is hit: bystanders that are would not be whole."""
    async with bench.server.client() as client:
        task = asyncio.create_task(ask(client, Ask("sick", 12, max_tokens=200)))
        await asyncio.sleep(0.1)
        await bench.arm("row.nan", row=-1)
        assert (await task).error == "model_not_finite"


async def fail_a_step(bench: Bench) -> None:
    for _ in range(2):
        await bench.arm("step.raise")
        assert (await bench.victim()).is_whole  # by then everybody has got through a step of its own


async def take_a_long_step(bench: Bench) -> None:
    await bench.arm("step.slow", s=0.4)
    assert (await bench.victim()).is_whole


def end_the_engine(point: str, *asked_then: Ask) -> Act:
    """Whoever was told nothing by then runs again; the others are told."""

    async def act(bench: Bench) -> None:
        whole = [
            asyncio.create_task(bench.client.post("/v1/completions", json=each.body(False))) for each in asked_then
        ]
        await asyncio.sleep(0.05)
        await bench.arm(point, is_deadly=True)
        for each, task in zip(asked_then, whole, strict=True):
            choices = (await task).json()["choices"]
            assert [(choice["text"], choice["finish_reason"]) for choice in choices] == each.expected()

    return act


async def draw_an_id_that_is_none(bench: Bench) -> None:
    task = asyncio.create_task(bench.victim(Ask("sick", 12, max_tokens=200)))
    await asyncio.sleep(0.1)
    await bench.arm("row.bad_id", row=-1)
    told = await task
    assert not told.is_cut
    assert told.error is not None or told.texts[0] != told.ask.expected()[0][0]


async def break_the_tokenizer(bench: Bench) -> None:
    await bench.arm("api.tokenizer.raise")
    assert (await bench.victim()).error == "internal_error"
    await bench.arm("api.tokenizer.slow", s=0.3)
    assert (await bench.victim(Ask("s" * 9000, 1, 5))).is_whole


async def break_the_detokenizer(bench: Bench) -> None:
    await bench.arm("api.detokenizer.raise")
    told = await bench.victim()
    # Whichever stream decodes next is hit: a bystander, or this one.
    assert told.is_honest


async def preempt_again_and_again(bench: Bench) -> None:
    await bench.arm("preempt", times=40)
    assert (await bench.victim()).is_whole


async def break_the_writing_down(bench: Bench) -> None:
    await bench.arm("api.render.raise")
    answer = await bench.client.post("/v1/completions", json=SHORT.body(stream=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def block_the_event_loop(bench: Bench) -> None:
    await bench.arm("api.loop.block", s=2.0)


async def shuffle_the_order(bench: Bench) -> None:
    await bench.arm("order", times=200, seed=1)
    assert (await bench.victim()).is_whole


# --- operations -------------------------------------------------------------------------------------------------------


async def run_out_of_descriptors(bench: Bench) -> None:
    async with bench.server.client() as kept:
        assert (await kept.get("/health")).status_code == httpx.codes.OK  # its connection is there from now on
        answer = await kept.post("/test/faults", json={"point": "api.descriptors", "times": 2})
        assert answer.status_code == httpx.codes.OK
        connections = []
        for _ in range(20):
            with socket.socket() as probe:
                probe.settimeout(0.2)
                probe.connect((bench.server.host, bench.server.port))
                connections.append(probe.detach())
        await asyncio.sleep(0.1)
        assert (await kept.get("/health")).status_code == httpx.codes.OK
        for descriptor in connections:
            os.close(descriptor)
        assert (await kept.post("/test/faults", json={"point": "api.descriptors", "times": -1})).status_code == 200


async def break_the_metrics(bench: Bench) -> None:
    await bench.arm("api.metrics.raise")
    assert (await bench.client.get("/metrics")).status_code == 500
    assert (await bench.client.get("/metrics")).status_code == 200


async def jump_in_time(bench: Bench) -> None:
    for shift_s in (3600.0, -3600.0):
        await bench.arm("api.clock.jump", s=shift_s)
        assert (await bench.victim()).is_whole
    await bench.arm("api.clock.jump", s=0.0)


@dataclass(frozen=True)
class Kind:
    act: Act
    ends_engine: bool = False
    """Bystanders that were told something are told of the end; else they are whole."""
    may_hit: int = 0
    """Bystanders that may be the ones it hits."""


KINDS = {
    "f01 leaves while queued": Kind(leave_while_queued),
    "f02 leaves in prefill": Kind(leave_in_prefill),
    "f03 leaves before the first token": Kind(leave_before_the_first_token),
    "f04 leaves in mid-stream": Kind(leave_in_mid_stream),
    "f05 leaves a whole answer": Kind(leave_a_whole_answer),
    "f06 resets": Kind(reset_in_mid_stream),
    "f07 half close": Kind(close_half),
    "f08 stalled reader": Kind(never_read),
    "f09 reads byte by byte": Kind(read_byte_by_byte),
    "f10 half a header": Kind(send_half_a_header),
    "f11 body shorter than declared": Kind(send_half_a_body),
    "f12 mass abort": Kind(leave_all_at_once),
    "f13 a request cannot be opened": Kind(fail_the_opening),
    "f14 f15 no finite scores": Kind(hold_rows_that_are_no_numbers),
    "f16 f17 a step fails": Kind(fail_a_step),
    "f19 the device is lost": Kind(end_the_engine("step.crash", SHORT, WHOLE), ends_engine=True),
    "f21 SIGKILL": Kind(end_the_engine("step.kill", Ask("waits", 3, 40, n=3), WHOLE), ends_engine=True),
    "f22 SIGSTOP": Kind(end_the_engine("step.stop", SHORT), ends_engine=True),
    "f22 a step hangs": Kind(end_the_engine("step.hang", WHOLE), ends_engine=True),
    "f23 an id that is none": Kind(draw_an_id_that_is_none),
    "f23 the detokenizer raises": Kind(break_the_detokenizer, may_hit=1),
    "f24 the tokenizer breaks": Kind(break_the_tokenizer),
    "f25 preempted again and again": Kind(preempt_again_and_again),
    "f26 the answer cannot be written down": Kind(break_the_writing_down),
    "f27 the event loop stands still": Kind(block_the_event_loop),
    "f44 no descriptors": Kind(run_out_of_descriptors),
    "f45 the metrics raise": Kind(break_the_metrics),
    "f46 the clock jumps": Kind(jump_in_time),
    "f48 a message from the engine is lost": Kind(end_the_engine("wire.lose", SHORT), ends_engine=True),
    "f48 a message from the engine is garbled": Kind(end_the_engine("wire.garble", SHORT), ends_engine=True),
    "another order of every step": Kind(shuffle_the_order),
    # The last one: for a minute behind it an engine may be silent for ten such steps before it counts as hung.
    "f20 a slow step": Kind(take_a_long_step),
}
REFUSALS = (
    "the engine is not running",
    "the model is loading",
)
"""What is told to a request that comes while there is no engine."""
AFTER = [5, *(pytest.param(after, marks=pytest.mark.full) for after in (1, 20, 60))]
"""Events that every bystander has had when it happens."""


def judge(kind: Kind, told: list[Told]) -> None:
    assert [each for each in told if not each.is_honest] == []
    if not kind.ends_engine:
        assert sum(not each.is_whole for each in told) <= kind.may_hit, [each for each in told if not each.is_whole]


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("name", KINDS)
def test_g1_a_fault_is_no_bystanders_business(server: FaultyServer, name: str, after: int) -> None:
    told = asyncio.run(asyncio.wait_for(beside(server, KINDS[name].act, after=after), 3 * TIMEOUT_S))
    judge(KINDS[name], told)


@pytest.mark.parametrize("point", ["inbox.lose", "inbox.garble"])
def test_f48_a_message_to_the_engine_that_is_lost_or_garbled_ends_it_and_everybody_is_told(
    server: FaultyServer, point: str
) -> None:
    async def act(bench: Bench) -> None:
        await bench.arm(point)
        # The message it costs.
        assert (await bench.victim()).is_honest

    judge(Kind(act, ends_engine=True), asyncio.run(beside(server, act)))


@pytest.mark.full
@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("point", ["step.kill", "step.crash", "step.raise"])
def test_r14_whole_answers_survive_an_engine_that_ends_at_any_step(
    patient_server: FaultyServer, point: str, moment: int
) -> None:
    async def run() -> None:
        async with patient_server.client() as client:
            bench = Bench(patient_server, client)
            await bench.settled()
            await bench.arm(point, after=3 * moment)
            answers = [client.post("/v1/completions", json=each.body(stream=False)) for each in BYSTANDERS]
            for each, answer in zip(BYSTANDERS, await asyncio.gather(*answers), strict=True):
                if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    assert answer.json()["error"]["message"] in REFUSALS, "it was admitted, and then given up"
                    continue
                choices = answer.json()["choices"]
                assert [(choice["text"], choice["finish_reason"]) for choice in choices] == each.expected()
            await bench.settled()

    asyncio.run(run())


# --- starts and ends --------------------------------------------------------------------------------------------------


def test_f42_sigterm_lets_what_runs_finish_and_refuses_the_rest(tmp_path: Path) -> None:
    async def run(server: FaultyServer) -> list[Told]:
        async with server.client() as client:
            bench = Bench(server, client)
            streams = [asyncio.create_task(ask(client, each)) for each in BYSTANDERS * 8]

            async def all_run() -> bool:
                return await bench.metric("cellserve:choices_started_total") == 72

            await bench.until(all_run)
            server.process.send_signal(signal.SIGTERM)
            refused = await bench.victim()
            while refused.error is None:  # the signal is on its way
                refused = await bench.victim()
            assert refused.error == "draining"
            return list(await asyncio.gather(*streams))

    with FaultyServer(tmp_path, "--max-num-seqs", "80") as server:
        told = asyncio.run(run(server))
        assert server.process.wait(TIMEOUT_S) == 0
    assert [each for each in told if not each.is_whole] == []


def test_f43_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    async def run(server: FaultyServer) -> None:
        async with server.client() as client:
            bench = Bench(server, client)
            stream = asyncio.create_task(ask(client, Ask("long", 1, 50_000)))

            async def runs() -> bool:
                return await bench.metric("vllm:num_requests_running") == 1

            async def drains() -> bool:
                return bool((await client.get("/ready")).json()["phase"] == "draining")

            await bench.until(runs)
            server.process.send_signal(signal.SIGTERM)
            await bench.until(drains)
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, TIMEOUT_S) == 128 + signal.SIGTERM
            told = await stream
            assert told.error is not None or told.is_cut

    with FaultyServer(tmp_path, "--drain-timeout", "600") as server:
        asyncio.run(run(server))
        assert "Traceback" not in server.log.read_text(), "what is cut off is no fault to tell of"


def test_f45_a_full_log_disk_is_nobodys_business(tmp_path: Path) -> None:
    async def full(bench: Bench) -> None:
        await bench.arm("api.log.full")
        await bench.arm("api.tokenizer.raise")  # which would be logged
        assert (await bench.victim()).error == "internal_error"

    with FaultyServer(tmp_path, *FLAGS) as server:
        judge(Kind(full), asyncio.run(beside(server, full)))


@pytest.mark.parametrize(("model", "flags", "code", "words"), [
    ("refuse-model", (), 1, "holds no config.json"),
    ("refuse-config", (), 2, "too few"),
    ("out-of-memory", (), 1, "out of memory while capturing"),
    ("letters", ("--host", "203.0.113.7"), 2, "no address of this machine"),
    ("letters", ("--kv-cells", "zero"), 2, "kv-cells"),
])  # fmt: skip
def test_f18_f47_a_start_that_cannot_be_ends_with_one_line(
    model: str, flags: tuple[str, ...], code: int, words: str
) -> None:
    command = [sys.executable, "-m", "support.scripted_server", model, "--port", "0", *flags]
    ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.returncode != 0, ended.stdout) == (True, "")
    last = ended.stderr.strip().splitlines()[-1]
    assert words in last
    if not last.startswith("engine.errors.ConfigError"):  # the test's own main has no edge for it
        assert ended.returncode == code


# --- the hooks are for tests only -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_faults_on_a_public_address_are_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--test-faults .* use --host 127.0.0.1 or --uds"):
        settings.load({"model": "letters", "host": host, "test_faults": True})
    for flags in ({"host": "127.0.0.1"}, {"host": "::1"}, {"host": "localhost"}, {"host": host, "uds": "/tmp/socket"}):
        assert settings.load({"model": "letters", "test_faults": True, **flags}).settings.test_faults


def test_a_server_of_users_has_no_hooks_and_no_routes_to_them() -> None:
    loaded = {module for module in sys.modules if module.endswith(".faults")}
    with live_server(scripted_client(), Settings(access_log=False)) as server:
        assert server.http.post("/test/faults", json={"point": "step.kill"}).status_code == 404
        assert server.http.get("/test/check").status_code == 404
        client = server.app.state.serving.client
        answer = server.run(client.inject(json.dumps({"do": "check"})))
        assert json.loads(answer) == {"error": "this engine was started without --test-faults"}
    assert {module for module in sys.modules if module.endswith(".faults")} == loaded
    assert not EngineConfig("m").test_faults


def test_an_order_that_is_none_is_a_400_that_names_what_there_is(server: FaultyServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for order, word in (
            ({"point": "step.rise"}, "there is no point step.rise"),
            ({"point": "api.nothing"}, "there is no point api.nothing"),
            ({"point": "step.raise", "when": 1}, "when"),
        ):
            answer = http.post("/test/faults", json=order)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
            assert word in answer.json()["error"]["message"]
