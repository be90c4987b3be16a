"""A device stream without a device: `cache.upload.Stream` whose work runs only when somebody waits for it."""

from collections.abc import Callable

import torch


class FakeStream:
    """Copies and scatters queue up and read their sources late, as a device would. `calls` is what was asked for.

    fail: names of calls that raise, each once.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: set[str] = set()
        self._queue: list[Callable[[], object]] = []

    def pinned(self, size: int) -> torch.Tensor:
        self._note("pinned")
        return torch.full((size,), 0x5A, dtype=torch.uint8)  # what was there before

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._note("copy")
        self._queue.append(lambda: destination.copy_(source))

    def scatter(self, destination: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
        self._note("scatter")
        self._queue.append(lambda: destination.index_copy_(0, index, value))

    def record_copied(self) -> None:
        self._note("record_copied")

    def wait_copied(self) -> None:
        self._note("wait_copied")
        self.drain()

    def synchronize(self) -> None:
        self._note("synchronize")
        self.drain()

    def record_step(self) -> None:
        self._note("record_step")

    def follow_step(self) -> None:
        self._note("follow_step")

    def drain(self) -> None:
        """Run everything enqueued."""
        for work in self._queue:
            work()
        self._queue.clear()

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            self.fail.remove(name)
            raise RuntimeError(f"{name} failed")
