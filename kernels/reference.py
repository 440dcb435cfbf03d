"""Every operation of the memory in plain torch: the judge of every faster version.

Shapes: B batch, T time, S residual streams, D hidden width, K convolution taps, n looked-up rows (with duplicates),
U distinct rows, W row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCORE = 1e-6  # |score| is clamped here before the root: its gradient would be infinite at 0


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """x / rms(x) * weight over the last dimension; `eps` None is the dtype's own epsilon, as in torch's RMSNorm."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def sigmoid_gate(query_BTSD: Tensor, key_BTSD: Tensor, kind: str) -> Tensor:
    """Normalised queries and keys [B, T, S, D] -> gate [B, T, S] in (0, 1).

    score = <query, key> / sqrt(D). "sigmoid" is the paper's equation 4; "signed_sqrt" takes
    sign(s) * sqrt(max(|s|, 1e-6)) first, as the demo and every released model do. A score of exactly 0 gives 0.5.
    """
    score_BTS = (query_BTSD * key_BTSD).sum(dim=-1) * query_BTSD.shape[-1] ** -0.5
    if kind == "signed_sqrt":
        score_BTS = score_BTS.sign() * score_BTS.abs().clamp_min(SMALLEST_SCORE).sqrt()
    return score_BTS.sigmoid()


