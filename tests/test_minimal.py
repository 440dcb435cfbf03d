"""engram/minimal.py: golden row numbers, and the demo's module in float64 equal to engram.layer, gradients included."""

from __future__ import annotations

import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from engram import families
from engram.config import EngramConfig
from engram.layer import Engram
from engram.minimal import MinimalEngram

HIDDEN, STREAMS, CLASSES = 24, 3, 1000


def _minimal() -> MinimalEngram:
    torch.manual_seed(0)
    minimal = MinimalEngram(HIDDEN, STREAMS, layer=1, classes=CLASSES, base=1000, heads=2, head_dim=5).double()
    with torch.no_grad():
        for parameter in minimal.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return minimal


def _layer_of(minimal: MinimalEngram) -> Engram:
    """engram.layer with the demo's weights, loaded weight for weight."""
    cfg = EngramConfig(
        hidden_size=HIDDEN, layers=(1,), orders=(2, 3), heads=2, head_dim=5, rows=1000, branches=STREAMS, bias=True,
        gate_eps=None, filler=2, boundary="none",
    )  # fmt: skip
    layer = Engram(cfg, 1, vocab_size=CLASSES).double()
    layer.table.store.rows = minimal.rows.weight.detach().clone()
    assert layer.value is not None and layer.key is not None
    with torch.no_grad():
        layer.value.load_state_dict(minimal.value.state_dict())
        layer.key.weight.copy_(torch.cat([key.weight for key in minimal.keys]))
        layer.key.bias.copy_(torch.cat([key.bias for key in minimal.keys]))
        for name in ("key_norm", "query_norm", "conv_norm", "conv"):
            getattr(layer, name).copy_(getattr(minimal, name))
    return layer


def test_row_numbers_are_the_golden_ones() -> None:
    golden = families.golden()["toy"]
    ids = torch.tensor([golden["ids"]])
    assert _minimal().row_numbers(ids)[0].tolist() == golden["by_layer"]["1"]["rows"]


def test_the_layer_equals_the_listing_in_float64_with_every_gradient() -> None:
    minimal = _minimal()
    layer = _layer_of(minimal)
    ids = torch.randint(0, CLASSES, (2, 33))
    x = torch.randn(2, 33, STREAMS, HIDDEN, dtype=torch.float64)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [minimal(xs[0], ids), layer(xs[1], layer.hash.rows(ids))]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(outs[0])
    for out in outs:
        (out * cotangent).sum().backward()
    assert layer.key is not None and layer.value is not None
    pairs = {
        "x": (xs[1].grad, xs[0].grad),
        "value": (layer.value.weight.grad, minimal.value.weight.grad),
        "value bias": (layer.value.bias.grad, minimal.value.bias.grad),
        "key": (layer.key.weight.grad, torch.cat([k.weight.grad for k in minimal.keys])),  # type: ignore[misc]
        "key bias": (layer.key.bias.grad, torch.cat([k.bias.grad for k in minimal.keys])),  # type: ignore[misc]
        **{
            n: (getattr(layer, n).grad, getattr(minimal, n).grad)
            for n in ("key_norm", "query_norm", "conv_norm", "conv")
        },
    }
    for name, (ours, theirs) in pairs.items():
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    proxy = layer.table.proxy
    dense = minimal.rows.weight.grad
    assert dense is not None and proxy.row_ids is not None and proxy.grad is not None
    assert torch.equal(dense.abs().sum(1).nonzero().flatten(), proxy.row_ids)
    torch.testing.assert_close(
        proxy.grad.double(), dense[proxy.row_ids], rtol=1e-5, atol=1e-6
    )  # rows are summed in fp32


def test_transformers_qwen4_exp_computes_the_same_layer() -> None:
    """The whole module of another code base: fused keys, zero-centred norm weights, masked convolution."""
    theirs_cfg = Qwen4ExpTextConfig(
        vocab_size=300, hidden_size=HIDDEN, ple_layer_ids=[2], ple_embed_dim=48, ngram_size=3, heads_per_ngram=4,
        ngram_vocab_size_base=500, seed=1234, eos_token_id=7, hc_count=STREAMS, num_hidden_layers=4, rms_norm_eps=1e-6,
    )  # fmt: skip
    theirs = Qwen4ExpTextPLELayer(theirs_cfg, 1, 0).double()
    ours_cfg = families.get("qwen3.8-flash-next").replace(
        hidden_size=HIDDEN, heads=4, head_dim=6, rows=500, filler=7, eos=(7,), vocab_size=300, branches=STREAMS,
        row_dtype="fp32",
    )  # fmt: skip
    ours = Engram(ours_cfg, 1).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        assert ours.value is not None and ours.key is not None
        ours.table.store.rows = theirs.ple_embedding.ngram_embedding.weight.detach().clone()
        ours.value.weight.copy_(theirs.value_proj.weight)
        ours.key.weight.copy_(theirs.key_proj.weight)
        for name, norm in (("key_norm", "norm_key"), ("query_norm", "norm_query"), ("conv_norm", "norm_conv")):
            getattr(ours, name).copy_(1 + getattr(theirs, norm).weight.view(STREAMS, HIDDEN))
        ours.conv.copy_(theirs.conv1d.weight.view(STREAMS, HIDDEN, -1))
    ids = torch.randint(0, 300, (3, 31))
    ids[:, 12] = 7
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    x = torch.randn(3, 31, STREAMS, HIDDEN, dtype=torch.float64)
    update = ours(x, ours.hash.rows(ids, mask=mask), keep_BT=mask.bool())
    expected = theirs(x.flatten(-2), torch.where(mask.bool(), ids, 7), None, conv_mask=mask)
    live = mask.bool()
    # transformers computes norms in fp32 whatever the dtype, which bounds the agreement
    torch.testing.assert_close(update.flatten(-2)[live], expected[live], rtol=2e-5, atol=2e-5)
