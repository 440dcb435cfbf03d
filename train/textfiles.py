"""Local text files, row by row: .txt, .jsonl, .json and .parquet, each also compressed, read through `datasets`.

Every error is a ConfigError that begins with `where` (the config field, then the file).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from engram.strict import ConfigError, require

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".parquet": "parquet",
}
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
HASH_WHOLE = 2 << 30
"""Files up to this many bytes in all are identified by their content; larger sets by size, time and both ends."""


def endings(path: str) -> tuple[str, str]:
    """Lower-case (ending, compression ending) of a file name; either may be empty."""
    name = path.lower()
    packed = next((p for p in PACKED if name.endswith(p)), "")
    return os.path.splitext(name[: len(name) - len(packed)])[1], packed


def is_known(path: str) -> bool:
    """Whether the name ends in a way this file can read."""
    return endings(path)[0] in KINDS


def expand(where: str, items: Sequence[str]) -> list[Path]:
    """Files behind paths, folders and globs, each once: in the order given, sorted within one item.

    Raises ConfigError for a path that does not exist, a file of an unknown ending, an item without any file, and a
    compression whose library is missing.
    """
    known = f"{', '.join(KINDS)} (each also with {', '.join(PACKED)})"
    found: dict[str, Path] = {}
    for item in items:
        path = Path(os.path.expanduser(item))
        if path.is_file():
            require(is_known(item), f"{where}: {item} has an unknown ending; known are {known}")
            batch = [path]
        else:
            hits: Iterable[str | Path]
            if path.is_dir():
                hits = [p for p in path.rglob("*") if not any(q.startswith(".") for q in p.relative_to(path).parts)]
            elif glob.has_magic(item):
                hits = glob.glob(str(path), recursive=True)
            else:
                raise ConfigError(f"{where}: {item!r} does not exist; give a file, a folder, a glob or 'builtin'")
            batch = sorted(p for p in map(Path, hits) if p.is_file() and is_known(p.name))
            require(bool(batch), f"{where}: {item!r} matches no file of a known ending: {known}")
        for path in batch:
            found.setdefault(str(path.resolve()), path)
    if any(endings(p.name)[1] == ".zst" for p in found.values()):
        require(has_module("zstandard"), f"{where}: reading .zst needs the library 'zstandard' (pip install zstandard)")
    return list(found.values())


def fingerprint(where: str, paths: Sequence[Path]) -> dict[str, Any]:
    """{"files", "bytes", "sha256"} of files in this order; their names and folders do not enter it, their kind does."""
    digest = hashlib.sha256()
    try:
        stats = [path.stat() for path in paths]
        total = sum(s.st_size for s in stats)
        for path, stat in zip(paths, stats, strict=True):
            digest.update(f"{KINDS[endings(path.name)[0]]}\0{stat.st_size}\0".encode())
            with open(path, "rb") as handle:
                if total <= HASH_WHOLE:
                    while block := handle.read(1 << 20):
                        digest.update(block)
                else:
                    digest.update(str(stat.st_mtime_ns).encode() + handle.read(1 << 20))
                    handle.seek(max(0, stat.st_size - (1 << 20)))
                    digest.update(handle.read())
    except OSError as error:
        raise ConfigError(f"{where}: {error.filename} cannot be read: {error.strerror}") from error
    return {"files": len(paths), "bytes": total, "sha256": digest.hexdigest()}


def file_texts(where: str, path: Path, column: str, txt_characters: int) -> Iterator[str | None]:
    """Texts of one file; None where a row has none. `txt_characters` is the longest document cut from a .txt file.

    Raises ConfigError, naming the file, for whatever is wrong with it.
    """
    kind = KINDS[endings(path.name)[0]]
    where = f"{where}: {path}"
    try:
        if kind == "json":  # one JSON object a line is common under this ending too
            first = next((line for line in _lines(path) if line.strip()), "")
            kind = "lines" if _is_object(first) or not first else "json"
        if kind == "text":
            yield from _cut(_no_binary(where, _lines(path)), txt_characters)
        elif kind == "lines":
            yield from _json_lines(where, _lines(path), column)
        else:
            # without a batch size of its own the Parquet reader fails on a file of no rows
            options = {"batch_size": 1000} if kind == "parquet" else {}
            with _table(kind, path, **options) as table:
                yield from column_texts(where, table, column)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is no UTF-8 text: {error}") from error
    except Exception as error:  # datasets, pyarrow and the decompressors share no base class
        raise ConfigError(f"{where} could not be read: {reason(error)}") from error


def column_texts(where: str, table: Any, column: str) -> Iterator[str | None]:
    """Texts of one column of a `datasets` data set, map-style or streamed; ConfigError if it is missing or no text."""
    names = table.column_names
    if names is None:
        names = list(next(iter(table), {}))
        if not names:
            return
    if column not in names:
        raise _no_column(where, column, names)
    number = itertools.count(1)
    for batch in table.select_columns([column]).iter(batch_size=500):
        for value in batch[column]:
            yield _text(f"{where}: row {next(number)}", column, value)


def load_datasets() -> Any:
    """The `datasets` library. Raises ConfigError where it is not installed."""
    if not has_module("datasets"):
        raise ConfigError(
            "source: reading files and data sets needs 'datasets' (pip install datasets); source: builtin does not"
        )
    return importlib.import_module("datasets")


def has_module(name: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(name) is not None


def reason(error: BaseException) -> str:
    """One line for an error message: the type and at most 300 characters."""
    text = " ".join(str(error).split()) or repr(error)
    return f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def _table(builder: str, path: Path, **options: Any) -> Iterator[Any]:
    """A streaming data set over one file (about 5 ms to open; streaming writes no second copy of the data).

    `datasets` takes names for glob patterns and silently reads nothing for some (brackets, '::'), so it is handed a
    link of a plain name.
    """
    datasets = load_datasets()
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        ending, packed = endings(path.name)
        if builder == "parquet" and packed:  # read from its end, so it cannot be decompressed on the way
            link = Path(folder, "file" + ending)
            with _opener(packed)(path) as compressed, open(link, "wb") as plain:
                shutil.copyfileobj(compressed, plain, 1 << 20)
        else:
            link = Path(folder, "file" + ending + packed)
            link.symlink_to(path.resolve())
        yield datasets.load_dataset(builder, data_files=[str(link)], split="train", streaming=True, **options)


def _opener(packed: str) -> Callable[[Path], IO[bytes]]:
    return cast(Callable[[Path], IO[bytes]], importlib.import_module(PACKED[packed]).open)


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends (universal newlines, a byte-order mark dropped)."""
    mark = "\ufeff"  # taken off here: with encoding="utf-8-sig" it stays in compressed files
    with _table("text", path, sample_by="line", keep_linebreaks=True) as table:
        for batch in table.iter(batch_size=1000):
            lines = batch["text"]
            if mark and lines:
                lines[0], mark = lines[0].removeprefix(mark), ""
            yield from lines


