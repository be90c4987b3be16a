"""Records: nothing but the very bytes that were sealed for this very chunk is accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cache.offload.chunks import Chunk
from cache.offload.records import TAG_BYTES, BadRecord, Layout
from support.tier_chunks import LAYOUT, PAYLOAD_BYTES, SPACE, path, payload

KEYED = replace(LAYOUT, secret=b"only we know")
CHUNK = path(1, 2)[1]
NUM_CORRUPTED = 5000


def verify(layout: Layout, record: bytes, chunk: Chunk = CHUNK) -> None:
    whole = memoryview(record)
    layout.verify(chunk, whole[: layout.head_bytes], whole[layout.head_bytes :])


def reason_of(layout: Layout, record: bytes, chunk: Chunk = CHUNK) -> str:
    with pytest.raises(BadRecord) as caught:
        verify(layout, record, chunk)
    return caught.value.reason


@pytest.fixture(params=[LAYOUT, KEYED], ids=["checksum", "keyed"])
def layout(request: pytest.FixtureRequest) -> Layout:
    assert isinstance(request.param, Layout)
    return request.param


def seal(layout: Layout, chunk: Chunk = CHUNK) -> bytes:
    return layout.seal(chunk, memoryview(payload(chunk)), sequence=7) + payload(chunk)


def test_a_sealed_chunk_is_accepted_and_its_head_tells_whose_it_is(layout: Layout) -> None:
    record = seal(layout)
    assert len(record) == layout.record_bytes
    verify(layout, record)
    head = layout.read_head(record[: layout.head_bytes])
    assert (head.key, head.parent, head.sequence) == (CHUNK.key, CHUNK.parent, 7)


def test_of_5000_corrupted_entries_none_is_accepted(layout: Layout) -> None:
    """Flipped bits, overwritten spans, zeroed tails, swapped halves and cuts, anywhere in head, tokens or payload."""
    record, rng = seal(layout), np.random.default_rng(0)
    size, accepted, tried = len(record), 0, 0
    while tried < NUM_CORRUPTED:
        broken, kind = bytearray(record), tried % 5
        at, length = int(rng.integers(size)), int(rng.integers(1, 64))
        if kind == 0:
            broken[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            broken[at : at + length] = rng.bytes(len(broken[at : at + length]))
        elif kind == 2:
            broken[at:] = bytes(size - at)
        elif kind == 3:
            broken = broken[at:] + broken[:at]
        else:
            broken = broken[:at]
        if broken == record:
            continue
        tried += 1
        try:
            verify(layout, bytes(broken))
            accepted += 1
        except BadRecord:
            pass
    assert accepted == 0


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "checksum"),
        (16, "magic"),
        (24, "version"),
        (28, "length"),
        (32, "length"),
        (40, "checksum"),
        (46, "checksum"),
        (48, "namespace"),
        (64, "key"),
        (80, "parent"),
        (96, "tokens"),
        (LAYOUT.head_bytes - 1, "checksum"),
        (-1, "checksum"),
    ],
)
def test_each_field_is_compared_and_told_apart(layout: Layout, offset: int, reason: str) -> None:
    record = bytearray(seal(layout))
    record[offset] ^= 0x10
    assert reason_of(layout, bytes(record)) == reason


def test_another_chunks_record_is_refused_even_under_the_same_key() -> None:
    """A key is no proof: the token ids decide (I5)."""
    other = path(2, 2)[1]
    assert reason_of(LAYOUT, seal(LAYOUT, other)) == "key"
    forged = replace(other, key=CHUNK.key, parent=CHUNK.parent)
    assert reason_of(LAYOUT, seal(LAYOUT, forged)) == "tokens"


def test_another_namespace_or_payload_size_is_refused() -> None:
    stranger = Layout(replace(SPACE, weights="sha-2").digest, LAYOUT.chunk_tokens, PAYLOAD_BYTES)
    assert reason_of(stranger, seal(LAYOUT)) == "namespace"
    assert reason_of(Layout(SPACE.digest, LAYOUT.chunk_tokens, PAYLOAD_BYTES * 2), seal(LAYOUT)) == "length"
    assert reason_of(LAYOUT, seal(LAYOUT)[:10]) == "short"
    assert reason_of(LAYOUT, seal(LAYOUT)[:-1]) == "short"


def test_a_writer_without_the_secret_cannot_forge_a_record() -> None:
    forged = bytearray(seal(LAYOUT))
    forged[-1] ^= 1
    resealed = LAYOUT.seal(CHUNK, memoryview(forged)[LAYOUT.head_bytes :]) + forged[LAYOUT.head_bytes :]
    verify(LAYOUT, bytes(resealed))
    assert reason_of(KEYED, bytes(resealed)) == "checksum"
    assert reason_of(replace(KEYED, secret=b"guess"), seal(KEYED)) == "checksum"


def test_the_head_is_a_multiple_of_256_bytes_and_its_tail_is_covered(layout: Layout) -> None:
    assert layout.head_bytes % 256 == 0
    record = bytearray(seal(layout))
    assert not any(record[TAG_BYTES + 80 + 64 : layout.head_bytes])
