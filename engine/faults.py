"""Faults on order, for tests: `cellserve serve --test-faults`, which only a loopback address or a Unix socket may have.

An engine of users never imports this file. In one of tests, `Faults.fitted` puts hooks around parts of the loop that
was just built, where they stand between caller and part until the process ends; a hook passes everything on until its
point is armed and its turn has come.

    points of any engine
        step.raise      the step is launched, and fails in its collect
        step.crash      an error that nobody handles
        step.hang       never comes back; step.slow takes `s` seconds
        step.kill       SIGKILL; step.stop: SIGSTOP
        open.raise      a request cannot be opened
        row.raise       chunk `row` of a step fails alone; row.nan: it has no finite scores
        row.bad_id      chunk `row` draws an id that no tokenizer has
        preempt         a session is preempted
        order           `seed` shuffles the chunks of each step
        wire.lose       a message from the engine, wire.garble; inbox.lose, inbox.garble: one to it
    points of an engine with a model
        forward.raise, sampler.raise, upload.raise; logits.nan: row `row` of the scores
        forward.oom, sampler.oom, upload.oom: the device's own allocator refuses; on a CPU, as it would
    points of an engine on a CUDA device
        device.assert   a kernel of a step fails: nothing on the device can be used again
    points of an engine with tiers below host memory
        tier.raise, tier.slow (`s` seconds), tier.corrupt, tier.full

Orders come as JSON through `EngineLoop.obey`, on the engine thread; a point may fire on any.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.errors import StepFailed
from engine.loop import EngineLoop
from engine.thread import BuildFromConfig, ProgressCallback
from engine.types import EngineInfo, StepOutput

ANY_ENGINE = frozenset(
    (
        *("step.raise", "step.crash", "step.hang", "step.slow", "step.kill", "step.stop"),
        *("open.raise", "row.raise", "row.bad_id", "row.nan", "preempt", "order"),
        *("wire.lose", "wire.garble", "inbox.lose", "inbox.garble"),
    )
)
WITH_MODEL = frozenset(
    (
        *("forward.raise", "sampler.raise", "upload.raise", "logits.nan"),
        *("forward.oom", "sampler.oom", "upload.oom"),
    )
)
ON_A_DEVICE = frozenset(("device.assert",))
WITH_TIERS = frozenset(("tier.raise", "tier.slow", "tier.corrupt", "tier.full"))

_BAD_ID = 1_000_000_000


class Injected(Exception):
    """What a fault raises where nothing more particular is asked for."""


@dataclass(slots=True)
class Armed:
    """A fault that waits for its turn."""

    point: str
    after: int = 0
    """Passes that are let through first."""
    times: int = 1
    """Passes that are hit then."""
    s: float = 0.0
    row: int = 0
    seed: int = 0


class Faults:
    """Of one engine's life."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._armed: list[Armed] = []
        self._fired: Counter[str] = Counter()
        self._points = set(ANY_ENGINE)
        self._device: Any = None  # torch.device of an engine with a model

    # --- orders -----------------------------------------------------------------------------------------------------

    def arm(self, point: str, **options: Any) -> None:
        """Raises ValueError for a point this engine does not have, TypeError for an option no fault has."""
        if point not in self._points:
            raise ValueError(f"there is no point {point} in this engine: it has {', '.join(sorted(self._points))}")
        armed = Armed(point, **options)
        with self._lock:
            self._armed.append(armed)

    def disarm(self) -> None:
        with self._lock:
            self._armed.clear()

    @property
    def fired(self) -> dict[str, int]:
        with self._lock:
            return dict(self._fired)

    def due(self, *points: str) -> Armed | None:
        """The first armed fault of these points whose turn is now, and one pass less for all of them."""
        with self._lock:
            for fault in [fault for fault in self._armed if fault.point in points]:
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self._armed.remove(fault)
                self._fired[fault.point] += 1
                return fault
        return None

    # --- where they are put -----------------------------------------------------------------------------------------

    def fitted(self, build: BuildFromConfig) -> BuildFromConfig:
        """`build`, and then the hooks around what it built."""

        def build_and_fit(config: EngineConfig, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
            loop, info = build(config, progress)
            self.fit(loop)
            return loop, info

        return build_and_fit

    def fit(self, loop: EngineLoop) -> None:
        """Once, before the loop's first turn."""
        parts: Any = loop  # whose insides are this file's business, and nobody's else
        executor, scheduler = parts._executor, parts._scheduler
        parts.obey = lambda order: json.dumps(self._obeyed(loop, order))
        self._around(executor, "launch", self._launching)
        self._around(executor, "collect", self._collecting)
        self._around(executor, "open_session", self._opening)
        self._around(scheduler, "next_takes", self._ordering)
        self._around(scheduler, "must_preempt", self._preempting(scheduler))
        if hasattr(executor, "_forwards"):
            self._points |= WITH_MODEL
            self._device = executor._device
            if self._device.type == "cuda":
                self._points |= ON_A_DEVICE
            self._around(executor._forwards, "run", self._running)
            self._around(executor._sampler, "sample", self._sampling)
            self._around(executor._cache, "prepare_step", self._uploading)
        tiers = parts._prefixes._tiers
        if tiers is not None:
            self._points |= WITH_TIERS
            # A tier may be below the stores of several object groups, and gets its hooks once.
            for tier in {id(each.tier): each.tier for store in tiers._objects.stores for each in store.tiers}.values():
                self._around(tier, "load", self._loading)
                self._around(tier, "store", self._storing)

    @staticmethod
    def _around(part: Any, name: str, hook: Callable[..., Any]) -> None:
        """Calls of part.name become hook(the method, its arguments)."""
        method = getattr(part, name)
        setattr(part, name, lambda *args, **fields: hook(method, *args, **fields))

    def lossy(self, post: Callable[[bytes], object]) -> Callable[[bytes], object]:
        """Around the sending of the engine's messages."""

        def send(data: bytes) -> None:
            fault = self.due("wire.lose", "wire.garble")
            if fault is None:
                post(data)
            elif fault.point == "wire.garble":
                post(data[:-1] + b"\xc1")

        return send

    def garbling(self, receive: Callable[[], bytes]) -> Callable[[], bytes]:
        """Around the receiving of messages to the engine."""

        def take() -> bytes:
            data = receive()
            fault = self.due("inbox.lose", "inbox.garble")
            if fault is None:
                return data
            return receive() if fault.point == "inbox.lose" else data[:-1] + b"\xc1"

        return take

    # --- the hooks --------------------------------------------------------------------------------------------------

    def _launching(self, launch: Callable[..., Any], batch: Any) -> Any:
        fault = self.due("step.crash", "step.hang", "step.slow", "step.kill", "step.stop")
        match fault.point if fault else "":
            case "step.crash":
                raise Injected("a fault that nobody handles")
            case "step.hang":
                threading.Event().wait()
            case "step.kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "step.stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "step.slow":
                assert fault is not None
                time.sleep(fault.s)
        return launch(batch)

    def _collecting(self, collect: Callable[..., Any], in_flight: Any) -> Any:
        output: StepOutput = collect(in_flight)
        if self.due("step.raise"):
            raise StepFailed("a fault of the step")
        fault = self.due("row.raise", "row.bad_id", "row.nan")
        if fault is None:
            return output
        chunks = list(output.chunks)
        row = fault.row % len(chunks)
        match fault.point:
            case "row.raise":
                chunks[row] = chunks[row]._replace(error="a fault of the row")
            case "row.nan":
                chunks[row] = chunks[row]._replace(error="a fault of the row", error_code="not_finite")
            case "row.bad_id":
                chunks[row] = chunks[row]._replace(token_ids=tuple(_BAD_ID for _ in chunks[row].token_ids))
        return StepOutput(tuple(chunks))

    def _opening(self, open_session: Callable[..., Any], params: Any, **fields: Any) -> Any:
        if self.due("open.raise"):
            raise Injected("a fault of the opening")
        return open_session(params, **fields)

    def _ordering(self, next_takes: Callable[..., Any], free_cells: int) -> Any:
        takes = next_takes(free_cells)
        fault = self.due("order")
        if fault is not None:
            # Decodes stay before prefills: that much of the order is promised.
            decodes = [take for take in takes if take.session.is_decoding]
            others = [take for take in takes if not take.session.is_decoding]
            draw = random.Random(f"{fault.seed} {fault.times}")
            draw.shuffle(decodes)
            draw.shuffle(others)
            takes = decodes + others
        return takes

    def _preempting(self, scheduler: Any) -> Callable[..., Any]:
        def must_preempt(original: Callable[..., Any], free_cells: int) -> Any:
            # Two at least: somebody must run, or no step ever comes.
            can = sum(session.remaining > 0 for session in scheduler._running) > 1
            return original(free_cells) or (can and self.due("preempt") is not None)

        return must_preempt

    def _running(self, run: Callable[..., Any], *args: Any) -> Any:
        fault = self.due("forward.raise", "forward.oom", "device.assert")
        match fault.point if fault else "":
            case "forward.raise":
                raise Injected("a fault of the forward")
            case "forward.oom":
                self._run_out_of_memory()
            case "device.assert":
                self._fail_a_kernel()
        return run(*args)

    def _sampling(self, sample: Callable[..., Any], logits: Any, *args: Any) -> Any:
        fault = self.due("sampler.raise", "sampler.oom", "logits.nan")
        match fault.point if fault else "":
            case "sampler.raise":
                raise Injected("a fault of the sampler")
            case "sampler.oom":
                self._run_out_of_memory()
            case "logits.nan":
                assert fault is not None
                logits = logits.clone()
                logits[fault.row % len(logits)] = float("nan")
        return sample(logits, *args)

    def _uploading(self, prepare_step: Callable[..., Any], width: int) -> Any:
        fault = self.due("upload.raise", "upload.oom")
        if fault is not None and fault.point == "upload.oom":
            self._run_out_of_memory()
        if fault is not None:
            raise Injected("a fault of the upload")
        return prepare_step(width)

    def _run_out_of_memory(self) -> None:
        """Ask for as much as the device has in all, of which the model already holds a part."""
        import torch

        if self._device.type == "cuda":
            torch.empty(torch.cuda.mem_get_info(self._device)[1], dtype=torch.uint8, device=self._device)
        raise torch.OutOfMemoryError("out of memory: a fault")

    def _fail_a_kernel(self) -> None:
        """Launch one that reads past its table. The device says so later, to whoever asks it next."""
        import torch

        outside = torch.ones(1, dtype=torch.int64, device=self._device)
        torch.zeros(1, device=self._device)[outside]

    def _loading(self, load: Callable[..., Any], chunk: Any, into: memoryview) -> None:
        from cache.offload.records import BadRecord
        from cache.offload.tiers import TierFault

        fault = self.due("tier.raise", "tier.slow", "tier.corrupt")
        if fault is None:
            load(chunk, into)
        elif fault.point == "tier.raise":
            raise TierFault("a fault of the tier")
        elif fault.point == "tier.slow":
            time.sleep(fault.s)
            load(chunk, into)
        else:
            load(chunk, into)
            into[0] ^= 1
            raise BadRecord("checksum")

    def _storing(self, store: Callable[..., Any], chunk: Any, payload: memoryview) -> Any:
        if self.due("tier.full"):
            raise OSError(errno.ENOSPC, "a fault of the disk")
        return store(chunk, payload)

    # --- what a test asks -------------------------------------------------------------------------------------------

    def _obeyed(self, loop: EngineLoop, order: str) -> dict[str, Any]:
        try:
            asked = json.loads(order)
            match asked.pop("do"):
                case "arm":
                    self.arm(**asked)
                case "disarm":
                    self.disarm()
                case "check":
                    return checked(loop)
                case unknown:
                    raise ValueError(f"nobody knows how to {unknown}")
        except (ValueError, TypeError, KeyError) as error:
            return {"error": str(error)}
        return {"fired": self.fired}


def checked(loop: EngineLoop) -> dict[str, Any]:
    """What the engine holds, and what is wrong with it: `problems` is empty when all of it adds up.

    An idle engine holds no session, and every cell of it is free or in the prefix tree.
    """
    parts: Any = loop
    executor, tree = parts._executor, parts._prefixes._tree
    problems = []
    tables = {"prefix tree": tree}
    if hasattr(executor, "_cache"):
        tables["cell table"] = executor._cache._table
    for name, table in tables.items():
        if hasattr(table, "check_integrity"):
            try:
                table.check_integrity()
            except AssertionError as error:
                problems.append(f"the {name} is broken: {error}")
    is_idle = not loop.has_work()
    held = {
        "requests": len(parts._requests),
        "deadlines": len(parts._deadlines),
        "queue deadlines": len(parts._queue_deadlines),
        "steps in flight": len(parts._launched),
        "leases": len(parts._prefixes._leases),
        "token arrays": len(parts._prefixes._tokens),
        "waits": len(parts._prefixes._waits),
    }
    if is_idle:
        problems += [f"an idle engine holds {count} {name}" for name, count in held.items() if count]
        if executor.free_cells + tree.num_held != executor.total_cells:
            problems.append(f"{executor.free_cells} free and {tree.num_held} cached of {executor.total_cells} cells")
    return {
        "is_idle": is_idle,
        "free_cells": executor.free_cells,
        "cached_cells": tree.num_held,
        "total_cells": executor.total_cells,
        "held": held,
        "problems": problems,
    }