def _no_binary(where: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        require("\0" not in line, f"{where} is no text: it holds NUL bytes")
        yield line


def _cut(lines: Iterable[str], limit: int) -> Iterator[str]:
    """Join lines into documents of at most `limit` characters (0: one), cut at a blank line where one is near."""
    if not limit:
        yield "".join(lines)
        return
    held: list[str] = []
    size = blank = blank_size = 0  # characters held; lines and characters up to the last blank line
    for line in lines:
        for piece in (line[i : i + limit] for i in range(0, len(line), limit)):
            while held and size + len(piece) > limit:
                at, cut = (blank, blank_size) if 2 * blank_size >= limit else (len(held), size)
                yield "".join(held[:at])
                held, size, blank, blank_size = held[at:], size - cut, 0, 0
            held.append(piece)
            size += len(piece)
            if not piece.strip():
                blank, blank_size = len(held), size
    if held:
        yield "".join(held)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _json_lines(where: str, lines: Iterable[str], column: str) -> Iterator[str | None]:
    """One JSON object a line. Parsed here: the JSON reader of `datasets` fails on a field that first comes late."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: line {number} is not JSON: {error.msg}") from error
        require(isinstance(row, dict), f"{where}: line {number} is no JSON object with a field {column!r}")
        if column not in row:
            raise _no_column(f"{where}: line {number}", column, row)
        yield _text(f"{where}: line {number}", column, row[column])


def _text(where: str, column: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{where}: text_column {column!r} holds {type(value).__name__}, not text")


def _no_column(where: str, column: str, present: Iterable[str]) -> ConfigError:
    return ConfigError(f"{where} has no text_column {column!r}; present are {', '.join(map(repr, present)) or 'none'}")
