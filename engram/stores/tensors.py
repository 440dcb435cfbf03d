"""Tensors of safetensors files: found by an own header reader and read in pieces; written in pieces.

    with TensorFiles("folder") as files:                       # or one file, or a model.safetensors.index.json
        files["model.norm.weight"].shape
        weight = files.read("model.norm.weight")               # a small tensor, whole
        bytes_nb = RowSpace(files, ["embed.weight"]).gather(ids_n)   # some rows of one that does not fit into memory
    write_tensors(path, {"rows": Stream(torch.bfloat16, (R, W), pieces)}, {"format": "pt"})

Nothing is mapped: the readers of torch and safetensors want the address space of a whole file, and a table may have
100 GB; their writer wants every tensor in memory. Everything a header says is checked before a byte behind it is used.

    8 bytes          header length N, little-endian
    N bytes          JSON: name -> {"dtype", "shape", "data_offsets": [first, end]}, counted from byte 8 + N
    tensors          one after another, without gaps

Shapes: n row numbers, b bytes of a row (everything behind the first dimension).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.stores.queues import open_transfer
from engram.stores.reading import Transfer, TransferError, move_whole
from engram.strict import ConfigError

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
PIECE = 1 << 28  # bytes that one system call is asked for: it moves at most 2 GiB
INLINE_READS = 64  # fewer than these do not pay for a queue
INDEX = "model.safetensors.index.json"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of a value by the format's name of its dtype; another name is listed, but not read."""
DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes that are read and written."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
READ_BYTES = 8 << 20
"""Bytes that are handed on at a time: a thousandth of a large table, and enough for the speed of a disk."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `size` bytes from byte `start` of `file`. `dtype` is the format's name of it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return self.size // self.shape[0] if self.shape and self.shape[0] else 0


class TensorFiles:
    """The tensors of one safetensors file, of a folder with an index, or of a folder of such files without one.

    tensors  name -> TensorInfo, of all files that are there.
    metadata of each file.
    absent   name -> file that the index names for it, for files that are not there: asking for such a tensor raises,
             so that a folder may hold a part of a model.

    Raises ConfigError for a path that is not there, holds no safetensors file, or an index whose names leave its folder
    (symbolic links inside are followed: caches are built of them). Raises ValueError naming the file for a header that
    does not fit its file, or does not hold what the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        self.absent: dict[str, str] = {}
        self._fds: dict[Path, int] = {}
        self._transfer: Transfer | None = None
        self._lock = threading.Lock()  # layers that share the files are read by threads of their own
        self._open()  # descriptors that an error leaves are closed with the object

    @property
    def files(self) -> list[Path]:
        """The files that are there, in the order of their names."""
        return sorted(self._fds)

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def size(self) -> int:
        """Bytes of all files that are there."""
        return sum(os.fstat(fd).st_size for fd in self._fds.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> TensorInfo:
        """Raises ValueError for a tensor that is not there, naming its file where the index does."""
        if name in self.absent:
            raise ValueError(f"path: {self.path}: {name} is in {self.absent[name]}, which is not there; add that file")
        if name not in self.tensors:
            raise ValueError(f"path: {self.path}: there is no tensor {name}")
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """A whole tensor, in memory of its own. Raises ValueError for a dtype that is not read."""
        info = self[name]
        if info.dtype not in DTYPES:
            raise ValueError(f"path: {info.file}: {name} has dtype {info.dtype}; read are {', '.join(DTYPES)}")
        raw = self._bytes(info, info.start, info.size)
        flat = torch.from_numpy(raw).view(DTYPES[info.dtype]) if info.size else torch.empty(0, dtype=DTYPES[info.dtype])
        return flat.view(info.shape)

    def span(self, name: str, first: int, count: int) -> np.ndarray:
        """Entries `first` to `first + count` of the first dimension -> their bytes uint8 [count, b].

        Raises IndexError outside the tensor.
        """
        info = self[name]
        if first < 0 or count < 0 or first + count > info.shape[0]:
            raise IndexError(f"{info.file}: {name} has {info.shape[0]:,} rows, asked are {first:,}..{first + count:,}")
        return self._bytes(info, info.start + first * info.row_bytes, count * info.row_bytes).reshape(count, -1)

    def pieces(self, name: str, piece_bytes: int = READ_BYTES) -> Iterator[tuple[int, Tensor]]:
        """All of a tensor -> (first entry, the next entries of the first dimension as bytes uint8 [n, b])."""
        info = self[name]
        if not info.size:
            return
        step = max(1, piece_bytes // info.row_bytes)
        for first in range(0, info.shape[0], step):
            yield first, torch.from_numpy(self.span(name, first, min(step, info.shape[0] - first)))

    def close(self) -> None:
        """Let go of files and threads."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if not self.path.exists():
            raise ConfigError(f"path: {self.path}: there is nothing here; give a safetensors file or a folder of them")
        index = self._index()
        if index is None:
            names = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
            if not names:
                raise ConfigError(f"path: {self.path}: no safetensors file in this folder; other formats are not read")
            for file in names:
                self._add(file, None)
            return
        by_file: dict[str, set[str]] = {}
        for name, file_name in index.items():
            by_file.setdefault(file_name, set()).add(name)
        for file_name, tensors in sorted(by_file.items()):
            file = self.folder / file_name
            if file.exists():
                self._add(file, tensors)
            else:
                self.absent.update(dict.fromkeys(tensors, file_name))

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name, as the index says; None without an index. Every name is checked."""
        if self.path.is_file():
            file = self.path if self.path.name.endswith(".index.json") else None
        else:
            found = sorted(self.path.glob("*.safetensors.index.json"))
            named = [one for one in found if one.name == INDEX]
            if len(found) > 1 and not named:
                raise ConfigError(f"path: {self.path}: {len(found)} indexes and none is {INDEX}; name the one to read")
            file = next(iter(named or found), None)
        if file is None:
            return None
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"path: {file}: no index with a weight_map ({error!r})") from error
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
            raise ValueError(f"path: {file}: weight_map is no mapping of tensor names to file names")
        for name, file_name in entries.items():
            parts = PurePosixPath(file_name)
            if parts.is_absolute() or ".." in parts.parts or not parts.parts or {"\\", "\0", ":"} & set(file_name):
                raise ConfigError(f"path: {file}: {name} is said to be in {file_name!r}, which leaves the folder")
        return entries

    def _add(self, file: Path, wanted: set[str] | None) -> None:
        """Open a file and take its tensors: those in `wanted`, or all."""
        try:
            fd = self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"path: {file}: {error.strerror or error}") from error
        found, self.metadata[file] = read_header(fd, file)
        lost = sorted((wanted or set()) - set(found))
        if lost:
            raise ValueError(f"path: {file}: the index says that it holds {lost[0]} ({len(lost)} such); it does not")
        for name, info in found.items():
            if wanted is not None and name not in wanted:
                continue
            if name in self.tensors:
                raise ValueError(f"path: {file}: {name} is in {self.tensors[name].file.name}, too; keep one of them")
            self.tensors[name] = info

    def _bytes(self, info: TensorInfo, start: int, size: int) -> np.ndarray:
        """`size` bytes from byte `start` of the file, in pieces."""
        buffer, fd = np.empty(size, dtype=np.uint8), self._fds[info.file]
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_SEQUENTIAL)
        try:
            for at in range(0, size, PIECE):
                move_whole(os.preadv, fd, start + at, buffer[at : at + PIECE].data)
        except TransferError as error:
            raise RuntimeError(f"{info.file}: {info.name} cannot be read: {error}") from error
        return buffer

    def read_pieces(
        self, file: Path, offsets_k: np.ndarray, lengths_k: np.ndarray, buffer: np.ndarray, starts_k: np.ndarray
    ) -> None:
        """Many pieces of one file into a buffer, as `Transfer.read`; no read-ahead. Raises TransferError."""
        fd = self._fds[file]
        if hasattr(os, "posix_fadvise"):  # read-ahead would fetch hundreds of times what is asked
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        if len(offsets_k) >= INLINE_READS:
            with self._lock:
                self._transfer = self._transfer or open_transfer("auto", direct=False)
                self._transfer.read(fd, offsets_k, lengths_k, buffer, starts_k)
            return
        for offset, length, start in zip(offsets_k.tolist(), lengths_k.tolist(), starts_k.tolist(), strict=True):
            move_whole(os.preadv, fd, offset, buffer[start : start + length].data)


