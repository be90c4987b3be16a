"""A real server: `cellserve serve` in a process of its own on a free port, with a model of the test's choice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.tiny_models import tiny_llama

READY_LINE = re.compile(r"^ready: (http://\S+) ")
STOP_S = 20.0


@contextmanager
def serving_tiny_model(folder: Path, *flags: str) -> Iterator[str]:
    """As `serving`, with a tiny model of random weights."""
    model = folder / "model"
    tiny_llama(architectures=["LlamaForCausalLM"]).save_pretrained(model)
    with serving(folder, str(model), "--load-format", "dummy", *flags) as url:
        yield url


@contextmanager
def serving(folder: Path, *options: str, device: str = "cpu") -> Iterator[str]:
    """Yields the URL once the server is ready; at the end it must drain and exit with 0. Its log goes to folder/log."""
    command = (sys.executable, "-m", "server.cli", "serve", *options, "--device", device)
    log_path = folder / "log"
    with log_path.open("w") as log:
        server = subprocess.Popen(
            (*command, "--port", "0", "--no-access-log"), stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert server.stdout is not None
    try:
        # The line comes when the engine is ready, the end of the output when there will be none.
        ready = READY_LINE.match(server.stdout.readline())
        assert ready, f"the server did not start:\n{log_path.read_text()}"
        yield ready[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0, log_path.read_text()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
