"""A whole server on the toy decoder, its engine in a process of its own: `python -m support.toy_process OPTIONS`.

As after `cellserve serve`, with room for 24 sequences. `serving_toy` is the test's end.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import process
from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.types import EngineInfo
from server import cli, run, settings
from support.live_server import TIMEOUT_S
from support.scripted_server import child_environment


@contextmanager
def serving_toy(folder: Path, *options: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields the URL and the server's process; it must drain and exit with 0. folder/log takes its standard error."""
    command = (sys.executable, "-m", "support.toy_process", "--port", "0", *options)
    log_path = folder / "log"
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command, env=child_environment() | variables, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert server.stdout is not None
    try:
        ready = re.match(r"ready: (http://\S+) ", server.stdout.readline())
        assert ready, f"the server did not start:\n{log_path.read_text()}"
        yield ready[1], server
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_S) == 0, log_path.read_text()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def build(config: EngineConfig, progress: Callable[[str, int, int], None]) -> tuple[EngineLoop, EngineInfo]:
    from support.toy_server import toy_engine, write_toy_tokenizer  # torch, which the server's process does without

    folder = Path(tempfile.mkdtemp(prefix="cellserve-toy-"))
    atexit.register(shutil.rmtree, folder)
    return toy_engine(write_toy_tokenizer(folder), max_num_seqs=24, max_waiting=config.max_waiting, cells=2047)


def main() -> int:
    args = cli.parse(["serve", *sys.argv[1:]])
    options = settings.load(cli.flags_of(args), args.config).settings
    client = ProcessClient(options.to_engine_config(), module="support.toy_process")
    with run.listening(options) as listeners:
        return run.serve(client, options, *listeners)


if __name__ == "__main__":
    # The engine's side is given its folder of sockets, the server's only options.
    is_engine = len(sys.argv) == 2 and os.path.isdir(sys.argv[1])
    sys.exit(process.main(Path(sys.argv[1]), build) if is_engine else main())
