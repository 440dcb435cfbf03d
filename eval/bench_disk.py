"""How near reads of rows from a file are to a raw loop in C at the same depth: claims of `engram bench`.

A file of 1 GiB with rows of 1 KiB is made in the temporary folder (the variable TMPDIR chooses another), and each call
reads 8,000 random rows of it with O_DIRECT. Each way of the store has a loop of its own kind (`bench_raw.py`), which
gets the distinct pages of such rows sorted and ready: finding them, and taking the rows out of them, counts for our
side alone. What is missing here is said in words and its claim left out.

Shapes: n rows of a call, p distinct pages, W row width.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from engram.eval.bench_gather import ratio_cells
from engram.eval.bench_raw import Reader, raw_reader
from engram.stores import DiskStore, TableSpec
from engram.stores.queues import DEPTH, IoUring, KernelAio, queue_works
from engram.stores.reading import PageBuffer
from engram.stores.rowfile import PAGE, read_info
from engram.strict import ConfigError

FILE_BYTES = 2**30
WIDTH = 256
ROWS_OF_PAGE = PAGE // (4 * WIDTH)
LOOKUPS = 8_000
THREADS = 16
WAYS = {"io_uring": DEPTH, "aio": DEPTH, "threads": THREADS}
"""Way of the disk store -> requests in flight, the same for both sides."""
BUDGET_S, LEAST_ROUNDS = 45.0, 3
"""No further round begins after this time: a slow disk gives fewer rounds, not a benchmark of hours."""
PIECE = 1 << 16  # rows written at a time
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass
class DiskTimes:
    """Seconds of each round, a round being `LOOKUPS` rows.

    sides    way -> "ours" and "raw", which took turns.
    ways     way -> how the store read, in words.
    warm     through a mapping whose pages are all in the page cache.
    missing  what could not be compared here, and why.
    """

    sides: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    warm: list[float] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def require_space() -> None:
    """Raise ConfigError when the temporary folder cannot take the file."""
    folder, needed = tempfile.gettempdir(), FILE_BYTES + FILE_BYTES // 16
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"bench: the file of the disk claims needs {needed:,} bytes, {folder} has {free:,}; set TMPDIR to a folder "
            f"with more room, or name other claims with --only"
        )


def disk_times(rounds: int, ways: Sequence[str] = tuple(WAYS), warm: bool = True) -> DiskTimes:
    """Make the file, and time every permitted way of `ways`, and a warm mapping.

    Raises RuntimeError when rows come back with other bits than were written, ConfigError when the file cannot be made.
    """
    found = DiskTimes()
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        reason = unfit(folder)
        if reason:
            found.missing.append(f"disk claims: {reason}")
            return found
        path = make_file(folder / "rows.safetensors")
        pairs: dict[str, dict[str, Callable[[], float]]] = {}
        for way in ways:
            pair = _pair(way, path, stack)
            if isinstance(pair, str):
                found.missing.append(f"disk-{way}: {pair}")
            else:
                found.ways[way], pairs[way] = pair
                found.sides[way] = {"ours": [], "raw": []}
        deadline = time.monotonic() + BUDGET_S
        for index in range(rounds if pairs else 0):
            if index >= LEAST_ROUNDS and time.monotonic() > deadline:
                break
            for way, both in pairs.items():
                for side in ("ours", "raw") if index % 2 else ("raw", "ours"):
                    found.sides[way][side].append(both[side]())
        if warm:
            found.warm = _warm_times(path, rounds)
    return found


def unfit(folder: Path) -> str:
    """Why reads from files in this folder say nothing about a disk, or nothing."""
    if not sys.platform.startswith("linux"):
        return "they need O_DIRECT, which is Linux's"
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    kind = next((kinds[str(up)] for up in (place, *place.parents) if str(up) in kinds), "")
    return f"{folder.parent} lies in memory ({kind}); set TMPDIR to a folder on a disk" if kind in IN_MEMORY else ""


def written(ids_n: Tensor) -> Tensor:
    """Row numbers [n] -> the values [n, W] that the file holds: exact in fp32, and different in every row."""
    column_W = torch.arange(WIDTH) * 12_289
    return (ids_n % 2**22).float().unsqueeze(1) + column_W


def make_file(path: Path) -> Path:
    """Write the whole row file, `FILE_BYTES` of rows -> its path. Raises ConfigError where there is no room."""
    spec = TableSpec(FILE_BYTES // (4 * WIDTH), WIDTH, zeros=True)
    with DiskStore(path, spec, "bench", backend="threads", direct=False, reserve=True) as store:
        for start in range(0, spec.rows, PIECE):
            ids = torch.arange(start, min(start + PIECE, spec.rows))
            store.update(ids, written(ids))
        store.commit_checkpoint(store.prepare_checkpoint())
    return path


def draws(rows: int) -> Iterator[np.ndarray]:
    """Rows of a table -> row numbers [n] of one call after another: random, on even and odd pages in turn.

    So no two pages of a call are neighbours, which the store would read as one, and none is left of the call before.
    """
    generator = np.random.default_rng(0)
    for odd in itertools.cycle((0, 1)):
        page_n = 2 * generator.integers(0, rows // ROWS_OF_PAGE // 2, LOOKUPS) + odd
        yield page_n * ROWS_OF_PAGE + generator.integers(0, ROWS_OF_PAGE, LOOKUPS)


def _pair(way: str, path: Path, stack: ExitStack) -> tuple[str, dict[str, Callable[[], float]]] | str:
    """A way -> its name in words and both sides, checked; or why it cannot be compared here."""
    kind = {"io_uring": IoUring, "aio": KernelAio}.get(way)
    if kind is not None and not queue_works(kind):
        return "not permitted here"
    store = stack.enter_context(DiskStore.open(path, backend=way, threads=THREADS, read_only=True))
    if not store.way.endswith("O_DIRECT"):
        return f"{path.parent.parent} has no O_DIRECT; set TMPDIR to a folder on another disk"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    stack.callback(os.close, fd)
    reader = stack.enter_context(raw_reader(way, WAYS[way], fd, path.parent))
    if isinstance(reader, str):
        return f"no raw loop to compare with: {reader}"
    return store.way, {"ours": _our_side(store), "raw": _raw_side(reader, path)}


def _our_side(store: DiskStore) -> Callable[[], float]:
    """Gather the rows of one call -> seconds. Raises RuntimeError unless they are those that were written."""
    calls, out_nW = draws(store.spec.rows), torch.empty(LOOKUPS, WIDTH)

    def run() -> float:
        ids_n = torch.from_numpy(next(calls))
        began = time.perf_counter()
        store.gather(ids_n, out_nW)
        return time.perf_counter() - began

    first_n = torch.from_numpy(next(calls))
    if not torch.equal(store.gather(first_n, out_nW).view(torch.int32), written(first_n).view(torch.int32)):
        raise RuntimeError(f"bench: the disk store gave other rows ({store.way})")
    return run


def _raw_side(reader: Reader, path: Path) -> Callable[[], float]:
    """Read the pages of one call -> seconds. Raises RuntimeError unless the rows are in them."""
    with open(path, "rb") as file:
        info, start = read_info(file.fileno(), path)
    calls, buffer = draws(info.spec.rows), PageBuffer().take(LOOKUPS * PAGE)

    def read(ids_n: np.ndarray) -> tuple[np.ndarray, float]:
        pages_p = np.unique(ids_n // ROWS_OF_PAGE)
        offsets_p = pages_p * PAGE + start
        began = time.perf_counter()
        reader(offsets_p, buffer)
        return pages_p, time.perf_counter() - began

    first_n = next(calls)
    pages_p, _ = read(first_n)
    row_n = np.searchsorted(pages_p, first_n // ROWS_OF_PAGE) * ROWS_OF_PAGE + first_n % ROWS_OF_PAGE
    wanted_nW = written(torch.from_numpy(first_n)).numpy().view(np.int32)
    if not np.array_equal(buffer.view(np.int32).reshape(-1, WIDTH)[row_n], wanted_nW):
        raise RuntimeError("bench: the C loop read other pages")
    return lambda: read(next(calls))[1]


def _warm_times(path: Path, rounds: int) -> list[float]:
    """Seconds of each round through a mapping, after every page of the file was read once."""
    with DiskStore.open(path, backend="mapping", read_only=True) as store:
        for start in range(0, store.spec.rows, PIECE):
            store.gather(torch.arange(start, min(start + PIECE, store.spec.rows)))
        side = _our_side(store)
        return [side() for _ in range(rounds)]


def sizes() -> dict[str, Any]:
    """What was read, for the result file."""
    return {"lookups": LOOKUPS, "file_bytes": FILE_BYTES, "row_bytes": 4 * WIDTH, "in_flight": dict(WAYS)}


def disk_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """The claims of a result -> Markdown: rows a second of both sides, and ours as a share of the raw loop's."""
    heads = ("way", "ours, rows/s", "raw loop in C, rows/s", "ours / raw", "quartiles")
    lines = [heads, ("--:",) * len(heads)]
    for one in claims:
        if one["id"] in {f"disk-{way}-against-raw" for way in WAYS}:
            low, high = one["quartiles"]
            speeds = (f"{LOOKUPS / one[side]:,.0f}" for side in ("value", "against"))
            lines.append((one["way"], *speeds, *ratio_cells(1 / one["ratio"], (1 / high, 1 / low), one["ok"])))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
