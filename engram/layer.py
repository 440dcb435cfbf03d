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

from engram.compress import TokenMap
from engram.config import EngramConfig
from engram.decoding import DecodeState
from engram.hashing import NgramHash
from engram.kernels.dispatch import conv_term, conv_update, gated_value
from engram.prefetch import Ticket
from engram.table import Table
from engram.window import document_numbers

ALWAYS_TAPPED = ("rows", "gate")  # small; the larger stages are kept only while `tapping` is on


class Engram(nn.Module):
    """The memory of one decoder block.

    hash, table     row numbers and rows (see NgramHash and Table)
    value, key      projections M -> D (shared) and M -> S * D (one key per stream)
    width           of value, convolution and update: D, or that of attention values (site "value")
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
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hash = NgramHash(cfg, layer, vocab_size, token_map)
        self.table = Table(cfg, layer, self.hash.identity, rows_of)
        width, hidden, streams = cfg.memory_width, cfg.hidden_size, cfg.branches
        self.width = hidden if value_width is None else value_width
        self.value = nn.Linear(width, self.width, bias=cfg.bias) if cfg.combine == "concat" else None
        self.key = self.key_norm = self.query_norm = self.conv_norm = self.conv = None
        if cfg.gate != "none":
            self.key = nn.Linear(width, streams * hidden, bias=cfg.bias)
            self.key_norm = nn.Parameter(torch.ones(streams, hidden))
            self.query_norm = nn.Parameter(torch.ones(streams, hidden))
        if cfg.conv_kernel:
            self.conv_norm = nn.Parameter(torch.ones(streams, self.width))
            self.conv = nn.Parameter(torch.zeros(streams, self.width, cfg.conv_kernel))
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
        state: DecodeState | None = None,
    ) -> Tensor:
        """Hidden state [B, T, D] (or [B, T, S, D]) and row numbers [B, T, C] -> update, of its shape but `width` wide.

        segment_BT  packed-document numbers: they cut the convolution exactly where they cut the hash window.
        ticket      the fetch of these rows, if it was started earlier; the layer waits for it here.
        keep_BT     False at padding and image spans: their value is zero, in the convolution too.
        state       the texts so far, whose last inputs the convolution reads, and which takes those of this forward.
        Raises ValueError when `x` has another shape than the rows and the configuration say.
        """
        streams_BTSD = self._streams(x, rows_BTC)
        self.taps = {}
        memory_BTM = self.table(rows_BTC, ticket, x.device).to(x.device)
        value_BTD = self._project(self.value, memory_BTM)
        gate_BTS = None
        if self.key is not None and self.query_norm is not None and self.key_norm is not None:
            key_BTM = self._project(self.key, memory_BTM)
            key_BTSD = key_BTM.unflatten(-1, (self.cfg.branches, self.cfg.hidden_size))
            norms = (self.query_norm, self.key_norm, self.cfg.gate_eps)
            gated_BTSD, gate_BTS = gated_value(streams_BTSD, key_BTSD, value_BTD, *norms, self.cfg.gate, keep_BT)
            self._tap(key=key_BTM)
        else:
            gated_BTSD = value_BTD.unsqueeze(-2)
            if self.cfg.branches > 1:
                gated_BTSD = gated_BTSD.repeat(1, 1, self.cfg.branches, 1)
            if keep_BT is not None:
                gated_BTSD = gated_BTSD * keep_BT[..., None, None]
        out_BTSD = gated_BTSD
        if self.conv is not None and self.conv_norm is not None:
            if segment_BT is not None:
                segment_BT = document_numbers(segment_BT)
            seen_BLSD, before = gated_BTSD, 0
            if state is not None:
                state.put(self.layer, gated_BTSD)
                if state.length:  # texts that are continued: no segments
                    before = state.taps
                    seen_BLSD = torch.cat([state.before(self.layer, gated_BTSD), gated_BTSD], dim=1)
            weights = (self.conv_norm, self.conv, self.cfg.conv_eps, self.cfg.max_order, segment_BT)
            out_BTSD = conv_update(seen_BLSD, *weights)[:, before:]
            if self.tapping:
                with torch.no_grad():
                    self._tap(conv=conv_term(seen_BLSD, *weights)[:, before:])
        update = out_BTSD.to(x.dtype).reshape(*x.shape[:-1], self.width)
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

    def _tap(self, **stages: Tensor | None) -> None:
        for name, value in stages.items():
            if value is not None and (self.tapping or name in ALWAYS_TAPPED):
                self.taps[name] = value.detach()

    def extra_repr(self) -> str:
        return f"layer={self.layer}, gate={self.cfg.gate}, streams={self.cfg.branches}"