class RowSpace:
    """Tensors one after another as one table of rows [count, row_bytes]: a table that was saved in shards.

    Raises ValueError when the tensors do not have rows, of the same dtype and shape.
    """

    def __init__(self, files: TensorFiles, names: Sequence[str]) -> None:
        self.files, self.infos = files, [files[name] for name in names]
        first = self.infos[0]
        for info in self.infos:
            if not info.shape or (info.shape[0] and not info.row_bytes):
                raise ValueError(f"path: {info.file}: {info.name} has shape {list(info.shape)}: no table of rows")
            if (info.dtype, info.shape[1:]) != (first.dtype, first.shape[1:]):
                raise ValueError(
                    f"path: {info.file}: {info.name} is {info.dtype} {list(info.shape)}, {first.name} is {first.dtype} "
                    f"{list(first.shape)}: they are no shards of one table"
                )
        self.row_bytes = next((info.row_bytes for info in self.infos if info.row_bytes), 0)
        self._firsts = np.cumsum([0, *(info.shape[0] for info in self.infos)], dtype=np.int64)
        self._starts = np.array([info.start for info in self.infos], dtype=np.int64)
        files_of = sorted({info.file for info in self.infos})
        self._file_of = np.array([files_of.index(info.file) for info in self.infos])
        self._files = files_of

    @property
    def count(self) -> int:
        """Rows of all tensors."""
        return int(self._firsts[-1])

    def gather(self, ids_n: np.ndarray) -> np.ndarray:
        """Row numbers int64 [n], in any order -> their bytes uint8 [n, row_bytes]; each distinct row is read once.

        Raises IndexError outside the table, RuntimeError naming file and row where one cannot be read.
        """
        if len(ids_n) and (int(ids_n.min()) < 0 or int(ids_n.max()) >= self.count):
            row = int(ids_n[(ids_n < 0) | (ids_n >= self.count)][0])
            raise IndexError(f"{self.infos[0].file}: row {row} is outside the {self.count:,} rows of the table")
        unique, inverse = np.unique(ids_n, return_inverse=True)
        shard = np.searchsorted(self._firsts, unique, side="right") - 1
        offsets = self._starts[shard] + (unique - self._firsts[shard]) * self.row_bytes
        buffer = np.empty(len(unique) * self.row_bytes, dtype=np.uint8)
        for number, file in enumerate(self._files):
            here = np.flatnonzero(self._file_of[shard] == number)
            # neighbours in the file and in the buffer are one request
            apart = (np.diff(offsets[here], prepend=-1) != self.row_bytes) | (np.diff(here, prepend=-2) != 1)
            begins = np.flatnonzero(apart)
            lengths = np.diff(begins, append=len(here)) * self.row_bytes
            try:
                self.files.read_pieces(file, offsets[here][begins], lengths, buffer, here[begins] * self.row_bytes)
            except TransferError as error:
                failed = int(unique[here][max(0, int(np.searchsorted(offsets[here], error.place, side="right")) - 1)])
                raise RuntimeError(f"{file}: row {failed} of the table cannot be read: {error}") from error
        return buffer.reshape(-1, self.row_bytes)[inverse.reshape(-1)]

    def span(self, first: int, count: int) -> np.ndarray:
        """Rows `first` to `first + count` -> their bytes uint8 [count, row_bytes]. Raises IndexError outside."""
        if first < 0 or count < 0 or first + count > self.count:
            raise IndexError(f"{self.infos[0].file}: rows {first:,}..{first + count:,} of a table of {self.count:,}")
        pieces = []
        for number, info in enumerate(self.infos):
            begin = max(first, int(self._firsts[number]))
            end = min(first + count, int(self._firsts[number + 1]))
            if begin < end:
                pieces.append(self.files.span(info.name, begin - int(self._firsts[number]), end - begin))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty((0, self.row_bytes), np.uint8), *pieces])


