"""The engine in its own process: real children, real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.errors import CellserveError, ConfigError, Draining, EngineUnavailable, ModelError, QueueFull
from engine.spawned import _Child
from engine.types import SamplingParams
from engine.wire import Garbled, Opener, Sealer, Stop, Submit, decode_from_engine, decode_to_engine, encode
from support.running import TIMEOUT_S, asyncio_test, read, request


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty folder in which temporary folders are made. Short: sockets live in it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def scene(name: str, **options: Any) -> ProcessClient:
    return ProcessClient(EngineConfig(model=name, **options), module="support.scripted_process")


@asynccontextmanager
async def ready(name: str, **options: Any) -> AsyncIterator[ProcessClient]:
    client = scene(name, **options)
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asyncio_test
async def test_a_request_goes_to_the_child_and_its_tokens_come_back(temporary: Path) -> None:
    async with ready("plain", max_num_seqs=3, max_waiting=5) as client:
        pid = client.pid
        assert pid is not None
        assert pid != os.getpid()
        assert (client.info.max_num_seqs, client.info.max_waiting) == (3, 5)
        params = SamplingParams(seed=1, logprobs=2, prompt_logprobs=1, logit_bias=((3, -1.5),))
        choices = await read(client.submit(request(prompt=(5, 6), n=2, sampling=params)))
        assert [choices[index].token_ids for index in (0, 1)] == [(7, 8, 9, 10)] * 2
        assert choices[0].finish == "length"
        assert client.stats.generated_tokens == 8
        (folder,) = temporary.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(entry.name for entry in folder.iterdir()) == ["from-engine", "to-engine"]
    assert not is_alive(pid)
    assert list(temporary.iterdir()) == []
    assert (client.phase.name, client.phase.reason) == ("dead", "shut down")


@asyncio_test
async def test_a_child_keeps_few_kernels_of_shapes_that_come_once_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    async with ready("plain") as client:
        environment = psutil.Process(client.pid).environ()
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    assert environment["LRU_CACHE_CAPACITY"] == "7"


@asyncio_test
async def test_a_flood_of_requests_is_admitted_up_to_the_limit_and_all_of_it_is_answered() -> None:
    async with ready("plain", max_num_seqs=8, max_waiting=40) as client:
        streams = [client.submit(request(f"r{i}", (i + 1,))) for i in range(48)]
        with pytest.raises(QueueFull):
            client.submit(request("one more"))
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        assert [answer[0].token_ids[0] for answer in answers] == [i + 2 for i in range(48)]


@asyncio_test
async def test_leaving_a_stream_ends_the_request_in_the_child() -> None:
    async with ready("plain") as client:
        async with client.submit(request("left", max_new_tokens=90_000)) as stream:
            await anext(stream)
        stream = client.submit(request("cancelled", max_new_tokens=90_000))
        client.cancel("cancelled")
        assert (await read(stream))[0].finish == "cancelled"
        assert client.num_outstanding == 0
        assert client.stats.cells_used == 0


@asyncio_test
async def test_the_load_tells_how_far_it_is() -> None:
    client = scene("load-for-ever")
    await client.start()
    assert client.phase.text == "starting the engine process"
    while client.phase.of == 0:
        await client.next_phase()
    assert (client.phase.name, client.phase.text, client.phase.done) == ("starting", "reading the script", 1)
    with pytest.raises(EngineUnavailable, match="loading"):
        client.submit(request())
    await client.close()
    assert client.pid is None
    with pytest.raises(EngineUnavailable, match="shut down"):
        await client.wait_ready()


@asyncio_test
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("refuse-config", ConfigError, "these options do not go together"),
        ("refuse-model", ModelError, "there is no such model"),
    ],
)
async def test_a_refused_load_comes_back_as_its_own_error_and_prints_nothing(
    name: str, error: type[CellserveError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    client = scene(name)
    await client.start()
    with pytest.raises(error, match=message):
        await client.wait_ready()
    await client.close()
    assert capfd.readouterr() == ("", "")


@asyncio_test
async def test_a_crash_in_the_load_is_an_engine_that_is_not_there_and_leaves_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = scene("crash-in-load")
    await client.start()
    with pytest.raises(EngineUnavailable, match="ZeroDivisionError: by zero"):
        await client.wait_ready()
    await client.close()
    assert "Traceback" in capfd.readouterr().err


@asyncio_test
@pytest.mark.parametrize(("name", "reason"), [("vanish", "SIGKILL"), ("no-such-scene", "KeyError")])
async def test_a_child_that_goes_before_it_is_ready_says_how(name: str, reason: str) -> None:
    client = scene(name)
    await client.start()
    with pytest.raises(EngineUnavailable, match=reason):
        await client.wait_ready()
    await client.close()


@asyncio_test
async def test_r14_a_killed_engine_fails_every_open_stream_at_once_and_can_be_started_anew(temporary: Path) -> None:
    async with ready("hang") as client:
        streams = [client.submit(request("a", n=2)), client.submit(request("b"))]
        assert (await anext(streams[0])).token_ids == (6,)
        assert client.pid is not None
        first_pid = client.pid
        killed_at = asyncio.get_running_loop().time()
        os.kill(first_pid, signal.SIGKILL)
        choices = [choice for stream in streams for choice in (await read(stream)).values()]
        assert asyncio.get_running_loop().time() - killed_at < 1.0
        assert [(choice.finish, choice.error_code) for choice in choices] == [("failed", "engine_unavailable")] * 3
        assert (client.phase.name, client.phase.reason) == ("dead", "the engine process was ended by SIGKILL")
        with pytest.raises(EngineUnavailable):
            client.submit(request("c"))
        client.cancel("a")
        await client.start()
        await client.wait_ready()
        assert client.pid != first_pid
        assert (await read(client.submit(request("d", max_new_tokens=1))))[0].finish == "length"
    assert list(temporary.iterdir()) == []


@asyncio_test
async def test_a_killed_engine_leaves_none_of_its_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    async with ready("letters") as client:  # which writes a tokenizer for this process
        assert client.pid is not None
        assert Path(client.info.tokenizer_dir or "").is_dir()
        os.kill(client.pid, signal.SIGKILL)
        assert (await client.next_phase()).name == "dead"
        assert list(temporary.iterdir()) == []


@asyncio_test
async def test_a_step_that_breaks_the_engine_fails_its_streams_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """RUN-29."""
    async with ready("break") as client:
        choice = (await read(client.submit(request())))[0]
        assert (choice.token_ids, choice.finish, choice.error_code) == ((6,), "failed", "engine_unavailable")
        assert client.phase.reason == "a step failed with MemoryError: the device is gone"
    assert "the device is gone" in capfd.readouterr().err


@asyncio_test
async def test_r13_an_engine_that_breaks_waits_for_nothing_that_will_not_be_given_back(temporary: Path) -> None:
    """It ends by itself: the time that its parent would give it is longer than this test's."""
    config = EngineConfig(model="break-and-stick")
    client = ProcessClient(config, module="support.scripted_process", stop_grace_s=10 * TIMEOUT_S)
    await client.start()
    await client.wait_ready()
    assert (await read(client.submit(request())))[0].finish == "failed"
    await client.close()
    assert client.pid is None
    assert list(temporary.iterdir()) == []


