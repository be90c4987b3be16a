"""Which programs run on a cache, and whether they are the model it was made for (POOL-3, POOL-12, REG-3).

A program is anything that steps a model: an eager forward, a captured one. It is checked when it is bound, and the
whole once more at the first step. What is found wrong is remembered: a cache whose model disagrees never steps.
Not thread-safe: the cache holds the lock.
"""

from __future__ import annotations

import torch

from cache.geometry import Geometry, InvalidProgram


class Programs:
    """The programs of one cache, by name."""

    def __init__(self, geometry: Geometry, kv_dtype: torch.dtype):
        self._geometry = geometry
        self._kv_dtype = kv_dtype
        self._bound: set[str] = set()
        self._storeless: set[str] = set()
        self._error: InvalidProgram | None = None
        self._has_stepped = False

    def bind(self, name: str, geometry: Geometry | None, kv_dtype: torch.dtype) -> bool:
        """Note a program with the K/V it stores. False: it stores none (`geometry` is None) and must never step."""
        if geometry is None:
            self._storeless.add(name)
            return False
        try:
            self._check(name, geometry, kv_dtype)
        except InvalidProgram as error:
            self._error = self._error or error
            raise
        self._bound.add(name)
        return True

    def release(self, name: str) -> None:
        """Forget a program that will not run again; nothing happens if it is not bound."""
        self._bound.discard(name)
        self._storeless.discard(name)

    def check_step(self) -> None:
        """Raise what was found wrong. At the first step, programs that together store nothing are (POOL-12).

        A cache to which nothing was bound is not judged: attention checks the shapes of every call itself.
        """
        if self._error is None and not self._has_stepped and self._storeless and not self._bound:
            self._error = InvalidProgram(
                f"none of {', '.join(sorted(self._storeless))} stores K/V: "
                f"all {len(self._geometry.layers)} layers of the cache were found nowhere"
            )
        if self._error is not None:
            raise self._error
        self._has_stepped = True

    def _check(self, name: str, geometry: Geometry, kv_dtype: torch.dtype) -> None:
        if kv_dtype != self._kv_dtype:
            raise InvalidProgram(f"{name} stores K/V as {kv_dtype}, the cache as {self._kv_dtype}")
        if len(geometry.layers) != len(self._geometry.layers):
            raise InvalidProgram(f"{name} has {len(geometry.layers)} layers, the cache {len(self._geometry.layers)}")
        for index, (theirs, ours) in enumerate(zip(geometry.layers, self._geometry.layers, strict=True)):
            if theirs != ours:
                raise InvalidProgram(f"layer {index} of {name} is {theirs}, the cache's is {ours}")
