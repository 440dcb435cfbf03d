"""The ops of the gate and of the convolution where no kernel runs: closed-form gradients in float64, compilers.

tests/triton/test_gate.py runs the same ops on the kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engram.kernels import conv, dispatch, gate, launch, reference


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _gate_inputs() -> tuple[Tensor, ...]:
    return _double(2, 3, 2, 5), _double(2, 3, 2, 5), _double(2, 3, 5), _double(2, 5), _double(2, 5)


def _conv_inputs() -> tuple[Tensor, ...]:
    return _double(2, 9, 2, 3), _double(2, 3), _double(2, 3, 4)


KEEP = torch.tensor([[True, False, True], [False, True, True]])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])


@pytest.mark.parametrize("kind", ["signed_sqrt", "sigmoid"])
@pytest.mark.parametrize("keep_BT", [None, KEEP], ids=["all", "some"])
def test_gradcheck_of_the_gate(kind: str, keep_BT: Tensor | None) -> None:
    inputs = _gate_inputs()
    ours, plain = (call(*inputs, 1e-6, kind, keep_BT) for call in (gate.gated_value, reference.gated_value))
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert torch.autograd.gradcheck(lambda *t: gate.gated_value(*t, 1e-6, kind, keep_BT), inputs)


def test_scores_of_zero_pass_no_gradient() -> None:
    inputs = _gate_inputs()
    with torch.no_grad():
        inputs[0][0, 1] = 0
    grads = torch.autograd.grad(gate.gated_value(*inputs, 1e-6, "signed_sqrt")[0].square().sum(), inputs)
    wanted = torch.autograd.grad(reference.gated_value(*inputs, 1e-6, "signed_sqrt")[0].square().sum(), inputs)
    assert not grads[0][0, 1].any() and grads[0][0, 0].any()
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dilation", [1, 3, 20])
@pytest.mark.parametrize("segment_BT", [None, SEGMENTS], ids=["one", "packed"])
def test_gradcheck_of_the_convolution(dilation: int, segment_BT: Tensor | None) -> None:
    inputs = _conv_inputs()
    assert torch.equal(*(f(*inputs, 1e-6, dilation, segment_BT) for f in (conv.conv_update, reference.conv_update)))
    assert torch.autograd.gradcheck(lambda *t: conv.conv_update(*t, 1e-6, dilation, segment_BT), inputs)


def test_the_ops_are_good_citizens_of_torch() -> None:
    single = [tensor.detach().float().requires_grad_() for tensor in _gate_inputs()]
    torch.library.opcheck(gate._gated_value, (*single, None, "signed_sqrt", KEEP))
    single = [tensor.detach().float().requires_grad_() for tensor in _conv_inputs()]
    torch.library.opcheck(conv._conv_update, (*single, 1e-6, 2, SEGMENTS))


@pytest.mark.parametrize("through", ["ops", "dispatch"])
def test_compiled_in_one_graph(through: str) -> None:
    inputs = (*_gate_inputs(), *_conv_inputs()[1:])
    inputs = (*inputs[:5], _double(2, 5), _double(2, 5, 3))
    gated_value, conv_update = (
        (gate.gated_value, conv.conv_update) if through == "ops" else (dispatch.gated_value, dispatch.conv_update)
    )

    def both(*tensors: Tensor) -> Tensor:
        return conv_update(gated_value(*tensors[:5], 1e-6, "signed_sqrt")[0], *tensors[5:], 1e-6, 2)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(call(*inputs).square().sum(), inputs) for call in (compiled, both))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_kernels_by_name_need_something_that_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_KERNELS", "triton")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inputs = _gate_inputs()
    for installed, message in ((True, "no GPU is here"), (False, "Triton is not installed")):
        monkeypatch.setattr(launch, "INSTALLED", installed)
        dispatch.choose_again()
        with pytest.raises(ValueError, match=message):
            dispatch.gated_value(*inputs, 1e-6, "sigmoid")
    monkeypatch.setenv("ENGRAM_KERNELS", "auto")
    dispatch.choose_again()
    assert torch.equal(
        dispatch.gated_value(*inputs, 1e-6, "sigmoid")[0], reference.gated_value(*inputs, 1e-6, "sigmoid")[0]
    )
    dispatch.choose_again()
