"""Speed claims as ratios of two things timed in one run: `engram bench`.

    engram bench --json        # {"hardware", "claims": [{"id", "value", "against", "ratio", "target", "ok", ...}]}
    engram bench --only 'disk-*' --only 'host-gather-256-B-*'
    engram bench --out runs/bench       # also runs/bench/bench.json, a result file
    engram bench --peers                # another package instead: eval/peers.py

Both sides of a claim are timed alternately, and the ratio is that of their medians, with the quartiles of the single
ratios beside it. A claim whose own check fails is no claim: it raises instead of reporting a time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import engram.optim
from engram.attaching import attach
from engram.backbone import BackboneConfig, build
from engram.config import EngramConfig
from engram.eval import bench_disk, bench_gather
from engram.eval.peers import measure_peers, show_peers
from engram.eval.report import result, write_json
from engram.info import foreign_seconds, machine
from engram.layer import Engram
from engram.strict import ConfigError
from engram.table import Table as RowTable

SMALL, LARGE = 10**4, 10**7
STEP_TARGET, DISK_TARGET = 1.05, 1 / 0.85
ROW_TARGETS = {"row-update-against-sparse-adam": 1 / 3, "row-update-against-dense-adam": 1 / 100}
GATHER_TARGETS = {"index_select": 1 / 0.9, "ceiling": 1 / 0.5}
VOCABULARY = 4096
SEED = 0
QUIET = 0.05
WARM = "disk-warm-mapping"

Side: TypeAlias = "tuple[RowTable, Callable[[], None]]"


def run(
    rounds: int = 30,
    only: Sequence[str] = (),
    out: str | None = None,
    compile_only: bool = False,
    full: bool = False,
    peers: bool = False,
    kernels: Any = None,
    compiler: Any = None,
) -> dict[str, Any]:
    """Claims with `rounds` timed rounds each -> {"hardware", "claims", "reported", "foreign", "failed"}.

    "reported" is measured and not claimed; "foreign" is the share of all cores that other programs took meanwhile.
    only  patterns like those of file names: claims whose id fits one of them; none of them means all.
    out   folder for a result file, bench.json (compile.json with `compile_only`).
    compile_only, full  time nothing: what `compiler` (kernels/aot.py) reports of all kernels, or of every variant.
    peers  measure engram against another package instead; see eval/peers.py.
    kernels  the claims of the kernels, kernels/bench.py.
    Raises ConfigError for a pattern that fits no claim, or without space for the file that the disk claims read.
    """
    if peers:
        if only or compile_only or full:
            raise ConfigError("peers: measured alone; leave out --only, --compile-only and --full")
        return measure_peers(rounds, out)
    if compile_only:
        return _compiled(compiler.compile_report(full), out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = chosen(only, [] if kernels is None else kernels.ids(device))
    if any(name.startswith("disk-") for name in wanted):
        bench_disk.require_space()
    began, others = time.perf_counter(), foreign_seconds()
    torch.manual_seed(SEED)
    failed: dict[str, str] = {}
    claims = [step_time(name, rounds, LARGE) for name in STEPPERS if step_id(name, LARGE) in wanted]
    claims += row_updates(rounds, LARGE // 5, wanted)
    claims += gathers(rounds, wanted)
    if kernels is not None:
        claims += kernel_claims(kernels, rounds, device, wanted, failed)
    more, reported = disk_reads(rounds, wanted)
    foreign = (foreign_seconds() - others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    found = {"hardware": machine(), "claims": claims + more, "reported": reported, "foreign": foreign}
    found["failed"] = failed
    if out:
        config: dict[str, Any] = {"rounds": rounds, "only": list(only), "rows": LARGE, "gather": bench_gather.sizes()}
        config["disk"] = bench_disk.sizes()
        metrics = {"arm": "bench", **{name: found[name] for name in ("claims", "reported", "foreign", "failed")}}
        write_json(Path(out) / "bench.json", result(config, SEED, metrics))
    return found


def _compiled(report: dict[str, Any], out: str | None) -> dict[str, Any]:
    found = {"hardware": machine(), **report}
    if out:
        write_json(Path(out) / "compile.json", found)
    return found


def kernel_claims(
    kernels: Any, rounds: int, device: torch.device, wanted: Sequence[str], failed: dict[str, str]
) -> list[dict[str, Any]]:
    """The wanted kernel claims; one whose check or memory fails has no number, goes to `failed` and stops no other."""
    found = []
    for name in kernels.ids(device):
        if name in wanted:
            try:
                found += [kernel_claim(name, measured) for _, measured in kernels.claims(rounds, device, [name])]
            except RuntimeError as error:
                failed[name] = str(error)
    return found


def kernel_claim(name: str, measured: Any) -> dict[str, Any]:
    """Times of kernels/bench.py -> a claim; where both sides say how much they move, seconds are those of a GB."""
    if not measured.value_bytes:
        return claim(name, measured.value, measured.against, measured.target)
    value, against = (
        [seconds / moved * 1e9 for seconds in times]
        for times, moved in ((measured.value, measured.value_bytes), (measured.against, measured.against_bytes))
    )
    return {**claim(name, value, against, measured.target), "unit": "s/GB"}


def chosen(only: Sequence[str], kernels: Sequence[str] = ()) -> list[str]:
    """Patterns -> ids of the claims that fit one of them; `kernels` are the ids of kernel claims that can be measured.

    Raises ConfigError for a pattern that fits none.
    """
    known = [step_id(name, LARGE) for name in STEPPERS] + list(ROW_TARGETS)
    known += [gather_id(size, name) for size in bench_gather.ROW_BYTES for name in GATHER_TARGETS]
    known += [*kernels, *(disk_id(way) for way in bench_disk.WAYS), WARM]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"only: {pattern!r} fits no claim; there are {', '.join(known)}")
    return [name for name in known if not only or any(fnmatchcase(name, pattern) for pattern in only)]


def step_id(name: str, large: int) -> str:
    """Name in STEPPERS, rows of the large table -> id of the claim."""
    return f"{name}-step-at-{large:.0e}-rows"


def step_time(name: str, rounds: int, large: int) -> dict[str, Any]:
    """A whole training step (forward, backward, update) with a table of `large` rows against one of 10^4.

    "model": a small transformer with one memory layer, 1,024 tokens x 8 columns of width 16. "layer": that memory layer
    alone, the harshest form, since nothing else computes. Ids are new in every round, so that rows are not in cache.
    """
    sides = {rows: STEPPERS[name](rows) for rows in (SMALL, large)}
    for table, _ in sides.values():
        if table.updates != 1:
            raise RuntimeError("bench: the warm-up step did not update the rows")
    times = alternate({str(rows): step for rows, (_, step) in sides.items()}, rounds)
    return claim(step_id(name, large), times[str(large)], times[str(SMALL)], STEP_TARGET)


def _config(rows: int) -> EngramConfig:
    return EngramConfig(
        hidden_size=128, layers=(1,), orders=(2, 3), heads=4, head_dim=16, rows=rows // 8, init="normal"
    )


def _ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 128))


def _layer_stepper(rows: int) -> Side:
    layer = Engram(_config(rows), 1, vocab_size=VOCABULARY)
    x_BTD = torch.randn(8, 128, 128)
    return layer.table, _stepper(layer, lambda: layer(x_BTD, layer.hash.rows(_ids())).square().mean())


def _model_stepper(rows: int) -> Side:
    model = build(BackboneConfig(kind="dense", hidden_size=128, blocks=4), VOCABULARY, seed=0)
    table = attach(model, _config(rows)).memory.layer(1).table
    return table, _stepper(model, lambda: model(_ids(), use_cache=False).logits.logsumexp(-1).mean())


def _stepper(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = engram.optim.build(module.train(), lr=1e-3)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the row state
    return step


STEPPERS: dict[str, Callable[[int], Side]] = {"model": _model_stepper, "layer": _layer_stepper}


def row_updates(
    rounds: int, rows: int, wanted: Collection[str] = tuple(ROW_TARGETS), width: int = 64, lookups: int = 16_384
) -> list[dict[str, Any]]:
    """Backward and update of `lookups` uniform rows: ours against torch's SparseAdam, and against a dense Adam step.

    Its check: after one step with the same gradient, ours has moved exactly the looked-up rows.
    """
    targets = {name: target for name, target in ROW_TARGETS.items() if name in wanted}
    if not targets:
        return []
    cfg = EngramConfig(hidden_size=width, layers=(1,), orders=(2,), heads=1, head_dim=width, rows=rows)
    table = RowTable(cfg, 1)
    sparse, dense = (nn.Embedding(rows, width, sparse=flag) for flag in (True, False))
    row_wise = engram.optim.build(table, lr=1e-3)
    judges = {
        "sparse-adam": (sparse, torch.optim.SparseAdam(sparse.parameters(), lr=1e-3)),
        "dense-adam": (dense, torch.optim.Adam(dense.parameters(), lr=1e-3)),
    }
    upstream_nW = torch.randn(lookups, width)

    def ours() -> float:
        ids_n = torch.randint(0, rows, (lookups,))
        values = table(ids_n.view(1, 1, -1))
        return _update_seconds(lambda: values.backward(upstream_nW.view(values.shape)), row_wise)

    def theirs(name: str) -> float:
        module, optimizer = judges[name]
        values_nW = module(torch.randint(0, rows, (lookups,)))
        return _update_seconds(lambda: values_nW.backward(upstream_nW), optimizer)

    ours()
    if not 0 < int(table.store.rows.any(dim=1).sum()) <= lookups:
        raise RuntimeError("bench: the row-wise step did not move the looked-up rows alone")
    claims = []
    for name, target in targets.items():
        judge = name.removeprefix("row-update-against-")
        theirs(judge)
        count = 3 if judge == "dense-adam" else rounds
        pairs = [(ours(), theirs(judge)) for _ in range(max(2, count))]
        value, against = (list(side) for side in zip(*pairs, strict=True))
        claims.append(claim(name, value, against, target))
    return claims


def gathers(rounds: int, wanted: Collection[str]) -> list[dict[str, Any]]:
    """Gather of 32,768 random host rows against `torch.index_select(out=)` and against a read-only C loop."""
    sizes = [size for size in bench_gather.ROW_BYTES if any(gather_id(size, name) in wanted for name in GATHER_TARGETS)]
    claims, found = [], bench_gather.gather_times(rounds, sizes)
    for size, times in found.items():
        for name, target in GATHER_TARGETS.items():
            if name in times and gather_id(size, name) in wanted:
                claims.append(claim(gather_id(size, name), times["ours"], times[name], target))
    if any("ceiling" not in times for times in found.values()):
        _say(f"{gather_id('*', 'ceiling')}: no C compiler, or none that takes the loop")
    return claims


def gather_id(size: int | str, name: str) -> str:
    """Bytes of a row, other side -> id of the claim."""
    return f"host-gather-{size}-B-against-{name}"


def disk_reads(rounds: int, wanted: Collection[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Gather of 8,000 random rows of a file, each permitted way against a raw loop in C -> claims, and what is none."""
    ways = [way for way in bench_disk.WAYS if disk_id(way) in wanted]
    if not ways and WARM not in wanted:
        return [], []
    found = bench_disk.disk_times(rounds, ways, WARM in wanted)
    for line in found.missing:
        _say(line)
    claims = []
    for way, times in found.sides.items():
        claims.append({**claim(disk_id(way), times["ours"], times["raw"], DISK_TARGET), "way": found.ways[way]})
    if not found.warm:
        return claims, []
    seconds = statistics.median(found.warm)
    return claims, [{"id": WARM, "value": seconds, "rows_per_second": bench_disk.LOOKUPS / seconds}]


