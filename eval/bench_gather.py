"""How near the host store's gather is to what the memory can do: claims of `engram bench`.

The ceiling is a C loop that reads every byte of the same random rows, software-prefetched, and writes nothing; it is
compiled when the benchmark runs. Where there is no C compiler the claim says so and is left out.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engram.eval.bench_raw import compile_library
from engram.stores import HostStore, TableSpec

ROW_BYTES = (256, 1024, 4096)
LOOKUPS = 32_768
TABLE_BYTES = 2**29
SETS = 8
"""Different sets of row numbers that take turns, so that rows are not in the processor's cache."""
READER = """
#include <stdint.h>
uint64_t read_rows(const char *table, const int64_t *ids, int64_t n, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    if (i + 8 < n) {
      const char *next = table + ids[i + 8] * bytes;
      for (int64_t b = 0; b < bytes && b < 512; b += 64) __builtin_prefetch(next + b);
    }
    const uint64_t *row = (const uint64_t *)(table + ids[i] * bytes);
    for (int64_t w = 0; w < bytes / 8; w++) sum ^= row[w];
  }
  return sum;
}
"""


def gather_sides(row_bytes: int, folder: Path) -> dict[str, Callable[[], float]]:
    """Row size -> "ours", "index_select" and, with a C compiler, "ceiling": each reads 32,768 random rows -> seconds.

    The check: ours returns the very rows. One thread each. Raises RuntimeError when a row differs.
    """
    store = HostStore(TableSpec(TABLE_BYTES // row_bytes, row_bytes // 4, zeros=True))
    store.rows.uniform_()
    sets = [torch.randint(0, store.spec.rows, (LOOKUPS,)) for _ in range(SETS)]
    out = torch.empty(LOOKUPS, store.spec.width)
    if not torch.equal(store.gather(sets[0], out), store.rows[sets[0]]):
        raise RuntimeError("bench: the host store gave other rows")
    turn = iter(range(10**9))

    def timed(call: Callable[[torch.Tensor], Any]) -> Callable[[], float]:
        def run() -> float:
            ids = sets[next(turn) % SETS]
            began = time.perf_counter()
            call(ids)
            return time.perf_counter() - began

        return run

    sides = {
        "ours": timed(lambda ids: store.gather(ids, out)),
        "index_select": timed(lambda ids: torch.index_select(store.rows, 0, ids, out=out)),
    }
    reader = compile_reader(folder)
    if reader is not None:
        address = store.rows.data_ptr()
        sides["ceiling"] = timed(lambda ids: reader(address, ids.data_ptr(), LOOKUPS, row_bytes))
    return sides


def compile_reader(folder: Path) -> Callable[..., int] | None:
    """The C loop as a function (table address, ids address, n, bytes of a row), or None without a C compiler."""
    library = compile_library(READER, folder / "reader.so", "-march=native")
    if library is None:
        return None
    function = library.read_rows
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_uint64
    return function


def gather_times(rounds: int, row_bytes: Sequence[int] = ROW_BYTES) -> dict[int, dict[str, list[float]]]:
    """Row size -> side -> seconds of each round, the sides taking turns, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shuffle = random.Random(0)
    try:
        with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
            found: dict[int, dict[str, list[float]]] = {}
            for size in row_bytes:
                sides = gather_sides(size, Path(folder))
                for side in sides.values():
                    side()
                found[size] = {name: [] for name in sides}
                for _ in range(rounds):
                    for name in shuffle.sample(list(sides), len(sides)):  # one order favours whoever finds `out` warm
                        found[size][name].append(sides[name]())
            return found
    finally:
        torch.set_num_threads(threads)


def sizes() -> dict[str, Any]:
    """What was gathered, for the result file."""
    return {"lookups": LOOKUPS, "table_bytes": TABLE_BYTES, "row_bytes": list(ROW_BYTES), "threads": 1}


def gather_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """The claims of a result -> Markdown: a line a row size, both ratios with quartiles; a missed target is said."""
    heads = ("row", "ours / `torch.index_select(out=)`", "quartiles", "ours / C loop that only reads", "quartiles")
    lines, by_id = [heads, ("--:",) * len(heads)], {one["id"]: one for one in claims}
    for size in ROW_BYTES:
        cells = [f"{size} B"]
        for name in ("index_select", "ceiling"):
            one = by_id.get(f"host-gather-{size}-B-against-{name}")
            cells += ["–", "–"] if one is None else ratio_cells(one["ratio"], one["quartiles"], one["ok"])
        lines.append(tuple(cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratio_cells(ratio: float, quartiles: Sequence[float], ok: bool) -> list[str]:
    """A ratio, its quartiles and whether its target was met -> two cells of a table."""
    return [f"{ratio:.2f}" + ("" if ok else ", missed"), "{:.2f} to {:.2f}".format(*quartiles)]
