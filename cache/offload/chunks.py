"""Which chunk of K/V is which: fixed runs of tokens, named by all that decides their bytes.

A chunk's K/V depends on the model, on how it is stored, and on every token before it. So a key is a chain:

    namespace record ──> root ──> key of chunk 0 ──> key of chunk 1 ──> ...
                                  tokens [0, C)      tokens [C, 2C)

Each arrow is a 16-byte BLAKE2b of what is on its left and, for a chunk, of its token ids. Two prompts share keys as far
as they share whole chunks, and nothing is shared between namespaces or between salts. Knows no bytes and no cells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from cache.geometry import Geometry, InvalidConfig

KEY_BYTES = 16
FORMAT = 1
"""Version of the layout of a chunk's bytes and of what is written around them."""

MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 256
MIN_CHUNK_BYTES = 1 << 20
"""A transfer of less is all overhead: small models get longer chunks."""

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens that decides a chunk's bytes. Whoever differs in one field shares nothing."""

    weights: str
    """Digest, or name and revision, of the weights that computed the K/V."""
    dtype: str
    geometry: str
    """As `geometry_record` writes it."""
    rope: str
    """Everything that turns a position into an angle."""
    adapter: str = ""
    steps: str = ""
    """How steps are computed, where K/V is to be the same to the last bit; else ""."""
    salt: str = ""
    """Separates tenants; their hits and the timing of their hits too."""
    format: int = FORMAT

    @property
    def record(self) -> str:
        """The fields in clear, one way to write them. Kept beside stored chunks, for people to tell what they are."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if not self.steps:  # so that keys are those of all that was stored before it could be said
            del fields["steps"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> bytes:
        """What stored chunks carry: of every field but the salt, which is in each key already."""
        return _hash(b"cellserve-record", replace(self, salt="").record.encode())

    @property
    def root(self) -> bytes:
        """The parent of every first chunk."""
        return _root(self)


def geometry_record(geometry: Geometry) -> str:
    """The layers, one way to write them."""
    return ";".join(
        f"{layer.num_kv_heads}x{layer.k_dim}+{layer.v_dim}/{layer.reach.kind}:{layer.reach.size}"
        for layer in geometry.layers
    )


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One whole chunk of a token sequence."""

    key: bytes
    parent: bytes
    """The key of the chunk before it; the root for the first."""
    tokens: TokenIds  # [C], kept to compare: a key that matches is no proof
    index: int
    """Its tokens are [index * C, (index + 1) * C) of the sequence."""


class ChunkChain:
    """The whole chunks of a token sequence that grows; each token is hashed once. One thread at a time."""

    def __init__(self, namespace: Namespace, chunk_tokens: int) -> None:
        check_chunk_tokens(chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self.chunks: list[Chunk] = []
        self._parent = namespace.root
        self._tail: TokenIds = np.empty(0, np.uint32)

    def reach(self, tokens: npt.NDArray[np.int64], count: int) -> list[Chunk]:
        """The first `count` chunks of `tokens`, which begin with all that was appended: in whole chunks alone."""
        done = len(self.chunks)
        if done < count:
            self.extend(tokens[done * self.chunk_tokens : count * self.chunk_tokens])
        return self.chunks[:count]

    def extend(self, tokens: npt.ArrayLike) -> list[Chunk]:
        """Append token ids; -> the chunks this completed. A partial tail waits for its rest (K1).

        ValueError for an id outside [0, 2**32); nothing is appended then.
        """
        pending = np.concatenate((self._tail, _token_ids(tokens)))
        whole = pending.size - pending.size % self.chunk_tokens
        completed = []
        for start in range(0, whole, self.chunk_tokens):
            ids = pending[start : start + self.chunk_tokens]
            chunk = Chunk(chunk_key(self._parent, ids), self._parent, ids, len(self.chunks))
            self._parent = chunk.key
            self.chunks.append(chunk)
            completed.append(chunk)
        self._tail = pending[whole:]
        return completed


def chunks_of(namespace: Namespace, tokens: npt.ArrayLike, chunk_tokens: int) -> list[Chunk]:
    """The whole chunks of `tokens`, in order."""
    return ChunkChain(namespace, chunk_tokens).extend(tokens)


def chunk_key(parent: bytes, tokens: TokenIds) -> bytes:
    """The key of the chunk of these tokens behind `parent`."""
    return _hash(b"cellserve-chunk", parent + tokens.astype("<u4", copy=False).tobytes())


def check_chunk_tokens(chunk_tokens: int) -> None:
    """InvalidConfig unless it is a power of two in [16, 256]."""
    if not MIN_CHUNK_TOKENS <= chunk_tokens <= MAX_CHUNK_TOKENS or chunk_tokens & (chunk_tokens - 1):
        raise InvalidConfig(
            f"a chunk of {chunk_tokens} tokens: it must be a power of two from {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
        )


def fitting_chunk_tokens(geometry: Geometry, kv_dtype: torch.dtype, wanted: int = 64) -> int:
    """`wanted` tokens, doubled until a chunk is worth a transfer (1 MiB) or as long as chunks get."""
    check_chunk_tokens(wanted)
    while wanted < MAX_CHUNK_TOKENS and wanted * geometry.bytes_per_cell(kv_dtype) < MIN_CHUNK_BYTES:
        wanted *= 2
    return wanted


@lru_cache(maxsize=4096)
def _root(namespace: Namespace) -> bytes:
    """Asked of each request anew, a salt at a time."""
    return _hash(b"cellserve-root", namespace.record.encode())


def _token_ids(tokens: npt.ArrayLike) -> TokenIds:
    ids = np.asarray(tokens, np.int64).reshape(-1)
    if ids.size and not (ids.min() >= 0 and ids.max() < 1 << 32):
        raise ValueError(f"token ids from {ids.min()} to {ids.max()} do not fit 32 bits")
    return ids.astype(np.uint32)


def _hash(purpose: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=KEY_BYTES, person=purpose).digest()
