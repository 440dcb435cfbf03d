"""The overlap benchmark: its definitions, its emulated link against arithmetic, its shape. Times are no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engram import info
from engram.backbone import build
from engram.cli import main
from engram.eval import overlap
from engram.eval.exposure import VARIANTS, first_hidden, hidden_table, summarise_times
from engram.eval.overlap import Cell, EmulatedStore, Emulation, OverlapConfig, Site, measure
from engram.stores import TableSpec
from engram.strict import ConfigError, from_dict, load_yaml, to_dict

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY: dict[str, Any] = {
    "backbone": {"kind": "dense", "hidden_size": 16, "blocks": 2, "heads": 2, "ffn_width": 32, "max_position": 16},
    "memory": {"heads": 1, "head_dim": 8, "rows": 50},
    "placements": [[0], [1], [0, 1]],
    "stores": ["host", "link"],
    "emulated": {"link": {"latency": 0.001, "bandwidth": 1e6}},
    "phases": ["prefill", "decode", "train"],
    "vocab_size": 32, "batch": 2, "seq_len": 6, "rounds": 3, "warm_up": 0, "pool": 2, "threads": 1,
}  # fmt: skip


def _config(**changes: Any) -> OverlapConfig:
    return from_dict(OverlapConfig, {**TINY, **changes})


def test_the_definitions_on_made_up_times() -> None:
    times = {"without": [1.0] * 5, "ready": [1.2] * 5, "sync": [1.6] * 5, "prefetch": [1.3] * 5}
    cell = summarise_times(times)
    assert cell["fetch"] == pytest.approx(0.4) and cell["exposed"] == pytest.approx(0.1)
    assert cell["hidden"] == pytest.approx(0.75) and cell["overhead"] == pytest.approx(0.3)
    assert cell["reason"] is None and cell["quartiles"]["sync"] == [1.6, 1.6] and cell["exposed_error"] == 0
    small = summarise_times({**times, "sync": [1.25] * 5})
    assert small["hidden"] is None and "under 5%" in small["reason"]
    spread = summarise_times({**times, "prefetch": [1.3, 1.2, 1.4, 1.3]} | {"ready": [1.2] * 4})
    assert spread["exposed_error"] == pytest.approx(1.57 * 0.15 / 2)


def test_the_table_shows_the_error_where_it_is_known() -> None:
    cell = {"layers": [1], "store": "s", "phase": "train", "launch": "ahead", "exposed": 0.001, "fetch": 0.02}
    found = {"cells": [{**cell, "hidden": 0.95}, {**cell, "layers": [3], "hidden": None, "exposed_error": 0.0042}]}
    lines = hidden_table(found, "train", "ahead").splitlines()
    assert lines[2] == "| s | 20.0 | 1.0 ms, 95% hidden | 1.0 ± 4.2 ms |"


def test_disturbed_rounds_are_measured_again_and_counted_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    made: list[int] = []
    clock = [0.0, 0.0]

    def one_round() -> int:
        clock[0] += 1.0
        clock[1] += shares[len(made)] * (overlap.os.cpu_count() or 1)
        made.append(len(made))
        return made[-1]

    monkeypatch.setattr(overlap.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(overlap, "foreign_seconds", lambda: clock[1])
    for given, expected in (
        ([0.0, 0.5, 0.05, 0.2, 0.0], ([0, 2, 4], 0)),
        ([0.5, 0.0] + [0.3] * 7, ([1, 0, 2], 2)),
    ):
        shares[:], made[:] = given, []
        assert overlap.undisturbed(one_round, 3, 0.1) == expected and len(made) == len(given)
    made.clear()
    shares[:] = [0.9] * 3
    assert overlap.undisturbed(one_round, 3, None) == ([0, 1, 2], 0)


def test_freed_memory_is_kept_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(overlap, "keep_freed_memory", lambda: kept.append(1))
    measure(_config(stores=["host"], placements=[[1]], phases=["prefill"]), quiet=True)
    assert not kept
    measure(_config(stores=["host"], placements=[[1]], phases=["prefill"], keep=True), quiet=True)
    assert kept


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_large_temporaries_are_not_faulted_in_again_when_memory_is_kept() -> None:
    """In a process of its own, since it cannot be undone: page faults of 32 MB allocated again and again."""
    program = """
import resource, sys, torch
from engram.eval.overlap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc")
    sys.exit()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    torch.ones(2**23)
before = faults()
for _ in range(5):
    torch.ones(2**23)
