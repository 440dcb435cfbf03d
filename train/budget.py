"""Iso-parameter, iso-FLOP arms: the same budget as a pure mixture of experts, part of it spent on memory rows.

    arms = plan_grid(backbone, memory, rhos=(1.0, 0.8, 0.6), seq_len=256, vocab_size=4096)
    rich.print(describe(arms))

rho is the share of *inactive* parameters that routed experts hold (paper, section 3.1). From rho=1 to rho=0 an arm
loses routed experts; three things happen so that the comparison stays fair:
  1. the memory's projections, convolution and gate cost FLOPs, the shorter router saves some, and the difference is
     taken from the FFN width of the leading dense block (left alone it is 5.5 % at a tiny size);
  2. every parameter that is free by then becomes table rows;
  3. totals and FLOPs per token must agree with rho=1 within the tolerance, or `plan_arm` does with the numbers.
Token embeddings and the output head stand outside the budget, as in the paper, and are reported beside it.

Letters: D hidden width, M memory width, S residual streams, C columns, W row width, K convolution taps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from engram.backbone import BackboneConfig, active_flops, parameter_counts
from engram.config import EngramConfig
from engram.hashing import total_rows
from engram.strict import ConfigError, choice, require, to_dict

Mode = Literal["iso", "on_top"]

TOLERANCE = 0.005
COLUMNS = (
    ("rho", "achieved_rho"),
    ("experts", "experts"),
    ("FFN width", "ffn_width"),
    ("row base", "rows"),
    ("total", "total"),
    ("off", "total_off"),
    ("active", "active"),
    ("table", "table"),
    ("FLOPs/token", "flops"),
    ("off", "flops_off"),
    ("embedding", "embedding"),
    ("head", "head"),
)
"""Heading -> key of `Arm.row`, in printing order."""


class BudgetError(ConfigError):
    """No arm can be built within the budget; the message says what is missing and what would do."""


@dataclass(frozen=True)
class Arm:
    """One arm of an experiment: what to build, and what it costs next to rho=1.

    rho              the share asked for; `achieved_rho` is the share of the arm as built.
    backbone, memory what to build; memory is None at rho=1.
    seq_len, vocab_size   what FLOPs and embeddings were counted for.
    parameters       backbone parts of `parameter_counts`, the memory's "value", "key", "norms", "conv" under
                     "memory_*", its "table", and "total", "active", "inactive" of both together.
    flops            the same for forward FLOPs of one token, "total" without head.
    reference        {"parameters", "flops"}: totals of rho=1.
    total_off, flops_off   relative deviation from the reference.
    """

    rho: float
    mode: Mode
    backbone: BackboneConfig
    memory: EngramConfig | None
    seq_len: int
    vocab_size: int
    parameters: dict[str, int]
    flops: dict[str, int]
    reference: dict[str, int]
    achieved_rho: float
    total_off: float
    flops_off: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, kept in every result file."""
        return to_dict(self)

    def row(self) -> dict[str, int | float]:
        """The numbers of one printed line, by the keys of COLUMNS; "rows" is the largest table base."""
        rows = 0 if self.memory is None else max(self.memory.bases)
        return {
            "achieved_rho": self.achieved_rho,
            "experts": self.backbone.experts if self.backbone.kind == "moe" else 0,
            "ffn_width": self.backbone.ffn_width,
            "rows": rows,
            "total": self.parameters["total"],
            "total_off": self.total_off,
            "active": self.parameters["active"],
            "table": self.parameters["table"],
            "flops": self.flops["total"],
            "flops_off": self.flops_off,
            "embedding": self.parameters["embedding"],
            "head": self.parameters["head"],
        }


def memory_parameters(cfg: EngramConfig) -> dict[str, int]:
    """Parameters of a memory over all its layers: "value", "key", "norms", "conv", their sum "dense", and "table"."""
    width, streams, memory = cfg.hidden_size, cfg.branches, cfg.memory_width
    gated, bias = cfg.gate != "none", int(cfg.bias)
    one = {
        "value": (memory + bias) * width if cfg.combine == "concat" else 0,
        "key": streams * (memory + bias) * width if gated else 0,
        "norms": streams * width * (2 * gated + (cfg.conv_kernel > 0)),
        "conv": cfg.conv_kernel * streams * width,
    }
    parts = {name: len(cfg.layers) * count for name, count in one.items()}
    return {**parts, "dense": sum(parts.values()), "table": _table(cfg)}


def memory_flops(cfg: EngramConfig) -> dict[str, int]:
    """Forward FLOPs of one token (2 per multiply-add) over all layers: "value", "key", "gate", "conv", sum "total"."""
    width, streams, memory = cfg.hidden_size, cfg.branches, cfg.memory_width
    gated = cfg.gate != "none"
    one = {
        "value": 2 * memory * width if cfg.combine == "concat" else 0,
        "key": 2 * streams * memory * width if gated else 0,
        "gate": 2 * streams * width if gated else 0,
        "conv": 2 * cfg.conv_kernel * streams * width,
    }
    parts = {name: len(cfg.layers) * count for name, count in one.items()}
    return {**parts, "total": sum(parts.values())}