@asyncio_test
async def test_a_drain_lets_the_running_ones_finish_even_if_every_process_got_the_signal() -> None:
    async with ready("hang") as client:
        stream = client.submit(request())
        await anext(stream)
        assert client.pid is not None
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(client.pid, number)
        closing = asyncio.create_task(client.close(drain_s=TIMEOUT_S))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            client.submit(request("late"))
        os.kill(client.pid, signal.SIGUSR1)
        assert (await read(stream))[0].finish == "length"
        await closing


@asyncio_test
async def test_an_engine_that_is_told_to_end_prints_nothing_and_leaves_nothing(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit handlers run, and then it is gone: no library looks at what the interpreter has not yet given back."""
    async with ready("complain-at-the-end"):
        pass
    assert capfd.readouterr() == ("", "")
    assert list(temporary.iterdir()) == []


@asyncio_test
async def test_an_idle_engine_ends_with_sigterm() -> None:
    async with ready("plain") as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        assert (await client.next_phase()).name == "dead"
        assert client.phase.reason == "the engine process ended with exit code 0"


@asyncio_test
async def test_an_engine_that_hangs_in_its_step_is_ended_from_outside() -> None:
    client = ProcessClient(EngineConfig(model="hang"), module="support.scripted_process", stop_grace_s=0.1)
    await client.start()
    await client.wait_ready()
    pid = client.pid
    stream = client.submit(request())
    await anext(stream)
    await client.close(drain_s=0.0)
    assert (await read(stream))[0].error_code == "shutting_down"
    assert pid is not None
    assert not is_alive(pid)


ORPHANING_PARENT = """
import asyncio, os, signal
from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.types import GenerateRequest

async def main():
    client = ProcessClient(EngineConfig(model={scene!r}), module="support.scripted_process")
    await client.start()
    if {scene!r} == "load-for-ever":
        while client.phase.of == 0:
            await client.next_phase()
    else:
        await client.wait_ready()
    if {scene!r} == "hang":
        await anext(client.submit(GenerateRequest("r", (5,))))
    print(client.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["plain", "load-for-ever", "hang"])
def test_a_child_leaves_with_its_parent_whatever_it_is_doing(name: str, temporary: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANING_PARENT.format(scene=name)], stdout=subprocess.PIPE, env=environment
    )
    # The child inherits this pipe: it is at its end when both are gone.
    output, _ = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == -signal.SIGKILL
    assert int(output) > 0
    assert list(temporary.iterdir()) == []


