"""A whole server process on a scripted engine: `python -m support.scripted_server OPTIONS`, as after `cellserve serve`.

Lines on standard input: "hold" freezes the engine's next step and is answered "held", "release" lets all steps pass.
The model's name chooses the start: "refuse-model" and "refuse-config" end it, "load-for-ever" never ends it.
`ServerProcess` is the test's end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.errors import ConfigError, ModelError
from engine.loop import EngineLoop
from engine.thread import ProgressCallback
from engine.types import EngineInfo
from server import cli, run, settings
from server.options import ENV_PREFIX
from server.settings import Settings
from support.live_server import TIMEOUT_S
from support.scripted import ScriptedExecutor, scripted_info, scripted_loop

IN_A_PROCESS = ("load-for-ever", "die-in-every-step", "letters", "letters-slow", "out-of-memory")
"""Models whose engine has a process of its own: scenes of support/scripted_process.py."""

ROOT = Path(__file__).parents[2]


def child_environment() -> dict[str, str]:
    """None of our variables, and the folders that pytest puts on the path."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return others | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


class ServerProcess:
    """Leaving the block kills it, if it has not ended by then."""

    def __init__(self, *options: str, module: str = "support.scripted_server") -> None:
        command = [sys.executable, "-m", module, "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self._threads = ThreadPoolExecutor(64)
        self._http = httpx.Client(trust_env=False, timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._threads.shutdown()
        self._http.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def ready_line(self) -> str:
        """Wait for the one line of a good start, and learn the address from it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"ready: (https?://\S+) ", line)
        assert found, f"no ready line: {line!r}"
        self.url = found[1]
        return line

    def wait_for_stderr(self, text: str) -> None:
        """Read standard error up to the line that holds `text`."""
        assert self.process.stderr is not None
        while text not in (line := self.process.stderr.readline()):
            assert line, f"{text!r} was never said"

    def tell(self, word: str) -> None:
        """ "hold" or "release". Returns once a "hold" holds: what is sent behind it is frozen for certain."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        if word == "hold":
            assert self.process.stdout.readline() == "held\n"

    def get(self, path: str) -> httpx.Response:
        return self._http.get(self.url + path)

    def complete(self, **body: Any) -> httpx.Response:
        return self._http.post(f"{self.url}/v1/completions", json=body)

    def complete_later(self, **body: Any) -> Future[httpx.Response]:
        return self._threads.submit(lambda: self.complete(**body))

    def num_started(self) -> int:
        """Choices that the engine has admitted."""
        found = re.search(r"^cellserve:choices_started_total\S* (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found
        return int(float(found[1]))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str, str]:
        """Exit code, and what was left to read of standard output and standard error."""
        output, complaint = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, output, complaint


def main() -> int:
    args = cli.parse(["serve", *sys.argv[1:]])
    options = settings.load(cli.flags_of(args), args.config).settings
    with run.listening(options) as listeners:
        return run.serve(_client(options), options, *listeners)


def _client(options: Settings) -> EngineClient:
    if options.model in IN_A_PROCESS:
        return ProcessClient(options.to_engine_config(), module="support.scripted_process")
    executor = ScriptedExecutor(max_sessions=128)

    def build(progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
        progress("reading the script", 1, 2)
        if options.model == "refuse-model":
            raise ModelError("refuse-model: the folder holds no config.json")
        if options.model == "refuse-config":
            raise ConfigError("--kv-cells 2 is too few: give at least 512")
        info = scripted_info(max_num_seqs=128, max_waiting=options.max_waiting)
        return scripted_loop(executor, info), info

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "hold":
                executor.hold()
                print("held", flush=True)
            else:
                executor.release()

    threading.Thread(target=obey, daemon=True).start()
    return InProcessClient(build)


if __name__ == "__main__":
    sys.exit(main())