def rows_for(memory: EngramConfig, values: int) -> EngramConfig:
    """`memory` with the table base whose rows hold as nearly `values` parameters as table sizes allow.

    Bases given per order keep their proportions. Raises BudgetError when even a base of 2 is too large.
    """
    per_unit = sum(base / memory.bases[0] for base in memory.bases) * memory.heads * len(memory.layers)
    high = max(3, int(values / memory.head_dim / per_unit) + 2)
    while _table(_scaled(memory, high)) < values:
        high *= 2
    step, low = 1, high - 1
    while low > 2 and _table(_scaled(memory, low)) > values:
        step *= 2
        low = max(2, low - step)
    while high - low > 1:
        middle = (low + high) // 2
        if _table(_scaled(memory, middle)) <= values:
            low = middle
        else:
            high = middle
    best = min((_scaled(memory, base) for base in (low, high)), key=lambda cfg: abs(_table(cfg) - values))
    smallest = _table(_scaled(memory, 2))
    if values < smallest:
        raise BudgetError(
            f"rows: {values:,} free parameters make a table base below 2 ({memory.columns} columns of width "
            f"{memory.head_dim} in {len(memory.layers)} layer(s) need at least {smallest:,}); "
            "use a smaller rho, fewer heads or a smaller head_dim"
        )
    return best


def plan_arm(
    backbone: BackboneConfig,
    memory: EngramConfig,
    rho: float,
    *,
    seq_len: int,
    vocab_size: int,
    mode: Mode = "iso",
    extra: int | None = None,
    tolerance: float = TOLERANCE,
) -> Arm:
    """The arm of share `rho` for a backbone that describes rho=1 and a memory template (its `rows` are solved for).

    mode "iso": routed experts per block are top_k + rho * inactive; total parameters and active FLOPs (at `seq_len`,
    forward, per token) agree with rho=1 within `tolerance`. rho=1 has no memory, rho=0 no expert beyond top_k.
    mode "on_top" (paper, section 7.3): the backbone stays whole (rho must be 1) and the memory is added, with its own
    rows, or with rows for `extra` table parameters.
    Raises ConfigError on values out of range, BudgetError when no such arm exists.
    """
    choice("mode", mode, ("iso", "on_top"))
    require(0 <= rho <= 1, f"rho: {rho} must lie in 0..1")
    require(
        memory.hidden_size == backbone.hidden_size,
        f"memory.hidden_size: {memory.hidden_size} differs from the backbone's {backbone.hidden_size}",
    )
    deepest = max(memory.layers)
    require(
        deepest < backbone.blocks,
        f"memory.layers: block {deepest} does not exist; the backbone has blocks 0..{backbone.blocks - 1}",
    )
    if mode == "on_top":
        require(rho == 1, f"rho: {rho} with mode 'on_top'; the backbone keeps every expert there, leave rho at 1")
        require(extra is None or extra > 0, f"extra: {extra} must be a number of table parameters above 0")
        return _arm(
            rho, mode, backbone, backbone, memory if extra is None else rows_for(memory, extra), seq_len, vocab_size
        )
    require(extra is None, f"extra: {extra} exists for mode 'on_top' only")
    if rho == 1:
        return _arm(rho, mode, backbone, backbone, None, seq_len, vocab_size)
    require(
        backbone.kind == "moe" and backbone.top_k >= 2,
        f"backbone: kind {backbone.kind!r} with top_k {backbone.top_k}; rho needs routed experts and a top_k of at "
        "least 2 (at rho=0 only the active experts remain); use mode 'on_top' for a dense backbone",
    )
    smaller = dataclasses.replace(backbone, experts=backbone.top_k + _kept(rho, backbone.inactive_experts))
    smaller = _pay_from_ffn(backbone, smaller, memory, seq_len)
    free = parameter_counts(backbone)["total"] - parameter_counts(smaller)["total"] - memory_parameters(memory)["dense"]
    arm = _arm(rho, mode, backbone, smaller, rows_for(memory, free), seq_len, vocab_size)
    if max(abs(arm.total_off), abs(arm.flops_off)) > tolerance:
        raise BudgetError(
            f"rho {rho}: total parameters {arm.parameters['total']:,} against {arm.reference['parameters']:,} "
            f"({arm.total_off:+.2%}), FLOPs per token {arm.flops['total']:,} against {arm.reference['flops']:,} "
            f"({arm.flops_off:+.2%}); the tolerance is {tolerance:.2%}; fewer memory layers, orders or heads, or a "
            "larger backbone, give finer steps"
        )
    return arm


