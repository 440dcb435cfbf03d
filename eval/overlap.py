"""How much of the retrieval each layer placement hides: `engram overlap CONFIG`.

    engram overlap configs/overlap/cpu.yaml --json      # {"hardware", "cells": [...]}, times in seconds

For every placement, store and phase the same step is timed in four variants, taking turns in random order:
    t_without    memory switched off
    t_ready      rows already in the layer's buffer
    t_sync       rows fetched by the layer when it needs them
    t_prefetch   rows requested early: at model entry, or one batch ahead
fetch = t_sync - t_ready; exposed = t_prefetch - t_ready; hidden = 1 - exposed / fetch;
overhead = t_prefetch / t_without - 1.
`hidden` is null where fetch is under 5 % of t_ready: then it is noise. Times are medians, with quartiles beside them;
`exposed_error` is half of a 95 % interval of the exposed time, from its single rounds.

On a CPU one core is left to the fetch, in all variants. Decode is one new token a sequence behind `seq_len` in a cache.
One batch ahead is measured as a training loop has it: every timed step follows another training step, before which its
rows were requested, so that the update of that step is patched into them; only `prefetch` begins while the rows of that
step are still being written, and fetches those of the next one meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import engram.optim
from engram.attaching import attach
from engram.backbone import BackboneConfig, active_flops, build
from engram.config import EngramConfig
from engram.eval.exposure import VARIANTS, first_hidden, summarise_times
from engram.eval.figures import exposed_by_layer, save_png
from engram.eval.plan import Speed, exposed_times, fetch_time
from engram.eval.report import write_json
from engram.handles import Handle
from engram.info import foreign_seconds, machine
from engram.prefetch import Fetcher
from engram.stores import DiskStore, HostStore, TableSpec
from engram.strict import apply_overrides, check_fields, from_dict, load_yaml, require, to_dict

FILL = 65_536  # rows written to a new file at a time
Phase = Literal["prefill", "decode", "train"]


@dataclass(frozen=True)
class Emulation:
    """A store whose fetch takes `latency` seconds plus its bytes over `bandwidth` (bytes per second)."""

    latency: float = 0.0
    bandwidth: float = 1e9


@dataclass(frozen=True)
class OverlapConfig:
    """What is measured.

    placements  lists of 0-based memory blocks.
    stores      "device", "host", "pinned", "disk", or names of `emulated`.
    disk        options of DiskStore ("backend", "direct", "threads"); the file is made in `folder` and removed again.
    phases      "prefill", "decode" (one token a sequence), "train" (forward, backward, update).
    memory      EngramConfig fields; layers, placement and hidden size are filled in.
    pool        different batches that take turns, so that rows are not in the processor's cache.
    threads     compute threads; null is all cores but one.
    device      "auto" is a GPU where there is one. dtype is the backbone's.
    keep        freed memory stays with the process, where the C library can (glibc). Else large temporaries are given
                back and faulted in again, in some steps and not in others: 30 of 130 ms in one training step.
    foreign     share of all cores; a round during which other programs took more is measured again (hiding needs a free
                core), until there are three times `rounds`. Null takes every round.
    """

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    memory: dict[str, Any] = field(default_factory=dict)
    placements: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,))
    stores: tuple[str, ...] = ("host",)
    emulated: dict[str, Emulation] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)
    folder: str | None = None
    phases: tuple[Phase, ...] = ("prefill", "train")
    vocab_size: int = 4096
    batch: int = 4
    seq_len: int = 128
    rounds: int = 15
    warm_up: int = 2
    pool: int = 6
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    keep: bool = False
    foreign: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        known = ("device", "host", "pinned", "disk", *self.emulated)
        for store in self.stores:
            require(store in known, f"stores: {store!r} is not known; use {', '.join(known)}")
        for layers in self.placements:
            require(
                bool(layers) and max(layers) < self.backbone.blocks,
                f"placements: {list(layers)}; the backbone has blocks 0..{self.backbone.blocks - 1}",
            )
            self.engram(layers, "device")
        for name in ("batch", "seq_len", "pool"):
            require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} must be at least 1")
        require(self.rounds >= 3, f"rounds: {self.rounds} must be at least 3")
        gpu = torch.cuda.is_available()
        require(self.device != "cuda" or gpu, "device: 'cuda' is asked for, but there is no CUDA device")
        require(
            self.foreign is None or 0 < self.foreign < 1, f"foreign: {self.foreign} must lie between 0 and 1, or null"
        )

    @property
    def place(self) -> torch.device:
        """Where the model computes."""
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")

    def engram(self, layers: tuple[int, ...], store: str) -> EngramConfig:
        """The memory of one cell. Emulated stores are host stores that take their time; the file is put in later."""
        placement = "host" if store == "disk" or store in self.emulated else store
        filled = {"hidden_size": self.backbone.hidden_size, "seed": self.seed, **self.memory}
        return from_dict(EngramConfig, {**filled, "layers": layers, "placement": placement}, "memory")


class EmulatedStore(HostStore):
    """Host rows behind a link of known latency and bandwidth: a benchmark whose right answer is arithmetic."""

    def __init__(self, spec: TableSpec, emulation: Emulation) -> None:
        super().__init__(spec)
        self.emulation = emulation

    def seconds(self, rows: int) -> float:
        """What a gather of `rows` takes."""
        return self.emulation.latency + 4 * rows * self.spec.width / self.emulation.bandwidth

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows [n] -> values [n, W], not before the link's time is over."""
        due = time.perf_counter() + self.seconds(len(ids_n))
        values_nW = super().gather(ids_n, out)
        time.sleep(max(0.0, due - time.perf_counter()))
        return values_nW


