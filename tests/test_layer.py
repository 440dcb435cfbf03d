"""The layer: float64 gradient checks, boundaries in hash and convolution, gates, casts, the meta device, taps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from engram.config import ConfigError, EngramConfig
from engram.kernels import reference
from engram.layer import Engram
from engram.stores import DeviceStore, TableSpec, initial_rows

CFG = EngramConfig(hidden_size=12, layers=(1,), heads=2, head_dim=4, rows=53, init="normal", init_std=1.0)


def _random(cfg: EngramConfig, **changes: object) -> Engram:
    layer = Engram(cfg.replace(**changes), 1, vocab_size=100)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "table.proxy":
                parameter.copy_(torch.randn_like(parameter))
    return layer


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["signed_sqrt", "sigmoid"])
def test_gradcheck_of_the_gate(kind: str) -> None:
    inputs = (_double(2, 3, 2, 5), _double(2, 3, 2, 5))
    assert torch.autograd.gradcheck(lambda q, k: reference.sigmoid_gate(q, k, kind), inputs)
    keep = torch.tensor([[True, False, True], [False, True, True]])
    inputs = (*inputs, _double(2, 3, 5), _double(2, 5), _double(2, 5))
    assert torch.autograd.gradcheck(lambda *tensors: reference.gated_value(*tensors, 1e-6, kind, keep), inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_the_convolution(packed: bool) -> None:
    segments = torch.tensor([[0] * 4 + [1] * 7, [0] * 11]) if packed else None
    inputs = (_double(2, 11, 2, 3), _double(2, 3, 4))
    assert torch.autograd.gradcheck(lambda x, w: reference.short_conv(x, w, 3, segments), inputs)
    inputs = (inputs[0], _double(2, 3), inputs[1])
    assert torch.autograd.gradcheck(lambda *tensors: reference.conv_update(*tensors, 1e-6, 3, segments), inputs)


def test_gradcheck_of_the_norm() -> None:
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 1e-6), (_double(2, 3, 5), _double(5)))


def test_the_convolution_is_torchs_depthwise_convolution() -> None:
    x, weight = torch.randn(2, 20, 2, 3), torch.randn(2, 3, 4)
    padded = torch.nn.functional.pad(x.flatten(-2).transpose(1, 2), (9, 0))
    expected = torch.nn.functional.conv1d(padded, weight.view(6, 1, 4), groups=6, dilation=3)
    ours = reference.short_conv(x, weight, 3)
    torch.testing.assert_close(ours.flatten(-2), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_a_score_of_zero_opens_the_gate_half_and_its_gradient_is_finite() -> None:
    query, key = torch.zeros(1, 1, 1, 4, requires_grad=True), torch.ones(1, 1, 1, 4)
    value = reference.sigmoid_gate(query, key, "signed_sqrt")
    value.sum().backward()
    assert value.item() == 0.5 and torch.isfinite(query.grad).all()  # type: ignore[arg-type]


def test_packed_documents_compute_what_they_compute_alone() -> None:
    layer = _random(CFG)
    a, b = torch.randint(0, 100, (1, 8)), torch.randint(0, 100, (1, 15))
    xa, xb = torch.randn(1, 8, 12), torch.randn(1, 15, 12)
    segments = torch.tensor([[3] * 8 + [4] * 15])
    rows = layer.hash.rows(torch.cat([a, b], 1), segment_ids=segments)
    packed = layer(torch.cat([xa, xb], 1), rows, segment_BT=segments)
    alone = torch.cat([layer(xa, layer.hash.rows(a)), layer(xb, layer.hash.rows(b))], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    leaking = layer(torch.cat([xa, xb], 1), rows)  # hash cut, convolution not
    assert not torch.allclose(leaking, alone)


def test_reused_segment_ids_are_still_different_documents() -> None:
    layer = _random(CFG)
    ids, x = torch.randint(0, 100, (1, 12)), torch.randn(1, 12, 12)
    reused = torch.tensor([[0] * 5 + [1] * 2 + [0] * 5])
    distinct = torch.tensor([[0] * 5 + [1] * 2 + [2] * 5])
    rows = layer.hash.rows(ids, segment_ids=reused)
    assert torch.equal(rows, layer.hash.rows(ids, segment_ids=distinct))
    assert torch.equal(layer(x, rows, segment_BT=reused), layer(x, rows, segment_BT=distinct))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1)])
def test_empty_and_single_batches_run_forward_and_backward(shape: tuple[int, int]) -> None:
    layer = _random(CFG)
    ids = torch.zeros(shape, dtype=torch.int64)
    layer(torch.randn(*shape, 12), layer.hash.rows(ids)).sum().backward()
    assert layer.value is not None and layer.value.weight.grad is not None


def test_the_convolutions_norm_does_not_overflow_in_16_bit() -> None:
    layer = _random(CFG, gate="none")
    assert layer.value is not None
    layer.value.weight.data *= 300  # squares beyond 65,504
    ids, x = torch.randint(0, 100, (1, 20)), torch.randn(1, 20, 12)
    with layer_taps(layer):
        layer(x, layer.hash.rows(ids))
    exact = layer.taps["conv"]
    half = copy.deepcopy(layer).half()
    with layer_taps(half):
        half(x.half(), half.hash.rows(ids))
    torch.testing.assert_close(half.taps["conv"].float(), exact, rtol=0.02, atol=0.02)


def test_16_bit_rows_in_a_state_dict_are_read_as_fp32() -> None:
    layer = Engram(CFG, 1, vocab_size=100)
    state = {k: v.bfloat16() if k.endswith("rows") else v for k, v in layer.state_dict().items()}
    for device in ("meta", "cpu"):
        with torch.device(device):
            other = Engram(CFG, 1, vocab_size=100)
        other.load_state_dict(state, assign=True)
        assert other.table.store.rows.dtype == torch.float32
        assert torch.equal(other.table.store.rows, state["table.store.rows"].float()), device
    with pytest.raises(RuntimeError, match="this table has"):
        layer.load_state_dict({**state, "table.store.rows": torch.zeros(3, 4)})


def test_frozen_rows_stay_frozen_in_copies() -> None:
    layer = Engram(CFG, 1, vocab_size=100)
    layer.table.trainable = False
    assert not copy.deepcopy(layer).table.trainable


def test_sharing_memory_shares_the_rows() -> None:
    layer = Engram(CFG, 1, vocab_size=100)
    layer.share_memory()
    assert layer.table.store.rows.is_shared()


def test_the_update_is_causal() -> None:
    layer = _random(CFG)
    ids, x = torch.randint(0, 100, (1, 25)), torch.randn(1, 25, 12)
    base = layer(x, layer.hash.rows(ids))
    other_ids, other_x = ids.clone(), x.clone()
    other_ids[0, 13] += 1
    other_x[0, 13] += 1
    changed = layer(other_x, layer.hash.rows(other_ids))
    assert torch.equal(changed[:, :13], base[:, :13]) and not torch.equal(changed[:, 13], base[:, 13])


def test_padding_contributes_nothing_even_through_the_convolution() -> None:
    layer = _random(CFG)
    ids, x = torch.randint(0, 100, (1, 12)), torch.randn(1, 12, 12)
    mask = torch.tensor([[0] * 5 + [1] * 7])
    padded = layer(x, layer.hash.rows(ids, mask=mask), keep_BT=mask.bool())
    alone = layer(x[:, 5:], layer.hash.rows(ids[:, 5:]))
    torch.testing.assert_close(padded[:, 5:], alone, rtol=1e-6, atol=1e-6)
    assert not padded[:, :5].any()


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("kind", ["signed_sqrt", "sigmoid", "none"])
@pytest.mark.parametrize("taps", [0, 4])
def test_every_form_runs_and_learns(streams: int, kind: str, taps: int) -> None:
    layer = _random(CFG, branches=streams, gate=kind, conv_kernel=taps)
    ids = torch.randint(0, 100, (2, 9))
    x = torch.randn(2, 9, streams, 12) if streams > 1 else torch.randn(2, 9, 12)
    update = layer(x, layer.hash.rows(ids))
    assert update.shape == x.shape
    update.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_new_convolution_changes_nothing() -> None:
    layer = Engram(CFG, 1, vocab_size=100)
    ids, x = torch.randint(0, 100, (2, 30)), torch.randn(2, 30, 12)
    with layer_taps(layer):
        update = layer(x, layer.hash.rows(ids))
    expected = layer.taps["gate"].unsqueeze(-1) * layer.taps["value"].unsqueeze(-2)
    assert torch.equal(update, expected.squeeze(-2)) and not layer.taps["conv"].any()


class layer_taps:
    def __init__(self, layer: Engram) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        self.layer.tapping = True

    def __exit__(self, *_: object) -> None:
        self.layer.tapping = False


def test_taps_name_every_stage() -> None:
    layer = _random(CFG, branches=2)
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 2, 12)
    rows = layer.hash.rows(ids)
    layer(x, rows)
    assert set(layer.taps) == {"rows", "gate"}
    with layer_taps(layer):
        layer(x, rows)
    assert set(layer.taps) == {"rows", "memory", "value", "key", "gate", "conv", "output"}
    assert torch.equal(layer.taps["rows"], rows) and layer.taps["gate"].shape == (2, 9, 2)
    assert torch.equal(layer.taps["memory"], layer.table.store.rows[rows].flatten(-2))
    assert not any(tap.requires_grad for tap in layer.taps.values())


def test_16_bit_layers_compute_the_gate_in_fp32() -> None:
    layer = _random(CFG)
    ids, x = torch.randint(0, 100, (2, 40)), torch.randn(2, 40, 12)
    exact = layer(x, layer.hash.rows(ids))
    narrow = copy.deepcopy(layer).to(torch.bfloat16)
    assert narrow.table.store.rows.dtype == torch.float32 and narrow.hash.sizes.dtype == torch.int64
    update = narrow(x.to(torch.bfloat16), narrow.hash.rows(ids))
    assert update.dtype == torch.bfloat16 and narrow.taps["gate"].dtype == torch.float32
    torch.testing.assert_close(update.float(), exact, rtol=0.05, atol=0.15)


def test_rows_survive_the_meta_device_a_junk_filled_allocator_and_a_copy(nan_empty: None) -> None:
    expected = Engram(CFG, 1, vocab_size=100).table.store.rows
    with torch.device("meta"):
        layer = Engram(CFG, 1, vocab_size=100)
    assert layer.table.store.rows.is_meta and sum(p.numel() for p in layer.table.parameters()) == 0
    for _ in range(2):
        layer.to_empty(device="cpu")
        assert torch.equal(layer.table.store.rows, expected)
    layer.table.store.rows += 1
    assert torch.equal(copy.deepcopy(layer).to("cpu").half().table.store.rows, expected + 1), "a move keeps values"


def test_state_dict_round_trip_has_rows_and_no_proxy() -> None:
    layer, other = _random(CFG), Engram(CFG.replace(init="zeros"), 1, vocab_size=100)
    state = layer.state_dict()
    assert not any("proxy" in key for key in state) and "table.store.rows" in state
    other.load_state_dict(state)
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 12)
    assert torch.equal(layer(x, layer.hash.rows(ids)), other(x, other.hash.rows(ids)))


def test_initial_values_are_a_pure_function_of_seed_row_and_column() -> None:
    ids = torch.tensor([0, 1, 41, 41, 2**40])
    values = initial_rows(7, ids, 8, 0.5)
    assert torch.equal(values[2], values[3]) and torch.equal(values[1:2], initial_rows(7, ids[1:2], 8, 0.5))
    assert torch.equal(DeviceStore(TableSpec(42, 8, seed=7, std=0.5)).rows[41], values[2])
    assert not torch.equal(values, initial_rows(8, ids, 8, 0.5))
    many = initial_rows(3, torch.arange(40_000), 16, 0.02)
    assert abs(float(many.mean())) < 1e-4 and abs(float(many.std()) / 0.02 - 1) < 5e-3
    assert abs(float((many / 0.02).pow(4).mean()) - 2.85) < 0.05, "the sum of eight bytes has kurtosis 3 - 1.2 / 8"
    # literal bits: an integer rule gives the same ones on every machine
    assert initial_rows(1, torch.tensor([5]), 4, 1.0).view(torch.int32).tolist() == LITERAL_BITS


LITERAL_BITS = [[1052869340, -1086305966, -1108662498, 1065833945]]


def test_bad_input_is_named() -> None:
    layer = Engram(CFG, 1, vocab_size=100)
    rows = layer.hash.rows(torch.randint(0, 100, (2, 9)))
    with pytest.raises(ValueError, match=r"\[2, 9, 13\], expected \[2, 9, 12\]"):
        layer(torch.randn(2, 9, 13), rows)
    with pytest.raises(IndexError):
        layer(torch.randn(2, 9, 12), rows + layer.table.store.spec.rows)
    for field, value in (("path", {"placement": "disk"}), ("row_dtype", {"row_dtype": "int7"})):
        with pytest.raises(ConfigError, match=field):
            Engram(CFG.replace(**value), 1, vocab_size=100)
