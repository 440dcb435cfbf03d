"""The file behind the disk store: a valid safetensors file whose rows start on a page, and its header.

    info = FileInfo(spec, "fp32", row_bytes=256, identity=digest)
    create_file(path, info)                 # sparse: 51 billion values cost one page until rows are touched
    fd = open_file(path); info, size = read_info(fd, path)

    8 bytes          header length N, little-endian; 8 + N is a multiple of 4,096
    N bytes          JSON with `__metadata__` (all of FileInfo, numbers as text), padded with spaces
    rows             [R, W] where rows fill pages without crossing one more than they must, else [units, unit] with gaps
    padding          up to the next page, absent where there is none
    touched          one bit a row, lowest bit first: 1 = the row was written. A row with bit 0 has its initial value
                     (a function of its number) whatever the file holds; the file then holds zeros, or a hole

The two texts that change in place (generation, state) have a fixed width, so the header never changes its length.

Shapes: R rows, n row numbers, W row width.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, gcd
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engram.stores.base import TableSpec
from engram.strict import ConfigError

PAGE = 4096
VERSION = "1"
MAX_HEADER = 1 << 16  # bytes; ours is about 1 KiB
MIN_FREE = 1 << 20  # bytes that must be free where a file is created
LOCK_WAIT_S = 1.0  # a killed process lets go of its lock once its last write has ended
WHOLE = {("fp32", 4): "F32", ("bf16", 2): "BF16"}  # (format, bytes a value) -> safetensors dtype of plain rows
log = logging.getLogger("engram")


@dataclass(frozen=True)
class Layout:
    """Where R rows of `row_bytes` lie, in bytes from the start of the row data: units of `per_unit` packed rows.

    As many rows follow each other as touch no page they need not touch (a row needs ceil(row_bytes / 4096)); then the
    next page begins. 256 bytes: no gap. 264: 15 rows a page, 3.3 % lost. 640: 6 a page, 6.3 %. 5,000: 4 in 5 pages,
    2.3 %. The worst, just above half a page, loses half.
    """

    rows: int
    row_bytes: int
    per_unit: int = field(init=False)
    unit_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slack = self.pages_per_row * PAGE - self.row_bytes
        step = self.row_bytes % PAGE
        # starts repeat after this many rows: no crossing until then means none ever
        crossing = (j for j in range(1, PAGE // gcd(step, PAGE) + 1) if j * step % PAGE > slack)
        count = next(crossing, self.rows)
        dense = count >= self.rows
        object.__setattr__(self, "per_unit", self.rows if dense else count)
        unit = self.rows * self.row_bytes if dense else ceil(count * self.row_bytes / PAGE) * PAGE
        object.__setattr__(self, "unit_bytes", unit)

    @property
    def pages_per_row(self) -> int:
        """Pages that every row touches, no more and no less."""
        return ceil(self.row_bytes / PAGE)

    @property
    def dense(self) -> bool:
        """Whether rows follow each other without a gap."""
        return self.per_unit == self.rows

    @property
    def data_bytes(self) -> int:
        """Bytes from the first row to the end of the last unit."""
        return ceil(self.rows / self.per_unit) * self.unit_bytes

    @property
    def waste(self) -> float:
        """Share of the row data that is gaps."""
        return 1 - self.rows * self.row_bytes / self.data_bytes

    def offsets(self, ids_n: np.ndarray) -> np.ndarray:
        """Row numbers [n] -> first byte of each row, int64 [n]."""
        if self.dense:
            return ids_n * self.row_bytes
        unit_n, place_n = np.divmod(ids_n, self.per_unit)
        return unit_n * self.unit_bytes + place_n * self.row_bytes

    def rows_on(self, pages_p: np.ndarray) -> Iterator[np.ndarray]:
        """Page numbers [p] -> arrays [p] of row numbers that together name every row on each page (some repeatedly)."""
        unit_p, inside_p = np.divmod(pages_p * PAGE, self.unit_bytes)
        first_p = inside_p // self.row_bytes
        for step in range(PAGE // self.row_bytes + 2):
            on_p = np.minimum(first_p + step, np.minimum((inside_p + PAGE - 1) // self.row_bytes, self.per_unit - 1))
            yield np.minimum(unit_p * self.per_unit + on_p, self.rows - 1)


@dataclass(frozen=True)
class FileInfo:
    """What the header says. `generation` is the last committed checkpoint, `last` the highest number ever given out.

    identity  what the rows belong to (the digest of a memory's hash and shape), compared as text.
    unique    16 random hex digits that tie journals to this file.
    clean     no row was written since the last committed checkpoint.
    """

    spec: TableSpec
    row_format: str
    row_bytes: int
    identity: str = ""
    unique: str = field(default_factory=lambda: os.urandom(8).hex())
    generation: int = 0
    last: int = 0
    clean: bool = True

    @property
    def layout(self) -> Layout:
        return Layout(self.spec.rows, self.row_bytes)

    @property
    def bits_offset(self) -> int:
        """First byte of the touched bits, from the start of the row data; a multiple of a page."""
        return ceil(self.layout.data_bytes / PAGE) * PAGE

    @property
    def bits_bytes(self) -> int:
        """Bytes of the touched bits, whole pages."""
        return ceil(self.spec.rows / (8 * PAGE)) * PAGE

    def header(self) -> bytes:
        """The file's first bytes: length and JSON, a whole number of pages."""
        layout = self.layout
        value_bytes = self.row_bytes // self.spec.width if self.row_bytes % self.spec.width == 0 else 0
        dtype = WHOLE.get((self.row_format, value_bytes), "U8")
        item = 1 if dtype == "U8" else value_bytes
        shape = [layout.rows if layout.dense else layout.data_bytes // layout.unit_bytes]
        shape.append((layout.row_bytes if layout.dense else layout.unit_bytes) // item)
        tensors = {"rows": (dtype, shape, layout.data_bytes)}
        if self.bits_offset > layout.data_bytes:
            tensors["padding"] = ("U8", [self.bits_offset - layout.data_bytes], self.bits_offset)
        tensors["touched"] = ("U8", [self.bits_bytes], self.bits_offset + self.bits_bytes)
        entries: dict[str, Any] = {"__metadata__": self._metadata()}
        start = 0
        for name, (kind, extent, end) in tensors.items():
            entries[name] = {"dtype": kind, "shape": extent, "data_offsets": [start, end]}
            start = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        length = ceil((8 + len(text)) / PAGE) * PAGE - 8
        return length.to_bytes(8, "little") + text.ljust(length)

    def _metadata(self) -> dict[str, str]:
        spec = self.spec
        return {
            "engram_rows": VERSION,
            "rows": str(spec.rows),
            "width": str(spec.width),
            "row_format": self.row_format,
            "row_bytes": str(self.row_bytes),
            "rows_per_unit": str(self.layout.per_unit),
            "unit_bytes": str(self.layout.unit_bytes),
            "seed": str(spec.seed),
            "std": repr(float(spec.std)),
            "zeros": str(int(spec.zeros)),
            "identity": self.identity,
            "unique": self.unique,
            "generation": f"{self.generation:020d}",
            "last": f"{self.last:020d}",
            "state": "clean" if self.clean else "dirty",
        }


def refuse(path: str | Path, error: OSError, needed: int = 0) -> NoReturn:
    """An error of the system while a file was made or opened -> ConfigError with what to change."""
    remedies = {
        errno.ENOENT: "create its folder first (a disk that is not mounted is a missing folder, too)",
        errno.ENOTDIR: "part of the path is a file; choose another",
        errno.EACCES: "choose a folder that this user may write to",
        errno.EPERM: "choose a folder that this user may write to",
        errno.EROFS: "the file system is read-only; choose another",
        errno.ENOSPC: f"{needed:,} bytes are needed; free space or choose another disk",
        errno.EDQUOT: f"{needed:,} bytes are needed; the quota is used up",
        errno.EFBIG: f"{needed:,} bytes are more than this file system takes in one file; use another, or fewer rows",
        errno.EISDIR: "this is a folder; name a file in it",
    }
    remedy = remedies.get(error.errno or 0, "choose another path")
    raise ConfigError(f"path: {path}: {error.strerror or error}; {remedy}") from error


def create_file(path: str | Path, info: FileInfo, reserve: bool = False) -> int:
    """Write a table none of whose rows is touched; returns its size in bytes. Never replaces a file.

    It is sparse, and so takes a page or two until rows are touched; `reserve` takes the disk space of all rows now.
    Raises ConfigError for zero rows, a path without space or permission, a file that is there, a leftover journal.
    """
    path = Path(path)
    if info.spec.rows < 1 or info.spec.width < 1 or info.row_bytes < 1:
        raise ConfigError(f"rows: a table of {info.spec.rows} x {info.spec.width} holds nothing; give at least 1 x 1")
    header = info.header()
    if len(header) > MAX_HEADER:
        raise ConfigError(f"identity: {len(info.identity):,} characters are too many; give a digest")
    size = len(header) + info.bits_offset + info.bits_bytes
    aside = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        leftover = sorted(name for name in os.listdir(path.parent) if name.startswith(path.name + ".journal-"))
        if leftover:
            raise ConfigError(f"path: {path}: {leftover[0]} is left of another table; remove it, or put its table back")
        disk = os.statvfs(path.parent)
        free = disk.f_bavail * disk.f_frsize
        needed = size if reserve else len(header) + MIN_FREE
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free:,} bytes are free")
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, header, 0)
            if reserve:
                os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
            _take_name(aside, path)
        finally:
            os.close(fd)
            aside.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"path: {path}: there is a file of this name; open it, or choose another") from error
    except OSError as error:
        refuse(path, error, size if reserve or error.errno != errno.ENOSPC else len(header) + MIN_FREE)
    sync_folder(path)
    if free < size:
        log.warning("disk store %s: %s bytes with all rows touched, %s are free", path, f"{size:,}", f"{free:,}")
    return size


