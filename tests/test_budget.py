"""The planner: what it counts is what is built, and every arm of the grid costs the same."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engram.backbone import BackboneConfig, build, hf_config, parameter_counts
from engram.config import EngramConfig, HashConfig
from engram.hashing import table_sizes
from engram.memory import Memory
from engram.strict import ConfigError, from_dict
from engram.train import budget
from engram.train.budget import (
    Arm,
    BudgetError,
    describe,
    memory_flops,
    memory_parameters,
    plan_arm,
    plan_grid,
    rows_for,
)

BACKBONE = BackboneConfig(hidden_size=64, blocks=5, heads=4, ffn_width=256, experts=22, top_k=2, expert_width=32)
MEMORY = EngramConfig(hidden_size=64, layers=(1,), orders=(2, 3), heads=2, head_dim=8)
SIZE: dict[str, Any] = {"seq_len": 128, "vocab_size": 512}
RHOS = (1.0, 0.95, 0.8, 0.6, 0.4, 0.2, 0.05, 0.0)
MEMORIES = {
    "plain": MEMORY,
    "two_layers": MEMORY.replace(layers=(1, 3), head_dim=4),
    "biased_streams": MEMORY.replace(branches=2, bias=True, head_dim=4),
    "no_gate": MEMORY.replace(gate="none"),
    "no_conv": MEMORY.replace(conv_kernel=0, gate="sigmoid"),
    "per_order": MEMORY.replace(rows=(1000, 3000), head_dim=4),
    "padded": MEMORY.replace(hash=HashConfig(pad_rows_to=128)),
    "odd": MEMORY.replace(hash=HashConfig(engine="polynomial", sizes="odd"), gate="none", conv_kernel=0),
    "sum": EngramConfig(hidden_size=64, layers=(1,), heads=1, head_dim=64, combine="sum", gate="none", conv_kernel=0),
}


def _built(arm: Arm) -> int:
    """Parameters of the arm outside embedding and head, from instantiated modules and their tables."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(arm.backbone, arm.vocab_size))
    outside = ("embed_tokens.weight", "lm_head.weight")
    total = sum(p.numel() for name, p in model.named_parameters() if not name.endswith(outside))
    if arm.memory is not None:
        memory = Memory(arm.memory)
        total += sum(p.numel() for p in memory.parameters())
        total += sum(layer.hash.total_rows for layer in memory.layers.values()) * arm.memory.head_dim
    return total


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_counts_equal_the_built_memory(name: str) -> None:
    cfg = MEMORIES[name]
    counts, memory = memory_parameters(cfg), Memory(cfg)
    real = {n: p.numel() for n, p in memory.named_parameters()}
    assert counts["dense"] == sum(real.values())
    kinds = {
        "value": "value",
        "key": "key",
        "key_norm": "norms",
        "query_norm": "norms",
        "conv_norm": "norms",
        "conv": "conv",
    }
    found = dict.fromkeys(("value", "key", "norms", "conv"), 0)
    for path, count in real.items():
        attribute = path.split(".")[2]  # layers.1.value.weight
        if attribute != "table":
            found[kinds[attribute]] += count
    assert {part: counts[part] for part in found} == found
    assert counts["table"] == sum(sum(sizes) for sizes in table_sizes(cfg).values()) * cfg.head_dim + (
        cfg.head_dim * (-sum(table_sizes(cfg)[1]) % cfg.hash.pad_rows_to)
    )


