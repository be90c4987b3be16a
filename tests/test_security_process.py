"""A whole server as it runs: what it listens on, what it says of itself, what it takes for a message.

S9, S10, S13 and S16.

One server process with its engine in another one, a key, and an access log.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from engine import wire
from server import cli
from support.live_server import TIMEOUT_S, until
from support.scripted_server import child_environment
from support.toy_process import serving_toy

KEY = "sk-canary-7f3a9c"
PROMPT = "x23 true {1,2}"
"""Spelled by the toy's letters alone, and found nowhere else."""


@dataclass
class Served:
    url: str
    process: psutil.Process
    folder: Path

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.url, trust_env=False, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {KEY}"}
        )

    @property
    def processes(self) -> list[psutil.Process]:
        """The server's, and those that it started."""
        return [self.process, *self.process.children(recursive=True)]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    key_file = folder / "keys"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    options = ("--api-key-file", str(key_file), "--served-model-name", "toy")
    # A folder of sockets whose mode is left to the umask would be open to all.
    before = os.umask(0)
    try:
        with serving_toy(folder, *options) as (url, process):
            served = Served(url, psutil.Process(process.pid), folder)
            yield served
            served.http.close()
    finally:
        os.umask(before)


# Sockets.


def test_there_is_one_listener_and_it_is_on_the_address_that_was_asked_for(served: Served) -> None:
    """S9: of the server and of every process that it started, whatever the protocol."""
    ours = [connection for process in served.processes for connection in process.net_connections("inet")]
    listening = {
        (c.laddr.ip, c.laddr.port) for c in ours if c.type == socket.SOCK_DGRAM or c.status == psutil.CONN_LISTEN
    }
    host, _, port = served.url.removeprefix("http://").partition(":")
    assert host == "127.0.0.1"
    assert listening == {(host, int(port))}
    assert len(served.processes) >= 2, "the engine has a process of its own"


def test_everything_else_is_a_socket_in_a_folder_of_the_users_own(served: Served) -> None:
    """S9: with any umask; nothing in the abstract namespace, which has no rights."""
    paths = {
        connection.laddr
        for process in served.processes
        for connection in process.net_connections("unix")
        if connection.laddr
    }
    folders = {Path(path).parent for path in paths}
    assert len(paths) >= 2
    assert not [path for path in paths if path.startswith(("@", "\0"))]
    for folder in folders:
        state = folder.stat()
        assert stat.S_IMODE(state.st_mode) == 0o700, folder
        assert state.st_uid == os.getuid()


def test_nobody_is_called_whatever_a_request_names(served: Served) -> None:
    """S16: links in text, images, files and schemas are never fetched; we listen where they point to."""
    with socket.create_server(("127.0.0.1", 0)) as canary:
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/x.png"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        schemas = [{"json": {"$ref": link}} for link in (url, "file:///etc/passwd")]
        completions = [
            {"prompt": url},
            {"prompt": "a", "prompt_embeds": url, "webhook": url, "model_url": url},
            {"prompt": "a", "model": url},
            *({"prompt": "a", "structured_outputs": schema} for schema in schemas),
        ]
        messages = [
            {"role": "user", "content": f"![]({url})"},
            {"role": "user", "content": "a", "image": url},
            image,
        ]
        bodies = [("/v1/completions", {**body, "max_tokens": 1}) for body in completions]
        bodies += [("/v1/chat/completions", {"messages": [message], "max_tokens": 1}) for message in messages]
        for path, body in bodies:
            assert served.http.post(path, json=body).status_code in (200, 400, 404), body
        canary.setblocking(False)
        with pytest.raises(BlockingIOError):
            canary.accept()
    others = {
        c.raddr.port for p in served.processes for c in p.net_connections("tcp") if c.raddr and c.status != "LISTEN"
    }
    own_port = int(served.url.rpartition(":")[2])
    theirs = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == own_port}
    assert others <= theirs | {own_port}, "only its clients"


# Messages.


