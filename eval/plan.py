"""What a placement of the rows costs, from a model of the hardware: `engram plan`.

    engram plan configs/plan/deepseek-v4.1-flash.yaml
    engram plan configs/plan/deepseek-v4.1-flash.yaml --set machine=gb300 --set tokens=64 --json

For every memory layer and store: bytes a token, time of the fetch, window in which it can hide, exposed time, bytes by
tier. The formulas (docs/plan.md explains them):

    fetch   = latency + max(wire bytes / bandwidth, reads / reads per second)
    wire    = reads * row bytes, each row rounded up to the granule
    window  = compute before the layer (launch "entry"), the whole step ("one_ahead"), or nothing ("layer")
    exposed = what of the fetches, one after the other on one link, the layer still has to wait for

Figures of links and machines come from configs/hardware, each with its source. Where one is unknown the plan refuses.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

import engram
from engram import families
from engram.config import EngramConfig
from engram.hashing import total_rows
from engram.stores.formats import FORMATS, get_format
from engram.strict import ConfigError, apply_overrides, check_fields, choice, from_dict, load_yaml, require, to_dict

CONFIGS = Path(str(engram.__file__)).parent / "configs"
GATHER_SHARE = 0.79
"""Share of the memory bandwidth that a row gather reaches: FBGEMM PR 3993, H100, 2.65 of 3.35 TB/s."""
SECTOR = 32  # bytes: the least that a GPU reads from its memory

Launch = Literal["entry", "one_ahead", "layer"]
Kind = Literal["device", "pinned", "host", "disk", "cxl"]
TIER: dict[str, str] = {"device": "device", "pinned": "host", "host": "host", "disk": "disk", "cxl": "cxl"}
"""Where the table of a store of each kind lies."""


@dataclass(frozen=True)
class Figure:
    """A number with its source; "unknown" where none is published, and the source then says what is known."""

    value: float | Literal["unknown"]
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        good = self.value == "unknown" or self.value > 0
        require(good, f"value: {self.value} must be above 0, or unknown")
        require(bool(self.source.strip()), "source: every figure needs one")


@dataclass(frozen=True)
class Link:
    """A way from a store to the device. Bytes, seconds, bytes a second.

    peak_bandwidth    of the specification, for comparison only.
    bandwidth         reached with row-sized reads.
    latency           of a fetch of a few rows, launch included.
    reads_per_second  of rows, whatever their size; .inf where bandwidth alone limits.
    granule           least bytes that a read moves.
    """

    title: str
    kind: Literal["link"]
    peak_bandwidth: Figure
    bandwidth: Figure
    latency: Figure
    reads_per_second: Figure
    granule: Figure


@dataclass(frozen=True)
class Machine:
    """One accelerator: bytes, bytes a second, dense FLOPs a second, and the default profile of each kind of store."""

    title: str
    kind: Literal["machine"]
    memory_bytes: Figure
    memory_bandwidth: Figure
    bf16_flops: Figure
    fp8_flops: Figure
    links: dict[str, str]


@dataclass(frozen=True)
class StorePlan:
    """A store to plan for: its kind, a link profile (default: the machine's for that kind), and measured figures, which
    win over the profile's. Kind "device" reads the machine's own memory.

    shared  one link serves all devices, as one drive does (default for kind "disk"); else each device has its own.
    """

    kind: Kind
    profile: str | None = None
    shared: bool | None = None
    bandwidth: float | None = None
    latency: float | None = None
    reads_per_second: float | None = None
    granule: float | None = None


@dataclass(frozen=True)
class BlockTime:
    """Compute time of one block and one step: `seconds` as measured (one number, or one for each block), or a roofline.

    flops_per_token  of one block, forward.
    weight_bytes     that one block reads in a step.
    efficiency       share of peak FLOPs and of memory bandwidth reached; there is no default, since it decides much.
    """

    seconds: float | tuple[float, ...] | None = None
    flops_per_token: float | None = None
    weight_bytes: float = 0.0
    precision: Literal["bf16", "fp8"] = "bf16"
    efficiency: float | None = None


@dataclass(frozen=True)
class PlanConfig:
    """One model on one kind of machine, and the stores that its rows may live in.

    family, memory      a released family, or EngramConfig fields: one of the two.
    layers              blocks with a memory; default: the configuration's.
    row_format          default: the configuration's row_dtype. row_bytes: for layouts that are none of ours.
    blocks, tokens      blocks of the model, tokens a step over all devices.
    stores              name -> store; null takes a store of the base config away.
    devices             that share the step evenly.
    copies              "split": each device holds and fetches its share of the rows; "each": all of them.
    block               compute time of a block. outside_seconds: of the step, outside of the blocks.
    launch              "entry": fetches start at model entry; "one_ahead": one step earlier; "layer": in the layer.
    unique_share        rows really read, over lookups: duplicates in a step are read once.
    hit_share           of those, served by a cache on the device.
    kv_bytes_per_token  of key-value cache, over all devices together.
    row_state           4 bytes of optimizer state a row, on the device.
    """

    name: str
    blocks: int
    tokens: int
    block: BlockTime
    stores: dict[str, StorePlan | None]
    family: str | None = None
    memory: EngramConfig | None = None
    layers: tuple[int, ...] | None = None
    row_format: str | None = None
    row_bytes: int | None = None
    machine: str | None = None
    devices: int = 1
    copies: Literal["split", "each"] = "split"
    outside_seconds: float = 0.0
    launch: Launch = "entry"
    unique_share: float = 1.0
    hit_share: float = 0.0
    kv_bytes_per_token: float | None = None
    row_state: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require((self.family is None) != (self.memory is None), "family, memory: give one of the two")
        for name in ("blocks", "tokens", "devices"):
            require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} must be at least 1")
        require(any(self.stores.values()), "stores: at least one is needed, for example {pinned: {kind: pinned}}")
        require(0 < self.unique_share <= 1, f"unique_share: {self.unique_share} must lie above 0 and up to 1")
        require(0 <= self.hit_share <= 1, f"hit_share: {self.hit_share} must lie in 0..1")
        require(self.outside_seconds >= 0, f"outside_seconds: {self.outside_seconds} must not be negative")
        kv, row = self.kv_bytes_per_token, self.row_bytes
        require(kv is None or kv > 0, f"kv_bytes_per_token: {kv} must be above 0")
        require(row is None or row >= 1, f"row_bytes: {row} must be at least 1")
        config = self.config  # an unknown family or layer is found here
        for layer in config.layers:
            require(0 <= layer < self.blocks, f"layers: {layer} is outside of the model's blocks 0..{self.blocks - 1}")
        choice("row_format", self.row_format or config.row_dtype, tuple(FORMATS))

    @property
    def config(self) -> EngramConfig:
        """The memory's configuration, with this plan's layers."""
        config = families.get(self.family) if self.family is not None else self.memory
        assert config is not None
        return config if self.layers is None else config.replace(layers=self.layers)


@dataclass(frozen=True)
class Speed:
    """Figures of one store, all known: bytes a second, seconds, reads a second, bytes."""

    bandwidth: float
    latency: float
    reads_per_second: float = math.inf
    granule: float = 1


def fetch_time(speed: Speed, reads: int, row_bytes: int) -> tuple[float, str]:
    """Rows read, bytes of a row -> (seconds of the fetch, what bounds it: "bandwidth", "reads", "latency").

    latency + max(wire bytes / bandwidth, reads / reads per second); "latency" where it is the larger part.
    """
    if not reads:
        return 0.0, "nothing"
    moving = reads * math.ceil(row_bytes / speed.granule) * speed.granule / speed.bandwidth
    asking = reads / speed.reads_per_second
    if speed.latency >= max(moving, asking):
        return speed.latency + max(moving, asking), "latency"
    return speed.latency + max(moving, asking), "bandwidth" if moving >= asking else "reads"


def exposed_times(
    fetches: Mapping[int, float], block_seconds: Sequence[float], outside_seconds: float, launch: Launch
) -> dict[int, tuple[float, float]]:
    """Layer -> seconds of its fetch, seconds of each block -> layer -> (window, exposed), seconds.

    Fetches use one link, one after the other in the order of their layers. A wait in one layer gives the later ones
    that much more time. Raises ConfigError for a layer outside of the blocks.
    """
    times: dict[int, tuple[float, float]] = {}
    done = waited = 0.0
    for layer in sorted(fetches):
        window = _window(layer, block_seconds, outside_seconds, launch)
        done += fetches[layer]
        exposed = fetches[layer] if launch == "layer" else max(0.0, done - window - waited)
        waited += exposed
        times[layer] = (window, exposed)
    return times


def first_free_layer(
    fetch: float, block_seconds: Sequence[float], outside_seconds: float, launch: Launch
) -> int | None:
    """Seconds of one fetch -> the first block at which a single memory layer waits for nothing, or None."""
    for layer in range(len(block_seconds)):
        if fetch <= _window(layer, block_seconds, outside_seconds, launch):
            return layer
    return None


def _window(layer: int, block_seconds: Sequence[float], outside_seconds: float, launch: Launch) -> float:
    require(0 <= layer < len(block_seconds), f"layers: {layer} is outside of the blocks 0..{len(block_seconds) - 1}")
    if launch == "layer":
        return 0.0
    return math.fsum(block_seconds[:layer]) if launch == "entry" else math.fsum([*block_seconds, outside_seconds])


def run_config(config: str, overrides: list[str]) -> dict[str, Any]:
    """`engram plan`: a YAML path, or the name of a preset in configs/plan, and overrides -> the plan as plain data."""
    preset = CONFIGS / "plan" / f"{config}.yaml"
    path = preset if preset.is_file() and not Path(config).exists() else Path(config)
    return make_plan(from_dict(PlanConfig, apply_overrides(load_yaml(path), overrides)))


def make_plan(cfg: PlanConfig) -> dict[str, Any]:
    """The plan of all layers and stores, as plain data; seconds and bytes. Raises ConfigError for unknown figures."""
    memory = cfg.config
    machine = None if cfg.machine is None else load_profile(cfg.machine, Machine)
    blocks = block_times(cfg, machine)
    row_bytes = cfg.row_bytes or get_format(cfg.row_format or memory.row_dtype, memory.head_dim).row_bytes
    rows = {layer: total_rows(memory, layer) for layer in memory.layers}
    lookups = cfg.tokens * memory.columns / (cfg.devices if cfg.copies == "split" else 1)
    reads = math.ceil(lookups * cfg.unique_share * (1 - cfg.hit_share))
    plan: dict[str, Any] = {
        "name": cfg.name,
        "machine": None if machine is None else machine.title,
        "devices": cfg.devices,
        "launch": cfg.launch,
        "tokens": cfg.tokens,
        "blocks": cfg.blocks,
        "block_seconds": list(blocks),
        "step_seconds": math.fsum([*blocks, cfg.outside_seconds]),
        "row_bytes": row_bytes,
        "rows": sum(rows.values()),
        "table_bytes": sum(rows.values()) * row_bytes,
        "rows_per_token": memory.columns * len(rows),
        "bytes_per_token": memory.columns * len(rows) * row_bytes,
        "stores": {},
        "cells": [],
        "config": to_dict(cfg),
    }
    for name, store in cfg.stores.items():
        if store is None:
            continue
        speed, sources = resolve(name, store, cfg.machine, machine)
        shared = store.kind == "disk" if store.shared is None else store.shared
        on_link = reads * (cfg.devices if shared else 1)
        fetch, bound = fetch_time(speed, on_link, row_bytes)
        times = exposed_times(dict.fromkeys(rows, fetch), blocks, cfg.outside_seconds, cfg.launch)
        for layer, (window, exposed) in times.items():
            plan["cells"].append(
                {
                    "store": name,
                    "layer": layer,
                    "rows_per_token": memory.columns,
                    "bytes_per_token": memory.columns * row_bytes,
                    "reads": on_link,
                    "fetch": fetch,
                    "bound": bound,
                    "window": window,
                    "exposed": exposed,
                    "hidden": 1 - exposed / fetch if fetch else None,
                }
            )
        total = math.fsum(exposed for _, exposed in times.values())
        plan["stores"][name] = {
            "kind": store.kind,
            "figures": {figure: {"value": getattr(speed, figure), "source": text} for figure, text in sources.items()},
            "exposed": total,
            "overhead": total / plan["step_seconds"],
            "first_free_layer": first_free_layer(fetch, blocks, cfg.outside_seconds, cfg.launch),
            **_memory_of(cfg, store.kind, machine, plan["table_bytes"], plan["rows"], reads * len(rows) * row_bytes),
        }
    return plan


def _memory_of(
    cfg: PlanConfig, kind: Kind, machine: Machine | None, table: int, rows: int, fetched: int
) -> dict[str, Any]:
    """Bytes by tier over all devices, what that frees on them, and the tokens of key-value cache that this holds."""
    on_device = table * (cfg.devices if cfg.copies == "each" else 1)
    buffers = 0 if kind == "device" else fetched * cfg.devices * (2 if cfg.launch == "one_ahead" else 1)
    tiers = {"device": buffers + (4 * rows if cfg.row_state else 0), "host": 0, "disk": 0, "cxl": 0}
    tiers[TIER[kind]] += on_device if kind == "device" else table  # elsewhere one copy serves all devices of a node
    if kind in ("host", "disk"):
        tiers["host"] += buffers  # page-locked staging
    freed = 0 if kind == "device" else on_device - buffers
    known = machine is not None and machine.memory_bytes.value != "unknown"
    share = tiers["device"] / cfg.devices / float(machine.memory_bytes.value) if known and machine else None
    kv = cfg.kv_bytes_per_token
    return {
        "tiers": tiers,
        "device_memory_share": share,
        "freed_bytes": freed,
        "kv_tokens": None if kv is None else max(0, int(freed // kv)),
    }


def block_times(cfg: PlanConfig, machine: Machine | None) -> tuple[float, ...]:
    """Seconds of each block of one step, as given or derived. Raises ConfigError where a figure is missing."""
    block = cfg.block
    if block.seconds is not None:
        require(block.flops_per_token is None, "block: seconds and flops_per_token are both given; give one of them")
        each = (block.seconds,) * cfg.blocks if isinstance(block.seconds, float) else block.seconds
        require(len(each) == cfg.blocks, f"block.seconds: {len(each)} times for {cfg.blocks} blocks; give one for each")
        require(all(0 < s < math.inf for s in each), f"block.seconds: {block.seconds} must be above 0")
        return each
    if block.flops_per_token is None or block.efficiency is None or machine is None:
        raise ConfigError(
            "block: give seconds (measured), or flops_per_token and efficiency together with a machine, "
            f"one of {', '.join(names_of_profiles('machine'))}"
        )
    require(block.flops_per_token > 0, f"block.flops_per_token: {block.flops_per_token} must be above 0")
    require(block.weight_bytes >= 0, f"block.weight_bytes: {block.weight_bytes} must not be negative")
    require(0 < block.efficiency <= 1, f"block.efficiency: {block.efficiency} must lie above 0 and up to 1")
    peak = _known(f"machine {cfg.machine}", machine, f"{block.precision}_flops", "block.seconds")
    seconds = block.flops_per_token * cfg.tokens / (cfg.devices * peak * block.efficiency)
    if block.weight_bytes:
        bandwidth = _known(f"machine {cfg.machine}", machine, "memory_bandwidth", "block.seconds")
        seconds = max(seconds, block.weight_bytes / (cfg.devices * bandwidth * block.efficiency))
    return (seconds,) * cfg.blocks


def resolve(
    name: str, store: StorePlan, machine_name: str | None = None, machine: Machine | None = None
) -> tuple[Speed, dict[str, str]]:
    """A store of a plan -> (its figures, the source of each). Raises ConfigError naming an unknown figure."""
    given = {f.name: getattr(store, f.name) for f in fields(Speed) if getattr(store, f.name) is not None}
    for figure, value in given.items():
        require(value > 0 or (figure == "latency" and value == 0), f"stores.{name}.{figure}: {value} is too small")
    missing = [f.name for f in fields(Speed) if f.name not in given]
    sources = dict.fromkeys(given, "given in the plan")
    profile = store.profile or (machine.links.get(store.kind) if machine is not None else None)
    if store.kind == "device" and profile is None:
        found = {"latency": 0.0, "reads_per_second": math.inf, "granule": float(SECTOR)}
        said = dict.fromkeys(found, "a gather in device memory; its launch is not counted")
        if "bandwidth" in missing:
            if machine is None:
                raise ConfigError(f"stores.{name}.bandwidth: unknown without a machine; give it, or `machine`")
            where = f"machine {machine_name}"
            found["bandwidth"] = GATHER_SHARE * _known(where, machine, "memory_bandwidth", f"stores.{name}.bandwidth")
            said["bandwidth"] = f"{GATHER_SHARE} (FBGEMM PR 3993) of {machine.memory_bandwidth.source}"
        return Speed(**{**found, **given}), {**said, **sources}
    if missing and profile is None:
        of = f"; machine {machine_name} names no published link for kind {store.kind}" if machine is not None else ""
        raise ConfigError(
            f"stores.{name}: {', '.join(missing)} unknown{of}. Give the figures, or `profile`: one of "
            f"{', '.join(names_of_profiles('link'))}"
        )
    if missing and profile is not None:
        link = load_profile(profile, Link)
        for figure in missing:
            given[figure] = _known(f"link {profile}", link, figure, f"stores.{name}.{figure}")
            sources[figure] = f"{profile}: {getattr(link, figure).source}"
    return Speed(**given), sources


def _known(owner: str, profile: Link | Machine, figure: str, remedy: str) -> float:
    """The value of a figure. Raises ConfigError with what its source says when it is unknown."""
    entry: Figure = getattr(profile, figure)
    if entry.value == "unknown":
        raise ConfigError(f"{owner}: {figure} is unknown ({entry.source}); measure it and give {remedy}")
    return entry.value


P = TypeVar("P", Link, Machine)


def load_profile(name: str, cls: type[P]) -> P:
    """A profile of configs/hardware by name, or a YAML file of one's own. Raises ConfigError with the known names."""
    kind = "link" if cls is Link else "machine"
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / "hardware" / f"{name}.yaml"
    if not path.is_file():
        known = names_of_profiles(kind)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"{kind}: profile {name!r} is not known{hint}; choose one of {', '.join(known)}, or a .yaml file"
        )
    data = load_yaml(path)
    if data.get("kind") != kind:
        raise ConfigError(
            f"{kind}: profile {name!r} is a {data.get('kind')}; choose one of {', '.join(names_of_profiles(kind))}"
        )
    return from_dict(cls, data, f"{kind} {name}")


