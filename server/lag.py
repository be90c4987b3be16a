"""How late the API's event loop runs what is due: what every request and every stream of this process waits as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.25


async def measure(tell: Callable[[float], None]) -> None:
    """Tell the delay of a timer, in seconds, once a tick. Until cancelled."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        tell(max(0.0, time.monotonic() - due_s))
