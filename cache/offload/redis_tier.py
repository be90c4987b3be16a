"""A tier in Redis, off by default: records cut into values of at most 1 MiB, which expire.

    kv:<namespace>:<key>:<part>     part 0 begins with the record's head and is written last

What is kept is Redis's business (`maxmemory-policy allkeys-lru`); a record that misses a part is missing. Where others
may write too, a checksum is not enough: give the layout a secret. Every call has a deadline, nothing is tried twice,
and the breaker above does the rest. Slower than prefill on most machines: it is for warm starts and for sharing.

The only file that knows redis-py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache.offload.chunks import Chunk
from cache.offload.records import BadRecord, Layout
from cache.offload.tiers import TierFault, TierStatus

PART_BYTES = 1 << 20
CONNECT_S = 0.05


class RedisTier:
    """Records of one namespace at `url` (redis://, rediss:// or unix://)."""

    name = "redis"

    def __init__(
        self,
        url: str,
        layout: Layout,
        *,
        ttl_s: int = 24 * 3600,
        operation_s: float = 0.5,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Connects to nobody yet. operation_s: the longest wait for one answer. ValueError for a URL that is none."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._faults: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._full: type[Exception] = redis.OutOfMemoryError
        self._layout = layout
        self._ttl_s = ttl_s
        self._part_bytes = part_bytes
        self._num_parts = -(-layout.record_bytes // part_bytes)
        self._client: Any = redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=operation_s,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )

    def known(self, chunks: Sequence[Chunk]) -> int:
        if not chunks:
            return 0
        try:
            pipeline = self._client.pipeline(transaction=False)
            for chunk in chunks:
                pipeline.exists(self._names(chunk)[0])
            answers = pipeline.execute()
        except self._faults as error:
            raise TierFault(f"asking Redis: {type(error).__name__}") from error
        return next((number for number, answer in enumerate(answers) if not answer), len(chunks))

    def may_have(self, chunk: Chunk) -> bool:
        return True  # whether it is, only Redis knows

    def load(self, chunk: Chunk, into: memoryview) -> None:
        names = self._names(chunk)
        try:
            parts = self._client.mget(names)
            try:
                self._join(chunk, parts, into)
            except BadRecord as error:
                if error.reason != "missing" or any(part is not None for part in parts):
                    self._client.delete(*names)
                raise
        except self._faults as error:
            raise TierFault(f"reading from Redis: {type(error).__name__}") from error

    def store(self, chunk: Chunk, payload: memoryview) -> bool:
        record = self._layout.seal(chunk, payload) + payload
        pipeline = self._client.pipeline(transaction=False)
        for part, name in reversed(list(enumerate(self._names(chunk)))):
            start = part * self._part_bytes
            pipeline.set(name, record[start : start + self._part_bytes], ex=self._ttl_s)
        try:
            pipeline.execute()
        except self._full:  # and nothing to evict
            return False
        except self._faults as error:
            raise TierFault(f"writing to Redis: {type(error).__name__}") from error
        return True

    def status(self) -> TierStatus:
        return TierStatus(self.name, None, None, None)

    def close(self) -> None:
        self._client.close()

    def _names(self, chunk: Chunk) -> list[str]:
        stem = f"kv:{self._layout.namespace.hex()}:{chunk.key.hex()}"
        return [f"{stem}:{part}" for part in range(self._num_parts)]

    def _join(self, chunk: Chunk, parts: Sequence[bytes | None], into: memoryview) -> None:
        present = [part for part in parts if part is not None]
        if len(present) < self._num_parts:
            raise BadRecord("missing", f"{len(present)} of {self._num_parts} parts")
        record = b"".join(present)
        if len(record) != self._layout.record_bytes:
            raise BadRecord("short", f"{len(record)} bytes")
        whole = memoryview(record)
        payload = whole[self._layout.head_bytes :]
        self._layout.verify(chunk, whole[: self._layout.head_bytes], payload)
        into[:] = payload
