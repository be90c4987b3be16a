"""An engine process with a scripted executor: `ProcessClient(config, module="support.scripted_process")`.

The config's model says what goes wrong: see `SCENES`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.loop import EngineLoop
from engine.process import main
from engine.types import EngineInfo, StepOutput
from support.letters import next_letter
from support.scripted import ScriptedExecutor, ScriptedInFlight, scripted_info, scripted_loop
from support.tiny_tokenizer import write_byte_level

LONGEST = 100_000
"""Positions of the model and cells of its pool: a request that asks for nearly as many runs until it is cancelled."""

PACE_S = 0.003

ProgressCallback = Callable[[str, int, int], None]


def build(config: EngineConfig, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
    if config.model in ("plain", "load-for-ever"):  # the others may be killed, and would leave it
        _keep_a_folder()
    progress("reading the script", 1, 2)
    cells = config.kv_cells or LONGEST
    executor = ScriptedExecutor(cells=cells, max_sessions=max(64, config.num_seqs), max_session_tokens=LONGEST)
    SCENES[config.model](executor)
    info = scripted_info(
        max_num_seqs=config.num_seqs, max_waiting=config.max_waiting, max_model_len=min(LONGEST, cells), kv_cells=cells
    )
    if config.model.startswith("letters"):
        folder = Path(tempfile.mkdtemp(prefix="cellserve-scripted-"))
        atexit.register(shutil.rmtree, folder)
        tiny = write_byte_level(folder)
        changes = {"tokenizer_dir": str(folder), "vocab_size": tiny.vocab_size, "eos_token_ids": (tiny.eos_id,)}
        info = replace(info, **changes)
    return scripted_loop(executor, info), info


def _keep_a_folder() -> None:
    """In a test's own TMPDIR, not where all is removed with the process: one that stays tells of a skipped handler."""
    if (folder := os.environ.get("TMPDIR")) is not None:
        atexit.register(shutil.rmtree, tempfile.mkdtemp(prefix="cellserve-scripted-", dir=folder))


def _plain(executor: ScriptedExecutor) -> None:
    pass


def _refuse_config(executor: ScriptedExecutor) -> None:
    raise ConfigError("these options do not go together")


def _refuse_model(executor: ScriptedExecutor) -> None:
    raise ModelError("there is no such model")


def _crash_in_load(executor: ScriptedExecutor) -> None:
    raise ZeroDivisionError("by zero")


def _load_for_ever(executor: ScriptedExecutor) -> None:
    threading.Event().wait()


def _hang(executor: ScriptedExecutor) -> None:
    """The second step never ends, unless SIGUSR1 comes."""
    executor.release(1)
    signal.signal(signal.SIGUSR1, lambda number, frame: executor.release())


def _break(executor: ScriptedExecutor) -> None:
    executor.fail_step(2, MemoryError("the device is gone"))


def _break_and_stick(executor: ScriptedExecutor) -> None:
    """A thread waits for ever, as one may that waits for a lost device."""
    _break(executor)
    threading.Thread(target=threading.Event().wait).start()


def _vanish(executor: ScriptedExecutor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_once(executor: ScriptedExecutor) -> None:
    """As hang, but only for the first engine that its parent starts."""
    mark = Path(os.environ.get("TMPDIR", "/tmp")) / f"cellserve-hung-{os.getppid()}"  # tempfile has one of this life
    if mark.exists():
        mark.unlink()
    else:
        mark.touch()
        _hang(executor)


def _letters(executor: ScriptedExecutor) -> None:
    executor.answer = next_letter
    executor.keeps_batches = False


def _slow_letters(executor: ScriptedExecutor) -> None:
    """Steps of a few milliseconds, so that something can happen in the middle of an answer."""
    _letters(executor)
    collect = executor.collect

    def paced(in_flight: ScriptedInFlight) -> StepOutput:
        time.sleep(PACE_S)
        return collect(in_flight)

    executor.collect = paced  # type: ignore[method-assign]


def _out_of_memory(executor: ScriptedExecutor) -> None:
    raise MemoryError("CUDA out of memory while capturing forward_64")


def _die_in_every_step(executor: ScriptedExecutor) -> None:
    def answer(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    executor.answer = answer


class _Complaint:
    """As a library's that finds itself still in use at the interpreter's end."""

    def __del__(self) -> None:
        os.write(2, b"something was not given back\n")


def _complain_at_the_end(executor: ScriptedExecutor) -> None:
    sys.modules["complaint"] = _Complaint()  # type: ignore[assignment]  # nothing ends it but the interpreter


SCENES: dict[str, Callable[[ScriptedExecutor], None]] = {
    "plain": _plain,
    "complain-at-the-end": _complain_at_the_end,
    "refuse-config": _refuse_config,
    "refuse-model": _refuse_model,
    "crash-in-load": _crash_in_load,
    "load-for-ever": _load_for_ever,
    "hang": _hang,
    "hang-once": _hang_once,
    "break": _break,
    "break-and-stick": _break_and_stick,
    "die-in-every-step": _die_in_every_step,
    "letters": _letters,
    "letters-slow": _slow_letters,
    "out-of-memory": _out_of_memory,
    "vanish": _vanish,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), build)
