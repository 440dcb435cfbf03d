"""Undo journal of a file that is updated in place: what rows were before, so that a killed run can go back.

    journal = UndoJournal.create(table_path, JournalKey(unique, rows, row_bytes), generation=3, previous=2)
    journal.append(ids_U, touched_U, old_tb)          # before the rows are written
    for ids_U, touched_U, old_tb in read_records(path, key): ...

`<table>.journal-<g>` holds, for every row that was overwritten after checkpoint g, what it was at checkpoint g; each
row once. Writing these bytes back gives the table of checkpoint g, however often and however far it is done.

What is relied on. A killed process loses nothing that a finished `write` was given: the kernel has it. So it is enough
that `append` returns before the first of its rows is written; a record cut short by the kill has no row written yet
and is ignored. A power cut may lose or reorder finished writes: only where `append` also syncs (`durable`) is the
record on the disk before its rows are. The default is not durable: a sync a batch costs 0.1-10 ms.

Record: 40 bytes (magic, number, count U, touched t, checksum of the body, checksum of these fields), then U row numbers
int64, U bytes (1 = was touched), t rows of `row_bytes`. An untouched row has no bytes: the file held zeros.

Shapes: U distinct rows, t those that were touched, b bytes a row.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from engram.stores.rowfile import FileInfo, sync_folder, write_info
from engram.strict import ConfigError

FILE_MAGIC, RECORD_MAGIC = b"ENGRAMJ1", b"ENGRAMR1"
_FILE = struct.Struct("<8s16sQQQQ")  # magic, unique, rows, row bytes, generation, previous
_RECORD = struct.Struct("<8sQQQI")  # magic, number, count, touched, checksum of the body
_SUM = struct.Struct("<I")
FILE_HEADER, RECORD_HEADER = _FILE.size + _SUM.size, _RECORD.size + _SUM.size
NO_PREVIOUS = 2**64 - 1
Record = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Row numbers [U], touched [U], bytes [t, row_bytes] of the touched ones."""


@dataclass(frozen=True)
class JournalKey:
    """What ties a journal to its table: the table's 16 random hex digits, its rows and bytes a row."""

    unique: str
    rows: int
    row_bytes: int


def journal_path(table: str | Path, generation: int) -> Path:
    """Table file and generation -> path of the journal beside it."""
    table = Path(table)
    return table.with_name(f"{table.name}.journal-{generation}")


def find_journals(table: str | Path) -> dict[int, Path]:
    """Table file -> its journals by generation, oldest first."""
    table = Path(table)
    pattern = re.compile(re.escape(table.name) + r"\.journal-(\d+)")
    found = {
        int(match[1]): table.with_name(name)
        for name in os.listdir(table.parent or ".")
        if (match := pattern.fullmatch(name))
    }
    return dict(sorted(found.items()))


