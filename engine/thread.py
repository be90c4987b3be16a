"""The engine thread: load, then drain the inbox, step, send, until told to stop.

The same code in a process of its own and in the server's. It owns the loop and everything below it; others reach it
through an `Inbox` alone.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.types import EngineInfo
from engine.view import View
from engine.wire import (
    AskKv,
    Cancel,
    Failed,
    FromEngine,
    Inject,
    Injected,
    Kv,
    Look,
    Progress,
    Ready,
    ResetPrefixes,
    Seen,
    Start,
    Step,
    Stop,
    Submit,
    ToEngine,
    WasReset,
)

if TYPE_CHECKING:
    from engine.loop import EngineLoop  # numpy, which a process that only holds a client does without

ProgressCallback = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)"""

Build = Callable[[ProgressCallback], tuple["EngineLoop", EngineInfo]]
"""Loads an engine. Raises ConfigError or ModelError when that cannot work."""

BuildFromConfig = Callable[[EngineConfig, ProgressCallback], tuple["EngineLoop", EngineInfo]]

SIGN_OF_LIFE_S = 0.25
"""Turns that bring no news, as while copies are under way, are told of no more often than that."""

log = logging.getLogger(__name__)


class Inbox(Protocol):
    """Messages in the order they were sent."""

    def take(self, *, wait: bool) -> list[ToEngine]:
        """All that have come; with `wait`, sleep until there is at least one."""
        ...


def run_engine(build: Build, inbox: Inbox, send: Callable[[FromEngine], None]) -> bool:
    """Live one engine's life; whether it ended because it was told to. Every other end is sent as `Failed`."""
    try:
        loop, info = build(lambda text, done, of: send(Progress(text, done, of)))
    except ConfigError as error:
        send(Failed("config", str(error)))
        return False
    except ModelError as error:
        send(Failed("model", str(error)))
        return False
    except Exception as error:
        log.exception("the engine could not be loaded")
        send(Failed("engine", f"the load failed with {type(error).__name__}: {error}"))
        return False
    send(Ready(info))
    try:
        _serve(loop, inbox, send)
    except Exception as error:
        log.exception("the engine stopped")
        send(Failed("engine", f"a step failed with {type(error).__name__}: {error}"))
        return False
    return True


def build_from_config(config: EngineConfig, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
    """The real engine. Imports torch; with `import_engine` the only thing here that does."""
    import_engine()
    from engine.build import build_engine

    return build_engine(config, progress)


def import_engine() -> None:
    """Import what `build_from_config` needs: seconds, once a process.

    Imports make a million objects and hardly any garbage, and collections among them take a sixth of the time: they are
    off meanwhile. Not for the load behind it, for what that drops may be weights.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        import engine.build  # noqa: F401
    finally:
        if collects:
            gc.enable()


def breakable(build: BuildFromConfig, config: EngineConfig) -> BuildFromConfig:
    """`build`, and for an engine of tests the faults that it can be told to have. No code of theirs runs elsewhere."""
    if not config.test_faults:
        return build
    from engine.faults import Faults

    return Faults().fitted(build)


def _serve(loop: EngineLoop, inbox: Inbox, send: Callable[[FromEngine], None]) -> None:
    told, due_s = None, 0.0
    while True:
        for message in inbox.take(wait=not loop.has_work()):
            match message:
                case Submit(request):
                    loop.submit(request)
                case Cancel(request_id, index):
                    loop.cancel(request_id, index)
                case AskKv(ask_id):
                    send(Kv(ask_id, loop.kv_report()))
                case ResetPrefixes(ask_id):
                    send(WasReset(ask_id, loop.reset_prefix_cache()))
                    send(Step((), loop.stats()))  # an idle engine would not say soon that cells became free
                case Look(ask_id, max_codes, behind_step):
                    send(Seen(ask_id, _view(loop, max_codes, behind_step)))
                case Inject(ask_id, order):
                    send(Injected(ask_id, loop.obey(order)))
                case Stop():
                    return
                case Start():
                    raise RuntimeError("told to start twice")
        if loop.has_work():
            updates, stats, now = loop.step(), loop.stats(), time.monotonic()
            if updates or stats != told or now >= due_s:
                send(Step(tuple(updates), stats))
                told, due_s = stats, now + SIGN_OF_LIFE_S


def _view(loop: EngineLoop, max_codes: int, behind_step: int) -> View:
    """Empty, and a line in the log, where it cannot be made: whoever looks must not end what they look at."""
    try:
        return loop.view(max_codes, behind_step)
    except Exception:
        log.exception("the engine could not be shown")
        return View()
