"""The short convolution as Triton kernels, forward and backward: norm, taps over time, silu, residual.

    update_BTSD = conv_update(gated_BTSD, norm_SD, weight_SDK, 1e-5, dilation)

The judge is `conv_update` of kernels/reference.py; the normed value stays in fp32 here. With n = gated r norm (r is
1 / rms) and z[t] = sum over taps j of w_j n[t - j dilation], without taps of other documents, the update is
gated + silu(z). With dz = d loss / d z, G_j = sum over tokens of dz[t] (gated r)[t - j dilation] and dn[t] = sum over j
of w_j dz[t + j dilation], where taps lie later:

    d w_j = norm G_j;  d norm = sum over j of w_j G_j;  d gated = d update + r norm dn - gated r^3 m,
    m[t] = mean over D of gated norm dn = 1 / r[t] times the sum over j of (mean over D of dz norm w_j gated r)

where the last mean belongs to the pair of tokens t and t + j dilation. So G alone is summed over tokens, and sums over
D are made where both tokens are at hand. Forward: `_norm` (r, kept for the backward), `_forward`. Backward: `_to_taps`
recomputes z, gives dz, sums over D, and each program adds its own tokens to its own slice of G, in order; `_to_input`
collects. Sums over D are made by block of columns, so D is cut over programs, and a program walks along time with most
taps in its cache. All is computed in fp32; no atomics, the same bits each run; no gradients of gradients.

Shapes: B batch, T time, S residual streams, D hidden width, K taps, P programs that share the sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.kernels import reference
from engram.kernels.launch import on, power_of_two, serves, tile, tl, triton, variant

PROGRAMS = 8192
"""Programs of one warp, at most: three times what 132 processors of an H100 hold at the same time (20 or 21 each)."""

PROGRAMS_TO_TAPS = 2048
"""The same for `_to_taps`, 9 at the same time: each has a slice of partial sums, 8 MiB together at K = 4."""

REGISTERS, REGISTERS_TO_TAPS = 136, 248
"""A thread, at most: 130, and 243 in `_to_taps`, which holds 8 columns of K taps, K weights and K sums."""


@triton.jit(do_not_specialize=["rows"])
def _norm(gated, scale, rows, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ROWS rows of D numbers -> 1 / rms of each, fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (d < D)[None, :]
        one = tl.load(gated + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += one * one
    tl.store(scale + row, tl.rsqrt(tl.sum(squares, 1) / D + eps), mask=live)


@triton.jit
def _tap(gated, scale, token, near, d, s, D: tl.constexpr, S: tl.constexpr):
    """gated r of these tokens, zero where not `near`: [ROWS, BLOCK] fp32."""
    row = token * S + s
    r = tl.load(scale + row, mask=near, other=0.0)
    one = tl.load(gated + row[:, None] * D + d[None, :], mask=near[:, None] & (d < D)[None, :], other=0.0)
    return one.to(tl.float32) * r[:, None]


@triton.jit
def _near(segment, token, t, time, live, SHIFT: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """Whether the token SHIFT places on is in the same sequence and document."""
    near = live & (t + SHIFT >= 0) & (t + SHIFT < time)
    if HAS_SEGMENTS and SHIFT != 0:
        own = tl.load(segment + token, mask=live, other=0)
        near = near & (tl.load(segment + token + SHIFT, mask=near, other=0) == own)
    return near


@triton.jit
def _weight(taps, s, d, D: tl.constexpr, S: tl.constexpr, J: tl.constexpr):
    """norm w_j of stream s."""
    return tl.load(taps + (J * S + s) * D + d, mask=d < D, other=0.0)


@triton.jit
def _mixed(
    gated,
    scale,
    taps,
    segment,
    token,
    t,
    time,
    live,
    d,
    s,
    D: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """z: the sum over taps."""
    near = _near(segment, token, t, time, live, 0, HAS_SEGMENTS)
    z = _tap(gated, scale, token, near, d, s, D, S) * _weight(taps, s, d, D, S, 0)[None, :]
    for j in tl.static_range(1, K):
        near = _near(segment, token, t, time, live, -j * DILATION, HAS_SEGMENTS)
        n = _tap(gated, scale, token - j * DILATION, near, d, s, D, S)
        z += n * _weight(taps, s, d, D, S, j)[None, :]
    return z


@triton.jit(do_not_specialize=["time", "chunks", "all_chunks", "each"])
def _forward(
    gated,
    scale,
    taps,
    segment,
    update,
    time,
    chunks,
    all_chunks,
    each,
    D: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: `each` chunks of ROWS tokens (a sequence has `chunks`), BLOCK columns of one stream -> update."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    d = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    s = (tl.program_id(0) // blocks) % S
    chunk = tl.program_id(0) // (blocks * S) * each
    end = tl.minimum(chunk + each, all_chunks)
    while chunk < end:
        t = (chunk % chunks) * ROWS + tl.arange(0, ROWS)
        token = (chunk // chunks).to(tl.int64) * time + t
        live = t < time
        z = _mixed(gated, scale, taps, segment, token, t, time, live, d, s, D, S, K, DILATION, HAS_SEGMENTS)
        at = (token * S + s)[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        one = tl.load(gated + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(update + at, one + z * tl.sigmoid(z), mask=mask)
        chunk += 1


@triton.jit(do_not_specialize=["time", "chunks", "all_chunks", "each", "tokens"])
def _to_taps(
    grad,
    gated,
    scale,
    taps,
    segment,
    grad_mixed,
    partials,
    dots,
    time,
    chunks,
    all_chunks,
    each,
    tokens,
    D: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """Programs as in `_forward` -> dz, the program's part of G [P, K, S, D], its columns' part of the dots.

    dots[block, j, row] is the sum over D of dz times what tap j added to z there, for `_to_input`.
    """
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    d = block * BLOCK + tl.arange(0, BLOCK)
    s = (tl.program_id(0) // blocks) % S
    part = tl.program_id(0) // (blocks * S)
    tap = tl.arange(0, K_PADDED)
    plane = (block * K + tap).to(tl.int64) * tokens * S
    sums = tl.zeros([K_PADDED, BLOCK], tl.float32)
    chunk = part * each
    end = tl.minimum(chunk + each, all_chunks)
    while chunk < end:
        t = (chunk % chunks) * ROWS + tl.arange(0, ROWS)
        token = (chunk // chunks).to(tl.int64) * time + t
        live = t < time
        z = _mixed(gated, scale, taps, segment, token, t, time, live, d, s, D, S, K, DILATION, HAS_SEGMENTS)
        at = (token * S + s)[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        opened = tl.sigmoid(z)
        dz = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * opened * (1.0 + z * (1.0 - opened))
        row_dots = tl.zeros([ROWS, K_PADDED], tl.float32)
        for j in tl.static_range(K):
            near = _near(segment, token, t, time, live, -j * DILATION, HAS_SEGMENTS)
            product = dz * _tap(gated, scale, token - j * DILATION, near, d, s, D, S)
            sums += tl.where(tap[:, None] == j, tl.sum(product, 0)[None, :], 0.0)
            dot = tl.sum(product * _weight(taps, s, d, D, S, j)[None, :], 1)
            row_dots += tl.where(tap[None, :] == j, dot[:, None], 0.0)
        tl.store(grad_mixed + at, dz, mask=mask)
        there = dots + plane[None, :] + (token * S + s)[:, None]
        tl.store(there, row_dots, mask=live[:, None] & (tap < K)[None, :])
        chunk += 1
    at = ((part.to(tl.int64) * K + tap) * S + s)[:, None] * D + d[None, :]
    tl.store(partials + at, sums, mask=(tap < K)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["time", "chunks", "all_chunks", "each", "tokens"])
def _to_input(
    grad,
    grad_mixed,
    dots,
    gated,
    scale,
    taps,
    segment,
    grad_gated,
    time,
    chunks,
    all_chunks,
    each,
    tokens,
    D: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs as in `_forward` -> d gated; dots [K, B, T, S] are summed over the blocks of columns here."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    d = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    s = (tl.program_id(0) // blocks) % S
    plane = tokens.to(tl.int64) * S
    chunk = tl.program_id(0) // (blocks * S) * each
    end = tl.minimum(chunk + each, all_chunks)
    while chunk < end:
        t = (chunk % chunks) * ROWS + tl.arange(0, ROWS)
        token = (chunk // chunks).to(tl.int64) * time + t
        live = t < time
        row = token * S + s
        dn = tl.zeros([ROWS, BLOCK], tl.float32)  # times norm
        pull = tl.zeros([ROWS], tl.float32)
        for j in tl.static_range(K):
            near = _near(segment, token, t, time, live, j * DILATION, HAS_SEGMENTS)
            later = row + j * DILATION * S
            pull += tl.load(dots + j * plane + later, mask=near, other=0.0)
            mask = near[:, None] & (d < D)[None, :]
            dz = tl.load(grad_mixed + later[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
            dn += dz * _weight(taps, s, d, D, S, j)[None, :]
        r = tl.load(scale + row, mask=live, other=0.0)
        at = row[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        one = tl.load(gated + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_gated + at, dy + r[:, None] * dn - (pull / D * r * r)[:, None] * one, mask=mask)
        chunk += 1


def _plan_norm(shape: torch.Size) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, constants."""
    B, T, S, D = shape
    chosen = tile(B * T * S, D)
    return (-(-B * T * S // chosen["ROWS"]),), {"D": D, **chosen}


def _plan(
    shape: torch.Size, programs: int, taps: int, dilation: int, segments: bool
) -> tuple[tuple[int], int, tuple[int, ...], dict[str, Any]]:
    """Grid, P, (time, chunks a sequence, of all, a program), constants.

    The chunks of a program follow each other in time, so that most taps are in its cache.
    """
    B, T, S, D = shape
    chosen = tile(B * T * S, D)
    chosen["ROWS"] = max(1, 4 * chosen["ROWS"] // max(4, power_of_two(taps)))  # more taps take more registers
    chunks, slices = -(-T // chosen["ROWS"]), S * -(-D // chosen["BLOCK"])
    each = -(-B * chunks // max(1, programs // slices))
    parts = -(-B * chunks // each)
    constants = {"D": D, "S": S, "K": taps, "DILATION": dilation, "HAS_SEGMENTS": segments, **chosen}
    return (slices * parts,), parts, (T, chunks, B * chunks, each), constants


def conv_update(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> Tensor:
    """As in kernels/reference.py, as the op `engram::conv_update`: gated value [B, T, S, D] -> update [B, T, S, D].

    Triton where it runs and all is fp32, bf16 or fp16, else plain torch. Raises ValueError on shapes that do not fit.
    """
    return _conv_update(gated_BTSD, norm_SD, weight_SDK, eps, dilation, segment_BT)[0]


def _check(gated_BTSD: Tensor, norm_SD: Tensor, weight_SDK: Tensor, dilation: int, segment_BT: Tensor | None) -> None:
    """The kernels read wherever these shapes say, so they have to fit."""
    if gated_BTSD.dim() != 4 or weight_SDK.dim() != 3:
        shapes = f"{list(gated_BTSD.shape)} and {list(weight_SDK.shape)}"
        raise ValueError(f"conv_update: gated and weight have shapes {shapes}, expected [B, T, S, D] and [S, D, K]")
    B, T, S, D = gated_BTSD.shape
    expected = {"norm": (norm_SD, [S, D]), "weight": (weight_SDK, [S, D, weight_SDK.shape[2]])}
    if segment_BT is not None:
        expected["segment"] = (segment_BT, [B, T])
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"conv_update: {name} has shape {list(tensor.shape)}, expected {shape} (gated decides)")
    if dilation < 1 or weight_SDK.shape[2] < 1:
        raise ValueError(f"conv_update: dilation {dilation} and taps {weight_SDK.shape[2]} have to be at least 1")


@torch.library.custom_op(
    "engram::conv_update",
    mutates_args=(),
    schema="(Tensor gated, Tensor norm, Tensor weight, float? eps, int dilation, Tensor? segment=None) "
    "-> (Tensor, Tensor)",
)
def _conv_update(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The update, and 1 / rms [B, T, S] for the backward."""
    _check(gated_BTSD, norm_SD, weight_SDK, dilation, segment_BT)
    gated_BTSD, norm_SD, weight_SDK = gated_BTSD.contiguous(), norm_SD.contiguous(), weight_SDK.contiguous()
    wide = torch.promote_types(gated_BTSD.dtype, torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if not serves(gated_BTSD, norm_SD, weight_SDK):
        update_BTSD = reference.conv_update(gated_BTSD, norm_SD, weight_SDK, eps, dilation, segment_BT)
        return update_BTSD, (gated_BTSD.to(wide).square().mean(dim=-1) + eps).rsqrt()
    dtype = torch.promote_types(gated_BTSD.dtype, weight_SDK.dtype)
    update_BTSD = torch.empty_like(gated_BTSD, dtype=dtype)
    scale_BTS = gated_BTSD.new_empty(gated_BTSD.shape[:3], dtype=torch.float32)
    if gated_BTSD.numel():
        with on(gated_BTSD):
            grid, constants = _plan_norm(gated_BTSD.shape)
            _norm[grid](gated_BTSD, scale_BTS, scale_BTS.numel(), eps, **constants)
            fixed = (weight_SDK.shape[2], dilation, segment_BT is not None)
            grid, _, numbers, constants = _plan(gated_BTSD.shape, PROGRAMS, *fixed)
            tensors = (gated_BTSD, scale_BTS, _taps(norm_SD, weight_SDK), _numbers(segment_BT, scale_BTS))
            _forward[grid](*tensors, update_BTSD, *numbers, **constants)
    return update_BTSD, scale_BTS


def _taps(norm_SD: Tensor, weight_SDK: Tensor) -> Tensor:
    """norm w_j, tap 0 first: [K, S, D] fp32. In [S, D, K] a thread would load its 8 columns one by one."""
    taps_KSD = norm_SD.new_empty((weight_SDK.shape[2], *norm_SD.shape), dtype=torch.float32)
    return torch.mul(weight_SDK.flip(-1).permute(2, 0, 1), norm_SD.float(), out=taps_KSD)


def _numbers(segment_BT: Tensor | None, other: Tensor) -> Tensor:
    """Document numbers for a kernel; without them some other tensor, which is not read then."""
    return other if segment_BT is None else segment_BT.contiguous()


@_conv_update.register_fake
def _(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(gated_BTSD, norm_SD, weight_SDK, dilation, segment_BT)
    dtype = torch.promote_types(gated_BTSD.dtype, weight_SDK.dtype)
    wide = torch.promote_types(gated_BTSD.dtype, torch.float32)
    update_BTSD = gated_BTSD.new_empty(gated_BTSD.shape, dtype=dtype)
    return update_BTSD, gated_BTSD.new_empty(gated_BTSD.shape[:3], dtype=wide)


@torch.library.custom_op(
    "engram::conv_update_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor gated, Tensor norm, Tensor weight, Tensor? segment, Tensor scale, int dilation) "
    "-> (Tensor, Tensor, Tensor)",
)
def _conv_update_backward(
    grad_BTSD: Tensor,
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    segment_BT: Tensor | None,
    scale_BTS: Tensor,
    dilation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gated, norm and weight, each in its tensor's dtype."""
    grad_BTSD, gated_BTSD = grad_BTSD.contiguous(), gated_BTSD.contiguous()
    norm_SD, weight_SDK = norm_SD.contiguous(), weight_SDK.contiguous()
    if not serves(grad_BTSD, gated_BTSD, norm_SD, weight_SDK):
        return reference.conv_update_backward(
            grad_BTSD, gated_BTSD, norm_SD, weight_SDK, segment_BT, scale_BTS, dilation
        )
    shape, K = gated_BTSD.shape, weight_SDK.shape[2]
    B, T, S, D = shape
    grad_gated_BTSD = torch.empty_like(gated_BTSD)
    sums_SDK = norm_SD.new_zeros((S, D, K), dtype=torch.float32)
    if gated_BTSD.numel():
        fixed = (K, dilation, segment_BT is not None)
        tensors = (gated_BTSD, scale_BTS, _taps(norm_SD, weight_SDK), _numbers(segment_BT, scale_BTS))
        mixed_BTSD = torch.empty_like(grad_BTSD)
        tokens, blocks = B * T, -(-D // tile(B * T * S, D)["BLOCK"])
        with on(gated_BTSD):
            grid, parts, numbers, constants = _plan(shape, PROGRAMS_TO_TAPS, *fixed)
            partials_PKSD = sums_SDK.new_empty((parts, K, S, D))
            dots_bKBTS = sums_SDK.new_empty((blocks, K, B, T, S))
            outputs = (mixed_BTSD, partials_PKSD, dots_bKBTS)
            _to_taps[grid](grad_BTSD, *tensors, *outputs, *numbers, tokens, **constants, K_PADDED=power_of_two(K))
            grid, _, numbers, constants = _plan(shape, PROGRAMS, *fixed)
            inputs = (grad_BTSD, mixed_BTSD, dots_bKBTS.sum(dim=0), *tensors)
            _to_input[grid](*inputs, grad_gated_BTSD, *numbers, tokens, **constants)
        sums_SDK = partials_PKSD.sum(dim=0).permute(1, 2, 0).flip(-1)
    return grad_gated_BTSD, *reference.tap_grads(sums_SDK, norm_SD, weight_SDK)


@_conv_update_backward.register_fake
def _(
    grad_BTSD: Tensor, gated_BTSD: Tensor, norm_SD: Tensor, weight_SDK: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [tensor.new_empty(tensor.shape) for tensor in (gated_BTSD, norm_SD, weight_SDK)]
    return grads[0], grads[1], grads[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gated_BTSD, norm_SD, weight_SDK, _, ctx.dilation, segment_BT = inputs
    ctx.set_materialize_grads(False)  # no zeros for 1 / rms, which nobody derives
    ctx.save_for_backward(gated_BTSD, norm_SD, weight_SDK, segment_BT, output[1])


def _backward(ctx: Any, grad_BTSD: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_BTSD is None:
        return (None,) * 6
    return *_conv_update_backward(grad_BTSD, *ctx.saved_tensors, ctx.dilation), None, None, None


_conv_update.register_autograd(_backward, setup_context=_save)


def _variants(
    streams: int, width: int, dtype: str, tokens: int = 8192, segments: bool = True, taps: int = 4
) -> list[dict[str, Any]]:
    shape, fixed = torch.Size((1, tokens, streams, width)), (taps, 3, segments)
    name = f"S={streams} D={width} K={taps} {dtype} tokens={tokens}"
    tensors = {"gated": f"*{dtype}", "scale": "*fp32", "taps": "*fp32"}
    tensors |= {"segment": "*i64" if segments else "*fp32"}
    norm = {"gated": f"*{dtype}", "scale": "*fp32", "rows": "i32", "eps": "fp32"}
    counts = dict.fromkeys(("time", "chunks", "all_chunks", "each"), "i32")
    forward = {**tensors, "update": f"*{dtype}", **counts}
    to_taps = {"grad": f"*{dtype}", **tensors, "grad_mixed": f"*{dtype}", "partials": "*fp32", "dots": "*fp32"}
    to_taps |= {**counts, "tokens": "i32"}
    to_input = {"grad": f"*{dtype}", "grad_mixed": f"*{dtype}", "dots": "*fp32", **tensors, "grad_gated": f"*{dtype}"}
    to_input |= {**counts, "tokens": "i32"}
    constants = _plan(shape, PROGRAMS, *fixed)[-1]
    padded = {**constants, "K_PADDED": power_of_two(taps)}
    return [
        variant(f"conv norm {name}", _norm, norm, _plan_norm(shape)[-1], REGISTERS),
        variant(f"conv forward {name}", _forward, forward, constants, REGISTERS),
        variant(f"conv to taps {name}", _to_taps, to_taps, padded, REGISTERS_TO_TAPS),
        variant(f"conv to input {name}", _to_input, to_input, constants, REGISTERS),
    ]


VARIANTS = [
    *_variants(1, 256, "bf16", segments=False),
    *_variants(1, 256, "fp32"),
    *_variants(4, 1280, "bf16"),
    *_variants(1, 2560, "bf16"),
    *_variants(1, 7168, "fp16"),
    *_variants(4, 1280, "bf16", tokens=1),
]
"""What a compiler needs to build representative launches without a GPU; see launch.variant."""