def read_header(fd: int, file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Descriptor of a safetensors file -> its tensors and its metadata. Nothing behind the header is read.

    Raises ValueError naming the file: a header that is larger than the file or no JSON, a shape or dtype that does not
    give the bytes between its offsets, tensors that overlap or leave gaps, a file shorter or longer than its tensors.
    """
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER or 8 + length > size:
        raise ValueError(
            f"path: {file}: no safetensors file: its header would have {length:,} bytes, the file has {size:,}"
        )
    try:
        entries = json.loads(os.pread(fd, length, 8), object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("it is no mapping")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"path: {file}: the header is damaged: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"path: {file}: the header is damaged: its metadata are no mapping")
    data = size - 8 - length
    found = {name: _entry(file, name, entry, 8 + length, data) for name, entry in entries.items()}
    end, before = 0, "the header"
    for info in sorted(found.values(), key=lambda info: (info.start, info.size)):
        first = info.start - 8 - length
        if first != end:
            what = "overlaps" if first < end else "leaves a gap after"
            raise ValueError(f"path: {file}: {info.name} {what} {before}: the header is damaged; use another copy")
        end, before = first + info.size, info.name
    if end != data:
        raise ValueError(
            f"path: {file}: {size:,} bytes, its header says {8 + length + end:,}: the file is not as it was written; "
            f"use another copy"
        )
    return found, {str(key): str(value) for key, value in metadata.items()}


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return dict(pairs)


def _entry(file: Path, name: str, entry: Any, start: int, data: int) -> TensorInfo:
    """One entry of the header, checked against itself and against the bytes behind the header."""
    try:
        dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path: {file}: the entry of {name} has no dtype, shape and two offsets") from error
    numbers = [*shape, first, end] if isinstance(shape, list) else [None]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"path: {file}: the entry of {name} is damaged: {str(entry)[:200]}")
    if first > end:
        raise ValueError(f"path: {file}: {name} ends at byte {end:,} before it begins at {first:,}")
    if end > data:
        raise ValueError(
            f"path: {file}: {name} ends at byte {end:,} of the tensors, the file has {data:,}: it is truncated; "
            f"use another copy"
        )
    if dtype in BITS and prod(shape) * BITS[dtype] != 8 * (end - first):
        raise ValueError(f"path: {file}: {name} has {end - first:,} bytes, {dtype} {shape} needs another number")
    return TensorInfo(name, file, dtype, tuple(shape), start + first, end - first)


@dataclass(frozen=True)
class Stream:
    """A tensor to be written: `pieces` are tensors of any shape whose bytes, one after another, are the tensor's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> Stream:
        """A tensor that is in memory as a whole."""
        return cls(tensor.dtype, tuple(tensor.shape), (tensor,))


def write_tensors(path: str | Path, streams: Mapping[str, Stream], metadata: Mapping[str, str]) -> int:
    """Write a new safetensors file, a piece at a time, and sync it -> its size in bytes.

    Pieces of zeros become holes where the file system has them. Raises FileExistsError when `path` exists, OSError when
    it cannot be written, ValueError for pieces that are not the tensor's bytes; no file is left then.
    """
    ordered = sorted(streams.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # keeps all of them aligned
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, stream in ordered:
        entries[name] = {
            "dtype": NAMES[stream.dtype],
            "shape": list(stream.shape),
            "data_offsets": [at, at + stream.size],
        }
        at += stream.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, len(head) + at)
        _write_at(fd, memoryview(head), 0)
        place = len(head)
        for name, stream in ordered:
            end = place + stream.size
            for piece in stream.pieces:
                flat = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                if place + len(flat) > end:
                    raise ValueError(f"{name}: more bytes than the {stream.size:,} of shape {list(stream.shape)}")
                if bool(flat.any()):
                    _write_at(fd, flat.numpy().data, place)
                place += len(flat)
            if place != end:
                raise ValueError(f"{name}: {stream.size - (end - place):,} bytes, {stream.size:,} are its shape's")
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return len(head) + at


def _write_at(fd: int, view: memoryview, place: int) -> None:
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written
