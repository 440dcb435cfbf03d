"""The backbone: what is built, what it counts, and equal initial values by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from engram.backbone import BackboneConfig, active_flops, build, config_of, hf_config, parameter_counts, reseed
from engram.strict import ConfigError, apply_overrides, from_dict, load_yaml

MOE = BackboneConfig(hidden_size=32, blocks=3, heads=2, ffn_width=48, experts=6, top_k=2, expert_width=16)
DENSE = BackboneConfig(kind="dense", hidden_size=32, blocks=2, heads=4, ffn_width=40)
SHAPES = {
    "moe": MOE,
    "dense": DENSE,
    "q_lora": BackboneConfig(**{**MOE.to_dict(), "q_lora_rank": 12, "shared_experts": 2, "first_dense": 2}),
    "no_dense": BackboneConfig(**{**MOE.to_dict(), "first_dense": 0, "qk_rope_dim": 4, "qk_nope_dim": 6, "v_dim": 10}),
    "grouped": BackboneConfig(**{**DENSE.to_dict(), "kv_heads": 2}),
    "tied": BackboneConfig(**{**DENSE.to_dict(), "tie_embeddings": True}),
}


def _meta(cfg: BackboneConfig, vocab_size: int) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(cfg, vocab_size))


def _loss(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss


@pytest.mark.parametrize("name", SHAPES)
def test_counts_equal_the_instantiated_parameters(name: str) -> None:
    cfg, vocab_size = SHAPES[name], 51
    counts = parameter_counts(cfg, vocab_size)
    model = _meta(cfg, vocab_size)
    real = {n: p.numel() for n, p in model.named_parameters()}
    assert counts["total"] + counts["embedding"] + counts["head"] == sum(real.values())
    parts = {
        "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"),
        "norms": ("norm",),
        "routed": (".experts.",),
        "shared": ("shared_experts",),
        "router": ("mlp.gate.weight",),
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
    }
    for part, patterns in parts.items():
        assert counts[part] == sum(n for key, n in real.items() if any(p in key for p in patterns)), part
    one_expert = 3 * cfg.hidden_size * cfg.expert_width
    inactive = cfg.moe_blocks * (cfg.experts - cfg.top_k) * one_expert if cfg.kind == "moe" else 0
    assert counts["active"] == counts["total"] - inactive == counts["total"] - counts["inactive_routed"]
    assert parameter_counts(model) == counts


@pytest.mark.parametrize("name", SHAPES)
def test_flops_equal_what_the_counter_sees(name: str) -> None:
    """The counter sees the whole T x T score matrix, twice the causal average that the budget uses."""
    cfg, vocab_size, batch, length = SHAPES[name], 51, 2, 16
    cfg = BackboneConfig(**{**cfg.to_dict(), "experts_implementation": "eager"})
    model = build(cfg, vocab_size, 0)
    model.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.randint(0, vocab_size, (batch, length)), use_cache=False)
    flops = active_flops(cfg, length, vocab_size)
    by_module = counter.get_flop_counts()  # some versions make rotation angles by a product
    rotation = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    seen = counter.get_total_flops() - rotation
    assert seen == batch * length * (flops["total"] + flops["scores"] + flops["head"])
    assert flops["total"] == sum(flops[k] for k in ("attention", "scores", "dense_ffn", "shared", "routed", "router"))
    assert active_flops(model, length) == flops


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_trains_in_fp32_on_the_cpu(kind: str) -> None:
    model = build(SHAPES[kind], 31, 0)
    if kind == "moe":
        assert model.config._experts_implementation == "grouped_mm"
        assert model.config.num_mtp_layers == 0
    assert model.config._attn_implementation == "sdpa"
    ids_BT = torch.arange(48).view(2, 24) % 31
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = _loss(model, ids_BT)
    first.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []
    for _ in range(5):
        optimizer.step()
        optimizer.zero_grad()
        last = _loss(model, ids_BT)
        last.backward()
    assert last.item() < first.item() - 0.3


def test_grouped_experts_equal_the_eager_loop_in_value_and_gradient() -> None:
    losses, gradients = [], []
    for implementation in ("grouped_mm", "eager"):
        model = build(BackboneConfig(**{**MOE.to_dict(), "experts_implementation": implementation}), 31, 3)
        loss = _loss(model, torch.arange(40).view(2, 20) % 31)
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7, msg=name)


def test_arms_agree_in_every_equal_name_and_shape() -> None:
    wide = build(MOE, 31, 7)
    narrow = build(BackboneConfig(**{**MOE.to_dict(), "experts": 4, "ffn_width": 30}), 31, 7)
    ours, theirs = dict(narrow.named_parameters()), dict(wide.named_parameters())
    assert ours.keys() == theirs.keys()
    differing = {n for n in ours if ours[n].shape != theirs[n].shape}
    assert {n.split("layers.")[-1] for n in differing} == {
        "0.mlp.gate_proj.weight",
        "0.mlp.up_proj.weight",
        "0.mlp.down_proj.weight",
        *(f"{i}.mlp.{part}" for i in (1, 2) for part in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")),
    }
    for name, parameter in ours.items():
        other = theirs[name]
        part = other[tuple(slice(0, n) for n in parameter.shape)]  # experts, router rows and FFN units both have
        assert torch.equal(parameter, part), name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    state = torch.random.get_rng_state()
    one = build(MOE, 31, 0)
    assert torch.equal(torch.random.get_rng_state(), state), "building must not move the global generator"
    torch.manual_seed(123)
    same, other = build(MOE, 31, 0), build(MOE, 31, 1)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert not torch.equal(parameter, other.get_parameter(name)), name
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
    stacks = one.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert not torch.equal(stacks[0], stacks[1])
    assert not torch.equal(
        one.get_parameter("model.layers.1.mlp.experts.down_proj")[0],
        one.get_parameter("model.layers.2.mlp.experts.down_proj")[0],
    )


def test_initial_values_are_these_numbers() -> None:
    """A literal judge: another generator, seed rule or order of filling shows here."""
    weight = build(DENSE, 31, 0).get_parameter("model.embed_tokens.weight")
    torch.testing.assert_close(weight[0, :3], torch.tensor(GOLDEN), rtol=1e-6, atol=0)


GOLDEN = [-0.014363619, -0.028255412, 0.017086105]


def test_reseed_keeps_scales_constants_and_empty_parameters() -> None:
    model = build(DENSE, 31, 0)
    memory = nn.Module()
    memory.proxy = nn.Parameter(torch.empty(0, 8))
    memory.value = nn.Parameter(torch.randn(64, 64))
    memory.value.init_std = 0.5  # type: ignore[attr-defined]
    memory.frozen = nn.Parameter(torch.randn(4))
    memory.frozen.init_std = 0.0  # type: ignore[attr-defined]
    memory.conv = nn.Parameter(torch.zeros(4, 4))
    frozen = memory.frozen.detach().clone()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.engram = memory
    names = reseed(model, 0)
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value), name
    assert "engram.value" in names and not {"engram.proxy", "engram.frozen", "engram.conv"} & set(names)
    assert memory.value.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(memory.frozen, frozen)
    assert not memory.conv.any() and memory.proxy.numel() == 0


def test_reseed_refuses_a_model_without_storage() -> None:
    with pytest.raises(ValueError, match="meta device"):
        reseed(_meta(DENSE, 31), 0)


@pytest.mark.parametrize("name", SHAPES)
def test_config_survives_the_model_and_yaml(name: str, tmp_path: Path) -> None:
    cfg = SHAPES[name]
    assert BackboneConfig.from_dict(cfg.to_dict()) == cfg
    model = build(cfg, 31, 0)
    assert parameter_counts(config_of(model), 31) == parameter_counts(cfg, 31)
    assert active_flops(config_of(model), 64, 31) == active_flops(cfg, 64, 31)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert config_of(loaded) == config_of(model)
    file = tmp_path / "backbone.yaml"
    file.write_text("kind: dense\nblocks: 3\n")
    assert from_dict(BackboneConfig, apply_overrides(load_yaml(file), ["heads=8"])) == BackboneConfig(
        kind="dense", blocks=3, heads=8
    )


def test_packed_documents_do_not_see_each_other() -> None:
    model = build(MOE, 31, 0).eval()
    ids_BT = torch.randint(0, 31, (1, 12), generator=torch.Generator().manual_seed(0))
    position_BT = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        packed = model(input_ids=ids_BT, position_ids=position_BT, use_cache=False).logits[:, 5:]
        alone = model(input_ids=ids_BT[:, 5:], use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads: 5 does not divide hidden_size 32; 4 or 8 would"),
        ({"experts": 1}, "experts: 1 must be at least 2"),
        ({"top_k": 7}, "at least top_k 7"),
        ({"first_dense": 3}, "first_dense: 3 leaves no block with experts"),
        ({"qk_rope_dim": 3}, "qk_rope_dim: 3 must be even"),
        ({"kv_heads": 1}, "kind 'dense' only"),
        ({"kind": "sparse"}, "kind: 'sparse' is not known"),
        ({"blocks": 0}, "blocks: 0 must be an integer of at least 1"),
        ({"hidden_size": True}, "hidden_size: True must be an integer"),
        ({"norm_eps": 0.0}, "norm_eps: 0.0 must be greater than 0"),
        ({"kind": "dense", "kv_heads": 3, "hidden_size": 48}, "kv_heads: 3 does not divide heads 2"),
        ({"kind": "dense", "hidden_size": 30}, "rotation needs an even width"),
    ],
)
def test_bad_shapes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackboneConfig(**{**MOE.to_dict(), **changes})


def test_unknown_key_and_foreign_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="hiddensize: unknown key"):
        BackboneConfig.from_dict({"hiddensize": 3})
    foreign = nn.Module()
    foreign.config = type("C", (), {"model_type": "gpt2"})()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="'gpt2' is no backbone"):
        config_of(foreign)