class _Touches:
    """What a pickle of it does when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self.path, os.O_CREAT)


@pytest.mark.parametrize("decode", [wire.decode_to_engine, wire.decode_from_engine])
def test_hostile_bytes_are_garbled_and_nothing_of_them_runs(decode: object, tmp_path: Path) -> None:
    """S10: pickles of every protocol, lengths beyond the bytes, nesting without end, and noise."""
    canary = tmp_path / "canary"
    hostile = [pickle.dumps(_Touches(str(canary)), protocol) for protocol in range(6)]
    # A field too many is skipped, however deep it goes.
    for whole in (wire.encode(wire.Cancel("x")), wire.encode(wire.Progress("x", 1, 2)), wire.encode(wire.Stop())):
        hostile.append(bytes([whole[0] + 1]) + whole[1:] + b"\x91" * 100_000)
        hostile += [whole[:-1], whole + b"\0", whole * 2]
    hostile += [b"", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x92\xa6cancel\xdb\xff\xff\xff\xff", b"\xc1"]
    noise = random.Random(7)
    hostile += [noise.randbytes(noise.randrange(1, 200)) for _ in range(2000)]
    for data in hostile:
        with pytest.raises(wire.Garbled):
            decode(data)  # type: ignore[operator]
    assert not canary.exists()


# What it says of itself.


def test_no_key_and_no_prompt_is_in_what_it_writes_or_answers(served: Served) -> None:
    """S13: with every kind of request behind it, also those with a key that is nearly right."""
    for path, body in [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": "x"}),
        ("/v1/completions", {"prompt": PROMPT, "stop": [PROMPT], "user": PROMPT, "no_such_field": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": f"({PROMPT}"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
        ("/tokenize", {"content": PROMPT}),
    ]:
        served.http.post(path, json=body)
    for header in (f"Bearer {KEY}x", f"Basic {KEY}", KEY):
        answer = served.http.get("/v1/models", headers={"Authorization": header})
        assert answer.status_code == 401
        assert KEY not in answer.text
    served.http.get(f"/v1/models?api_key={KEY}&prompt={PROMPT}")
    for path in ("/server_info", "/metrics", "/openapi.json", "/v1/models", "/load", "/version", "/v1/kv/status"):
        answer = served.http.get(path)
        assert answer.status_code == 200
        assert KEY not in answer.text
        assert PROMPT not in answer.text
        assert "/keys" not in answer.text
    until(lambda: served.log.count("/v1/kv/status") == 1)
    assert KEY not in served.log
    assert PROMPT not in served.log
    assert "keys" not in " ".join(" ".join(process.cmdline()) for process in served.processes[1:])


def test_one_request_is_one_line_of_the_log_whatever_it_holds(served: Served) -> None:
    """S13: a line break, a colour or a date in a request makes no line that looks like ours."""
    before = len(served.log.splitlines())
    forged = "2026-01-01 00:00:00,000 INFO cellserve.access: 127.0.0.1 GET /v1/models 200 0.001s forged"
    host, _, port = served.url.removeprefix("http://").partition(":")
    for line, header in [
        (f"GET /a%0d%0a{forged.replace(' ', '%20')} HTTP/1.1", "X: y"),
        ("GET /a%1b[31m%07%00%c2%85%e2%80%a8 HTTP/1.1", "X: y"),
        ("GET /live2 HTTP/1.1", "X-Request-Id: a\tb"),
        ("GET /live2 HTTP/1.1", "X-Request-Id: \x85forged"),
        ("GET /live2 HTTP/1.1", "User-Agent: ${jndi:ldap://x}\x85"),
    ]:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            request = "\r\n".join(
                (line, "Host: x", f"Authorization: Bearer {KEY}", header, "Connection: close", "", "")
            )
            connection.sendall(request.encode("latin-1"))
            assert connection.recv(65536)
    names = {f"field\n{forged}": 1, "\x1b[31mred": 1, "a\rb": 1, "\u2028": 1, "x" * 5000: 1}
    served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **names})
    until(lambda: "/v1/completions" in served.log.splitlines()[-1])
    new = served.log.splitlines()[before:]
    assert len(new) == 7, new
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) cellserve\.\w+: ", line) for line in new
    ), new
    assert all(len(line) < 2000 and line.isprintable() for line in new), new


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_show_config_and_doctor_tell_that_there_is_a_key_and_not_which(source: str, tmp_path: Path) -> None:
    """S13."""
    config = tmp_path / "c.yaml"
    secret_url = f"redis://user:{KEY}@127.0.0.1:1/0"
    config.write_text(f"api_key: [{KEY}]\nkv_redis: {secret_url}\nkv_host_gib: 1\n")
    options = {
        "flag": (["--api-key", KEY, "--kv-redis", secret_url, "--kv-host-gib", "1"], {}),
        "environment": (
            [],
            {"CELLSERVE_API_KEY": KEY, "CELLSERVE_KV_REDIS": secret_url, "CELLSERVE_KV_HOST_GIB": "1"},
        ),
        "file": (["--config", str(config)], {}),
    }
    flags, variables = options[source]
    shown = subprocess.run(
        [sys.executable, "-m", "server.cli", "show-config", *flags],
        env=child_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("***") == 2
    assert KEY not in shown.stdout + shown.stderr


@pytest.mark.parametrize("argv", [
    ["serve", "--api-key", KEY, "--port", "x"],
    ["serve", "--api-key", KEY, "--no-such-option"],
    ["serve", f"--api-kee={KEY}"],
    ["serve", "--kv-redis", f"http://{KEY}"],
    ["serve", "--kv-redis", f"redis://:{KEY}@x"],
    ["serve", "--otlp-endpoint", f"http://user:{KEY}@localhost:4318"],
])  # fmt: skip
def test_a_wrong_option_is_told_without_the_secret_beside_it(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """S13."""
    assert cli.main(argv) == 2
    assert KEY not in capsys.readouterr().err


def test_a_key_in_a_broken_yaml_file_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S13: the parser's own message repeats the line."""
    config = tmp_path / "c.yaml"
    for text in (f"api_key: {KEY}: x", f"api_key: [{KEY}", f"api_key: '{KEY}", f"api_key: {{{KEY}: "):
        config.write_text(text)
        assert cli.main(["serve", "--config", str(config)]) == 2
        told = capsys.readouterr().err
        assert KEY not in told
        assert "line 1" in told or "line 2" in told


