"""The kernels of the gate and of the short convolution against plain torch in float64: results, and gradients by name.

An error may be a little of the largest number of its row. Scores stay away from 0, where the root makes a large
gradient of the rounding of its score; what happens at 0 is asked apart. In 16 bits that little is two steps: the
interpreter cuts where a GPU rounds, and the gate and the convolution's inner gradient are rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engram.config import EngramConfig
from engram.kernels import conv, dispatch, gate, launch, reference
from engram.layer import Engram

GATE_INPUTS = ("x", "key", "value", "query_norm", "key_norm")
CONV_INPUTS = ("gated", "norm", "weight")
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2 * 2**-7, torch.float16: 2 * 2**-10}
EPS = 1e-6


def _run(call: Callable[..., Any], inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Outputs and gradients by name; those that come in are the same numbers in every dtype."""
    made = call(*inputs.values())
    made = made if isinstance(made, tuple) else (made,)
    torch.manual_seed(5)
    loss = sum((one.double() * torch.randint(-8, 9, one.shape).div(4).to(one.device)).sum() for one in made)
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return dict(zip((*outputs, *(f"d {name}" for name in inputs)), (*made, *grads), strict=True))


def _compare(
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    inputs: dict[str, Tensor],
    outputs: tuple[str, ...],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    found = _run(ours, inputs, outputs)
    exact = _run(plain, {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}, outputs)
    for name, wanted in exact.items():
        assert found[name].shape == wanted.shape, name
        if name.startswith("d "):
            assert found[name].dtype == inputs[name[2:]].dtype, name
        if wanted.numel():
            assert found[name].isfinite().all(), name
            errors = (found[name].double() - wanted).detach().abs()
            allowed = ALLOWED[dtype] * wanted.detach().abs().amax(dim=-1, keepdim=True) + 2e-6
            assert (errors <= allowed).all(), f"{name}: {float((errors / allowed).max()):.2g} times what is allowed"
    return found


def _leaf(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(device, dtype).requires_grad_()


def _gate_inputs(B: int, T: int, S: int, D: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Scores of 4, give or take 1, or of -4; rows of one or three numbers stay away from 0, where 1 / rms is large."""
    x_BTSD, noise_BTSD, value_BTD = torch.randn(B, T, S, D), torch.randn(B, T, S, D), torch.randn(B, T, D)
    x_BTSD += x_BTSD.sign() * 0.5
    like, noise = (2 * D**-0.5, 0.5) if D > 4 else (1, 0.1)
    key_BTSD = (torch.rand(B, T, S, 1) - 0.5).sign() * (like * x_BTSD + noise * noise_BTSD)
    tensors = (x_BTSD, key_BTSD, value_BTD, 1 + 0.2 * torch.randn(S, D), 1 + 0.2 * torch.randn(S, D))
    return {n: t.to(device, dtype).requires_grad_() for n, t in zip(GATE_INPUTS, tensors, strict=True)}


def _conv_inputs(B: int, T: int, S: int, D: int, K: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = ((B, T, S, D), (S, D), (S, D, K))
    return {n: _leaf(*shape, device=device, dtype=dtype) for n, shape in zip(CONV_INPUTS, shapes, strict=True)}


def _check_gate(
    shape: tuple[int, int, int, int],
    device: torch.device,
    kind: str = "signed_sqrt",
    dtype: torch.dtype = torch.float32,
    keep: str = "some",
    eps: float | None = EPS,
) -> dict[str, Tensor]:
    keep_BT = {"some": torch.rand(shape[:2]) > 0.3, "none": torch.zeros(shape[:2], dtype=torch.bool), "all": None}[keep]
    keep_BT = keep_BT if keep_BT is None else keep_BT.to(device)
    inputs = _gate_inputs(*shape, device=device, dtype=dtype)
    exact_eps = torch.finfo(torch.float32).eps if eps is None else eps

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return gate.gated_value(*tensors, eps, kind, keep_BT)

    def plain(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return reference.gated_value(*tensors, exact_eps, kind, keep_BT)

    return _compare(ours, plain, inputs, ("gated", "gate"), dtype)


def _check_conv(
    shape: tuple[int, int, int, int],
    device: torch.device,
    taps: int = 4,
    dilation: int = 3,
    segment_BT: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    inputs = _conv_inputs(*shape, taps, device=device, dtype=dtype)
    segment_BT = segment_BT if segment_BT is None else segment_BT.to(device)

    def ours(*tensors: Tensor) -> Tensor:
        return conv.conv_update(*tensors, EPS, dilation, segment_BT)

    def plain(*tensors: Tensor) -> Tensor:
        return reference.conv_update(*tensors, EPS, dilation, segment_BT)

    return _compare(ours, plain, inputs, ("update",), dtype)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, several rows' tiles a program, several programs a sum."""

    def tile(rows: int, width: int) -> dict[str, Any]:
        return {"ROWS": 4, "BLOCK": 16, "num_warps": 1, **launch.NO_FUSION}

    for module in (gate, conv):
        monkeypatch.setattr(module, "tile", tile)
    monkeypatch.setattr(gate, "PROGRAMS", 12)
    monkeypatch.setattr(conv, "PROGRAMS", 12)
    monkeypatch.setattr(conv, "PROGRAMS_TO_TAPS", 12)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every choice of dispatch.py falls on the kernels."""
    dispatch.choose_again()
    monkeypatch.setenv("ENGRAM_KERNELS", "triton")
    yield
    dispatch.choose_again()


SHAPES = [(2, 63, 4, 31), (1, 63, 1, 160), (2, 7, 3, 1), (1, 1, 1, 3), (1, 5, 4, 1280), (1, 3, 1, 7168), (1, 70, 2, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["signed_sqrt", "sigmoid"])
def test_the_gate(shape: tuple[int, int, int, int], kind: str, device: torch.device) -> None:
    _check_gate(shape, device, kind, keep="some" if kind == "sigmoid" else "all", eps=EPS if shape[2] > 1 else None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution(shape: tuple[int, int, int, int], packed: bool, device: torch.device) -> None:
    segment_BT = torch.randint(0, 5, shape[:2]).eq(0).cumsum(1) if packed else None
    _check_conv(shape, device, segment_BT=segment_BT)


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 4, 100])
def test_taps_and_dilations(taps: int, dilation: int, device: torch.device) -> None:
    _check_conv((2, 20, 2, 24), device, taps, dilation)


def test_documents_of_one_token_leave_only_the_current_tap(device: torch.device) -> None:
    found = _check_conv((2, 9, 2, 8), device, segment_BT=torch.arange(9).expand(2, 9))
    assert not found["d weight"][..., :-1].any() and found["d weight"][..., -1].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    _check_gate((2, 20, 2, 160), device, dtype=dtype)
    _check_conv((2, 20, 2, 160), device, segment_BT=torch.randint(0, 9, (2, 20)).eq(0).cumsum(1), dtype=dtype)


def test_every_tensor_has_its_own_dtype(device: torch.device) -> None:
    inputs = _gate_inputs(1, 6, 2, 32, device, torch.float32)
    for name, dtype in (("x", torch.bfloat16), ("value", torch.float16), ("key_norm", torch.bfloat16)):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    ours = _run(lambda *t: gate.gated_value(*t, EPS, "sigmoid"), inputs, ("gated", "gate"))
    plain = _run(lambda *t: reference.gated_value(*t, EPS, "sigmoid"), inputs, ("gated", "gate"))
    assert ours["gated"].dtype == torch.float16 and ours["gate"].dtype == torch.float32
    for name, wanted in plain.items():
        assert ours[name].dtype == wanted.dtype, name
        torch.testing.assert_close(
            ours[name].float(), wanted.float(), rtol=0.02, atol=0.02 * float(wanted.detach().abs().max())
        )
    mixed = _conv_inputs(1, 6, 2, 32, 3, device, torch.float32)
    mixed["gated"] = mixed["gated"].detach().bfloat16().requires_grad_()
    assert conv.conv_update(*mixed.values(), EPS, 2).dtype == torch.float32


def test_no_epsilon_is_the_one_of_the_dtype(device: torch.device) -> None:
    inputs = _gate_inputs(1, 4, 1, 8, device, torch.float32)
    mixed = _conv_inputs(1, 4, 1, 8, 2, device, torch.float32)
    with torch.no_grad():
        inputs["x"] *= 1e-3
        mixed["gated"] *= 1e-3
    for ours, plain in (
        (gate.gated_value(*inputs.values(), None, "sigmoid"), reference.gated_value(*inputs.values(), None, "sigmoid")),
        ((conv.conv_update(*mixed.values(), None, 1),), (reference.conv_update(*mixed.values(), None, 1),)),
    ):
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_many_tiles_and_programs(small_tiles: None, device: torch.device) -> None:
    _check_gate((2, 21, 2, 40), device)
    segment_BT = torch.randint(0, 9, (2, 21)).eq(0).cumsum(1)
    _check_conv((2, 21, 2, 40), device, segment_BT=segment_BT)


def test_equal_runs_give_equal_bits(small_tiles: None, device: torch.device) -> None:
    inputs = _gate_inputs(1, 30, 1, 20, device, torch.float32)
    mixed = _conv_inputs(1, 30, 1, 20, 4, device, torch.float32)
    for call, given, outputs in (
        (lambda *t: gate.gated_value(*t, EPS, "signed_sqrt"), inputs, ("gated", "gate")),
        (lambda *t: conv.conv_update(*t, EPS, 3), mixed, ("update",)),
    ):
        first, second = (_run(call, given, outputs) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tokens", [(0, 5), (2, 0)])
def test_no_tokens(tokens: tuple[int, int], device: torch.device) -> None:
    found = {**_check_gate((*tokens, 2, 8), device), **_check_conv((*tokens, 2, 8), device)}
    for name in ("d query_norm", "d key_norm", "d norm", "d weight"):
        assert found[name].numel() and not found[name].any(), name


def test_padding_gives_zeros_whatever_the_value_holds(device: torch.device) -> None:
    found = _check_gate((2, 9, 2, 12), device, keep="none")
    assert all(not tensor.any() for name, tensor in found.items() if name in ("gated", "d value"))
    inputs = _gate_inputs(1, 4, 1, 8, device, torch.float32)
    with torch.no_grad():
        inputs["value"][:, 2] = float("nan")
    keep_BT = torch.tensor([[True, True, False, True]], device=device)
    gated_BTSD, _ = gate.gated_value(*inputs.values(), EPS, "signed_sqrt", keep_BT)
    gated_BTSD.sum().backward()
    for name, tensor in inputs.items():
        assert tensor.grad is not None and tensor.grad.isfinite().all(), name


def test_scores_below_the_clamp_pass_no_gradient(device: torch.device) -> None:
    inputs = _gate_inputs(1, 3, 1, 4, device, torch.float32)
    with torch.no_grad():
        inputs["x"].copy_(torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).view(1, 3, 1, 4))
        inputs["key"].copy_(torch.tensor([[1.0, -1, 0, 0], [1, -1 + 1e-7, 0, 0], [1, -1.1, 0, 0]]).view(1, 3, 1, 4))
        for name in ("query_norm", "key_norm"):
            inputs[name].fill_(1)
    found = _run(lambda *t: gate.gated_value(*t, EPS, "signed_sqrt"), inputs, ("gated", "gate"))
    gate_T = found["gate"].flatten().tolist()
    assert gate_T[0] == 0.5 and gate_T[2] < 0.49
    assert gate_T[1] == pytest.approx(float(torch.tensor(1e-3).sigmoid()), abs=5e-7)  # a GPU divides to 2 ulp
    for name in ("d x", "d key"):
        assert not found[name][:, :2].any() and found[name][:, 2].any(), name


def test_what_is_no_number_stays_none(device: torch.device) -> None:
    inputs = _gate_inputs(1, 2, 1, 4, device, torch.float32)
    with torch.no_grad():
        inputs["x"][0, 1, 0, 2] = float("nan")
    gated_BTSD, gate_BTS = gate.gated_value(*inputs.values(), EPS, "signed_sqrt")
    assert gate_BTS[0, 0].isfinite().all() and gate_BTS[0, 1].isnan().all() and gated_BTSD[0, 1].isnan().all()


def test_one_of_two_results_may_be_all_that_is_used(device: torch.device) -> None:
    inputs = _gate_inputs(1, 5, 2, 8, device, torch.float32)
    for used in (0, 1):
        ours = torch.autograd.grad(
            gate.gated_value(*inputs.values(), EPS, "sigmoid")[used].square().sum(), list(inputs.values())
        )
        plain = torch.autograd.grad(
            reference.gated_value(*inputs.values(), EPS, "sigmoid")[used].square().sum(),
            list(inputs.values()),
            materialize_grads=True,
        )
        for name, one, other in zip(inputs, ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"{name}, result {used}")


def test_strides_do_not_matter(device: torch.device) -> None:
    inputs = _gate_inputs(2, 6, 2, 10, device, torch.float32)
    strided = {name: tensor.detach().mT.contiguous().mT.requires_grad_() for name, tensor in inputs.items()}
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    keep_BT = (torch.rand(6, 2, device=device) > 0.3).T
    ours, again = (
        _run(lambda *t, k=keep: gate.gated_value(*t, EPS, "signed_sqrt", k), given, ("gated", "gate"))
        for given, keep in ((inputs, keep_BT.contiguous()), (strided, keep_BT))
    )
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    mixed = _conv_inputs(2, 6, 2, 10, 4, device, torch.float32)
    strided = {name: tensor.detach().mT.contiguous().mT.requires_grad_() for name, tensor in mixed.items()}
    segment_BT = torch.randint(0, 3, (6, 2), device=device).eq(0).cumsum(0).T
    ours, again = (
        _run(lambda *t, n=numbers: conv.conv_update(*t, EPS, 2, n), given, ("update",))
        for given, numbers in ((mixed, segment_BT.contiguous()), (strided, segment_BT))
    )
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    conv.conv_update(*strided.values(), EPS, 2).sum().backward()  # its gradient is one number, expanded


def test_the_ops_are_good_citizens_of_torch(device: torch.device) -> None:
    inputs = _gate_inputs(2, 5, 2, 6, device, torch.float32)
    keep_BT = torch.rand(2, 5, device=device) > 0.3
    torch.library.opcheck(gate._gated_value, (*inputs.values(), EPS, "signed_sqrt", keep_BT))
    mixed = _conv_inputs(2, 5, 2, 6, 3, device, torch.float32)
    segment_BT = torch.tensor([[0, 0, 1, 1, 1]] * 2, device=device)
    torch.library.opcheck(conv._conv_update, (*mixed.values(), None, 2, segment_BT))


def test_the_layer_on_kernels_is_the_layer(
    kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = EngramConfig(
        hidden_size=12, layers=(1,), heads=2, head_dim=4, rows=53, init="normal", init_std=1.0, branches=2
    )
    layer = Engram(cfg, 1, vocab_size=100)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "table.proxy":
                parameter.copy_(torch.randn_like(parameter))
    layer.to(device)
    ids_BT, x = torch.randint(0, 100, (2, 11)).to(device), torch.randn(2, 11, 2, 12).to(device)
    segment_BT = torch.tensor([[0] * 4 + [1] * 7, [0] * 11], device=device)
    keep_BT = (torch.rand(2, 11) > 0.2).to(device)
    rows_BTC = layer.hash.rows(ids_BT, segment_ids=segment_BT)
    layer.tapping = True
    found, calls = [], []
    for module in (gate, conv):
        monkeypatch.setattr(module, "serves", lambda *t, m=module: calls.append(m) or launch.serves(*t))
    for choice in ("triton", "reference"):
        dispatch.choose_again()
        monkeypatch.setenv("ENGRAM_KERNELS", choice)
        calls.clear()
        layer.zero_grad()
        update = layer(x, rows_BTC, segment_BT=segment_BT, keep_BT=keep_BT)
        update.square().sum().backward()
        assert set(calls) == ({gate, conv} if choice == "triton" else set())
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"update": update.detach(), **layer.taps, **grads})
    for name, wanted in found[1].items():
        torch.testing.assert_close(found[0][name], wanted, rtol=1e-4, atol=1e-4, msg=name)


def test_compiled_in_one_graph(kernels: None, device: torch.device) -> None:
    def both(x: Tensor, key: Tensor, value: Tensor, query: Tensor, keys: Tensor, norm: Tensor, taps: Tensor) -> Tensor:
        gated_BTSD, _ = dispatch.gated_value(x, key, value, query, keys, EPS, "signed_sqrt")
        return dispatch.conv_update(gated_BTSD, norm, taps, EPS, 2)

    dispatch.backend()
    inputs = _gate_inputs(2, 5, 2, 6, device, torch.float32)
    inputs |= {n: t for n, t in _conv_inputs(2, 5, 2, 6, 3, device, torch.float32).items() if n != "gated"}
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found, wanted = (_run(call, inputs, ("update",)) for call in (compiled, both))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_float64_goes_to_plain_torch_and_its_autograd(kernels: None, device: torch.device) -> None:
    gate_inputs = tuple(_gate_inputs(1, 4, 1, 6, device, torch.float64).values())
    conv_inputs = tuple(_conv_inputs(1, 4, 1, 3, 2, device, torch.float64).values())
    assert torch.autograd.gradgradcheck(lambda *t: dispatch.gated_value(*t, EPS, "sigmoid")[0], gate_inputs)
    assert torch.autograd.gradgradcheck(lambda *t: dispatch.conv_update(*t, EPS, 1), conv_inputs)


def test_shapes_that_do_not_fit_are_named(device: torch.device) -> None:
    good = list(_gate_inputs(1, 4, 2, 6, device, torch.float32).values())
    bad = {0: "x has shape", 1: "key has shape", 2: "value has shape", 3: "query_norm has", 4: "key_norm has"}
    for place, message in bad.items():
        with pytest.raises(ValueError, match=f"gated_value: {message}"):
            gate.gated_value(
                *good[:place], good[place][..., :1, :].flatten(-2)[..., :5], *good[place + 1 :], EPS, "sigmoid"
            )
    for keep_BT in (torch.ones(1, 3, dtype=torch.bool, device=device), torch.ones(1, 4, device=device)):
        with pytest.raises(ValueError, match="gated_value: keep has"):
            gate.gated_value(*good, EPS, "sigmoid", keep_BT)
    gated, norm, weight = _conv_inputs(1, 4, 2, 6, 3, device, torch.float32).values()
    for wrong in ((gated[0], norm, weight), (gated, norm[:1], weight), (gated, norm, weight[..., 0])):
        with pytest.raises(ValueError, match="conv_update: .* ha(s|ve) shape"):
            conv.conv_update(*wrong, EPS, 2)
    with pytest.raises(ValueError, match="segment has shape"):
        conv.conv_update(gated, norm, weight, EPS, 2, torch.zeros(4, 1, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="dilation 0"):
        conv.conv_update(gated, norm, weight, EPS, 0)


def test_variants_name_every_argument_in_order() -> None:
    for variant in gate.VARIANTS + conv.VARIANTS:
        names = list(variant["kernel"].arg_names)
        assert list(variant["signature"]) == names, variant["name"]
        assert [name for name in names if variant["signature"][name] == "constexpr"] == list(variant["constexprs"])