def plan_grid(
    backbone: BackboneConfig,
    memory: EngramConfig,
    rhos: Iterable[float],
    *,
    seq_len: int,
    vocab_size: int,
    tolerance: float = TOLERANCE,
) -> list[Arm]:
    """The iso arms of several shares, in the order given. Raises as `plan_arm` does, before anything is trained."""
    return [
        plan_arm(backbone, memory, rho, seq_len=seq_len, vocab_size=vocab_size, tolerance=tolerance) for rho in rhos
    ]


def describe(arms: Sequence[Arm]) -> Table:
    """A rich table of the arms: shares, sizes, totals, FLOPs per token and their deviations from rho=1."""
    table = Table(title="budget (embedding and head stand outside it)", title_justify="left")
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for arm in arms:
        row = arm.row()
        table.add_row(*(_cell(key, row[key]) for _, key in COLUMNS))
    return table


def _cell(key: str, value: int | float) -> str:
    if key.endswith("_off"):
        return f"{value:+.3%}"
    if isinstance(value, int):
        return f"{value / 1e6:.3f}M" if value >= 1e5 else f"{value:,}"
    return f"{value:.3f}"


def _kept(rho: float, inactive: int) -> int:
    """Inactive routed experts that stay. Raises BudgetError unless rho * inactive is a whole number."""
    kept = rho * inactive
    if abs(kept - round(kept)) > 1e-6:
        below, above = int(kept), int(kept) + 1
        raise BudgetError(
            f"rho: {rho} of {inactive} inactive experts is {kept:.4g} experts; the next shares that are whole are "
            f"{below / inactive:.6g} ({below}) and {above / inactive:.6g} ({above}); 20 inactive experts make every "
            "step of 0.05 whole"
        )
    return round(kept)


def _pay_from_ffn(full: BackboneConfig, arm: BackboneConfig, memory: EngramConfig, seq_len: int) -> BackboneConfig:
    """Narrow the leading dense FFN by what the memory's FLOPs exceed the router's savings."""
    extra = active_flops(arm, seq_len)["total"] + memory_flops(memory)["total"] - active_flops(full, seq_len)["total"]
    require(full.first_dense >= 1, "first_dense: 0 leaves no dense FFN that could pay for the memory's FLOPs; use 1")
    unit = 6 * full.hidden_size * full.first_dense
    width = full.ffn_width - round(extra / unit)
    if width < 1:
        raise BudgetError(
            f"ffn_width: {full.ffn_width} is too narrow to pay for the memory's {extra:,} extra FLOPs per token "
            f"({unit:,} per unit of width over {full.first_dense} block(s)); it must be at least "
            f"{full.ffn_width - width + 1}, or the memory narrower"
        )
    return dataclasses.replace(arm, ffn_width=width)


def _arm(
    rho: float,
    mode: Mode,
    full: BackboneConfig,
    backbone: BackboneConfig,
    memory: EngramConfig | None,
    seq_len: int,
    vocab_size: int,
) -> Arm:
    """Count one arm against rho=1. A token reads C rows of each layer: these table values are active."""
    counts, flops = parameter_counts(backbone, vocab_size), active_flops(backbone, seq_len, vocab_size)
    whole, whole_flops = parameter_counts(full)["total"], active_flops(full, seq_len)["total"]
    held = dict.fromkeys(("value", "key", "norms", "conv", "dense", "table"), 0)
    spent = dict.fromkeys(("value", "key", "gate", "conv", "total"), 0)
    read = 0
    if memory is not None:
        held, spent = memory_parameters(memory), memory_flops(memory)
        read = len(memory.layers) * memory.columns * memory.head_dim
    total = counts["total"] + held["dense"] + held["table"]
    inactive = counts["inactive_routed"] + held["table"] - read
    return Arm(
        rho=rho,
        mode=mode,
        backbone=backbone,
        memory=memory,
        seq_len=seq_len,
        vocab_size=vocab_size,
        parameters={
            **counts,
            **{f"memory_{name}": held[name] for name in ("value", "key", "norms", "conv", "dense")},
            "table": held["table"],
            "total": total,
            "active": total - inactive,
            "inactive": inactive,
        },
        flops={
            **flops,
            **{f"memory_{name}": spent[name] for name in ("value", "key", "gate", "conv")},
            "total": flops["total"] + spent["total"],
        },
        reference={"parameters": whole, "flops": whole_flops},
        achieved_rho=counts["inactive_routed"] / inactive if inactive else 1.0,
        total_off=total / whole - 1,
        flops_off=(flops["total"] + spent["total"]) / whole_flops - 1,
    )


def _scaled(memory: EngramConfig, base: int) -> EngramConfig:
    """`memory` with first base `base`, the other orders in proportion."""
    if isinstance(memory.rows, int):
        return memory.replace(rows=base)
    return memory.replace(rows=tuple(max(2, round(base * other / memory.rows[0])) for other in memory.rows))


def _table(cfg: EngramConfig) -> int:
    return sum(total_rows(cfg, layer) for layer in cfg.layers) * cfg.head_dim