def test_a_secret_s_own_text_is_nowhere_in_the_settings_as_they_are_printed() -> None:
    """S13: repr, str and JSON of every field that holds a secret."""
    from server.settings import Settings

    given = Settings(api_key=(KEY,), kv_redis=f"redis://:{KEY}@x", kv_host_gib=1.0)  # type: ignore[arg-type]
    written = repr(given) + str(given) + json.dumps(given.model_dump(mode="json")) + repr(given.to_engine_config())
    assert KEY not in written


def test_a_second_server_does_not_reach_into_the_first(served: Served, tmp_path: Path) -> None:
    """S9: every engine has a folder of its own, so two users' servers on one machine never meet."""
    mine = {c.laddr for p in served.processes for c in p.net_connections("unix") if c.laddr}
    with serving_toy(tmp_path, "--no-access-log") as (url, process):
        other = psutil.Process(process.pid)
        theirs = {
            c.laddr for p in [other, *other.children(recursive=True)] for c in p.net_connections("unix") if c.laddr
        }
        assert mine.isdisjoint(theirs)
        assert httpx.get(f"{url}/health", trust_env=False, timeout=TIMEOUT_S).status_code == 200
    assert not [path for path in theirs if Path(path).exists()], "its sockets went with it"


def test_bytes_that_are_no_message_end_an_engine_at_most(served: Served, tmp_path: Path) -> None:
    """S10: only this user reaches the sockets between the processes; what arrives there garbled is never obeyed."""
    canary = tmp_path / "canary"
    paths = {c.laddr for p in served.processes for c in p.net_connections("unix") if c.laddr}
    noise = random.Random(7)
    for path in paths:
        for data in (
            pickle.dumps(_Touches(str(canary))),
            b"\0" * 100,
            noise.randbytes(4096),
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.connect(path)
                connection.sendall(data)
    body = {"prompt": "a", "max_tokens": 2}
    deadline_s = time.monotonic() + 4 * TIMEOUT_S  # another engine may have to start first
    status = 0
    while status != 200:
        assert time.monotonic() < deadline_s, served.log[-2000:]
        with suppress(httpx.TimeoutException):  # it waits for that engine
            status = served.http.post("/v1/completions", json=body).status_code
    assert not canary.exists()