class UndoJournal:
    """An open journal that records are appended to. `records` and `size` (bytes) say what is in it."""

    def __init__(self, path: Path, fd: int, key: JournalKey, durable: bool) -> None:
        self.path, self.key, self.durable = path, key, durable
        self.records, self.size = 0, FILE_HEADER
        self._fd = fd

    @classmethod
    def create(
        cls, table: str | Path, key: JournalKey, generation: int, previous: int | None = None, durable: bool = False
    ) -> UndoJournal:
        """Make an empty journal; `previous` is the generation of the journal before it. Raises OSError.

        durable  every record is on the disk before `append` returns, and the file's name is before this does.
        """
        path = journal_path(table, generation)
        fields = (
            key.unique.encode(),
            key.rows,
            key.row_bytes,
            generation,
            NO_PREVIOUS if previous is None else previous,
        )
        head = _FILE.pack(FILE_MAGIC, *fields)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        journal = cls(path, fd, key, durable)
        try:
            _write_all(fd, head + _SUM.pack(zlib.crc32(head)))
            if durable:
                os.fsync(fd)
                sync_folder(path)
        except OSError:
            journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    def append(self, ids_U: np.ndarray, touched_U: np.ndarray, old_tb: np.ndarray) -> None:
        """Row numbers [U], bool [U] and the bytes [t, row_bytes] of the touched ones -> one record at the end.

        When it returns, the rows may be written. Raises OSError; then they must not be.
        """
        body = ids_U.astype("<i8").tobytes() + touched_U.astype(np.uint8).tobytes() + old_tb.tobytes()
        head = _RECORD.pack(RECORD_MAGIC, self.records, len(ids_U), len(old_tb), zlib.crc32(body))
        _write_all(self._fd, head + _SUM.pack(zlib.crc32(head)) + body)
        if self.durable:
            os.fdatasync(self._fd)
        self.records += 1
        self.size += RECORD_HEADER + len(body)

    def sync(self) -> None:
        """Everything appended so far has reached the disk, and so has the journal's name."""
        os.fsync(self._fd)
        sync_folder(self.path)

    def close(self) -> None:
        """Let go of the descriptor; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_previous(path: Path, key: JournalKey, generation: int) -> int | None:
    """Generation of the journal before this one, or `NO_PREVIOUS`; None for a journal cut short while it was made.

    Raises ConfigError when it belongs to another table or was renamed.
    """
    with open(path, "rb") as file:
        head = file.read(FILE_HEADER)
    if len(head) < FILE_HEADER or _SUM.unpack(head[_FILE.size :])[0] != zlib.crc32(head[: _FILE.size]):
        if os.path.getsize(path) > FILE_HEADER:
            raise ConfigError(
                f"path: {path}: the head of this undo journal is damaged; its table cannot be rolled back"
            )
        return None
    magic, unique, rows, row_bytes, number, previous = _FILE.unpack(head[: _FILE.size])
    if (magic, unique, rows, row_bytes) != (FILE_MAGIC, key.unique.encode(), key.rows, key.row_bytes):
        raise ConfigError(f"path: {path}: this undo journal belongs to another table; put the right one back")
    if number != generation:
        raise ConfigError(f"path: {path}: this undo journal is number {number} and was renamed; name it so again")
    return int(previous)


def read_records(path: Path, key: JournalKey) -> Iterator[Record]:
    """Journal -> (row numbers [U], touched [U], bytes [t, row_bytes]) of each whole record.

    A record cut short at the end is left out: its rows were not written yet. Raises ConfigError for a damaged record
    with others behind it: the table can then not be rolled back.
    """
    with open(path, "rb") as file:
        file.seek(FILE_HEADER)
        number = 0
        while True:
            start = file.tell()
            record = _read_record(file.read(RECORD_HEADER), file.read, number, key)
            if record is None:
                break
            yield record
            number += 1
        file.seek(start)
        if _more_follows(file.read(), number):
            raise ConfigError(
                f"path: {path}: damaged at byte {start:,} with whole records behind it; its table cannot be rolled "
                f"back to the checkpoint: use a copy of the table"
            )


def _read_record(head: bytes, read: Callable[[int], bytes], number: int, key: JournalKey) -> Record | None:
    """One record, or None where there is no whole and undamaged one."""
    if not _whole_head(head):
        return None
    _, found, count, touched, checksum = _RECORD.unpack(head[: _RECORD.size])
    body = read(9 * count + touched * key.row_bytes)
    if found != number or len(body) != 9 * count + touched * key.row_bytes or zlib.crc32(body) != checksum:
        return None
    ids_U = np.frombuffer(body, "<i8", count)
    touched_U = np.frombuffer(body, np.uint8, count, 8 * count).astype(bool)
    old_tb = np.frombuffer(body, np.uint8, offset=9 * count).reshape(touched, key.row_bytes)
    if count and not (touched_U.sum() == touched and ids_U.min() >= 0 and ids_U.max() < key.rows):
        return None
    return ids_U, touched_U, old_tb


def _whole_head(head: bytes) -> bool:
    if len(head) < RECORD_HEADER or not head.startswith(RECORD_MAGIC):
        return False
    return bool(_SUM.unpack(head[_RECORD.size : RECORD_HEADER])[0] == zlib.crc32(head[: _RECORD.size]))


def _more_follows(rest: bytes, number: int) -> bool:
    """Whether what could not be read as record `number` is damage: one with another number, or more records behind."""
    if _whole_head(rest[:RECORD_HEADER]) and _RECORD.unpack(rest[: _RECORD.size])[1] != number:
        return True
    at = rest.find(RECORD_MAGIC, 1)
    while at >= 0:
        if _whole_head(rest[at : at + RECORD_HEADER]):
            return True
        at = rest.find(RECORD_MAGIC, at + 1)
    return False


class Checkpoints:
    """The generations of one open table: which journal records go to, and how the table gets back to a checkpoint.

    Generation g is the state of the table at checkpoint g. `prepare` begins generation g + 1 while journal g stays, and
    the caller writes g + 1 into a checkpoint of its own; once that has its final name, `commit` drops journal g.
    Between the two both checkpoints can be gone back to. A number that was given out is never given out again.

    info        the table's header, as it stands in the file.
    generation  of the journal that records go to now.
    """

    def __init__(self, table: str | Path, fd: int, info: FileInfo, durable: bool) -> None:
        self.table, self.info, self.durable = Path(table), info, durable
        self.generation, self._last = info.generation, max(info.last, info.generation)
        self.key = JournalKey(info.unique, info.spec.rows, info.row_bytes)
        self._fd = fd
        self._journal: UndoJournal | None = None

    def live(self, generation: int | None = None) -> list[tuple[int, Path]]:
        """Journals to go back to checkpoint `generation` (None: the last committed one) with, oldest first.

        Raises ConfigError when that checkpoint cannot be reached: never made, dropped, or a journal is missing.
        """
        info, journals, before = self.info, find_journals(self.table), {}
        for number, path in list(journals.items()):
            previous = read_previous(path, self.key, number)
            if previous is None:  # cut short while it was made: nothing was written under it
                del journals[number]
            else:
                before[number] = previous
        target = info.generation if generation is None else generation
        if target < info.generation or (target > info.generation and target not in journals):
            there = sorted({info.generation, *(number for number in journals if number > info.generation)})
            raise ConfigError(
                f"generation: {self.table} cannot go back to checkpoint {target}, only to {there}; use the checkpoint "
                f"that was written last, or a copy of the table made with the one wanted"
            )
        live = [(number, path) for number, path in journals.items() if number >= target]
        missing = [target] if (live or not info.clean) and target not in journals else []
        missing += [before[b] for (a, _), (b, _) in pairwise(live) if before[b] != a]
        if missing:
            raise ConfigError(
                f"path: {journal_path(self.table, missing[0])} is missing: without this undo journal the table cannot "
                f"go back to checkpoint {target}; put it back beside the table (the two move together)"
            )
        return live

    def roll_back(self, generation: int | None, restore: Callable[..., None], settle: Callable[[], None]) -> int:
        """Undo everything after checkpoint `generation` (None: the last committed one) -> number of rows restored.

        restore  takes the arrays of a record and writes them back; called newest journal first.
        settle   makes it reach the disk, before the first journal is dropped.
        It may be killed at any point and done again. Raises ConfigError as `live` and `read_records` do.
        """
        live, count = self.live(generation), 0
        for _, path in reversed(live):
            for ids_U, touched_U, old_tb in read_records(path, self.key):
                restore(ids_U, touched_U, old_tb)
                count += len(ids_U)
        journals = find_journals(self.table)
        if journals:
            settle()
            target = live[0][0] if live else self.info.generation
            self._last = max(self._last, *journals)
            # numbers first: one that is dropped must not come again. Then the newest journal first, and `target` last,
            # since a newer one without the older ones behind it would lead to a state between checkpoints.
            self.info = write_info(self._fd, self.info, last=self._last)
            self._drop([number for number in journals if number > target])
            self.info = write_info(self._fd, self.info, generation=target, clean=True)
            self._drop([number for number in journals if number <= target])
            self.generation = target
        return count

    def record(self, ids_U: np.ndarray, touched_U: np.ndarray, old_tb: np.ndarray) -> None:
        """Keep what rows were before they are overwritten for the first time in this generation. Raises OSError."""
        journal = self._begin()
        if self.info.clean:
            self.info = write_info(self._fd, self.info, clean=False)
        journal.append(ids_U, touched_U, old_tb)

    def prepare(self) -> int:
        """Begin the next generation -> its number. The caller has flushed the rows (`sync` before them)."""
        before, number = self._begin(), self._last + 1  # every generation that can be gone back to has a journal
        after = UndoJournal.create(self.table, self.key, number, self.generation, self.durable)
        after.sync()
        before.close()
        self._journal, self.generation, self._last = after, number, number
        return number

    def commit(self, generation: int) -> None:
        """The caller's checkpoint with this number is in its place: older ones are dropped. Raises ConfigError."""
        known = [self.info.generation, *(number for number in find_journals(self.table) if number <= self.generation)]
        if generation not in known or generation < self.info.generation:
            raise ConfigError(f"generation: {generation} was not prepared; of {self.table} these were: {known}")
        self.info = write_info(self._fd, self.info, generation=generation, last=self._last)
        self._drop([number for number in find_journals(self.table) if number < generation])

    def sync(self) -> None:
        """What was recorded has reached the disk."""
        if self._journal is not None:
            self._journal.sync()

    def bytes_held(self) -> int:
        """Bytes of the journal that is written to."""
        return 0 if self._journal is None else self._journal.size

    def close(self) -> None:
        """Close the journal. Where nothing was overwritten since the last commit it goes: the table stands alone."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
            if self.generation == self.info.generation and journal.records == 0:
                self.info = write_info(self._fd, self.info, clean=True)
                self._drop([self.generation])

    def _begin(self) -> UndoJournal:
        if self._journal is None:
            self._journal = UndoJournal.create(self.table, self.key, self.generation, durable=self.durable)
        return self._journal

    def _drop(self, numbers: list[int]) -> None:
        for number in sorted(numbers, reverse=True):
            journal_path(self.table, number).unlink(missing_ok=True)
        sync_folder(self.table)