@asyncio_test
async def test_an_engine_that_was_spawned_before_the_start_is_the_one_that_starts(temporary: Path) -> None:
    client = scene("plain", max_num_seqs=3)
    client.spawn()
    assert client.pid is not None
    await client.start()
    assert (await client.wait_ready()).max_num_seqs == 3
    first = client.pid
    assert len(list(temporary.iterdir())) == 1, "no second one was spawned"
    os.kill(first, signal.SIGKILL)
    assert (await client.next_phase()).name == "dead"
    await client.start()
    await client.wait_ready()
    assert client.pid != first
    await client.close()
    assert list(temporary.iterdir()) == []


def test_a_child_that_was_spawned_for_a_start_that_never_came_leaves_with_its_parent(temporary: Path) -> None:
    program = """
from engine.client import ProcessClient
from engine.config import EngineConfig
client = ProcessClient(EngineConfig(model="plain"), module="support.scripted_process")
client.spawn()
print(client.pid, flush=True)
raise SystemExit(2)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    parent = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    # The child inherits these pipes: they are at their end when both are gone.
    assert (parent.returncode, parent.stderr) == (2, "")
    assert int(parent.stdout) > 0
    assert list(temporary.iterdir()) == []


SLOW_TO_BIND = """
import os, sys, zmq
from pathlib import Path
from engine import process

bind, full = zmq.Socket.bind, len(os.listdir(sys.argv[1]))

def bind_in_a_folder_that_is_being_removed(socket, address):
    for _ in range(1000):
        if len(os.listdir(sys.argv[1])) != full:
            break
    return bind(socket, address)

zmq.Socket.bind = bind_in_a_folder_that_is_being_removed
process.main(Path(sys.argv[1]))
"""


def test_a_child_whose_parent_is_gone_before_it_has_its_socket_leaves_no_folder(temporary: Path) -> None:
    folder = temporary / "private"
    folder.mkdir()
    for number in range(3000):  # to be removed for longer than a socket takes to be made
        (folder / str(number)).touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SLOW_TO_BIND, str(folder)]
    child = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (child.returncode, child.stderr) == (1, "")
    assert not folder.exists()


@asyncio_test
async def test_a_process_that_cannot_be_started_is_an_engine_that_is_not_there(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    client = scene("plain")
    with pytest.raises(EngineUnavailable, match=r"could not be started: .*/no/such/python"):
        await client.start()
    assert client.phase.name == "dead"
    assert list(temporary.iterdir()) == []


@asyncio_test
async def test_a_temporary_folder_too_deep_for_a_socket_is_an_error_that_says_what_to_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    client = scene("plain")
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter folder"):
        await client.start()
    assert list(deep.iterdir()) == []
    assert client.phase.name == "dead"
    await client.close()


def test_a_signal_to_a_child_that_has_ended_leaves_its_exit_status_to_whoever_waits_for_it() -> None:
    process: Any = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    nothing: Any = None
    _Child(process, nothing, nothing, nothing).signal(signal.SIGTERM)
    assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    assert process.wait() == 7


def test_what_is_no_message_is_refused_at_both_ends() -> None:
    submit, step = encode(Submit(request())), b"\x92\xa4step\x90"
    for garbled in (b"", b"\xc1", submit[:-3], b"\x91\xa7unknown", step):
        with pytest.raises(Garbled):
            decode_to_engine(garbled)
        with pytest.raises(Garbled):
            decode_from_engine(garbled)
    with pytest.raises(Garbled):
        decode_from_engine(submit)
    assert decode_to_engine(submit) == Submit(request())


def test_a_message_that_never_came_or_came_twice_is_found_out_by_the_next_one() -> None:
    sealer = Sealer()
    sealed = [sealer.seal(Stop()) for _ in range(3)]
    opener = Opener(decode_to_engine)
    assert opener.open(sealed[0]) == Stop()
    for wrong in (sealed[2], sealed[0], b""):
        with pytest.raises(Garbled, match=r"where 1 was due"):
            opener.open(wrong)
    assert opener.open(sealed[1]) == Stop()