def short_conv(x_BTSD: Tensor, weight_SDK: Tensor, dilation: int, segment_BT: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution over time; tap K-1 is the current position, tap K-1-j the one j * dilation back.

    segment_BT  packed-document numbers: a tap that would reach into another document reads zero.
    """
    taps = weight_SDK.shape[-1]
    out = x_BTSD * weight_SDK[..., -1]
    for j in range(1, taps):
        back = j * dilation
        if back >= x_BTSD.shape[1]:
            break
        earlier = x_BTSD[:, :-back]
        if segment_BT is not None:
            same_Bt = segment_BT[:, back:] == segment_BT[:, :-back]
            earlier = earlier * same_Bt[:, :, None, None]
        out = out + torch.nn.functional.pad(earlier * weight_SDK[..., taps - 1 - j], (0, 0, 0, 0, back, 0))
    return out


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
    """Hidden state and keys [B, T, S, D], value [B, T, D], norm weights [S, D] -> gated value and gate [B, T, S].

    The value may have another width than D, which the gated value then has, too.
    The gate is that of `sigmoid_gate` over RMS-normed queries (`x`) and keys. Norms, dot product and root are in fp32
    or better: 16-bit scores near 0 would lose the sign of the root. The gate is rounded to the value's dtype, which is
    also that of the gated value; the gate itself is given back unrounded.

    keep_BT  bool, False where the gated value is zero (padding); the gate is given there, too.
    """
    wide = torch.promote_types(x_BTSD.dtype, torch.float32)
    query_BTSD = rms_norm(x_BTSD.to(wide), query_norm_SD.to(wide), eps)
    gate_BTS = sigmoid_gate(query_BTSD, rms_norm(key_BTSD.to(wide), key_norm_SD.to(wide), eps), kind)
    gated_BTSD = gate_BTS.to(value_BTD.dtype).unsqueeze(-1) * value_BTD.unsqueeze(-2)
    return (gated_BTSD if keep_BT is None else gated_BTSD * keep_BT[..., None, None]), gate_BTS


def gate_scalars(x_BTSD: Tensor, key_BTSD: Tensor, query_norm_SD: Tensor, key_norm_SD: Tensor, eps: float) -> Tensor:
    """Score, 1 / rms of `x` and 1 / rms of the key, [3, B, T, S] in fp32 or better: what the gate's backward reads."""
    wide = torch.promote_types(x_BTSD.dtype, torch.float32)
    x_BTSD, key_BTSD = x_BTSD.to(wide), key_BTSD.to(wide)
    rx_BTS, rk_BTS = ((each.square().mean(dim=-1) + eps).rsqrt() for each in (x_BTSD, key_BTSD))
    score_BTS = (x_BTSD * key_BTSD * (query_norm_SD.to(wide) * key_norm_SD.to(wide))).sum(dim=-1)
    return torch.stack([score_BTS * rx_BTS * rk_BTS * x_BTSD.shape[-1] ** -0.5, rx_BTS, rk_BTS])


def gated_value_backward(
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
    """Gradients of x, key, value and both norm weights of `gated_value`, from those of its two results.

    The formulas at the head of kernels/gate.py: an op cannot run autograd inside itself. `scalars` are `gate_scalars`.
    """
    wide = gate_BTS.dtype
    x_BTSD_, key_BTSD_, grad_BTSD = x_BTSD.to(wide), key_BTSD.to(wide), grad_BTSD.to(wide)
    w_SD = query_norm_SD.to(wide) * key_norm_SD.to(wide)
    if keep_BT is not None:
        grad_BTSD = grad_BTSD * keep_BT[..., None, None]
    grad_value_BTD = (grad_BTSD * gate_BTS.to(value_BTD.dtype).to(wide).unsqueeze(-1)).sum(dim=2)
    c_BTS = (grad_BTSD * value_BTD.to(wide).unsqueeze(-2)).sum(dim=-1)
    c_BTS = c_BTS if grad_BTS is None else c_BTS + grad_BTS
    c_BTS = c_BTS * gate_BTS * (1 - gate_BTS) * x_BTSD.shape[-1] ** -0.5
    score_BTS, rx_BTS, rk_BTS = scalars_3BTS
    if kind == "signed_sqrt":
        size_BTS = score_BTS.abs()
        c_BTS = torch.where(size_BTS < SMALLEST_SCORE, 0, c_BTS * 0.5 * size_BTS.rsqrt())
    own_BTS = c_BTS * score_BTS * x_BTSD.shape[-1] ** -0.5
    both_BTS1 = (c_BTS * rx_BTS * rk_BTS).unsqueeze(-1)
    grad_x_BTSD = both_BTS1 * w_SD * key_BTSD_ - (own_BTS * rx_BTS.square()).unsqueeze(-1) * x_BTSD_
    grad_key_BTSD = both_BTS1 * w_SD * x_BTSD_ - (own_BTS * rk_BTS.square()).unsqueeze(-1) * key_BTSD_
    sums_SD = (both_BTS1 * x_BTSD_ * key_BTSD_).sum(dim=(0, 1))
    grads = (grad_x_BTSD.to(x_BTSD.dtype), grad_key_BTSD.to(key_BTSD.dtype), grad_value_BTD.to(value_BTD.dtype))
    return *grads, *norm_grads(sums_SD, query_norm_SD, key_norm_SD)


def norm_grads(sums_SD: Tensor, query_norm_SD: Tensor, key_norm_SD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both norm weights [S, D] from the one sum over tokens that they share (kernels/gate.py)."""
    query_SD, key_SD = query_norm_SD.to(sums_SD.dtype), key_norm_SD.to(sums_SD.dtype)
    return (sums_SD * key_SD).to(query_norm_SD.dtype), (sums_SD * query_SD).to(key_norm_SD.dtype)


def conv_term(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> Tensor:
    """silu(short_conv(rms_norm(gated))), [B, T, S, D] -> [B, T, S, D]; the norm is in fp32 or better, then rounded.

    segment_BT  packed-document numbers that differ between any two documents of a sequence.
    """
    wide = torch.promote_types(gated_BTSD.dtype, torch.float32)
    normed_BTSD = rms_norm(gated_BTSD.to(wide), norm_SD.to(wide), eps).to(gated_BTSD.dtype)
    return torch.nn.functional.silu(short_conv(normed_BTSD, weight_SDK, dilation, segment_BT))


def conv_update(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> Tensor:
    """gated + conv_term(gated): the update of a layer with a convolution; dtype is promoted from gated and taps."""
    return gated_BTSD + conv_term(gated_BTSD, norm_SD, weight_SDK, eps, dilation, segment_BT)


def conv_update_backward(
    grad_BTSD: Tensor,
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    segment_BT: Tensor | None,
    scale_BTS: Tensor,
    dilation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gated, norm and taps of `conv_update`; `scale` is 1 / rms of gated, [B, T, S].

    The formulas at the head of kernels/conv.py: an op cannot run autograd inside itself.
    """
    wide, taps = scale_BTS.dtype, weight_SDK.shape[2]
    flat_BTSD = gated_BTSD.to(wide) * scale_BTS.unsqueeze(-1)
    norm_SD_, weight_SDK_ = norm_SD.to(wide), weight_SDK.to(wide)
    z_BTSD = short_conv(flat_BTSD * norm_SD_, weight_SDK_, dilation, segment_BT)
    opened_BTSD = z_BTSD.sigmoid()
    dz_BTSD = grad_BTSD.to(wide) * opened_BTSD * (1 + z_BTSD * (1 - opened_BTSD))
    sums_KSD, dn_BTSD = [], torch.zeros_like(dz_BTSD)
    for j in range(taps - 1, -1, -1):
        back = min(j * dilation, dz_BTSD.shape[1])
        later_BtSD, length = dz_BTSD[:, back:], dz_BTSD.shape[1] - back
        if segment_BT is not None:
            later_BtSD = later_BtSD * (segment_BT[:, back:] == segment_BT[:, :length])[..., None, None]
        sums_KSD.append((later_BtSD * flat_BTSD[:, :length]).sum(dim=(0, 1)))
        dn_BTSD += torch.nn.functional.pad(later_BtSD * weight_SDK_[..., taps - 1 - j], (0, 0, 0, 0, 0, back))
    dn_BTSD *= norm_SD_
    pull_BTS1 = (dn_BTSD * flat_BTSD).mean(dim=-1, keepdim=True)
    own_BTSD = (dn_BTSD - flat_BTSD * pull_BTS1) * scale_BTS.unsqueeze(-1)
    grads = tap_grads(torch.stack(sums_KSD, dim=-1), norm_SD, weight_SDK)
    return (grad_BTSD.to(wide) + own_BTSD).to(gated_BTSD.dtype), *grads


def tap_grads(sums_SDK: Tensor, norm_SD: Tensor, weight_SDK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of norm [S, D] and taps [S, D, K] from the sums over tokens that they share (kernels/conv.py)."""
    wide = sums_SDK.dtype
    grad_norm_SD = (sums_SDK * weight_SDK.to(wide)).sum(dim=-1).to(norm_SD.dtype)
    return grad_norm_SD, (sums_SDK * norm_SD.to(wide).unsqueeze(-1)).to(weight_SDK.dtype).contiguous()


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Looked-up row numbers [n] and their gradients [n, W] -> distinct rows [U], ascending, and fp32 sums [U, W].

    The third result, [U], is where each distinct row occurs first among the n.

    Duplicates are added in the order of their occurrence (stable sort, sequential segments), so the result is the same
    bits in every run. Nothing of the table's size is made.
    """
    if not len(ids_n):
        return ids_n, grads_nW.float(), ids_n
    order_n = torch.argsort(ids_n, stable=True)
    unique_U, counts_U = torch.unique_consecutive(ids_n[order_n], return_counts=True)
    sums_UW = torch.segment_reduce(grads_nW[order_n].float(), "sum", lengths=counts_U, axis=0)
    return unique_U, sums_UW, order_n[counts_U.cumsum(0) - counts_U]


def rowwise_adam(
    values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, beta2: float, eps: float
) -> tuple[Tensor, Tensor]:
    """One row-wise Adam step on touched rows: returns the new values and the new state (one fp32 scalar a row).

    v = mean over the row of g^2 at the first touch (v is 0 for a row never touched), then
    v <- beta2 v + (1 - beta2) mean g^2; row <- row - lr g / (sqrt(v) + eps). No bias correction: with the global one a
    row first touched at step 1000 moves 25 times the learning rate. A gradient of exactly zero (masked labels) is
    no first touch: counted as one, it would let the next move the row by lr / sqrt(1 - beta2).
    """
    square_U = grads_UW.square().mean(dim=-1)
    new_v_U = torch.where(v_U == 0, square_U, beta2 * v_U + (1 - beta2) * square_U)
    return values_UW - lr * grads_UW / (new_v_U.sqrt() + eps).unsqueeze(-1), new_v_U


def rowwise_adagrad(values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, eps: float) -> tuple[Tensor, Tensor]:
    """One row-wise Adagrad step: v <- v + mean over the row of g^2 (from 0); row <- row - lr g / (sqrt(v) + eps)."""
    new_v_U = v_U + grads_UW.square().mean(dim=-1)
    return values_UW - lr * grads_UW / (new_v_U.sqrt() + eps).unsqueeze(-1), new_v_U


def elementwise_adam(
    values_UW: Tensor,
    grads_UW: Tensor,
    m_UW: Tensor,
    v_UW: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lazy element-wise Adam (the rule of torch's SparseAdam, the paper's optimizer for rows) on touched rows."""
    m_UW = betas[0] * m_UW + (1 - betas[0]) * grads_UW
    v_UW = betas[1] * v_UW + (1 - betas[1]) * grads_UW.square()
    scale = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
    return values_UW - scale * m_UW / (v_UW.sqrt() + eps), m_UW, v_UW
