"""A tier on local disk: segment files cut into slots, one record a slot.

    folder/
      lock                      held while a server uses the folder
      <namespace>/record.json   what this namespace's bytes depend on, in clear
      <namespace>/000000.seg    slots of record_bytes, rounded up to 4 KiB
      <namespace>/index         whose record each slot has: what would take a read a slot to collect

The folder never holds more bytes than its cap, and never fills its filesystem past 90 %. Segments of other namespaces
count too; they are deleted, oldest first, when this one needs their room. A record's payload is written first, then its
head, then its entry in the index, and nothing is synced: after a crash the checksum decides. At start the index is
read, or the heads where it is not whole; either may be wrong about a slot, which is found when that is loaded.

I/O is buffered and blocking: for threads that may block. Files are for the server's own user alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from cache.geometry import InvalidConfig
from cache.offload.chunks import KEY_BYTES, Chunk, Namespace
from cache.offload.records import LAST_SEQUENCE, BadRecord, Head, Layout
from cache.offload.residents import Resident, Residents
from cache.offload.tiers import TierFault, TierStatus

PAGE_BYTES = 4096
SEGMENT_BYTES = 1 << 30
MAX_FILESYSTEM_FILL = 0.9
_ENTRY = struct.Struct(f"<Q{KEY_BYTES}s{KEY_BYTES}s")
"""Of the index: sequence (0: nothing), key, parent."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTier:
    """Records of one namespace in `folder`, at most `capacity_bytes` of files."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        layout: Layout,
        capacity_bytes: int,
        *,
        needs_parents: bool = True,
        segment_bytes: int | None = None,
    ) -> None:
        """Reads the heads of what is there. segment_bytes: by default 1 GiB, or an eighth of a small cap.

        needs_parents: False where a chunk is of use without those before it, as behind a window.

        Raises InvalidConfig: not a folder one may write, one that others may write too, in use, or too small.
        """
        self._layout = layout
        self._capacity_bytes = capacity_bytes
        self._needs_parents = needs_parents
        self._slot_bytes = -(-layout.record_bytes // PAGE_BYTES) * PAGE_BYTES
        if segment_bytes is None:
            segment_bytes = min(SEGMENT_BYTES, capacity_bytes // 8)
        self._segment_slots = max(1, segment_bytes // self._slot_bytes)
        self._folder = folder
        self._own = folder / layout.namespace.hex()
        self._lock = threading.Lock()
        self._residents = Residents()
        self._files: list[int] = []  # descriptors, by segment
        self._places: list[tuple[int, int]] = []  # slot -> descriptor, offset
        self._free: list[int] = []
        self._sequence = 0
        self._lock_file = self._index = -1
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self._own)
            self._lock_file = _locked(folder / "lock")
            try:
                self._index = os.open(self._own / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                _write_small(self._own / "record.json", namespace.record)
                self._check_capacity()
                self._read_index()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise InvalidConfig(f"cannot keep K/V in {folder}: {error}") from error

    def known(self, chunks: Sequence[Chunk]) -> int:
        with self._lock:
            for number, chunk in enumerate(chunks):
                if self._residents.get(chunk.key) is None:
                    return number
            return len(chunks)

    def may_have(self, chunk: Chunk) -> bool:
        with self._lock:
            return self._residents.get(chunk.key) is not None

    def load(self, chunk: Chunk, into: memoryview) -> None:
        with self._lock:
            entry = self._residents.get(chunk.key)
            if entry is None:
                raise BadRecord("missing")
            self._residents.wanted_again(entry)
            file, offset = self._places[entry.slot]
        head = bytearray(self._layout.head_bytes)
        try:
            # The slot may be given to another chunk meanwhile: what is read then is a record of another key.
            if _read(file, offset, head) < len(head) or _read(file, offset + len(head), into) < len(into):
                raise BadRecord("short")
            self._layout.verify(chunk, head, into)
        except BadRecord:
            with self._lock:
                if self._residents.get(chunk.key) is entry:
                    self._residents.remove(entry)
                    self._free.append(entry.slot)
            raise
        except OSError as error:
            raise TierFault(f"reading {self._own}: {error}") from error

    def store(self, chunk: Chunk, payload: memoryview) -> bool:
        with self._lock:
            entry = self._residents.get(chunk.key)
            if entry is not None:
                self._residents.wanted_again(entry)
                return True
            if self._needs_parents and chunk.index and self._residents.get(chunk.parent) is None:
                return False
            try:
                slot = self._take_slot(chunk)
            except OSError as error:
                if error.errno in _FULL:
                    return False
                raise TierFault(f"growing {self._own}: {error}") from error
            if slot is None:
                return False
            self._sequence += 1
            sequence = self._sequence
            file, offset = self._places[slot]
        head = self._layout.seal(chunk, payload, sequence)
        indexed = _ENTRY.pack(sequence, chunk.key, chunk.parent)
        try:
            _write(file, offset + len(head), payload)
            _write(file, offset, memoryview(head))
            _write(self._index, slot * _ENTRY.size, memoryview(indexed))
        except OSError as error:
            with self._lock:
                self._free.append(slot)
            if error.errno in _FULL:
                return False
            raise TierFault(f"writing {self._own}: {error}") from error
        with self._lock:
            self._residents.add(Resident(chunk.key, chunk.parent, slot))
        return True

    def status(self) -> TierStatus:
        with self._lock:
            used = len(self._residents) * self._slot_bytes
            return TierStatus(self.name, self._capacity_bytes, used, len(self._residents))

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                os.close(file)
            self._files.clear()
            for file in (self._index, self._lock_file):
                if file >= 0:
                    os.close(file)
            self._index = self._lock_file = -1

    # -- Slots. Under the lock.

    def _take_slot(self, chunk: Chunk) -> int | None:
        if not self._free:
            self._grow()
        if not self._free:
            owner = self._residents.owner_behind(chunk.parent)
            evicted = self._residents.evict(keep=chunk.parent, owner=owner)
            if evicted is not None:
                self._free.append(evicted.slot)
        return self._free.pop() if self._free else None

    def _grow(self) -> None:
        """Add a segment, or as much of one as cap and filesystem allow; perhaps none."""
        room, each = self._room(), self._slot_bytes + _ENTRY.size
        while room < self._segment_slots * each:
            foreign = min(self._foreign_segments(), key=_written, default=None)
            if foreign is None:
                break
            foreign.unlink(missing_ok=True)
            room = self._room()
        slots = min(self._segment_slots, room // each)
        if slots < 1:
            return
        path = self._own / f"{len(self._files):06d}.seg"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, slots * self._slot_bytes)  # now, so that a full disk is found before a write
        except BaseException:
            os.close(file)
            path.unlink()
            raise
        self._add_segment(file, slots)
        os.ftruncate(self._index, len(self._places) * _ENTRY.size)

    def _add_segment(self, file: int, slots: int) -> None:
        self._files.append(file)
        first = len(self._places)
        self._places += [(file, index * self._slot_bytes) for index in range(slots)]
        self._free += range(first + slots - 1, first - 1, -1)

    def _room(self) -> int:
        """Bytes that may still be added to the folder."""
        filesystem = os.statvfs(self._folder)
        reserve = int((1 - MAX_FILESYSTEM_FILL) * filesystem.f_blocks * filesystem.f_frsize)
        return max(
            0, min(self._capacity_bytes - self._used_bytes(), filesystem.f_bavail * filesystem.f_frsize - reserve)
        )

    def _foreign_segments(self) -> list[Path]:
        return [path for path in self._folder.rglob("*.seg") if path.parent != self._own]

    # -- At start

    def _check_capacity(self) -> None:
        small = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file() and path.suffix != ".seg")
        if self._capacity_bytes < small + self._slot_bytes + _ENTRY.size:
            raise InvalidConfig(f"{self._capacity_bytes} bytes of disk do not hold one chunk of {self._slot_bytes}")

    def _read_index(self) -> None:
        """Open the segments; of a key's records the newest counts. Give up what is past a cap that became smaller."""
        for path in sorted(self._own.glob("*.seg")):
            slots = path.stat().st_size // self._slot_bytes
            if path.name != f"{len(self._files):06d}.seg" or slots < 1:
                path.unlink()  # after a gap: numbered by nobody any more
                continue
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._add_segment(file, slots)
        size = len(self._places) * _ENTRY.size
        indexed = self._indexed(size)
        heads = self._read_heads() if indexed is None else indexed
        taken = set()
        for slot, head in sorted(heads.items(), key=lambda item: item[1].sequence):
            entry = Resident(head.key, head.parent, slot)
            self._sequence = head.sequence
            older = self._residents.get(entry.key)
            if older is not None:
                self._residents.remove(older)
                taken.discard(older.slot)
            self._residents.add(entry)
            taken.add(entry.slot)
        self._free = [slot for slot in self._free if slot not in taken]
        if indexed is None:
            entries = [heads.get(slot, _NOTHING) for slot in range(len(self._places))]
            table = b"".join(_ENTRY.pack(head.sequence, head.key, head.parent) for head in entries)
            os.ftruncate(self._index, size)
            _write(self._index, 0, memoryview(table))
        self._shrink()

    def _indexed(self, size: int) -> dict[int, Head] | None:
        """By slot, as the index has it; None where it is not whole or cannot be read."""
        table = bytearray(size)
        try:
            if os.fstat(self._index).st_size != size or _read(self._index, 0, table) < size:
                return None
        except OSError:
            return None
        entries = enumerate(_ENTRY.iter_unpack(table))
        return {
            slot: Head(key, parent, sequence)
            for slot, (sequence, key, parent) in entries
            if 0 < sequence <= LAST_SEQUENCE
        }

    def _read_heads(self) -> dict[int, Head]:
        """By slot, as the records themselves have it: a read each."""
        found = {}
        for slot, (file, offset) in enumerate(self._places):
            try:
                found[slot] = self._layout.read_head(os.pread(file, self._layout.head_bytes, offset))
            except BadRecord:
                continue
        return found

    def _shrink(self) -> None:
        """Delete segments, foreign ones first, until the folder is within its cap."""
        while self._files and self._used_bytes() > self._capacity_bytes:
            foreign = min(self._foreign_segments(), key=_written, default=None)
            if foreign is not None:
                foreign.unlink(missing_ok=True)
                continue
            file = self._files.pop()
            os.close(file)
            (self._own / f"{len(self._files):06d}.seg").unlink()
            self._places = [place for place in self._places if place[0] != file]
            os.ftruncate(self._index, len(self._places) * _ENTRY.size)
            self._free = [slot for slot in self._free if slot < len(self._places)]
            for entry in self._residents.entries():
                if entry.slot >= len(self._places):
                    self._residents.remove(entry)

    def _used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())


_NOTHING = Head(bytes(KEY_BYTES), bytes(KEY_BYTES), 0)


def clear_folder(folder: Path) -> None:
    """Delete the segments of whatever namespaces are kept in `folder` itself, for those below it to have their room.

    Raises InvalidConfig when a server uses them.
    """
    segments = list(folder.glob("*/*.seg")) if folder.is_dir() else []
    segments = [path for path in segments if not (path.parent / "lock").exists()]
    if segments:
        lock = _locked(folder / "lock")
        for path in segments:
            path.unlink(missing_ok=True)
        os.close(lock)


def _check_owner(folder: Path) -> None:
    """Whoever can write there chooses what this server takes for its own K/V."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InvalidConfig(
            f"{folder} may be written by others (mode {found.st_mode & 0o777:o}, owner {found.st_uid}): "
            "give another folder, or take it over with chown and chmod go-w"
        )


def _locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InvalidConfig(f"{path.parent} is in use by another server: give each its own folder") from error
    return file


def _write_small(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _read(file: int, offset: int, into: bytearray | memoryview) -> int:
    view, done = memoryview(into), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _write(file: int, offset: int, content: memoryview) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)
