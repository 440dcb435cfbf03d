"""The gate as Triton kernels, forward and backward: norms, dot product, root, sigmoid, value times gate.

    gated_BTSD, gate_BTS = gated_value(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, 1e-6, "signed_sqrt")

The judge is `gated_value` of kernels/reference.py. With q = x rx wq and k = key rk wk (rx, rk are 1 / rms) the score is
rx rk / sqrt(D) times the sum of x key w, where w = wq wk: the two norm weights are needed as their product only, in the
backward too. With c = d loss / d score / sqrt(D):

    d x = c rx rk w key - c rx^2 score / sqrt(D) x;  d wq = wk A,  d wk = wq A,  A = sum over tokens of c rx rk x key

and the same for the key. So the backward is two passes that together read every tensor once: `_to_value` sums the
gradient times the value over D, gives d value and three factors of each row; `_to_inputs` has no sum over D left, so D
is cut over programs, and each adds its own tokens to its own slice of A, in order: no atomics, the same bits each run.

Programs take tiles (launch.tile) of a few tokens of one stream. All is computed in fp32, whatever the dtype of the
tensors; gradients of gradients are not supported. At padding (`keep` False) the gated value and all gradients through
it are zero, whatever the value holds.

Shapes: B batch, T time, S residual streams, D hidden width, P programs that share the sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.kernels import reference
from engram.kernels.launch import on, power_of_two, serves, tile, tl, triton, variant
from engram.kernels.reference import SMALLEST_SCORE

PROGRAMS = 2048
"""Programs of `_to_inputs`, at most: 15 for each processor of an H100. Their partial sums take 2 MiB."""

REGISTERS = 120
"""A thread, at most (80 to 114 in the loops over D): 16 programs of one warp fit into a processor."""


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x,
    key,
    value,
    query_norm,
    key_norm,
    keep,
    gated,
    gate,
    scalars,
    tokens,
    eps,
    D: tl.constexpr,
    S: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    SIGNED: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS tokens of one stream. scalars[0] is the score, [1] and [2] are 1 / rms of x and of the key."""
    s = tl.program_id(0) % S  # the streams of a token side by side: they share its value in the cache
    token = (tl.program_id(0) // S).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    row = token * S + s
    plane = tokens.to(tl.int64) * S
    xx = tl.zeros([ROWS, BLOCK], tl.float32)
    kk = tl.zeros([ROWS, BLOCK], tl.float32)
    xk = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < D
        w = tl.load(query_norm + s * D + d, mask=inside, other=0.0).to(tl.float32)
        w = w * tl.load(key_norm + s * D + d, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * D + d[None, :]
        mask = live[:, None] & inside[None, :]
        one = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(key + at, mask=mask, other=0.0).to(tl.float32)
        xx += one * one
        kk += two * two
        xk += one * two * w[None, :]
    rx = tl.rsqrt(tl.sum(xx, 1) / D + eps)
    rk = tl.rsqrt(tl.sum(kk, 1) / D + eps)
    score = tl.sum(xk, 1) * rx * rk * (D**-0.5)
    tl.store(scalars + row, score, mask=live)
    tl.store(scalars + plane + row, rx, mask=live)
    tl.store(scalars + 2 * plane + row, rk, mask=live)
    if SIGNED:
        size = tl.abs(score)
        root = tl.sqrt(tl.where(size < SMALLEST, SMALLEST, size))  # not tl.maximum: it would hide a NaN
        score = tl.where(score == 0, 0.0, tl.where(score < 0, -root, root))
    opened = tl.sigmoid(score)
    tl.store(gate + row, opened, mask=live)
    opened = opened.to(value.dtype.element_ty).to(tl.float32)
    if HAS_KEEP:
        opened = tl.where(tl.load(keep + token, mask=live, other=0) != 0, opened, 0.0)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (d < D)[None, :]
        v = tl.load(value + token[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(gated + row[:, None] * D + d[None, :], opened[:, None] * v, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _to_value(
    grad_gated,
    grad_gate,
    value,
    keep,
    gate,
    scalars,
    grad_value,
    factors,
    tokens,
    D: tl.constexpr,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    SIGNED: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS tokens, all streams -> d value, and the rows' factors.

    Those are c rx rk, c rx^2 score / sqrt(D) and c rk^2 score / sqrt(D), a plane each.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    kept = live
    if HAS_KEEP:
        kept = live & (tl.load(keep + token, mask=live, other=0) != 0)
    stream = tl.arange(0, S_PADDED)
    dots = tl.zeros([ROWS, S_PADDED], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < D
        v = tl.load(value + token[:, None] * D + d[None, :], mask=kept[:, None] & inside[None, :], other=0.0)
        v = v.to(tl.float32)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for s in tl.static_range(S):
            at = (token * S + s)[:, None] * D + d[None, :]
            grad = tl.load(grad_gated + at, mask=kept[:, None] & inside[None, :], other=0.0).to(tl.float32)
            opened = tl.load(gate + token * S + s, mask=live, other=0.0)
            total += grad * opened.to(value.dtype.element_ty).to(tl.float32)[:, None]
            dots += tl.where(stream[None, :] == s, tl.sum(grad * v, 1)[:, None], 0.0)
        tl.store(grad_value + token[:, None] * D + d[None, :], total, mask=live[:, None] & inside[None, :])
    row = token[:, None] * S + stream[None, :]
    plane = tokens.to(tl.int64) * S
    mask = live[:, None] & (stream < S)[None, :]
    if HAS_GATE:
        dots += tl.load(grad_gate + row, mask=mask, other=0.0)
    opened = tl.load(gate + row, mask=mask, other=0.0)
    score = tl.load(scalars + row, mask=mask, other=0.0)
    rx = tl.load(scalars + plane + row, mask=mask, other=0.0)
    rk = tl.load(scalars + 2 * plane + row, mask=mask, other=0.0)
    c = dots * opened * (1.0 - opened) * (D**-0.5)
    if SIGNED:
        size = tl.abs(score)
        c = tl.where(size < SMALLEST, 0.0, c * 0.5 * tl.rsqrt(tl.where(size < SMALLEST, 1.0, size)))
    tl.store(factors + row, c * rx * rk, mask=mask)
    tl.store(factors + plane + row, c * rx * rx * score * (D**-0.5), mask=mask)
    tl.store(factors + 2 * plane + row, c * rk * rk * score * (D**-0.5), mask=mask)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _to_inputs(
    x,
    key,
    query_norm,
    key_norm,
    factors,
    grad_x,
    grad_key,
    partials,
    tokens,
    tiles,
    D: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: `tiles` tiles of ROWS tokens, BLOCK columns of one stream -> d x, d key, its part of A."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    d = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    s = (tl.program_id(0) // blocks) % S
    part = tl.program_id(0) // (blocks * S)
    inside = d < D
    w = tl.load(query_norm + s * D + d, mask=inside, other=0.0).to(tl.float32)
    w = w * tl.load(key_norm + s * D + d, mask=inside, other=0.0).to(tl.float32)
    plane = tokens.to(tl.int64) * S
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    i = 0
    while i < tiles:
        token = (part.to(tl.int64) * tiles + i) * ROWS + tl.arange(0, ROWS)
        live = token < tokens
        row = token * S + s
        both = tl.load(factors + row, mask=live, other=0.0)[:, None]
        own_x = tl.load(factors + plane + row, mask=live, other=0.0)[:, None]
        own_key = tl.load(factors + 2 * plane + row, mask=live, other=0.0)[:, None]
        at = row[:, None] * D + d[None, :]
        mask = live[:, None] & inside[None, :]
        one = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(key + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + at, both * w[None, :] * two - own_x * one, mask=mask)
        tl.store(grad_key + at, both * w[None, :] * one - own_key * two, mask=mask)
        sums += both * one * two
        i += 1
    tl.store(partials + (part * S + s) * D + d, tl.sum(sums, 0), mask=inside)


def _plan_forward(shape: torch.Size, kind: str, keep: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, constants."""
    B, T, S, D = shape
    chosen = tile(B * T * S, D)
    constants: dict[str, Any] = {"D": D, "S": S, "HAS_KEEP": keep}
    constants |= {"SIGNED": kind == "signed_sqrt", "SMALLEST": SMALLEST_SCORE}
    return (S * -(-B * T // chosen["ROWS"]),), {**constants, **chosen}


def _plan_to_value(shape: torch.Size, kind: str, keep: bool, gate: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, constants."""
    B, T, S, D = shape
    chosen = tile(B * T, D)
    constants: dict[str, Any] = {"D": D, "S": S, "S_PADDED": power_of_two(S), "HAS_GATE": gate, "HAS_KEEP": keep}
    constants |= {"SIGNED": kind == "signed_sqrt", "SMALLEST": SMALLEST_SCORE}
    return (-(-B * T // chosen["ROWS"]),), {**constants, **chosen}


def _plan_to_inputs(shape: torch.Size) -> tuple[tuple[int], int, int, dict[str, Any]]:
    """Grid, P, tiles a program, constants."""
    B, T, S, D = shape
    chosen = tile(B * T * S, D)
    tiles, slices = -(-B * T // chosen["ROWS"]), S * -(-D // chosen["BLOCK"])
    each = -(-tiles // max(1, PROGRAMS // slices))
    parts = -(-tiles // each)
    return (slices * parts,), parts, each, {"D": D, "S": S, **chosen}


def gated_value(
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    eps: float | None,
    kind: str,
    keep_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As in kernels/reference.py, as the op `engram::gated_value`: gated value [B, T, S, D] and gate [B, T, S].

    Triton where it runs and all is fp32, bf16 or fp16, else plain torch. Raises ValueError on shapes that do not fit.
    """
    return _gated_value(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, eps, kind, keep_BT)[:2]


def _check(
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    keep_BT: Tensor | None,
) -> None:
    """The kernels read wherever these shapes say, so they have to fit."""
    if x_BTSD.dim() != 4:
        raise ValueError(f"gated_value: x has shape {list(x_BTSD.shape)}, expected [B, T, S, D]")
    B, T, S, D = x_BTSD.shape
    expected = {"key": (key_BTSD, [B, T, S, D]), "value": (value_BTD, [B, T, D])}
    expected |= {"query_norm": (query_norm_SD, [S, D]), "key_norm": (key_norm_SD, [S, D])}
    if keep_BT is not None:
        expected["keep"] = (keep_BT, [B, T])
        if keep_BT.dtype != torch.bool:
            raise ValueError(f"gated_value: keep has dtype {keep_BT.dtype}, expected torch.bool")
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"gated_value: {name} has shape {list(tensor.shape)}, expected {shape} (x decides)")


@torch.library.custom_op(
    "engram::gated_value",
    mutates_args=(),
    schema="(Tensor x, Tensor key, Tensor value, Tensor query_norm, Tensor key_norm, float? eps, str kind, "
    "Tensor? keep=None) -> (Tensor, Tensor, Tensor)",
)
def _gated_value(
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    eps: float | None,
    kind: str,
    keep_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gated value, gate, and [3, B, T, S] for the backward: score, 1 / rms of x, 1 / rms of the key."""
    _check(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, keep_BT)
    x_BTSD, key_BTSD, value_BTD = x_BTSD.contiguous(), key_BTSD.contiguous(), value_BTD.contiguous()
    query_norm_SD, key_norm_SD = query_norm_SD.contiguous(), key_norm_SD.contiguous()
    wide = torch.promote_types(x_BTSD.dtype, torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if not serves(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD):
        gated_BTSD, gate_BTS = reference.gated_value(
            x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, eps, kind, keep_BT
        )
        return gated_BTSD, gate_BTS, reference.gate_scalars(x_BTSD, key_BTSD, query_norm_SD, key_norm_SD, eps)
    gated_BTSD = torch.empty_like(x_BTSD, dtype=value_BTD.dtype)
    gate_BTS = x_BTSD.new_empty(x_BTSD.shape[:3], dtype=torch.float32)
    scalars_3BTS = x_BTSD.new_empty((3, *gate_BTS.shape), dtype=torch.float32)
    if x_BTSD.numel():
        tensors = (x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, _flags(keep_BT, value_BTD))
        grid, constants = _plan_forward(x_BTSD.shape, kind, keep_BT is not None)
        with on(x_BTSD):
            _forward[grid](*tensors, gated_BTSD, gate_BTS, scalars_3BTS, len(value_BTD.flatten(0, 1)), eps, **constants)
    return gated_BTSD, gate_BTS, scalars_3BTS


def _flags(keep_BT: Tensor | None, other: Tensor) -> Tensor:
    """`keep` as bytes; without one some other tensor, which is not read then."""
    return other if keep_BT is None else keep_BT.contiguous().view(torch.uint8)


@_gated_value.register_fake
def _(
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    eps: float | None,
    kind: str,
    keep_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, keep_BT)
    wide = torch.promote_types(x_BTSD.dtype, torch.float32)
    gated_BTSD = x_BTSD.new_empty(x_BTSD.shape, dtype=value_BTD.dtype)
    gate_BTS = x_BTSD.new_empty(x_BTSD.shape[:3], dtype=wide)
    return gated_BTSD, gate_BTS, x_BTSD.new_empty((3, *x_BTSD.shape[:3]), dtype=wide)


@torch.library.custom_op(
    "engram::gated_value_backward",
    mutates_args=(),
    schema="(Tensor grad_gated, Tensor? grad_gate, Tensor x, Tensor key, Tensor value, Tensor query_norm, "
    "Tensor key_norm, Tensor? keep, Tensor gate, Tensor scalars, str kind) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _gated_value_backward(
    grad_BTSD: Tensor,
    grad_BTS: Tensor | None,
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    keep_BT: Tensor | None,
    gate_BTS: Tensor,
    scalars_3BTS: Tensor,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, key, value and both norm weights, each in its tensor's dtype."""
    grad_BTSD, grad_BTS = grad_BTSD.contiguous(), None if grad_BTS is None else grad_BTS.contiguous()
    x_BTSD, key_BTSD, value_BTD = x_BTSD.contiguous(), key_BTSD.contiguous(), value_BTD.contiguous()
    query_norm_SD, key_norm_SD = query_norm_SD.contiguous(), key_norm_SD.contiguous()
    if not serves(grad_BTSD, x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD):
        return reference.gated_value_backward(
            grad_BTSD,
            grad_BTS,
            x_BTSD,
            key_BTSD,
            value_BTD,
            query_norm_SD,
            key_norm_SD,
            keep_BT,
            gate_BTS,
            scalars_3BTS,
            kind,
        )
    S, D = query_norm_SD.shape
    tokens = len(value_BTD.flatten(0, 1))
    grad_x_BTSD, grad_key_BTSD, grad_value_BTD = map(torch.empty_like, (x_BTSD, key_BTSD, value_BTD))
    factors_3BTS = torch.empty_like(scalars_3BTS)
    sums_SD = query_norm_SD.new_zeros((S, D), dtype=torch.float32)
    if x_BTSD.numel():
        with on(x_BTSD):
            optional = (gate_BTS if grad_BTS is None else grad_BTS, value_BTD, _flags(keep_BT, value_BTD))
            grid, constants = _plan_to_value(x_BTSD.shape, kind, keep_BT is not None, grad_BTS is not None)
            outputs = (grad_value_BTD, factors_3BTS)
            _to_value[grid](grad_BTSD, *optional, gate_BTS, scalars_3BTS, *outputs, tokens, **constants)
            grid, parts, tiles, constants = _plan_to_inputs(x_BTSD.shape)
            partials_PSD = sums_SD.new_empty((parts, S, D))
            tensors = (x_BTSD, key_BTSD, query_norm_SD, key_norm_SD, factors_3BTS)
            _to_inputs[grid](*tensors, grad_x_BTSD, grad_key_BTSD, partials_PSD, tokens, tiles, **constants)
        sums_SD = partials_PSD.sum(dim=0)
    grads = (grad_x_BTSD, grad_key_BTSD, grad_value_BTD)
    return *grads, *reference.norm_grads(sums_SD, query_norm_SD, key_norm_SD)


@_gated_value_backward.register_fake
def _(
    grad_BTSD: Tensor,
    grad_BTS: Tensor | None,
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    of = (x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD)
    return tuple(tensor.new_empty(tensor.shape) for tensor in of)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, _, ctx.kind, keep_BT = inputs
    _, gate_BTS, scalars_3BTS = output
    ctx.set_materialize_grads(False)  # the gate is rarely part of a loss: no zeros for it
    ctx.save_for_backward(x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD, keep_BT, gate_BTS, scalars_3BTS)


def _backward(ctx: Any, grad_BTSD: Tensor | None, grad_BTS: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x_BTSD, *_, value_BTD = ctx.saved_tensors[:3]
    if grad_BTSD is None:
        grad_BTSD = torch.zeros_like(x_BTSD, dtype=value_BTD.dtype)
    return *_gated_value_backward(grad_BTSD, grad_BTS, *ctx.saved_tensors, ctx.kind), None, None, None


_gated_value.register_autograd(_backward, setup_context=_save)


def _variants(streams: int, width: int, dtype: str, tokens: int = 8192) -> list[dict[str, Any]]:
    shape = torch.Size((1, tokens, streams, width))
    name = f"S={streams} D={width} {dtype} tokens={tokens}"
    like = dict.fromkeys(("x", "key", "value", "query_norm", "key_norm"), f"*{dtype}")
    wide = {"gate": "*fp32", "scalars": "*fp32"}
    forward = {**like, "keep": "*u8", "gated": f"*{dtype}", **wide, "tokens": "i32", "eps": "fp32"}
    to_value = {"grad_gated": f"*{dtype}", "grad_gate": "*fp32", "value": f"*{dtype}", "keep": "*u8", **wide}
    to_value |= {"grad_value": f"*{dtype}", "factors": "*fp32", "tokens": "i32"}
    to_inputs = {key: kind for key, kind in like.items() if key != "value"}
    to_inputs |= {"factors": "*fp32", "grad_x": f"*{dtype}", "grad_key": f"*{dtype}", "partials": "*fp32"}
    to_inputs |= {"tokens": "i32", "tiles": "i32"}
    return [
        variant(f"gate forward {name}", _forward, forward, _plan_forward(shape, "signed_sqrt", True)[-1], REGISTERS),
        variant(
            f"gate to value {name}",
            _to_value,
            to_value,
            _plan_to_value(shape, "signed_sqrt", True, False)[-1],
            REGISTERS,
        ),
        variant(f"gate to inputs {name}", _to_inputs, to_inputs, _plan_to_inputs(shape)[-1], REGISTERS),
    ]


VARIANTS = [
    *_variants(1, 256, "bf16"),
    *_variants(1, 256, "fp32"),
    *_variants(4, 1280, "bf16"),
    *_variants(1, 2560, "bf16"),
    *_variants(1, 7168, "fp16"),
    *_variants(4, 1280, "bf16", tokens=1),
]
"""What a compiler needs to build representative launches without a GPU; see launch.variant."""