def run_config(config: str, overrides: list[str], out: str | None = None) -> dict[str, Any]:
    """`engram overlap`: a YAML path -> the result of `measure`; with `out`, JSON and figures there, too."""
    cfg = from_dict(OverlapConfig, apply_overrides(load_yaml(config), overrides))
    folder = None if out is None else Path(out)
    found = measure(cfg, keep=None if folder is None else lambda part: write_json(folder / "overlap.json", part))
    if folder is not None:
        for phase, launch in sorted({(cell["phase"], cell["launch"]) for cell in found["cells"]}):
            save_png(exposed_by_layer(found["cells"], phase, launch), folder / f"overlap-{phase}-{launch}.png")
    return found


def measure(
    cfg: OverlapConfig, quiet: bool = False, keep: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Every cell of a configuration -> {"config", "hardware", "cells", "first_hidden"}.

    `keep` gets what is there after each site, so that a run that is cut off leaves what it has measured. One backbone
    serves all sites, with its first weights at each.
    """
    before = torch.get_num_threads()
    if cfg.keep:
        keep_freed_memory()
    torch.set_num_threads(cfg.threads or max(1, (os.cpu_count() or 2) - 1))
    plan = [(layers, store) for layers in cfg.placements for store in cfg.stores]
    about = {"config": to_dict(cfg), "hardware": machine()}
    found: dict[str, Any] = {**about, "cells": [], "first_hidden": {}}
    try:
        model = build(cfg.backbone, cfg.vocab_size, cfg.seed).to(cfg.place, getattr(torch, cfg.dtype))
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with (
            tempfile.TemporaryDirectory(prefix="engram-overlap-", dir=cfg.folder) as folder,
            Progress(console=Console(stderr=True), disable=quiet) as bar,
        ):
            for layers, store in bar.track(plan, description="overlap"):
                model.load_state_dict(first)
                site = Site(cfg, layers, store, Path(folder), model)
                for phase in cfg.phases:
                    for launch in ("entry", "ahead") if phase == "train" else ("entry",):
                        found["cells"].append(Cell(site, phase, launch).measure())
                site.handle.memory.close()
                site.handle.detach()
                model.zero_grad()
                del site
                gc.collect()  # tables of hundreds of megabytes are not left to cycles
                found["first_hidden"] = first_hidden(found["cells"])
                if keep is not None:
                    keep(found)
        return found
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> bool:
    """From now on this process keeps memory that it frees -> whether the C library can do that (glibc's mallopt)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    m_trim_threshold, m_mmap_max, never = -1, -4, -1
    return bool(mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, never))


class Site:
    """A model with memory at one placement, rows in one store; made once for all phases."""

    def __init__(self, cfg: OverlapConfig, layers: tuple[int, ...], store: str, folder: Path, model: nn.Module) -> None:
        self.cfg, self.layers, self.store, self.model = cfg, layers, store, model
        self.handle: Handle = attach(self.model, cfg.engram(layers, store))
        for layer in layers:
            table = self.handle.memory.layer(layer).table
            other = self._other_store(table.store.spec, folder)
            if other is not None:
                del table.store
                table.store, table.fetcher = other, Fetcher(other, f"memory layer {layer}")
            if hasattr(table.store, "rows"):
                table.store.rows.uniform_(-0.02, 0.02)  # every page real, in a fraction of the time of initial values

    def _other_store(self, spec: TableSpec, folder: Path) -> Any:
        """The emulated link or the file that takes the place of host rows; None for a store that is there already."""
        if self.store in self.cfg.emulated:
            return EmulatedStore(spec, self.cfg.emulated[self.store])
        if self.store != "disk":
            return None
        path = folder / f"{spec.rows}.safetensors"  # tables of equal size share a file, one after another
        made = path.exists()
        store = DiskStore(path, replace(spec, seed=0), "overlap", **self.cfg.disk)
        for start in range(0, 0 if made else spec.rows, FILL):
            ids = torch.arange(start, min(start + FILL, spec.rows))
            store.update(ids, torch.empty(len(ids), spec.width).uniform_(-0.02, 0.02))
        store.commit_checkpoint(store.prepare_checkpoint())
        return store


class Cell:
    """One phase and launch mode at a site: its four variants."""

    def __init__(self, site: Site, phase: str, launch: str) -> None:
        cfg = site.cfg
        self.cfg, self.layers, self.store, self.phase, self.launch = cfg, site.layers, site.store, phase, launch
        self.model, self.handle = site.model.train(phase == "train"), site.handle
        self.optimizer = engram.optim.build(self.model, lr=1e-4) if phase == "train" else None
        generator = torch.Generator().manual_seed(cfg.seed)
        shape = (cfg.batch, 1 if phase == "decode" else cfg.seq_len)
        drawn = [torch.randint(0, cfg.vocab_size, shape, generator=generator) for _ in range(cfg.pool)]
        self.batches = [batch.to(cfg.place) for batch in drawn]
        self.turn = 0
        self.ahead = launch == "ahead"
        self.caches: dict[bool, Any] = {}  # with memory, and without, which must not see the other's tokens
        if phase == "decode":
            self._read_prompts(torch.randint(0, cfg.vocab_size, (cfg.batch, cfg.seq_len), generator=generator))

    @torch.no_grad()
    def _read_prompts(self, prompts_BT: Tensor) -> None:
        self.caches[True] = self.model(prompts_BT.to(self.cfg.place), use_cache=True).cache
        with self.handle.disabled():
            self.caches[False] = self.model(prompts_BT.to(self.cfg.place), use_cache=True).cache

    def measure(self) -> dict[str, Any]:
        """Time the variants in random order -> the cell as plain data."""
        variants: dict[str, Callable[[], float]] = {
            "without": self.without,
            "ready": self.ready,
            "sync": self.sync,
            "prefetch": self.prefetched,
        }
        shuffle = random.Random(self.cfg.seed)

        def one_round() -> dict[str, float]:
            return {name: variants[name]() for name in shuffle.sample(VARIANTS, len(VARIANTS))}

        for _ in range(self.cfg.warm_up):
            one_round()
        rounds, disturbed = undisturbed(one_round, self.cfg.rounds, self.cfg.foreign)
        times = {name: [one[name] for one in rounds] for name in VARIANTS}
        self.handle.memory.flush()
        stats = [self.handle.memory.layer(layer).table.store for layer in self.layers]
        return {
            "layers": list(self.layers),
            "store": self.store,
            "kind": stats[0].kind,
            "way": getattr(stats[0], "way", "memory"),
            "phase": self.phase,
            "launch": self.launch,
            "batch": self.cfg.batch,
            "tokens": self.batches[0].numel(),
            "rows_per_token": len(self.layers) * self.handle.memory.cfg.columns,
            "row_bytes": 4 * self.handle.memory.cfg.head_dim,
            "resident_bytes": sum(sum(store.bytes_held().values()) for store in stats),
            "disturbed": disturbed,
            **self._with_prediction(summarise_times(times)),
        }

    def _with_prediction(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Add what the model of `engram plan` says the exposed time is, and how far the measurement is from it.

        The fetch is the link's arithmetic where it is emulated, else the measured one; blocks take equal parts of the
        step without memory that belong to blocks by FLOPs. A training step hides one batch ahead behind all of itself;
        launched at entry it has no prediction, since how the step divides into forward and backward is not measured.
        """
        predicted, link = None, self.cfg.emulated.get(self.store)
        fetch = cell["fetch"]
        if link is not None:
            reads = self.batches[0].numel() * self.handle.memory.cfg.columns
            speed = Speed(bandwidth=link.bandwidth, latency=link.latency)
            fetch = fetch_time(speed, reads, 4 * self.handle.memory.cfg.head_dim)[0]
        if self.launch == "ahead":
            predicted = max(0.0, fetch - cell["t_ready"])
        elif self.phase != "train" and len(self.layers) == 1:
            flops = active_flops(self.cfg.backbone, self.batches[0].shape[1], self.cfg.vocab_size)
            share = flops["total"] / (flops["total"] + flops["head"])
            blocks = [cell["t_without"] * share / self.cfg.backbone.blocks] * self.cfg.backbone.blocks
            predicted = exposed_times({self.layers[0]: fetch}, blocks, 0.0, "entry")[self.layers[0]][1]
        error = None if predicted is None else cell["exposed"] - predicted
        return {**cell, "predicted": predicted, "prediction_error": error}

    def without(self) -> float:
        """A step with memory switched off."""
        with self.handle.disabled():
            return self._timed(self._next(request=False), with_memory=False)

    def ready(self) -> float:
        """A step whose rows are in the layer's buffer before it begins."""
        batch = self._next(request=True)
        self._arrive()
        return self._timed(batch, hash_again=True)

    def sync(self) -> float:
        """A step whose layers fetch when they need their rows."""
        batch = self._next(request=False)
        self.handle.memory.launch_at = "layer"
        try:
            return self._timed(batch)
        finally:
            self.handle.memory.launch_at = "entry"

    def prefetched(self) -> float:
        """A step whose rows are requested at its entry; or one batch ahead, while it requests those of the next."""
        batch = self._next(request=self.ahead)
        if not self.ahead:
            return self._timed(batch)
        return self._timed(batch, following=self.batches[(self.turn + 1) % len(self.batches)])

    def _next(self, request: bool) -> Tensor:
        """The batch of the next timed step, its rows requested or not, and before it, one ahead, another step."""
        self.handle.memory.drop_ahead()  # what the variant before has asked for is not this one's
        before = self._take_turn() if self.ahead else None
        batch = self._take_turn()
        if before is not None and request:  # its own rows were requested in the step before it
            self.handle.prefetch(before)
            self._arrive()
        if request:
            self.handle.prefetch(batch, cache=self.caches.get(True))
        if before is not None:
            self._run(before)
        return batch

    def _take_turn(self) -> Tensor:
        self.turn += 1
        return self.batches[self.turn % len(self.batches)]

    def _arrive(self) -> None:
        """Wait until what was requested is there."""
        for step in self.handle.memory.ahead():
            for ticket in step.tickets.values():
                ticket.arrive()

    def _run(self, batch: Tensor, with_memory: bool = True) -> None:
        """One step: a forward, and when training the backward and the update."""
        if self.optimizer is None:
            cache = self.caches.get(with_memory)
            with torch.no_grad():
                self.model(batch, cache=cache, use_cache=cache is not None)
            return
        self.model(batch, use_cache=False).logits.logsumexp(-1).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _timed(
        self, batch: Tensor, following: Tensor | None = None, hash_again: bool = False, with_memory: bool = True
    ) -> float:
        for layer in self.layers:
            fetcher = self.handle.memory.layer(layer).table.fetcher
            if fetcher is not None and following is None:  # writes of the step before are not this step's
                fetcher.drain()
        cache = self.caches.get(with_memory)
        history = cache.layers[-1].state.history(len(batch)) if hash_again and cache is not None else None
        _settle()
        began = time.perf_counter()
        if hash_again:  # every variant hashes once in its time; this one's rows were hashed before it
            self.handle.memory.hash_ids(batch, history=history)
        if following is not None:
            self.handle.prefetch(following)
        self._run(batch, with_memory)
        if following is not None:  # one batch ahead: its fetch belongs to this step
            self._arrive()
        _settle()
        seconds = time.perf_counter() - began
        if cache is not None:
            cache.crop(-batch.shape[1])  # every step decodes at the same place
        return seconds


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def undisturbed(one_round: Callable[[], Any], count: int, limit: float | None) -> tuple[list[Any], int]:
    """Measure until `count` rounds passed without others taking more than `limit` of all cores -> they, and 0.

    At most three times `count` are made: where fewer were clean, disturbed ones fill up, and their number comes back.
    """
    clean: list[Any] = []
    rest: list[Any] = []
    while len(clean) < count and len(clean) + len(rest) < 3 * count:
        began, others = time.perf_counter(), foreign_seconds()
        found = one_round()
        share = (foreign_seconds() - others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
        (clean if limit is None or share <= limit else rest).append(found)
    return (clean + rest)[:count], max(0, count - len(clean))