def names_of_profiles(kind: str) -> list[str]:
    """The names in configs/hardware of one kind, "link" or "machine", sorted."""
    return sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml") if load_yaml(path).get("kind") == kind)


def show(plan: dict[str, Any]) -> None:
    """Print the plan: a line for each layer and store, then one for each store."""
    console = Console()
    of = f"{plan['devices']} x {plan['machine'] or 'a device'}"
    block = sum(plan["block_seconds"]) / plan["blocks"]
    console.print(
        f"{plan['name']}: {plan['rows']:,} rows of {plan['row_bytes']} B = {_bytes(plan['table_bytes'])}; "
        f"{plan['rows_per_token']} rows = {_bytes(plan['bytes_per_token'])} a token; {of}, "
        f"{plan['tokens']:,} tokens a step, {plan['blocks']} blocks of {_time(block)}, launch {plan['launch']!r}",
        soft_wrap=True,
    )
    columns = ("store", "layer", "B/token", "reads", "fetch", "bound", "window", "exposed", "hidden")
    cells = Table(*columns, box=None, header_style="bold")
    for cell in plan["cells"]:
        times = (_time(cell["fetch"]), cell["bound"], _time(cell["window"]), _time(cell["exposed"]))
        hidden = "" if cell["hidden"] is None else f"{cell['hidden']:.0%}"
        cells.add_row(
            cell["store"], str(cell["layer"]), str(cell["bytes_per_token"]), f"{cell['reads']:,}", *times, hidden
        )
    console.print(cells)
    for name, store in plan["stores"].items():
        tiers = ", ".join(f"{_bytes(count)} {tier}" for tier, count in store["tiers"].items() if count)
        share, kv, first = store["device_memory_share"], store["kv_tokens"], store["first_free_layer"]
        tiers += "" if share is None else f" ({share:.1%} of device memory)"
        cache = "" if kv is None else f" = {kv:,} tokens of key-value cache"
        freed = f"frees {_bytes(store['freed_bytes'])}{cache}"
        found = "no layer has nothing exposed" if first is None else f"nothing exposed from layer {first} on"
        console.print(
            f"{name}: {tiers}; {freed}; the step is {store['overhead']:.1%} longer; {found}",
            soft_wrap=True,
        )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _time(seconds: float) -> str:
    if not seconds:
        return "0"
    for factor, unit in ((1e9, "ns"), (1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g}\u00a0{unit}"  # does not break in a narrow column
    return f"{seconds:.3g}\u00a0s"
