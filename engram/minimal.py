"""The whole algorithm in about 100 lines of plain torch: no options, no stores, no hooks. Read this first.

It is the module of the Engram demo (deepseek-ai/Engram, engram_demo_v1): orders 2 and 3, S residual streams with one
key each and a shared value, biases, signed-square-root gate, short convolution. tests/test_minimal.py holds it equal to
`engram.layer` in float64, and holds its row numbers to the golden ones.

    memory = MinimalEngram(hidden=64, streams=4, layer=1, classes=1000, base=1000, heads=2, head_dim=16)
    x_BTSD = x_BTSD + memory(x_BTSD, ids_BT)

Shapes: B batch, T time, S streams, D hidden, C columns = 2 * heads, W row width, M = C * W, K = 4 taps.
"""

import numpy as np
import torch
from sympy import nextprime
from torch import Tensor, nn

ORDERS, TAPS, DILATION = (2, 3), 4, 3


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class MinimalEngram(nn.Module):
    """Hashed 2-/3-gram memory of one block: hidden states [B, T, S, D] and class ids [B, T] -> update [B, T, S, D]."""

    def __init__(
        self, hidden: int, streams: int, layer: int, classes: int, base: int, heads: int, head_dim: int, pad: int = 2
    ) -> None:
        super().__init__()
        self.pad, width = pad, len(ORDERS) * heads * head_dim

        # one odd multiplier per look-back slot, bounded so that id * multiplier never overflows int64
        half = (2**63 - 1) // classes // 2
        draws = np.random.default_rng(10007 * layer).integers(0, half, size=max(ORDERS), dtype=np.int64)
        self.multipliers = [2 * int(draw) + 1 for draw in draws]

        # one table per order and head, each of a prime size of its own; all of them stacked in one
        self.sizes, prime = [], base - 1
        for _ in range(len(ORDERS) * heads):
            prime = int(nextprime(prime))
            self.sizes.append(prime)
        self.rows = nn.Embedding(sum(self.sizes), head_dim)

        self.value = nn.Linear(width, hidden)
        self.keys = nn.ModuleList(nn.Linear(width, hidden) for _ in range(streams))
        self.key_norm = nn.Parameter(torch.ones(streams, hidden))
        self.query_norm = nn.Parameter(torch.ones(streams, hidden))
        self.conv_norm = nn.Parameter(torch.ones(streams, hidden))
        self.conv = nn.Parameter(torch.zeros(streams, hidden, TAPS))

    def row_numbers(self, ids_BT: Tensor) -> Tensor:
        """Class ids [B, T] -> row numbers [B, T, C]: multiply, XOR, remainder."""
        shifted = [
            torch.cat([torch.full_like(ids_BT[:, :back], self.pad), ids_BT[:, : ids_BT.shape[1] - back]], 1)
            for back in range(max(ORDERS))
        ]
        mix, columns, offset = shifted[0] * self.multipliers[0], [], 0
        sizes = iter(self.sizes)
        for order in ORDERS:
            mix = mix ^ (shifted[order - 1] * self.multipliers[order - 1])
            for _ in range(len(self.sizes) // len(ORDERS)):
                size = next(sizes)
                columns.append(mix % size + offset)
                offset += size
        return torch.stack(columns, -1)

    def forward(self, x_BTSD: Tensor, ids_BT: Tensor) -> Tensor:
        """Look the n-grams up, gate their value by the hidden state, convolve over time."""
        memory_BTM = self.rows(self.row_numbers(ids_BT)).flatten(-2)
        value_BTD = self.value(memory_BTM)
        eps, hidden = torch.finfo(x_BTSD.dtype).eps, x_BTSD.shape[-1]

        gated = []
        for s, key in enumerate(self.keys):
            k_BTD = rms(key(memory_BTM), self.key_norm[s], eps)
            q_BTD = rms(x_BTSD[:, :, s], self.query_norm[s], eps)
            score_BT = (k_BTD * q_BTD).sum(-1) / hidden**0.5
            score_BT = score_BT.abs().clamp_min(1e-6).sqrt() * score_BT.sign()
            gated.append(score_BT.sigmoid().unsqueeze(-1) * value_BTD)
        u_BTSD = torch.stack(gated, 2)

        normed_BTSD = rms(u_BTSD, self.conv_norm, 1e-5)
        mixed_BTSD = torch.zeros_like(u_BTSD)
        for tap in range(TAPS):  # the last tap is the current position, the first lies 9 places back
            back = (TAPS - 1 - tap) * DILATION
            if back < ids_BT.shape[1]:
                mixed_BTSD[:, back:] += self.conv[..., tap] * normed_BTSD[:, : ids_BT.shape[1] - back]
        return u_BTSD + nn.functional.silu(mixed_BTSD)
