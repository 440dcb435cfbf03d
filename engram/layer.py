"""One memory layer: the fetched value is gated by the hidden state and added to it.

    update = layer(x, rows_BTC)          # the caller adds it: x + update

Token ids are hashed to row numbers (hashing.py), rows are fetched from a table that may live anywhere (table.py),
projected to one shared value and one key per residual stream, gated, and passed through a short causal convolution:

    gate = sigmoid(signed_sqrt(<rms(key), rms(x)> / sqrt(D)));  u = gate * value;  update = u + silu(conv(rms(u)))

(paper section 2; DeepSeek-V4.1 has no convolution, LongCat and BLT neither gate nor convolution).

Shapes: B batch, T time, C columns, W row width, M memory width, S residual streams, D hidden width, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.compress import TokenMap
from engram.config import EngramConfig
from engram.hashing import NgramHash
from engram.kernels.dispatch import gate, rms_norm, short_conv
from engram.prefetch import Ticket
from engram.table import Table
from engram.window import document_numbers

ALWAYS_TAPPED = ("rows", "gate")  # small; the larger stages are kept only while `tapping` is on


class Engram(nn.Module):
    """The memory of one decoder block.

    hash, table     row numbers and rows (see NgramHash and Table)
    value, key      projections M -> D (shared) and M -> S * D (one key per stream)
    key_norm, query_norm, conv_norm   RMS-norm weights [S, D]
    conv            depthwise taps [S, D, K], zero at the start so that the update starts as the gated value alone

    `taps` holds the detached stages of the last forward by name: rows, gate, and while `tapping` is on also memory,
    value, key, conv, output.
    """

    def __init__(
        self,
        cfg: EngramConfig,
        layer: int,
        vocab_size: int | None = None,
        token_map: TokenMap | None = None,
        rows_of: Table | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hash = NgramHash(cfg, layer, vocab_size, token_map)
        self.table = Table(cfg, layer, self.hash.identity, rows_of)
        width, hidden, streams = cfg.memory_width, cfg.hidden_size, cfg.branches
        self.value = nn.Linear(width, hidden, bias=cfg.bias) if cfg.combine == "concat" else None
        self.key = self.key_norm = self.query_norm = self.conv_norm = self.conv = None
        if cfg.gate != "none":
            self.key = nn.Linear(width, streams * hidden, bias=cfg.bias)
            self.key_norm = nn.Parameter(torch.ones(streams, hidden))
            self.query_norm = nn.Parameter(torch.ones(streams, hidden))
        if cfg.conv_kernel:
            self.conv_norm = nn.Parameter(torch.ones(streams, hidden))
            self.conv = nn.Parameter(torch.zeros(streams, hidden, cfg.conv_kernel))
        for linear in (self.value, self.key):
            if linear is not None:
                # keeps the scale of the memory vector; training code refills parameters by name with this deviation
                linear.weight.init_std = width**-0.5  # type: ignore[attr-defined]
                nn.init.normal_(linear.weight, std=width**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        self.tapping = False
        self.taps: dict[str, Tensor] = {}

    def forward(
        self,
        x: Tensor,
        rows_BTC: Tensor,
        segment_BT: Tensor | None = None,
        keep_BT: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> Tensor:
        """Hidden state [B, T, D] (or [B, T, S, D]) and row numbers [B, T, C] -> update of the same shape as `x`.

        segment_BT  packed-document numbers: they cut the convolution exactly where they cut the hash window.
        ticket      the fetch of these rows, if it was started earlier; the layer waits for it here.
        keep_BT     False at padding and image spans: their value is zero, in the convolution too.
        Raises ValueError when `x` has another shape than the rows and the configuration say.
        """
        streams_BTSD = self._streams(x, rows_BTC)
        self.taps = {}
        memory_BTM = self.table(rows_BTC, ticket).to(x.device)
        value_BTD = self._project(self.value, memory_BTM)
        gated_BTSD = value_BTD.unsqueeze(-2)
        gate_BTS = None
        if self.key is not None:
            key_BTM = self._project(self.key, memory_BTM)
            gate_BTS = self._gate(streams_BTSD, key_BTM.unflatten(-1, (self.cfg.branches, self.cfg.hidden_size)))
            gated_BTSD = gate_BTS.to(value_BTD.dtype).unsqueeze(-1) * gated_BTSD
            self._tap(key=key_BTM)
        elif self.cfg.branches > 1:
            gated_BTSD = gated_BTSD.repeat(1, 1, self.cfg.branches, 1)
        if keep_BT is not None:
            gated_BTSD = gated_BTSD * keep_BT[..., None, None]
        out_BTSD = gated_BTSD
        if self.conv is not None and self.conv_norm is not None:
            wide = torch.promote_types(gated_BTSD.dtype, torch.float32)
            normed_BTSD = rms_norm(gated_BTSD.to(wide), self.conv_norm.to(wide), self.cfg.conv_eps).to(gated_BTSD.dtype)
            if segment_BT is not None:
                segment_BT = document_numbers(segment_BT)
            conv_BTSD = F.silu(short_conv(normed_BTSD, self.conv, self.cfg.max_order, segment_BT))
            out_BTSD = out_BTSD + conv_BTSD
            self._tap(conv=conv_BTSD)
        update = out_BTSD.to(x.dtype).view(x.shape)
        self._tap(rows=rows_BTC, memory=memory_BTM, value=value_BTD, gate=gate_BTS, output=update)
        return update

    def _streams(self, x: Tensor, rows_BTC: Tensor) -> Tensor:
        """`x` as [B, T, S, D], checked against the configuration and the rows."""
        expected = [*rows_BTC.shape[:2], self.cfg.branches, self.cfg.hidden_size]
        short = expected[:2] + expected[3:]
        if list(x.shape) != expected and not (self.cfg.branches == 1 and list(x.shape) == short):
            wanted = short if self.cfg.branches == 1 else expected
            raise ValueError(f"layer {self.layer}: hidden state has shape {list(x.shape)}, expected {wanted}")
        return x.view(expected)

    def _project(self, linear: nn.Linear | None, memory_BTM: Tensor) -> Tensor:
        """Rows keep their own dtype; the projection runs in that of its weight."""
        return memory_BTM if linear is None else linear(memory_BTM.to(linear.weight.dtype))

    def _gate(self, x_BTSD: Tensor, key_BTSD: Tensor) -> Tensor:
        """Norms, dot product and root in fp32 or better: 16-bit scores near 0 would lose the sign of the root."""
        wide = torch.promote_types(x_BTSD.dtype, torch.float32)
        eps = self.cfg.gate_eps
        assert self.key_norm is not None and self.query_norm is not None
        query_BTSD = rms_norm(x_BTSD.to(wide), self.query_norm.to(wide), eps)
        return gate(query_BTSD, rms_norm(key_BTSD.to(wide), self.key_norm.to(wide), eps), self.cfg.gate)

    def _tap(self, **stages: Tensor | None) -> None:
        for name, value in stages.items():
            if value is not None and (self.tapping or name in ALWAYS_TAPPED):
                self.taps[name] = value.detach()

    def extra_repr(self) -> str:
        return f"layer={self.layer}, gate={self.cfg.gate}, streams={self.cfg.branches}"