def _take_name(aside: Path, path: Path) -> None:
    """Rename without replacing: a hard link fails where the name is taken. Not every file system has links."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(path)) from None
        os.rename(aside, path)


def sync_folder(path: str | Path) -> None:
    """Make new and removed names beside `path` survive a power cut."""
    fd = os.open(Path(path).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: str | Path, read_only: bool = False) -> int:
    """Open and lock the file -> its descriptor. One writer, or any number of readers.

    Raises ConfigError when it cannot be opened or another process (or store) holds it.
    """
    try:
        fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    except OSError as error:
        refuse(path, error)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise ConfigError(
                    f"path: {path}: another store has this file open; close it first, or give each its own file"
                ) from error
            time.sleep(0.02)
        except OSError as error:  # file systems without locks
            log.warning("disk store %s: no lock (%s); make sure that nothing else writes it", path, error.strerror)
            return fd


def read_info(fd: int, path: str | Path) -> tuple[FileInfo, int]:
    """Descriptor -> header and the size of the header in bytes, which is where the rows start.

    Everything is checked before a row is read: raises ConfigError when this is no row file, its version is another,
    a number in it does not fit the others, or the file is shorter or longer than its header says.
    """
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER - 8 or length + 8 > size:
        raise ConfigError(f"path: {path}: no row file ({size:,} bytes without a header that fits); choose another")
    raw = start + os.pread(fd, length, 8)
    try:
        meta = json.loads(raw[8:])["__metadata__"]
        version = meta["engram_rows"]
        spec = TableSpec(
            int(meta["rows"]), int(meta["width"]), int(meta["seed"]), float(meta["std"]), meta["zeros"] == "1"
        )
        info = FileInfo(
            spec,
            meta["row_format"],
            int(meta["row_bytes"]),
            meta["identity"],
            meta["unique"],
            int(meta["generation"]),
            int(meta["last"]),
            meta["state"] == "clean",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"path: {path}: a safetensors file perhaps, but no row file ({error!r})") from error
    if version != VERSION:
        raise ConfigError(f"path: {path}: version {version} of the row file; this program reads {VERSION}")
    if spec.rows < 1 or spec.width < 1 or info.row_bytes < 1 or raw != info.header():
        raise ConfigError(f"path: {path}: the header contradicts itself: the file is damaged; use another copy")
    expected = len(raw) + info.bits_offset + info.bits_bytes
    if size != expected:
        raise ConfigError(
            f"path: {path}: {size:,} bytes, its header says {expected:,}: the file is "
            f"{'truncated' if size < expected else 'not as it was written'}; use another copy"
        )
    return info, len(raw)


def write_info(fd: int, info: FileInfo, **changes: Any) -> FileInfo:
    """Write the header with generation, last or clean changed, in one write of the same length, and sync it."""
    info = replace(info, **changes)
    os.pwrite(fd, info.header(), 0)
    os.fsync(fd)
    return info


def check_same(path: str | Path, found: FileInfo, wanted: FileInfo) -> None:
    """Raise ConfigError naming the first field in which a file is not the one that is wanted."""
    pairs = {
        "rows": (found.spec.rows, wanted.spec.rows),
        "width": (found.spec.width, wanted.spec.width),
        "format": (found.row_format, wanted.row_format),
        "bytes a row": (found.row_bytes, wanted.row_bytes),
        "identity": (found.identity, wanted.identity),
        "seed": (found.spec.seed, wanted.spec.seed),
        "std": (float(found.spec.std), float(wanted.spec.std)),
        "zeros": (found.spec.zeros, wanted.spec.zeros),
    }
    for name, (there, want) in pairs.items():
        if there != want:
            raise ConfigError(
                f"path: {path}: the file was made with {name} {there!r}, asked is {want!r}; "
                f"choose another path or the configuration it was made with"
            )


class RowBits:
    """One bit for each of R rows, in memory that becomes real where it is set; optionally mirrored in a file."""

    def __init__(self, rows: int) -> None:
        self.bytes = np.zeros(ceil(rows / (8 * PAGE)) * PAGE, dtype=np.uint8)
        self._dirty: set[int] = set()

    def get(self, ids_n: np.ndarray) -> np.ndarray:
        """Row numbers [n] -> bool [n]."""
        return (self.bytes[ids_n >> 3] >> (ids_n & 7).astype(np.uint8) & 1).astype(bool)

    def set(self, ids_n: np.ndarray) -> None:
        """Set the bits of rows [n]."""
        np.bitwise_or.at(self.bytes, ids_n >> 3, self._masks(ids_n))

    def clear(self, ids_n: np.ndarray) -> None:
        """Clear the bits of rows [n]."""
        np.bitwise_and.at(self.bytes, ids_n >> 3, ~self._masks(ids_n))

    def count(self) -> int:
        """How many bits are set."""
        return int(np.unpackbits(self.bytes[self.bytes > 0]).sum())

    def _masks(self, ids_n: np.ndarray) -> np.ndarray:
        self._dirty.update(np.unique(ids_n >> 15).tolist())  # 8 * 4,096 rows a page of bits
        return np.left_shift(np.uint8(1), (ids_n & 7).astype(np.uint8))

    def load(self, fd: int, offset: int) -> None:
        """Read the bits from byte `offset` of the file; holes are skipped. Raises OSError where the file ends early."""
        end, at = offset + len(self.bytes), offset
        if os.fstat(fd).st_size < end:
            raise OSError(errno.EIO, "the file ends inside the touched bits")
        while at < end:
            try:
                at = max(at, os.lseek(fd, at, os.SEEK_DATA)) // PAGE * PAGE
                stop = min(end, os.lseek(fd, at, os.SEEK_HOLE))
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but holes from here
                    return
                stop = end  # no holes on this file system
            if at >= end:
                return
            view = self.bytes.data[at - offset : stop - offset]
            while view:
                got = os.preadv(fd, [view[: 1 << 24]], at)
                if not got:
                    raise OSError(errno.EIO, "the file ends inside the touched bits")
                at, view = at + got, view[got:]

    def store(self, fd: int, offset: int) -> None:
        """Write the pages of bits that changed since the last call to byte `offset` of the file."""
        for page in sorted(self._dirty):
            os.pwrite(fd, self.bytes[page * PAGE : (page + 1) * PAGE].tobytes(), offset + page * PAGE)
        self._dirty.clear()
