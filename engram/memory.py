"""All memory layers of one model: one hash per forward for all of them, started from the ids, used layer by layer.

    mem = engram.Memory(cfg)                     # in a model of one's own
    mem.start(ids_BT)                            # once per forward, as soon as the ids are known
    x_BTD = x_BTD + mem(layer, x_BTD)            # once per memory layer, before the block's attention

Row numbers depend on token ids alone: everything that has to be fetched is known at `start`, before block 0 computes.

Shapes: B batch, T time, N longest n-gram, C columns, S residual streams, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.layer import Engram

IDLE_LIMIT = 256  # training forwards without one update of the rows, after which silence is an error


@dataclass
class Step:
    """What one forward knows from its ids: row numbers by layer, document borders, kept positions, layers reached."""

    rows_BTC: dict[int, Tensor]
    segment_BT: Tensor | None
    keep_BT: Tensor | None
    reached: set[int] = field(default_factory=set)


class Memory(nn.Module):
    """The memory layers of `cfg.layers`, as `layers[str(layer)]`.

    vocab_size  ids of the host model (classes, with `compress` and canonical ids); None accepts any 31-bit id.
    token_map   raw id -> class, needed with `compress`.
    """

    def __init__(self, cfg: EngramConfig, vocab_size: int | None = None, token_map: TokenMap | None = None) -> None:
        super().__init__()
        self.cfg, self.token_map = cfg, token_map
        self.layers = nn.ModuleDict({str(layer): Engram(cfg, layer, vocab_size, token_map) for layer in cfg.layers})
        self.idle_limit = IDLE_LIMIT
        self._step: Step | None = None
        self._missed: set[int] = set()
        self._idle: dict[int, tuple[int, int]] = {}
        self.forwards = 0

    def layer(self, layer: int) -> Engram:
        """The memory of decoder block `layer`. Raises ConfigError when that block has none."""
        if str(layer) not in self.layers:
            raise ConfigError(f"layer: block {layer} has no memory; configured are {list(self.cfg.layers)}")
        return cast(Engram, self.layers[str(layer)])

    def start(
        self,
        ids_BT: Tensor,
        *,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Hash the ids [B, T] of one forward for every layer; arguments as in `NgramHash.rows`.

        Raises RuntimeError when a layer was left out in the two forwards before, or when rows that should learn have
        not
        been updated for `idle_limit` training forwards: memory without effect is an error, not a silent no-op.
        """
        self._check_reached_twice()
        self._check_idle()
        first = self.layer(self.cfg.layers[0])
        window_BTN = first.hash.window(ids_BT, segment_ids=segment_ids, blocked=blocked, mask=mask)
        rows = {layer: self.layer(layer).hash.rows_of_window(window_BTN) for layer in self.cfg.layers}
        keep_BT = None if mask is None else mask.to(window_BTN.device).bool()
        if blocked is not None:
            live_BT = ~blocked.to(window_BTN.device).bool()
            keep_BT = live_BT if keep_BT is None else keep_BT & live_BT
        segment_BT = None
        if segment_ids is not None and self.cfg.boundary != "none":
            segment_BT = segment_ids.to(window_BTN.device)
        self._step = Step(rows, segment_BT, keep_BT)
        self.forwards += 1

    def forward(self, layer: int, x: Tensor) -> Tensor:
        """Update for the hidden state [B, T, D] (or [B, T, S, D]) of block `layer`; the caller adds it.

        The same step may be asked again (activation recomputation). Raises RuntimeError before the first `start`.
        """
        module = self.layer(layer)
        if self._step is None:
            raise RuntimeError(f"memory layer {layer} was called before start(ids): its rows are not known")
        self._step.reached.add(layer)
        rows_BTC = self._step.rows_BTC[layer].to(x.device)
        return cast(Tensor, module(x, rows_BTC, _on(self._step.segment_BT, x), _on(self._step.keep_BT, x)))

    def finish(self) -> None:
        """End of a forward. Raises RuntimeError when a memory layer was never reached in it."""
        missing = self._unreached()
        if missing:
            raise RuntimeError(
                f"memory layer(s) {sorted(missing)} were attached but never reached in this forward: the host skipped "
                f"those blocks, or calls them without running their hooks"
            )

    def check_learning(self) -> None:
        """Raise RuntimeError when trainable rows have never been updated: call it after training steps."""
        still = [m.layer for m in self._modules_of() if m.table.trainable and m.table.updates == 0]
        if still:
            raise RuntimeError(
                f"the rows of memory layer(s) {still} have not been updated by any training step; build the optimizer "
                f"with engram.optim.build(model, ...), or freeze them on purpose with layer.table.trainable = False"
            )

    def stats(self) -> dict[int, dict[str, Any]]:
        """Layer -> rows, row width, bytes held by place, optimizer updates, ids masked to the filler, forwards."""
        return {
            m.layer: {
                "rows": m.table.store.count,
                "width": m.table.store.width,
                "bytes": m.table.store.bytes_held(),
                "updates": m.table.updates,
                "ids_masked": int(m.hash.masked),
                "forwards": self.forwards,
            }
            for m in self._modules_of()
        }

    def _modules_of(self) -> list[Engram]:
        return [self.layer(layer) for layer in self.cfg.layers]

    def _unreached(self) -> set[int]:
        return set() if self._step is None else set(self.cfg.layers) - self._step.reached

    def _check_reached_twice(self) -> None:
        """One incomplete forward may be an exception half way; the same layer missing twice in a row is a mistake."""
        missing = self._unreached()
        again, self._missed = self._missed & missing, missing
        if again:
            raise RuntimeError(
                f"memory layer(s) {sorted(again)} were not called in the last two forwards: "
                f"add x = x + memory({min(again)}, x) before that block"
            )

    def _check_idle(self) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        for module in self._modules_of():
            seen, idle = self._idle.get(module.layer, (module.table.updates, 0))
            idle = idle + 1 if module.table.trainable and module.table.updates == seen else 0
            self._idle[module.layer] = (module.table.updates, idle)
            if idle > self.idle_limit:
                raise RuntimeError(
                    f"the rows of memory layer {module.layer} have not been updated in {self.idle_limit} training "
                    f"forwards; build the optimizer with engram.optim.build(model, ...), freeze the rows with "
                    f"layer.table.trainable = False, or raise memory.idle_limit for longer accumulation"
                )


def _on(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(x.device)
