"""--api-workers: several processes speak HTTP for one engine, and nobody can tell from outside. Real processes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from engine.errors import ConfigError
from engine.wire import Failed
from server import settings
from server.admission import Admission
from server.errors import ApiError
from server.metrics import Metrics
from server.run import EXIT_ENGINE, bind, listen_for_workers
from server.settings import Settings
from server.shares import Share, make
from server.workers import SLOTS_FILE, plain
from support.live_server import TIMEOUT_S, until
from support.scripted import scripted_client
from support.scripted_server import ServerProcess

WORKERS = 2
SEQUENCES = 4


def started(*options: str) -> ServerProcess:
    sizes = ("--max-num-seqs", str(SEQUENCES), "--max-waiting", "0")
    words = ("letters-slow", "--api-workers", str(WORKERS), *sizes, "--no-access-log", *options)
    return ServerProcess(*words, module="support.workers_server")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with started() as process:
        process.ready_line()
        yield process


def children(server: ServerProcess, module: str) -> list[psutil.Process]:
    """Running ones, by what they run."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it is just ending
            found += [child] if module in child.cmdline() else []
    return found


def sums(server: ServerProcess) -> dict[str, float]:
    """Each series of one scrape."""
    lines = (line for line in server.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def total(server: ServerProcess, name: str) -> float:
    return sum(value for series, value in sums(server).items() if series.partition("{")[0] == name)


class OpenStream:
    """An endless answer on a connection of its own, behind its first frame."""

    def __init__(self, server: ServerProcess) -> None:
        self._client = httpx.Client(trust_env=False, timeout=TIMEOUT_S)
        body = {"prompt": "a", "stream": True, "max_tokens": 50_000, "ignore_eos": True}
        self._answer = self._client.stream("POST", f"{server.url}/v1/completions", json=body)
        self.lines = self._answer.__enter__().iter_lines()
        self.id = json.loads(next(self.lines).removeprefix("data: "))["id"]

    def close(self) -> None:
        self._client.close()


def test_every_process_serves_and_one_scrape_counts_for_all(server: ServerProcess) -> None:
    before = sums(server)
    for _ in range(12):
        assert server.complete(prompt="a", max_tokens=2).json()["usage"]["completion_tokens"] == 2
    told = 'cellserve:choices_started_total{engine="0",model_name="letters-slow"}'
    tokens = 'vllm:generation_tokens_total{engine="0",model_name="letters-slow"}'
    for _ in range(6):  # whichever process answers
        now = sums(server)
        assert now[told] - before[told] == 12
        assert now[tokens] - before[tokens] == 24
        drawn = 'cellserve:engine_generated_tokens_total{engine="0",model_name="letters-slow"}'
        assert now[drawn] == now[tokens]
    # Each has accepted some of those connections: a socket each, over which the kernel spreads them.
    assert all(worker.cpu_times().user > 0 for worker in children(server, "server.worker"))


def test_places_are_counted_over_all_processes(server: ServerProcess) -> None:
    streams = [OpenStream(server) for _ in range(SEQUENCES)]
    for _ in range(6):
        refused = server.complete(prompt="a", max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    for stream in streams:
        stream.close()
    until(lambda: server.complete(prompt="a", max_tokens=2).status_code == 200)


def test_a_request_is_cancelled_by_its_id_whichever_process_has_it(server: ServerProcess) -> None:
    until(lambda: total(server, "vllm:num_requests_running") == 0)
    for number in range(SEQUENCES):
        stream = OpenStream(server)
        cancelled = httpx.delete(f"{server.url}/v1/requests/{stream.id}", timeout=TIMEOUT_S, trust_env=False)
        assert cancelled.status_code == 200, number
        assert any("request_cancelled" in line for line in stream.lines)
        stream.close()
    unknown = httpx.delete(f"{server.url}/v1/requests/unknown", timeout=TIMEOUT_S, trust_env=False)
    assert unknown.status_code == 404


def test_an_address_that_another_server_shares_with_its_own_is_in_use(server: ServerProcess) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="in use"):
        listen_for_workers(Settings(model="letters-slow", port=port, api_workers=2))


def test_a_dead_process_is_replaced_its_requests_end_and_no_counter_falls() -> None:
    with started() as server:
        server.ready_line()
        for _ in range(6):
            assert server.complete(prompt="a", max_tokens=2).status_code == 200
        before = total(server, "cellserve:choices_started_total")
        streams = [OpenStream(server) for _ in range(SEQUENCES)]
        engine = children(server, "support.scripted_process")
        victim = children(server, "server.worker")[0]
        victim.kill()
        until(lambda: len(set(children(server, "server.worker")) - {victim}) == WORKERS)
        # What lived in the dead process was cancelled: its cells and places are free. The others' go on.
        assert total(server, "cellserve:choices_started_total") >= before
        for stream in streams:
            stream.close()
        until(lambda: total(server, "vllm:num_requests_running") == 0)
        with ThreadPoolExecutor(SEQUENCES) as threads:
            answers = list(threads.map(lambda _: server.complete(prompt="a", max_tokens=3), range(SEQUENCES)))
        assert [answer.status_code for answer in answers] == [200] * SEQUENCES
        assert children(server, "support.scripted_process") == engine

        # The engine's death is told to every process, and the next engine is everybody's.
        engine[0].kill()
        until(lambda: [child for child in children(server, "support.scripted_process") if child != engine[0]] != [])
        for _ in range(6):
            until(lambda: server.complete(prompt="a", max_tokens=2).status_code == 200)
        assert total(server, "cellserve:engine_restarts_total") == 1

        # A signal drains all: streams in every process finish.
        asked = [server.complete_later(prompt="a", max_tokens=100) for _ in range(SEQUENCES)]
        until(lambda: total(server, "vllm:num_requests_running") == SEQUENCES)
        server.signal(signal.SIGTERM)
        assert [answer.result().json()["choices"][0]["finish_reason"] for answer in asked] == ["length"] * SEQUENCES
        exit_code, _, complaint = server.ended()
        assert exit_code == 0, complaint


def test_a_killed_main_process_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="w-") as folder:  # short: a socket's name has a limit
        monkeypatch.setenv("TMPDIR", folder)
        with started() as server:
            server.ready_line()
            left = psutil.Process(server.process.pid).children()
            assert len(left) == WORKERS + 1
            server.process.kill()
            until(lambda: not any(child.is_running() for child in left))
            assert not [path for path in Path(folder).iterdir() if "scripted" not in path.name]


