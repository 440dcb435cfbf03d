"""Speed claims as ratios of two things timed in one run: `engram bench`.

    engram bench --json        # {"hardware", "claims": [{"id", "value", "against", "ratio", "target", "ok", ...}]}

Both sides of a claim are timed alternately, and the ratio is that of their medians, with the quartiles of the single
ratios beside it. A claim whose own check fails is no claim: it raises instead of reporting a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import engram.optim
from engram.attaching import attach
from engram.backbone import BackboneConfig, build
from engram.config import EngramConfig
from engram.eval.bench_gather import gather_times
from engram.info import machine
from engram.layer import Engram
from engram.table import Table as RowTable

SMALL, LARGE = 10**4, 10**7
STEP_TARGET = 1.05
VOCABULARY = 4096

Side: TypeAlias = "tuple[RowTable, Callable[[], None]]"


def run(rounds: int = 30, rows: int = LARGE) -> dict[str, Any]:
    """All claims -> {"hardware", "claims"}; `rounds` timed rounds a claim, `rows` of the large table."""
    claims = [step_time(name, rounds, rows) for name in STEPPERS]
    claims += row_updates(rounds, rows=rows // 5)
    claims += gathers(rounds)
    return {"hardware": machine(), "claims": claims}


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
    return claim(f"{name}-step-at-{large:.0e}-rows", times[str(large)], times[str(SMALL)], STEP_TARGET)


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


def row_updates(rounds: int, rows: int, width: int = 64, lookups: int = 16_384) -> list[dict[str, Any]]:
    """Backward and update of `lookups` uniform rows: ours against torch's SparseAdam, and against a dense Adam step.

    Its check: after one step with the same gradient, ours has moved exactly the looked-up rows.
    """
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
    for name, target, count in (("sparse-adam", 1 / 3, rounds), ("dense-adam", 1 / 100, 3)):
        theirs(name)
        pairs = [(ours(), theirs(name)) for _ in range(max(2, count))]
        value, against = (list(side) for side in zip(*pairs, strict=True))
        claims.append(claim(f"row-update-against-{name}", value, against, target))
    return claims


def gathers(rounds: int) -> list[dict[str, Any]]:
    """Gather of 32,768 random host rows against `torch.index_select(out=)` and against a read-only C loop."""
    claims = []
    for size, times in gather_times(rounds).items():
        for name, target in (("index_select", 1 / 0.9), ("ceiling", 1 / 0.5)):
            if name in times:
                claims.append(claim(f"host-gather-{size}-B-against-{name}", times["ours"], times[name], target))
    if not any("ceiling" in one["id"] for one in claims):
        Console(stderr=True).print("no C compiler: the read-only ceiling is not measured")
    return claims


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
    quartiles = statistics.quantiles([a / b for a, b in zip(value, against, strict=True)], n=4)
    return {
        "id": name,
        "value": statistics.median(value),
        "against": statistics.median(against),
        "ratio": ratio,
        "quartiles": [quartiles[0], quartiles[2]],
        "rounds": len(value),
        "target": target,
        "ok": ratio <= target,
    }


def show(found: dict[str, Any]) -> None:
    """Print the claims as a table."""
    table = Table(Column("claim", overflow="fold"), "median, ms", "against, ms", "ratio", "quartiles", "target", "")
    for one in found["claims"]:
        low, high = one["quartiles"]
        times = (f"{1e3 * one['value']:.3f}", f"{1e3 * one['against']:.3f}")
        ratio = (f"{one['ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{one['target']:.3g}")
        table.add_row(one["id"], *times, *ratio, "met" if one["ok"] else "missed")
    Console().print(table)
