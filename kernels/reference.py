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


def gate(query_BTSD: Tensor, key_BTSD: Tensor, kind: str) -> Tensor:
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
