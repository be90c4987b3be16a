"""A chunk outside this process's memory: its bytes behind a fixed binary head that says whose they are.

    [ tag 16 ][ magic 8 ][ version 4 ][ tokens 4 ][ payload 8 ][ sequence 8 ][ namespace 16 ][ key 16 ][ parent 16 ]
    [ token ids, 4 bytes each ][ zeros to a multiple of 256 ]
    [ payload: the chunk's K/V as the staging buffer lays it out ]

Little-endian. The tag covers everything behind it, payload included: CRC-32 against decay, or, with a secret, a keyed
BLAKE2b against whoever else can write to the store. Whatever is read is compared with the chunk that was asked for,
token by token, before anybody sees it. Nothing here is ever executed: no pickle, no code, no lengths that are obeyed.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from cache.geometry import CacheError
from cache.offload.chunks import FORMAT, KEY_BYTES, Chunk, TokenIds
from cache.offload.staging import aligned

TAG_BYTES = 16
_HEAD = struct.Struct(f"<8sIIQQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
MAGIC = b"CELLS-KV"
LAST_SEQUENCE = (1 << 63) - 1
"""A number behind it is decay: who went on from there would soon have none left."""

Buffer = bytes | bytearray | memoryview


class BadRecord(CacheError):
    """What was read is not the chunk that was asked for. `reason` is one word, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{': ' + detail if detail else ''}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Head:
    """What a stored head claims; nothing of it is verified before `Layout.verify`."""

    key: bytes
    parent: bytes
    sequence: int
    """Greater means written later by the same server."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the chunks of one namespace are written; the same in every tier."""

    namespace: bytes
    """`Namespace.digest`."""
    chunk_tokens: int
    payload_bytes: int
    secret: bytes = b""
    """Up to 64 bytes. Empty: a plain checksum, which is no defence against a writer."""

    @property
    def head_bytes(self) -> int:
        return aligned(TAG_BYTES + _HEAD.size + 4 * self.chunk_tokens)

    @property
    def record_bytes(self) -> int:
        return self.head_bytes + self.payload_bytes

    def seal(self, chunk: Chunk, payload: memoryview, sequence: int = 0) -> bytes:
        """The head [head_bytes] of a chunk with this payload [payload_bytes]."""
        assert len(payload) == self.payload_bytes, "the payload is not a chunk"
        assert chunk.tokens.size == self.chunk_tokens, "the tokens are not a chunk's"
        fields = (MAGIC, FORMAT, self.chunk_tokens, self.payload_bytes, sequence)
        body = _HEAD.pack(*fields, self.namespace, chunk.key, chunk.parent) + _bytes_of(chunk.tokens)
        body = body.ljust(self.head_bytes - TAG_BYTES, b"\0")
        return self._tag(body, payload) + body

    def read_head(self, head: Buffer) -> Head:
        """What a head claims. BadRecord unless it is one of this layout."""
        if len(head) < TAG_BYTES + _HEAD.size:
            raise BadRecord("short", f"{len(head)} bytes")
        magic, version, tokens, payload, sequence, namespace, key, parent = _HEAD.unpack_from(head, TAG_BYTES)
        if magic != MAGIC:
            raise BadRecord("magic")
        if version != FORMAT:
            raise BadRecord("version", f"{version}, not {FORMAT}")
        if namespace != self.namespace:
            raise BadRecord("namespace")
        if (tokens, payload) != (self.chunk_tokens, self.payload_bytes):
            raise BadRecord("length", f"{tokens} tokens in {payload} bytes")
        if sequence > LAST_SEQUENCE:
            raise BadRecord("sequence", f"{sequence}")
        return Head(key, parent, sequence)

    def verify(self, chunk: Chunk, head: Buffer, payload: memoryview) -> None:
        """BadRecord unless head and payload are exactly what `seal` made of this chunk."""
        claim = self.read_head(head)
        if len(head) != self.head_bytes or len(payload) != self.payload_bytes:
            raise BadRecord("short", f"{len(head)} + {len(payload)} bytes")
        if claim.key != chunk.key:
            raise BadRecord("key")
        if claim.parent != chunk.parent:
            raise BadRecord("parent")
        first = TAG_BYTES + _HEAD.size
        if bytes(head[first : first + 4 * self.chunk_tokens]) != _bytes_of(chunk.tokens):
            raise BadRecord("tokens")
        if bytes(head[:TAG_BYTES]) != self._tag(head[TAG_BYTES:], payload):
            raise BadRecord("checksum")

    def _tag(self, body: Buffer, payload: memoryview) -> bytes:
        if self.secret:
            keyed = blake2b(body, digest_size=TAG_BYTES, key=self.secret)
            keyed.update(payload)
            return keyed.digest()
        return zlib.crc32(payload, zlib.crc32(body)).to_bytes(4, "little").ljust(TAG_BYTES, b"\0")


def _bytes_of(tokens: TokenIds) -> bytes:
    return np.ascontiguousarray(tokens, "<u4").tobytes()
