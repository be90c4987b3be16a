"""What the API processes of one server ask each other: numbers for a scrape, and who has the request to be cancelled.

Questions and answers are JSON in text; the main process passes them on and remembers what dead processes had counted.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from server.metric_sums import Sums
from server.metrics import Metrics
from server.running import Running

SUMS = "sums"


class Siblings:
    """In every API process; in a server of one process there is nobody to ask."""

    def __init__(
        self, metrics: Metrics, running: Callable[[], Running | None], ask: Callable[[str], Awaitable[tuple[str, ...]]]
    ) -> None:
        """running: None until the engine has been ready. ask: put a question to all others and gather the answers."""
        self._metrics = metrics
        self._running = running
        self._ask = ask

    def answer(self, question: str) -> str:
        """What this process tells another one."""
        asked: dict[str, Any] = json.loads(question)
        if asked["about"] == SUMS:
            return json.dumps(self._metrics.sums())
        running = self._running()
        return json.dumps(running is not None and running.cancel(asked["name"], asked["key"]))

    async def sums(self) -> list[Sums]:
        """Of each other process, and of those that died. Its own go with the question: it may be the next to die."""
        if self._ask is nobody:
            return []
        question = json.dumps({"about": SUMS, "mine": self._metrics.sums()})
        return [json.loads(answer) for answer in await self._ask(question)]

    async def cancel(self, name: str, key: str | None) -> bool:
        """End what runs elsewhere under this name; whether there was anything."""
        answers = await self._ask(json.dumps({"about": "cancel", "name": name, "key": key}))
        return any(json.loads(answer) for answer in answers)


async def nobody(question: str) -> tuple[str, ...]:
    return ()


def sums_of_asker(question: str) -> Sums | None:
    """None where the question is about something else."""
    sums: Sums | None = json.loads(question).get("mine")
    return sums


ABOUT_SUMS = json.dumps({"about": SUMS})
"""As the main process passes it on."""


def of_the_dead(sums: Sums) -> Sums:
    """What stays true: what was counted, and not what was there."""
    return {key: value for key, value in sums.items() if json.loads(key)[1].endswith(_COUNTED)}


_COUNTED = ("_total", "_bucket", "_count", "_sum")