@pytest.mark.parametrize("name", ["plain", "two_layers", "no_gate", "sum"])
def test_memory_flops_equal_what_the_counter_sees(name: str) -> None:
    cfg = MEMORIES[name]
    memory = Memory(cfg)
    ids_BT = torch.randint(0, 99, (2, 8))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        memory.start(ids_BT)
        for layer in cfg.layers:
            memory(layer, torch.randn(2, 8, 64))
    products = counter.get_flop_counts().get("Global", {})
    seen = sum(n for op, n in products.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    flops = memory_flops(cfg)
    assert seen == 16 * (flops["value"] + flops["key"])
    gated = cfg.gate != "none"
    element_wise = len(cfg.layers) * 64 * 2 * (gated + cfg.conv_kernel)
    assert flops["total"] - flops["value"] - flops["key"] == element_wise


@pytest.mark.parametrize("name", MEMORIES)
def test_every_arm_costs_the_same(name: str) -> None:
    rhos = RHOS if name == "plain" else (1.0, 0.8, 0.0)
    arms = plan_grid(BACKBONE, MEMORIES[name], rhos, **SIZE)
    reference = arms[0]
    assert reference.memory is None and reference.backbone == BACKBONE and reference.achieved_rho == 1.0
    for rho, arm in zip(rhos, arms, strict=True):
        total = _built(arm)
        assert total == arm.parameters["total"]
        assert abs(total / _built(reference) - 1) <= 0.005
        assert abs(arm.flops["total"] / reference.flops["total"] - 1) <= 0.005
        assert arm.total_off == pytest.approx(total / reference.parameters["total"] - 1)
        assert arm.parameters["active"] + arm.parameters["inactive"] == total
        assert abs(arm.parameters["active"] / reference.parameters["active"] - 1) < 0.01
        assert arm.achieved_rho == pytest.approx(rho, abs=0.01)
        assert arm.backbone.experts == 2 + round(20 * rho)
        for key in ("embedding", "head"):
            assert arm.parameters[key] == 512 * 64
        assert (arm.memory is None) == (rho == 1)


def test_ends_of_the_grid() -> None:
    assert plan_arm(BACKBONE, MEMORY, 1.0, **SIZE).parameters["table"] == 0
    none_left = plan_arm(BACKBONE, MEMORY, 0.0, **SIZE)
    assert none_left.backbone.experts == none_left.backbone.top_k == 2
    assert none_left.parameters["inactive_routed"] == 0 and none_left.achieved_rho == 0.0
    model = build(none_left.backbone, 64, 0)
    model(input_ids=torch.arange(8).view(1, 8), use_cache=False).logits.sum().backward()


def test_the_ffn_pays_for_the_memory() -> None:
    """By hand, D=64, M=32, one layer, 4 taps: 2*32*64*2 + 2*64 + 2*4*64 = 8,832 FLOPs; 4 experts fewer save
    2*64*4 in each of 4 routers = 2,048; the rest, 6,784, is 17.67 units of 6*64."""
    arm = plan_arm(BACKBONE, MEMORY, 0.8, **SIZE)
    assert memory_flops(MEMORY)["total"] == 8832
    assert arm.backbone.ffn_width == 256 - 18
    unpaid = arm.flops["total"] + 18 * 6 * 64
    assert unpaid / arm.reference["flops"] - 1 > 0.01, "too small a debt to show anything"


def test_rows_come_as_near_as_primes_allow() -> None:
    for values in (700, 5_000, 123_456, 2_000_000):
        cfg = rows_for(MEMORY, values)
        held = memory_parameters(cfg)["table"]
        for other in (cfg.bases[0] - 1, cfg.bases[0] + 1):
            assert abs(held - values) <= abs(memory_parameters(MEMORY.replace(rows=other))["table"] - values)
    big = rows_for(
        EngramConfig(hidden_size=64, layers=(1, 14), orders=(2, 3, 4), heads=8, head_dim=256), 196_614_354_000
    )
    assert big.bases[0] == pytest.approx(16_000_000, rel=1e-4)


def test_bases_per_order_keep_their_proportions() -> None:
    arm = plan_arm(BACKBONE, MEMORIES["per_order"], 0.5, **SIZE)
    assert arm.memory is not None
    small, large = arm.memory.bases
    assert large / small == pytest.approx(3.0, rel=0.01)


def test_on_top_keeps_the_backbone() -> None:
    arm = plan_arm(BACKBONE, MEMORY.replace(rows=500), 1.0, mode="on_top", **SIZE)
    assert arm.backbone == BACKBONE and arm.memory == MEMORY.replace(rows=500)
    extra = memory_parameters(arm.memory)
    assert arm.parameters["total"] - arm.reference["parameters"] == extra["dense"] + extra["table"]
    assert arm.flops["total"] - arm.reference["flops"] == 8832
    sized = plan_arm(BACKBONE, MEMORY, 1.0, mode="on_top", extra=100_000, **SIZE)
    assert sized.parameters["table"] == pytest.approx(100_000, rel=0.01)
    dense = BackboneConfig(kind="dense", hidden_size=64, blocks=2, heads=4, ffn_width=64)
    arm = plan_arm(dense, MEMORY.replace(rows=500), 1.0, mode="on_top", **SIZE)
    assert arm.parameters["total"] == parameter_counts(dense)["total"] + extra["dense"] + extra["table"]
    assert plan_arm(dense, MEMORY, 1.0, **SIZE).achieved_rho == 1.0


def test_arms_are_plain_data_and_print() -> None:
    from rich.console import Console

    arms = plan_grid(BACKBONE, MEMORY, (1.0, 0.8), **SIZE)
    data = json.loads(json.dumps(arms[1].to_dict()))
    assert from_dict(Arm, data) == arms[1]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(describe(arms))
    text = console.export_text()
    for arm in arms:
        assert f"{arm.parameters['total'] / 1e6:.3f}M" in text and f"{arm.flops['total'] / 1e6:.3f}M" in text
        assert f"{arm.achieved_rho:.3f}" in text and f"{arm.total_off:+.3%}" in text


@pytest.mark.parametrize(
    ("backbone", "memory", "rho", "message"),
    [
        ({}, {}, 0.33, r"rho: 0\.33 of 20 inactive experts is 6\.6 experts.*0\.3 \(6\) and 0\.35 \(7\)"),
        ({}, {}, 1.2, r"rho: 1\.2 must lie in 0\.\.1"),
        ({}, {}, -0.1, r"rho: -0\.1 must lie"),
        ({"ffn_width": 10}, {}, 0.8, r"ffn_width: 10 is too narrow.*6,784 extra FLOPs.*at least 19"),
        ({"first_dense": 0}, {}, 0.8, "first_dense: 0 leaves no dense FFN"),
        ({"top_k": 1, "experts": 21}, {}, 0.8, "top_k of at least 2"),
        ({"kind": "dense"}, {}, 0.5, "kind 'dense'.*mode 'on_top'"),
        ({}, {"hidden_size": 32}, 0.8, r"memory\.hidden_size: 32 differs from the backbone's 64"),
        ({}, {"layers": (7,)}, 0.8, r"block 7 does not exist; the backbone has blocks 0\.\.4"),
        ({"expert_width": 1}, {"heads": 16, "head_dim": 1}, 0.95, "make a table base below 2"),
    ],
)
def test_impossible_arms_are_named(backbone: dict[str, Any], memory: dict[str, Any], rho: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_arm(BackboneConfig(**{**BACKBONE.to_dict(), **backbone}), MEMORY.replace(**memory), rho, **SIZE)


def test_mode_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="mode: 'both' is not known"):
        plan_arm(BACKBONE, MEMORY, 1.0, mode="both", **SIZE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave rho at 1"):
        plan_arm(BACKBONE, MEMORY, 0.5, mode="on_top", **SIZE)
    with pytest.raises(ConfigError, match="extra: 5 exists for mode 'on_top' only"):
        plan_arm(BACKBONE, MEMORY, 0.5, extra=5, **SIZE)
    with pytest.raises(ConfigError, match="extra: 0 must be"):
        plan_arm(BACKBONE, MEMORY, 1.0, mode="on_top", extra=0, **SIZE)


def test_a_budget_that_cannot_be_met_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match=r"total parameters [\d,]+ against [\d,]+ \([+-][\d.]+%\), FLOPs per token"):
        plan_arm(BACKBONE, MEMORY, 0.8, tolerance=1e-6, **SIZE)
    monkeypatch.setattr(budget, "_pay_from_ffn", lambda full, arm, memory, seq_len: arm)
    with pytest.raises(BudgetError, match="FLOPs per token"):
        plan_arm(BACKBONE, MEMORY, 0.8, **SIZE)