def disk_id(way: str) -> str:
    """Way of the disk store -> id of the claim."""
    return f"disk-{way}-against-raw"


def _say(line: str) -> None:
    Console(stderr=True).print(f"left out: {line}", soft_wrap=True, highlight=False)


def _update_seconds(backward: Callable[[], Any], optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def alternate(sides: dict[str, Callable[[], None]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Name -> seconds of each round, the sides taking turns and changing order from round to round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warm_up + rounds):
        order = list(sides) if index % 2 else list(reversed(sides))
        for name in order:
            began = time.perf_counter()
            sides[name]()
            if index >= warm_up:
                times[name].append(time.perf_counter() - began)
    return times


def claim(name: str, value: list[float], against: list[float], target: float) -> dict[str, Any]:
    """Seconds of both sides -> the claim that value / against is at most `target`."""
    ratio = statistics.median(value) / statistics.median(against)
    ratios = [a / b for a, b in zip(value, against, strict=True)]
    quartiles, fifths = (statistics.quantiles(ratios, n=n) for n in (4, 5))
    return {
        "id": name,
        "value": statistics.median(value),
        "against": statistics.median(against),
        "ratio": ratio,
        "quartiles": [quartiles[0], quartiles[2]],
        "quantiles_20_80": [fifths[0], fifths[3]],
        "rounds": len(value),
        "target": target,
        "ok": ratio <= target,
    }


def show(found: dict[str, Any]) -> None:
    """Print the claims as a table, or the compile report, or the comparison with another package."""
    if "sides" in found:
        show_peers(found)
        return
    if "compiled" in found:
        show_compiled(found)
        return
    table = Table(Column("claim", overflow="fold"), "median, ms", "against, ms", "ratio", "quartiles", "target", "")
    for one in found["claims"]:
        low, high = one["quartiles"]
        times = (f"{1e3 * one['value']:.3f}", f"{1e3 * one['against']:.3f}")
        ratio = (f"{one['ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{one['target']:.3g}")
        table.add_row(one["id"], *times, *ratio, "met" if one["ok"] else "missed")
    console = Console()
    console.print(table)
    for name, why in found["failed"].items():
        console.print(f"{name} failed: {why}")
    for one in found["reported"]:
        console.print(f"{one['id']}: {one['rows_per_second']:,.0f} rows a second (reported, no claim)")
    if found["foreign"] > QUIET:
        console.print(f"not a quiet machine: other programs took {found['foreign']:.0%} of all cores meanwhile")


def show_compiled(found: dict[str, Any]) -> None:
    """Print a compile report: a row per kernel, registers and shared memory on each target, and what failed."""
    targets = found["targets"]
    table = Table(Column("kernel", overflow="fold"), *(f"{target}" for target in targets), title_justify="left")
    table.title = "registers / shared bytes / 16-byte loads+stores of all / instructions"
    by_kernel: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        by_kernel.setdefault(row["kernel"], {})[row["target"]] = row
    for name, rows in by_kernel.items():
        table.add_row(name, *(_compiled_cell(rows[target]) for target in targets))
    console = Console()
    console.print(table)
    version, failed = found["versions"]["triton"], len(found["failed"])
    console.print(f"{found['compiled']} compiled with Triton {version}, {failed} failed")
    for problem in found["failed"]:
        console.print(f"failed: {problem}")


def _compiled_cell(row: dict[str, Any]) -> str:
    wide, every = row["wide_loads"] + row["wide_stores"], row["loads"] + row["stores"]
    return f"{row['registers']} / {row['shared']} / {wide} of {every} / {row['instructions']}"


def compiled_table(found: dict[str, Any]) -> str:
    """A compile report -> Markdown: registers a thread / instructions of each kernel on each target."""
    targets = found["targets"]
    lines = [["kernel", *targets], ["---"] + ["--:"] * len(targets)]
    for name in dict.fromkeys(row["kernel"] for row in found["rows"]):
        mine = {row["target"]: row for row in found["rows"] if row["kernel"] == name}
        lines.append([name, *(f"{mine[one]['registers']} / {mine[one]['instructions']}" for one in targets)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
