"""The disk tier: what was stored is found after a restart, the cap is exact, decay is a miss."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.geometry import InvalidConfig
from cache.offload.chunks import Chunk, Namespace
from cache.offload.disk import PAGE_BYTES, DiskTier
from cache.offload.records import BadRecord, Layout
from cache.offload.tiers import TierFault
from support.tier_chunks import CHUNK_TOKENS, LAYOUT, PAYLOAD_BYTES, SPACE, path, payload

CAPACITY = 10 * PAGE_BYTES  # nine slots of a page, beside the record in clear
OpenTier = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    opened: list[DiskTier] = []

    def open_one(capacity: int = CAPACITY, space: Namespace = SPACE) -> DiskTier:
        layout = Layout(space.digest, CHUNK_TOKENS, PAYLOAD_BYTES)
        opened.append(DiskTier(tmp_path, space, layout, capacity, segment_bytes=4 * PAGE_BYTES))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def put(tier: DiskTier, *chunks: Chunk) -> list[bool]:
    return [tier.store(chunk, memoryview(payload(chunk))) for chunk in chunks]


def get(tier: DiskTier, chunk: Chunk) -> str:
    """'right' or why not. Wrong bytes are an error."""
    memory = bytearray(PAYLOAD_BYTES)
    try:
        tier.load(chunk, memoryview(memory))
    except BadRecord as error:
        return error.reason
    assert bytes(memory) == payload(chunk)
    return "right"


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def segments(folder: Path, space: Namespace = SPACE) -> list[Path]:
    return sorted((folder / space.digest.hex()).glob("*.seg"))


def index_of(folder: Path) -> Path:
    return folder / SPACE.digest.hex() / "index"


def test_what_was_stored_is_read_back_also_by_the_next_server(open_tier: OpenTier) -> None:
    chunks = path(1, 6)
    tier = open_tier()
    assert put(tier, *chunks) == [True] * 6
    assert [get(tier, chunk) for chunk in chunks] == ["right"] * 6
    tier.close()
    again = open_tier()
    assert (again.known(chunks), again.status().objects) == (6, 6)
    assert [get(again, chunk) for chunk in chunks] == ["right"] * 6
    assert get(again, path(2, 1)[0]) == "missing"


def test_a_restart_reads_the_index_and_no_head(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, chunks = open_tier(), path(1, 9)
    put(tier, *chunks, *path(2, 3))
    kept = [tier.known(chunks), tier.known(path(2, 3))]
    tier.close()
    monkeypatch.delattr(os, "pread")
    again = open_tier()
    assert [again.known(chunks), again.known(path(2, 3))] == kept
    assert [get(again, chunk) for chunk in chunks[: kept[0]]] == ["right"] * kept[0]


@pytest.mark.parametrize("harm", ["gone", "cut", "longer"])
def test_where_the_index_is_not_whole_the_heads_are_read_and_it_is_made_anew(
    open_tier: OpenTier, tmp_path: Path, harm: str
) -> None:
    chunks = path(1, 6)
    tier = open_tier()
    put(tier, *chunks)
    tier.close()
    whole = index_of(tmp_path).read_bytes()
    if harm == "gone":
        index_of(tmp_path).unlink()
    else:
        index_of(tmp_path).write_bytes(whole[:-1] if harm == "cut" else whole + b"x")
    again = open_tier()
    assert [get(again, chunk) for chunk in chunks] == ["right"] * 6
    assert index_of(tmp_path).read_bytes() == whole


def test_an_index_that_is_wrong_about_a_slot_costs_that_chunk_alone(open_tier: OpenTier, tmp_path: Path) -> None:
    """As after a crash between a record and its entry."""
    tier, chunks = open_tier(), path(1, 3)
    put(tier, *chunks)
    tier.close()
    stale = bytearray(index_of(tmp_path).read_bytes())
    stale[8:24] = path(2, 1)[0].key
    index_of(tmp_path).write_bytes(stale)
    again = open_tier()
    assert get(again, path(2, 1)[0]) in ("key", "parent")
    assert [get(again, chunk) for chunk in chunks] == ["missing", "right", "right"]
    assert put(again, chunks[0]) == [True]
    assert get(again, chunks[0]) == "right"


def test_the_folder_never_holds_more_than_its_cap(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    for name in range(20):
        put(tier, *path(name, 3))
        assert bytes_in(tmp_path) <= CAPACITY
    assert tier.status().objects == 9, "as many as there is room for"
    assert [tier.known(path(name, 3)) for name in (16, 17, 18, 19)] == [0, 3, 3, 3]


def test_leaves_go_first_and_the_least_recently_used_path_before_others(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier, *path(1, 3), *path(2, 3), *path(3, 3))
    assert get(tier, path(1, 3)[2]) == "right"
    put(tier, *path(4, 2))
    assert [tier.known(path(name, 3)) for name in (1, 2, 3)] == [3, 1, 3]


def test_a_chunk_without_its_parent_is_not_kept(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert put(tier, path(1, 2)[1]) == [False]
    assert put(tier, *path(1, 12)) == [True] * 9 + [False] * 3, "nothing of its own path goes for it"


def test_a_smaller_cap_is_kept_from_the_start(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier, *path(1, 9))
    tier.close()
    smaller = open_tier(capacity=6 * PAGE_BYTES)
    assert bytes_in(tmp_path) <= 6 * PAGE_BYTES
    assert smaller.status().objects == 4
    put(smaller, *path(2, 9))
    assert bytes_in(tmp_path) <= 6 * PAGE_BYTES


@pytest.mark.parametrize("where", ["head", "tokens", "payload", "cut", "gone", "zeroed"])
def test_decay_on_disk_is_a_miss_once_and_the_chunk_may_be_stored_again(
    open_tier: OpenTier, tmp_path: Path, where: str
) -> None:
    chunk, tier = path(1, 1)[0], open_tier()
    put(tier, chunk)
    file = segments(tmp_path)[0]
    offset = {"head": 50, "tokens": 100, "payload": LAYOUT.head_bytes + 9}.get(where, 0)
    if where == "cut":
        os.truncate(file, LAYOUT.head_bytes + 5)
    elif where == "gone":
        os.truncate(file, 0)
    else:
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(b"\xff" if where != "zeroed" else bytes(PAGE_BYTES))
    assert get(tier, chunk) not in ("right", "missing")
    assert get(tier, chunk) == "missing"
    assert put(tier, chunk) == [True]
    assert get(tier, chunk) == "right"


def test_a_restart_over_random_damage_serves_right_bytes_or_none(open_tier: OpenTier, tmp_path: Path) -> None:
    rng, chunks, outcomes = np.random.default_rng(0), path(1, 9), Counter[str]()
    for _ in range(30):
        tier = open_tier()
        put(tier, *chunks)
        tier.close()
        for file in (*segments(tmp_path), index_of(tmp_path)):
            content = bytearray(file.read_bytes())
            for at in rng.integers(len(content), size=20):
                content[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(content[: int(rng.integers(len(content) // 2, len(content) + 1))])
        damaged = open_tier()
        outcomes.update(get(damaged, chunk) for chunk in chunks)
        damaged.close()
    assert outcomes["right"] > 0
    assert outcomes["checksum"] > 0


def test_of_two_records_of_one_key_the_newer_counts(open_tier: OpenTier, tmp_path: Path) -> None:
    tier, chunk = open_tier(), path(1, 1)[0]
    put(tier, chunk)
    tier.close()
    with segments(tmp_path)[0].open("r+b") as file:
        stale = LAYOUT.seal(chunk, memoryview(bytes(PAYLOAD_BYTES)), sequence=0) + bytes(PAYLOAD_BYTES)
        file.seek(2 * PAGE_BYTES)
        file.write(stale)
    index_of(tmp_path).unlink()
    again = open_tier()
    assert (again.status().objects, get(again, chunk)) == (1, "right")


def test_a_sequence_number_that_decayed_ends_no_numbering(open_tier: OpenTier, tmp_path: Path) -> None:
    """Heads are not verified at start: one that claims the last number there is must not be followed."""
    tier, chunk = open_tier(), path(1, 1)[0]
    put(tier, chunk)
    tier.close()
    with segments(tmp_path)[0].open("r+b") as file:
        file.write(LAYOUT.seal(chunk, memoryview(payload(chunk)), sequence=(1 << 64) - 1))
    index_of(tmp_path).unlink()
    again = open_tier()
    assert put(again, *path(2, 2)) == [True, True]
    assert [get(again, each) for each in path(2, 2)] == ["right"] * 2


def test_another_namespace_sees_nothing_and_its_room_is_taken_when_needed(open_tier: OpenTier, tmp_path: Path) -> None:
    old = replace(SPACE, weights="sha-0")
    tier = open_tier(space=old)
    put(tier, *path(1, 4))
    tier.close()
    tier = open_tier()
    assert (tier.known(path(1, 4)), tier.status().objects) == (0, 0)
    put(tier, *path(1, 4))
    assert len(segments(tmp_path, old)) == 1, "there is room for both"
    put(tier, *path(2, 4))
    assert segments(tmp_path, old) == []
    assert bytes_in(tmp_path) <= CAPACITY


def test_a_folder_has_one_user_and_only_its_owner_may_read_it(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier, path(1, 1)[0])
    with pytest.raises(InvalidConfig, match="in use by another server"):
        open_tier()
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / SPACE.digest.hex()).rglob("*"))
    assert (tmp_path / SPACE.digest.hex() / "record.json").read_text() == SPACE.record


def test_a_folder_that_others_may_write_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    """Its name can be guessed, and a checksum is no defence against who writes what it says."""
    (tmp_path / SPACE.digest.hex()).mkdir(mode=0o700)
    (tmp_path / SPACE.digest.hex()).chmod(0o770)
    with pytest.raises(InvalidConfig, match=r"may be written by others \(mode 770, owner .*\): .* chmod go-w"):
        open_tier()
    (tmp_path / SPACE.digest.hex()).chmod(0o755)
    assert put(open_tier(), path(1, 1)[0]) == [True]


def test_what_cannot_be_a_tier_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot keep K/V in"):
        DiskTier(tmp_path / "file", SPACE, LAYOUT, CAPACITY)
    with pytest.raises(InvalidConfig, match="4096 bytes of disk do not hold one chunk of 4096"):
        DiskTier(tmp_path / "folder", SPACE, LAYOUT, PAGE_BYTES)


@pytest.mark.parametrize(("number", "is_fault"), [(errno.ENOSPC, False), (errno.EIO, True)])
def test_a_full_disk_is_no_fault_and_a_broken_one_is(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, number: int, is_fault: bool
) -> None:
    tier, (first, second) = open_tier(), path(1, 2)
    put(tier, first)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        if is_fault:
            with pytest.raises(TierFault, match="writing"):
                put(tier, second)
        else:
            assert put(tier, second) == [False]
    assert put(tier, second) == [True], "its slot was not lost"
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierFault, match="reading"):
        get(tier, first)
