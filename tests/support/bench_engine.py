"""Engines that draw one token a stream and step and compute nothing: what is left is the cost of serving.

`LockStepClient` steps on the server's own event loop and waits until each token has been taken, so that every token is
a frame of its own. `python -m support.bench_engine FOLDER` is the real loop in a process of its own: it runs as far
ahead as it likes, and the server joins what it cannot send one by one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.dispatch import EngineClient
from engine.executor import Cells
from engine.loop import EngineLoop
from engine.process import main
from engine.scheduler import SchedulerLimits
from engine.thread import ProgressCallback
from engine.types import Batch, ChunkOutput, EngineInfo, EngineStats, SamplingParams, StepOutput, Update
from engine.wire import Cancel, Ready, Step, Submit, ToEngine, decode_from_engine, encode
from support.scripted import scripted_info
from support.tiny_tokenizer import write_byte_level

MARK = "~"
"""In every token's text once and nowhere else in a frame, so that a reader counts tokens without parsing."""
NUM_WORDS = 64
FIRST_WORD = 256
POSITIONS = 1 << 22
TOKENIZER_VARIABLE = "BENCH_TOKENIZER"
STEP_VARIABLE = "BENCH_STEP_MS"


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer whose words are a few letters and the mark."""
    write_byte_level(folder, [f" w{'o' * (i % 5)}rd{i}{MARK}" for i in range(NUM_WORDS)])
    return folder


def next_token(count: int) -> int:
    """The words in turn."""
    return FIRST_WORD + count % NUM_WORDS


def bench_info(tokenizer_dir: str, streams: int) -> EngineInfo:
    return scripted_info(
        max_model_len=POSITIONS,
        vocab_size=FIRST_WORD + NUM_WORDS,
        kv_cells=POSITIONS * streams,
        max_num_seqs=streams,
        max_waiting=streams,
        eos_token_ids=(),
        tokenizer_dir=tokenizer_dir,
    )


class LockStepClient(EngineClient):
    """An engine on the event loop: a step's message is decoded as between processes, then taken by every stream.

    All streams draw the same words, and none ever ends by itself: a step's bytes are made once and used again.
    """

    def __init__(self, info: EngineInfo) -> None:
        super().__init__()
        self._engine_info = info
        self._requests: list[str] = []
        self._messages: dict[int, bytes] = {}
        """By word, for the requests that run now."""
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _launch(self) -> None:
        self._begin("starting")
        self._receive(Ready(self._engine_info))
        self._task = asyncio.create_task(self._run())

    def _send(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._requests.append(request.request_id)
                self._messages.clear()
                self._has_work.set()
            case Cancel(request_id):
                self._requests.remove(request_id)
                self._messages.clear()
                gone = Step((Update(request_id, finish="cancelled"),), EngineStats())
                asyncio.get_running_loop().call_soon(self._receive, gone)

    def _kill(self) -> None:
        self._requests.clear()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        steps = 0
        while True:
            if not self._requests:
                self._has_work.clear()
                await self._has_work.wait()
            steps += 1
            self._receive(decode_from_engine(self._message(next_token(steps))))
            await asyncio.sleep(0)
            while any(entry.stream.has_unread for entry in self._open.values()):
                await asyncio.sleep(0)

    def _message(self, word: int) -> bytes:
        if word not in self._messages:
            updates = tuple(Update(request_id, token_ids=(word,)) for request_id in self._requests)
            self._messages[word] = encode(Step(updates, EngineStats(running=len(updates))))
        return self._messages[word]


@dataclass(frozen=True, slots=True)
class Launched:
    batch: Batch
    forwards = ()


class IdleExecutor:
    """Holds no cells and computes nothing. A step takes at least `step_s`."""

    overlaps = False
    padding_rows = 0
    free_cells = total_cells = 1 << 30
    max_session_tokens = POSITIONS

    def __init__(self, max_sessions: int, step_s: float) -> None:
        self.max_sessions = max_sessions
        self._step_s = step_s
        self._next_s = 0.0
        self._opened = 0
        self._steps = 0

    def method_calls(self) -> tuple[tuple[str, int], ...]:
        return (("forward_others", self._steps),)

    def open_session(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        prefix: Cells | None = None,
    ) -> int:
        self._opened += 1
        return self._opened

    def close_session(self, session_id: int) -> None:
        pass

    def cells_of(self, session_id: int, start: int, stop: int) -> Cells:
        return np.empty(0, np.int32)

    def launch(self, batch: Batch) -> Launched:
        self._steps += 1
        return Launched(batch)

    def collect(self, in_flight: Launched) -> StepOutput:
        if self._step_s:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            self._next_s = max(self._next_s, time.monotonic() - self._step_s) + self._step_s
        chunks = in_flight.batch.chunks
        return StepOutput(
            tuple(
                ChunkOutput(chunk.session_id, (next_token(chunk.position),) if chunk.wanted_rows != "none" else ())
                for chunk in chunks
            )
        )


def build(config: EngineConfig, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
    streams = config.num_seqs
    limits = SchedulerLimits(max_num_seqs=streams, prefill_budget=4096, mixed_budget=4096 + streams, prefill_chunk=64)
    executor = IdleExecutor(streams, float(os.environ.get(STEP_VARIABLE, "0")) / 1000)
    loop = EngineLoop(executor, limits, prefix_cache=False)  # type: ignore[arg-type]
    return loop, bench_info(os.environ[TOKENIZER_VARIABLE], streams)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), build))