print(faults() - before)
"""
    found = [
        subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout.strip()
        for how in ("keep", "give back")
    ]
    if found[0] == "no glibc" or int(found[1]) < 20_000:
        pytest.skip("another C library, or huge pages")
    assert int(found[0]) <= int(found[1]) / 3


def test_what_this_process_computes_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {"user": 5.0, "nice": 0.5, "system": 2.0, "idle": 100.0, "iowait": 7.0, "guest": 3.0}
    monkeypatch.setattr(info.psutil, "cpu_times", lambda: SimpleNamespace(**cores))
    own = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=4.0, system=1.0))
    monkeypatch.setattr(info.psutil, "Process", lambda: own)
    assert info.foreign_seconds() == 2.5


def test_the_first_block_with_nothing_exposed() -> None:
    cells = [
        {"layers": layers, "store": "s", "phase": "prefill", "launch": "entry", "exposed": exposed, "t_ready": 1.0}
        for layers, exposed in (([2], 0.01), ([0], 0.4), ([1], 0.2), ([0, 1], 0.0))
    ]
    assert first_hidden(cells) == {"s/prefill/entry": 2}
    assert first_hidden(cells[1:3]) == {"s/prefill/entry": None}


def test_an_emulated_link_takes_at_least_its_arithmetic() -> None:
    store = EmulatedStore(TableSpec(100, 8, zeros=True), Emulation(latency=0.01, bandwidth=64_000))
    assert store.seconds(20) == pytest.approx(0.01 + 20 * 32 / 64_000)
    began = overlap.time.perf_counter()
    store.gather(torch.arange(20))
    assert overlap.time.perf_counter() - began >= 0.02


def test_the_variants_fetch_when_they_say_they_do(tmp_path: Path) -> None:
    """Counted, not timed: who launches how many fetches, and for which forward."""
    cfg = _config(stores=["host"])
    site = Site(cfg, (1,), "host", tmp_path, build(cfg.backbone, cfg.vocab_size, cfg.seed))
    table = site.handle.memory.layer(1).table
    assert table.fetcher is not None
    counters = table.fetcher.counters
    cell = Cell(site, "prefill", "entry")
    cell.without()
    assert counters.fetches == 0
    cell.ready()
    assert (counters.fetches, counters.ahead) == (1, 1)
    cell.sync()
    cell.prefetched()
    assert (counters.fetches, counters.ahead) == (3, 1)
    train = Cell(site, "train", "ahead")
    patched = counters.patched_rows
    train.prefetched()
    assert counters.updates == 2, "of the step before, and of the timed one"
    assert counters.ahead == 3 and len(site.handle.memory.ahead()) == 1
    assert counters.patched_rows > patched, "the step before changed rows of the timed one, and this one of the next"
    ahead, updates, fetches = counters.ahead, counters.updates, counters.fetches
    for variant in (train.sync, train.without, train.sync):
        variant()
    assert counters.ahead == ahead, "what one variant prefetched serves no other"
    assert (counters.updates, counters.fetches) == (updates + 4, fetches + 4)
    train.ready()
    assert (counters.updates, counters.fetches, counters.ahead) == (updates + 6, fetches + 6, ahead + 2)


def test_decoding_goes_on_behind_a_cache_and_always_at_the_same_place(tmp_path: Path) -> None:
    """Every variant reads the rows of the whole text, and leaves both caches as they were."""
    cfg = _config(stores=["host"])
    site = Site(cfg, (1,), "host", tmp_path, build(cfg.backbone, cfg.vocab_size, cfg.seed))
    cell, layer = Cell(site, "decode", "entry"), site.handle.memory.layer(1)
    fetcher = layer.table.fetcher
    assert fetcher is not None
    state = cell.caches[True].layers[-1].state
    state.settle()
    prompts = torch.cat(state._ids.last(cfg.seq_len), dim=1)
    ahead = fetcher.counters.ahead
    for name in ("prefetched", "ready", "sync", "without"):
        fetches = fetcher.counters.fetches
        getattr(cell, name)()
        assert [cache.get_seq_length() for cache in cell.caches.values()] == [cfg.seq_len] * 2
        assert fetcher.counters.fetches == fetches + (name != "without")
        if name != "without":
            whole = torch.cat([prompts, cell.batches[cell.turn % len(cell.batches)]], dim=1)
            assert torch.equal(layer.taps["rows"], layer.hash.rows(whole)[:, -1:])
    assert fetcher.counters.ahead == ahead + 1, "rows that were asked for behind this very text"


def test_only_a_prefetched_step_begins_while_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _config(stores=["host"])
    site = Site(cfg, (1,), "host", tmp_path, build(cfg.backbone, cfg.vocab_size, cfg.seed))
    fetcher = site.handle.memory.layer(1).table.fetcher
    assert fetcher is not None
    cell, drained = Cell(site, "train", "ahead"), []
    original = fetcher.drain
    monkeypatch.setattr(fetcher, "drain", lambda: drained.append(1) or original())
    for variant, count in (("ready", 1), ("sync", 1), ("without", 1), ("prefetched", 0)):
        drained.clear()
        getattr(cell, variant)()
        assert len(drained) == count, variant


def test_every_cell_is_measured_and_complete() -> None:
    found = measure(_config(), quiet=True)
    assert len(found["cells"]) == 3 * 2 * (1 + 1 + 2)
    for cell in found["cells"]:
        assert all(cell[f"t_{name}"] > 0 for name in VARIANTS)
        assert cell["rows_per_token"] == 2 * len(cell["layers"]) and cell["row_bytes"] == 32
        assert cell["tokens"] == (2 if cell["phase"] == "decode" else 12) and cell["kind"] == "host"
        assert (cell["hidden"] is None) == (cell["reason"] is not None) and cell["disturbed"] == 0
    assert torch.get_num_threads() == 1
    json.dumps(found)


def test_rows_in_a_file_are_measured_and_the_file_is_gone_afterwards(tmp_path: Path) -> None:
    cfg = _config(stores=["disk"], folder=str(tmp_path), disk={"backend": "threads", "direct": False})
    found = measure(cfg, quiet=True)
    assert len(found["cells"]) == 12 and not list(tmp_path.iterdir())
    for cell in found["cells"]:
        assert cell["kind"] == "disk" and "threads" in cell["way"] and cell["resident_bytes"] > 0


def test_an_exposed_fetch_at_block_0_is_seen() -> None:
    """A link of 60 ms in front of a forward of a millisecond: nothing can hide it at the first block."""
    cfg = _config(stores=["link"], emulated={"link": {"latency": 0.06}}, placements=[[0]], phases=["prefill"], rounds=5)
    cell = measure(cfg, quiet=True)["cells"][0]
    assert cell["fetch"] > 0.03 and cell["hidden"] < 0.5
    assert cell["predicted"] == pytest.approx(0.06 + 12 * 2 * 32 / 1e9), "no window at block 0"
    assert cell["prediction_error"] == pytest.approx(cell["exposed"] - cell["predicted"])
    assert first_hidden([cell]) == {"link/prefill/entry": None}


def test_the_command_writes_json_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(TINY), encoding="utf-8")
    settings = ["--set", "placements=[[0],[1]]", "--set", "phases=[prefill]"]
    assert main(["overlap", str(config), *settings, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"hardware", "cells"} <= set(printed) and len(printed["cells"]) == 4
    assert json.loads((tmp_path / "overlap.json").read_text()) == printed
    assert (tmp_path / "overlap-prefill-entry.png").stat().st_size > 1000
    assert main(["overlap", str(config), *settings]) == 0
    assert "first block with nothing exposed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stores": ["tape"]}, "stores: 'tape' is not known; use device, host, pinned, disk, link"),
        ({"placements": [[2]]}, r"placements: \[2\]; the backbone has blocks 0..1"),
        ({"phases": ["sleep"]}, "phases"),
        ({"rounds": 1}, "rounds: 1 must be at least 3"),
        ({"foreign": 1.5}, "foreign: 1.5 must lie between 0 and 1, or null"),
        ({"memory": {"head": 1}}, "memory.head: unknown key"),
    ],
)
def test_bad_configurations_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**changes)


def test_a_run_that_is_cut_off_leaves_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sites = overlap.Site, []

    def second_fails(*given: Any) -> Any:
        sites.append(given[1])
        if len(sites) == 2:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(overlap, "Site", second_fails)
    path = tmp_path / "small.yaml"
    cfg = _config(stores=["host"], placements=[[0], [1]], phases=["prefill"])
    path.write_text(json.dumps(to_dict(cfg)), encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        overlap.run_config(str(path), [], str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "overlap.json").read_text(encoding="utf-8"))
    assert [cell["layers"] for cell in found["cells"]] == [[0]] and found["hardware"] and found["first_hidden"]


def test_every_site_begins_with_the_same_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training at one site leaves no trace at the next: weights are the first ones, hooks and memory are gone."""
    seen: list[tuple[float, int]] = []
    original = overlap.Site

    def look(cfg: Any, layers: Any, store: Any, folder: Any, model: Any) -> Any:
        weights = sum(float(p.detach().double().sum()) for p in model.parameters())
        hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
        assert not hasattr(model, "engram")
        seen.append((weights, hooks))
        return original(cfg, layers, store, folder, model)

    monkeypatch.setattr(overlap, "Site", look)
    measure(_config(stores=["host"], placements=[[0], [1]], phases=["train"]), quiet=True)
    assert len(seen) == 2 and seen[0] == seen[1]


@pytest.mark.parametrize("path", sorted((CONFIGS / "overlap").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    cfg = from_dict(OverlapConfig, load_yaml(path))
    assert (0,) in cfg.placements and len(set(cfg.placements)) == len(cfg.placements)
    if path.stem == "cpu":
        assert {(block,) for block in range(cfg.backbone.blocks)} <= set(cfg.placements)