def test_a_failed_load_ends_all_with_the_reason() -> None:
    with ServerProcess("refuse-model", "--api-workers", "2", module="support.workers_server") as server:
        exit_code, output, complaint = server.ended()
        assert (exit_code, output) == (1, "")
        assert "there is no such model" in complaint


def test_a_process_that_comes_while_an_engine_cannot_be_loaded_leaves_to_be_started_again() -> None:
    """It would answer 503 for ever, however many engines came later."""
    with tempfile.TemporaryDirectory(prefix="w-") as folder, zmq.Context() as context, bind("127.0.0.1", 0) as listener:
        make(Path(folder) / SLOTS_FILE, 1)
        with context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
            sender.linger = 0
            receiver.bind(f"ipc://{folder}/to-main")
            child = subprocess.Popen(
                (sys.executable, "-m", "server.worker"), stdin=subprocess.PIPE, pass_fds=(listener.fileno(),)
            )
            assert child.stdin is not None
            options = {"settings": plain(Settings(model="m")), "listener": listener.fileno()}
            child.stdin.write(json.dumps(options | {"folder": folder, "number": 0, "name": "api-0-1"}).encode() + b"\n")
            child.stdin.flush()
            try:
                assert receiver.poll(1000 * TIMEOUT_S), "it asked for no engine"
                sender.connect(f"ipc://{folder}/api-0-1")
                sender.send(msgspec.msgpack.encode(Failed("engine", "it ended")))
                assert child.wait(TIMEOUT_S) == EXIT_ENGINE
            finally:
                child.kill()
                child.stdin.close()
                child.wait()


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--in-process"):
        settings.load({"model": "m", "api_workers": "2", "in_process": "true"})
    with pytest.raises(ConfigError, match=re.escape("--key-concurrent is 1, which 2 API workers")):
        settings.load({"model": "m", "api_workers": "2", "api_key": "k", "key_concurrent": "1"})
    limits = Settings(api_workers=2, key_concurrent=5, key_tokens_per_minute=100).key_limits()
    assert (limits.concurrent, limits.tokens_per_minute, limits.requests_per_minute) == (2, 50, None)


def test_admission_counts_what_others_hold(tmp_path: Path) -> None:
    make(tmp_path / "slots", 2)
    one, other = (
        Admission(3, max_queued_tokens=10, share=Share(tmp_path / "slots", number)) for number in range(WORKERS)
    )
    held = one.reserve(2, tokens=6)
    with pytest.raises(ApiError, match="2 of 3 sequences are taken"):
        other.reserve(2)
    with pytest.raises(ApiError, match="6 of 10 prompt tokens wait"):
        other.reserve(1, tokens=5)
    held.release()
    other.reserve(3, tokens=10).release()
    one.reserve(3, tokens=10)
    Share(tmp_path / "slots", 0)  # a new life of the same process: what the dead one held is free
    other.reserve(3, tokens=10)


def test_sums_add_up_and_the_engines_numbers_do_not() -> None:
    client = scripted_client()
    one, other = Metrics("m", client), Metrics("m", client)
    one.rejected("queue_full")
    other.rejected("queue_full")
    other.rejected("draining")
    other.first_token(0.1)
    text = one.render([other.sums(), {}]).decode()
    assert 'vllm:admission_rejections_total{engine="0",model_name="m",reason="queue_full"} 2.0' in text
    assert 'vllm:admission_rejections_total{engine="0",model_name="m",reason="draining"} 1.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0' in text
    assert not any("cellserve:steps" in key for key in other.sums())


def test_a_shared_listener_leaves_the_port_to_its_siblings() -> None:
    with bind("127.0.0.1", 0, is_shared=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, is_shared=True) as second, socket.create_connection(("127.0.0.1", port)):
            assert second.getsockname()[1] == port
