"""A whole model through the kernels: what it computes, its gradients and its training, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import engram
from engram.backbone import BackboneConfig, build
from engram.config import EngramConfig
from engram.kernels import conv, dispatch, gate, gather, rows, scatter

VOCABULARY = 97
CFG = EngramConfig(hidden_size=32, layers=(0, 1), orders=(2, 3), heads=2, head_dim=12, rows=61, init="normal")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def chosen(name: str) -> None:
        monkeypatch.setenv("ENGRAM_KERNELS", name)
        dispatch.choose_again()

    yield chosen
    dispatch.choose_again()


def _model(cfg: EngramConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    backbone = BackboneConfig(kind="dense", hidden_size=32, blocks=2, heads=2, ffn_width=64, max_position=64)
    torch.manual_seed(0)
    model = build(backbone, VOCABULARY, seed=0).to(device, dtype)
    handle = engram.attach(model, cfg)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in handle.memory.named_parameters():
        if name.endswith(("conv", "value.weight")):  # zero at the start: the kernels would compute nothing
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter)
    return model, handle


def _ids(device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(seed)).to(device)


def _train(model: nn.Module, device: torch.device, steps: int, **options: Any) -> list[float]:
    optimizer = engram.optim.build(model.train(), lr=3e-3, **options)
    losses = []
    for step in range(steps):
        ids = _ids(device, step)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_logits_and_every_gradient(choose: Callable[[str], None], device: torch.device) -> None:
    model, _ = _model(CFG, device)
    found = {}
    for name in ("triton", "reference"):
        choose(name)
        one = copy.deepcopy(model)
        memory = one.engram
        handle = engram.attach(_detached(one), CFG)
        handle.memory.load_state_dict(memory.state_dict())
        logits = one(_ids(device), use_cache=False).logits
        logits.square().mean().backward()
        grads = {key: p.grad for key, p in one.named_parameters() if p.grad is not None}
        proxies = [handle.memory.layer(layer).table.proxy for layer in CFG.layers]
        found[name] = (logits.detach(), grads, [proxy.row_ids for proxy in proxies])
    ours, judge = found["triton"], found["reference"]
    torch.testing.assert_close(ours[0], judge[0], rtol=1e-4, atol=1e-5)
    assert set(ours[1]) == set(judge[1]) and any("conv_norm" in key for key in ours[1])
    for key, grad in judge[1].items():
        assert grad is not None and ours[1][key] is not None
        torch.testing.assert_close(ours[1][key], grad, rtol=1e-3, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    for a, b in zip(ours[2], judge[2], strict=True):
        assert torch.equal(a, b)


def _detached(model: nn.Module) -> nn.Module:
    """A copied model's hooks still belong to the original's memory: begin anew."""
    del model.engram
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return model


@pytest.mark.parametrize("rule", ["rowwise_adam", "rowwise_adagrad", "sgd", "adam"])
def test_training_through_the_kernels(rule: Any, choose: Callable[[str], None], device: torch.device) -> None:
    losses, tables = {}, {}
    for name in ("triton", "reference"):
        choose(name)
        model, handle = _model(CFG, device)
        losses[name] = _train(model, device, 3, row_rule=rule, row_weight_decay=0.1)
        tables[name] = handle.memory.layer(1).table.store.rows.clone()
    assert losses["triton"][0] != losses["triton"][2]
    torch.testing.assert_close(torch.tensor(losses["triton"]), torch.tensor(losses["reference"]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tables["triton"], tables["reference"], rtol=2e-3, atol=1e-4)


def test_global_decay_and_16_bit_rows(choose: Callable[[str], None], device: torch.device) -> None:
    for cfg, options in (
        (CFG, {"row_weight_decay": 10.0, "row_decay": "global"}),
        (CFG.replace(row_dtype="bf16"), {"row_weight_decay": 0.1}),
    ):
        losses, values = {}, {}
        for name in ("triton", "reference"):
            choose(name)
            model, handle = _model(cfg, device)
            losses[name] = torch.tensor(_train(model, device, 3, **options))
            table = handle.memory.layer(1).table
            assert (table.scale < 0.9) == (cfg is CFG)
            _train(model, device, 1)  # without decay, but on rows that have decayed
            values[name] = table.read(torch.arange(table.store.spec.rows, device=device))
        torch.testing.assert_close(losses["triton"], losses["reference"], rtol=1e-4, atol=2e-4)
        # 16-bit rows are rounded by random bits: a last bit of the gradient may move one to its neighbour
        torch.testing.assert_close(values["triton"], values["reference"], rtol=2e-3 if cfg is CFG else 2**-6, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "lut3"])
def test_rows_of_fewer_bits_are_decoded_in_the_kernel(
    name: Any, choose: Callable[[str], None], device: torch.device
) -> None:
    found = {}
    for version in ("triton", "reference"):
        choose(version)
        model, handle = _model(CFG.replace(row_dtype=name), device)
        with torch.no_grad(), handle.taps() as taps:
            model(_ids(device), use_cache=False)
        found[version] = taps[1]["memory"]
    assert torch.equal(found["triton"], found["reference"]) and bool(found["triton"].any())


def test_every_kernel_is_reached(
    choose: Callable[[str], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher really takes the kernels: each of them ran in one training step."""
    choose("triton")
    called: set[str] = set()
    for module, name in (
        (rows, "hash_rows"), (gather, "gather_rows"), (gate, "gated_value"), (conv, "conv_update"),
        (scatter, "sum_duplicates"), (scatter, "update_rows"),
    ):  # fmt: skip
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, o=original, n=name, **k: called.add(n) or o(*a, **k))
    _train(_model(CFG, device)[0], device, 1)
    assert called == {"hash_rows", "gather_rows", "gated_value", "conv_update", "sum_duplicates", "update_rows"}


def test_runs_are_bit_equal(choose: Callable[[str], None], device: torch.device) -> None:
    choose("triton")
    first, second = (_model(CFG, device) for _ in range(2))
    assert _train(first[0], device, 3) == _train(second[0], device, 3)
    for a, b in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_attention_values_narrower_than_the_hidden_state(choose: Callable[[str], None], device: torch.device) -> None:
    """The gate's kernel has one width: plain torch takes the other, and the convolution's kernel goes on."""
    logits = {}
    for name in ("triton", "reference"):
        choose(name)
        model, handle = _model(CFG.replace(site="value"), device)
        handle.detach()
        model.config.num_key_value_heads = 1
        torch.manual_seed(0)
        for block in model.model.layers:
            attention = block.self_attn
            for part in ("k_proj", "v_proj"):
                linear = torch.nn.Linear(32, attention.head_dim, bias=False, device=device)
                setattr(attention, part, linear)
            attention.num_key_value_groups = model.config.num_attention_heads
        torch.manual_seed(1)
        handle = engram.attach(model, CFG.replace(site="value"))
        for layer in handle.memory.modules_by_layer():
            torch.nn.init.normal_(layer.value.weight)
            torch.nn.init.normal_(layer.conv)
        loss = model(_ids(device), labels=_ids(device), use_cache=False).loss
        loss.backward()
        logits[name] = torch.stack([loss.detach(), handle.memory.layer(1).value.weight.grad.norm()])
    torch.testing.assert_close(logits["triton"], logits["reference"], rtol=1e-4, atol=1e-5)
