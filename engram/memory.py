"""All memory layers of one model: one hash per forward for all of them, started from the ids, used layer by layer.

    mem = engram.Memory(cfg)                     # in a model of one's own
    mem.start(ids_BT)                            # once per forward, as soon as the ids are known
    x_BTD = x_BTD + mem(layer, x_BTD)            # once per memory layer, before the block's attention

Row numbers depend on token ids alone: everything that has to be fetched is known at `start`, before block 0 computes.

Shapes: B batch, T time, N longest n-gram, C columns, S residual streams, D hidden width.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.decoding import BLOCKED, DecodeState
from engram.hashing import rows_of_layers
from engram.layer import Engram
from engram.prefetch import Ticket
from engram.table import Table, require_same_rows

IDLE_LIMIT = 256
"""Row gradients that may arrive without the optimizer applying one (accumulation), before silence is an error."""
DROPPED_LIMIT = 32
"""Row gradients that may be thrown away one after another (a gradient scaler skips steps while it finds its scale)."""
AHEAD = 2
"""Prefetched forwards that are kept: buffers for more would only wait."""
UNREACHED_LIMIT = 8
"""Forwards of one's own model that may miss the same layer (exceptions, retries after running out of memory)."""


@dataclass
class Step:
    """What one forward knows from its ids: row numbers by layer, document borders, kept positions, layers reached.

    `off` marks a forward that runs without memory. `state` carries the texts that it begins or continues. `tickets` are
    the fetches under way, by layer; tables on the device have none. `asked` is what the step was made from, to
    recognise the forward it was prefetched for.
    """

    rows_BTC: dict[int, Tensor] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    asked: tuple[Tensor | None, ...] = ()
    segment_BT: Tensor | None = None
    keep_BT: Tensor | None = None
    state: DecodeState | None = None
    off: bool = False
    with_grad: bool = False
    reached: set[int] = field(default_factory=set)


class Memory(nn.Module):
    """The memory layers of `cfg.layers`, as `layers[str(layer)]`.

    launch_at   "entry": rows are requested as soon as ids are known; "layer": by each layer when it needs them.
    vocab_size  ids of the host model; None accepts any 31-bit id.
    token_map   raw id -> class, needed with `compress` and refused without it.
    rows_of     another memory whose rows this one uses instead of its own: one store and one worker for both, the rows
                frozen here until `layer.table.trainable = True` (docs/stores.md). Raises ConfigError naming the field
                when the two would address or hold other rows.
    value_width width of the updates where it is not `cfg.hidden_size`: that of the attention values (site "value").
    """

    def __init__(
        self,
        cfg: EngramConfig,
        vocab_size: int | None = None,
        token_map: TokenMap | None = None,
        *,
        rows_of: Memory | None = None,
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        if cfg.compress != (token_map is not None):
            raise ConfigError(
                "compress: true needs a token_map, TokenMap.from_tokenizer(tokenizer, vocab_size)"
                if cfg.compress
                else "token_map: given, but compress is false and raw ids would be hashed; set compress: true"
            )
        self.cfg, self.token_map = cfg, token_map
        self.number = secrets.token_hex(8)  # whose state a cache carries
        if rows_of is not None:
            require_same_rows(cfg, rows_of.cfg)
        tables = {layer: None if rows_of is None else rows_of.layer(layer).table for layer in cfg.layers}
        modules = {
            str(layer): Engram(cfg, layer, vocab_size, token_map, table, value_width) for layer, table in tables.items()
        }
        self.layers = nn.ModuleDict(modules)
        self.idle_limit = IDLE_LIMIT
        self.launch_at: Literal["entry", "layer"] = "entry"
        self.forwards = 0
        self._step: Step | None = None
        self._unreached: dict[int, int] = {}
        self._pending = 0
        self._recomputed = False
        self._ahead: list[Step] = []

    def layer(self, layer: int) -> Engram:
        """The memory of decoder block `layer`. Raises ConfigError when that block has none."""
        if str(layer) not in self.layers:
            raise ConfigError(f"layer: block {layer} has no memory; configured are {list(self.cfg.layers)}")
        return cast(Engram, self.layers[str(layer)])

    @torch.compiler.disable
    def start(
        self,
        ids_BT: Tensor,
        *,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
        state: DecodeState | None = None,
    ) -> Step:
        """Hash the ids [B, T] of one forward for every layer; arguments as in `NgramHash.rows`.

        state  texts that this forward begins or continues, from `new_state`; their segments cannot be given.

        The step that comes back may be handed to `memory(layer, x, step)`; without it the latest one is meant. Raises
        RuntimeError when a layer is left out again and again, or when gradients of rows arrive but no optimizer applies
        them: memory without effect is an error, not a silent no-op. Raises ValueError for a state of another memory.
        """
        self._check_reached()
        self._check_applied()
        history = None
        if state is not None:
            history = self._history(state, ids_BT, segment_ids)
        asked = (ids_BT, segment_ids, blocked, mask, history)
        step = self._take_ahead(asked)
        if step is None:
            step = self.hash_ids(*asked)
            if self.launch_at == "entry":
                self._launch(step, ahead=False)
        if state is not None:
            step.state = state
            state.begin(self._to_remember(ids_BT, step.keep_BT), self.cfg.layers if self.cfg.conv_kernel else ())
        self.forwards += 1
        return self._begin(step)

    def new_state(self) -> DecodeState:
        """A state for texts that are read in more than one forward."""
        taps = max(0, self.cfg.conv_kernel - 1) * self.cfg.max_order
        return DecodeState(self.number, self.cfg.max_order - 1, taps)

    def _history(self, state: DecodeState, ids_BT: Tensor, segment_ids: Tensor | None) -> Tensor | None:
        if state.owner != self.number:
            raise ValueError(
                "memory: this cache was filled by another memory; its ids and convolution inputs are not ours"
            )
        if segment_ids is not None:
            raise ValueError("segment_ids: packed documents cannot be continued; run each document with its own state")
        return state.history(len(ids_BT))

    def _to_remember(self, ids_BT: Tensor, keep_BT: Tensor | None) -> Tensor:
        """Ids as a later look-back needs them: blocked ones negative, those outside the vocabulary past it."""
        constants = self.layer(self.cfg.layers[0]).hash.constants
        ids_BT = ids_BT.to(constants.sizes_K.device, torch.int64)
        ids_BT = ids_BT.where((ids_BT >= 0) & (ids_BT < constants.limit), constants.limit)
        return ids_BT if keep_BT is None else ids_BT.where(keep_BT, BLOCKED)

    @torch.compiler.disable
    def prefetch(
        self,
        ids_BT: Tensor,
        *,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
        state: DecodeState | None = None,
    ) -> None:
        """Start fetching the rows of a later forward, whose `start` gets the same arguments (`state`: as it is now).

        The latest two are kept (the forward about to start, and the one after it), older ones are dropped. With tables
        on the device there is nothing to fetch, and nothing happens.
        """
        if all(module.table.fetcher is None for module in self.modules_by_layer()):
            return
        history = None if state is None else self._history(state, ids_BT, segment_ids)
        asked = (ids_BT, segment_ids, blocked, mask, history)
        if self._find_ahead(asked) is not None:
            return
        while len(self._ahead) >= AHEAD:
            for ticket in self._ahead.pop(0).tickets.values():
                ticket.drop()
        self._ahead.append(self.hash_ids(*asked))
        self._launch(self._ahead[-1], ahead=True)

    def drop_ahead(self) -> None:
        """Forget every prefetched forward."""
        while self._ahead:
            for ticket in self._ahead.pop().tickets.values():
                ticket.drop()

    def drop_fetches(self) -> None:
        """Forget every fetch under way: prefetched forwards, and what the latest forward has not asked for."""
        self.drop_ahead()
        for ticket in [] if self._step is None else self._step.tickets.values():
            ticket.drop()

    def ahead(self) -> list[Step]:
        """The prefetched forwards that have not begun, oldest first."""
        return list(self._ahead)

    def flush(self) -> None:
        """Every write of rows has reached its place."""
        for module in self.modules_by_layer():
            module.table.flush()

    def catch_up(self) -> None:
        """Stored rows become the values, where all rows have decayed: for readers of the bare file or tensor."""
        for module in self.modules_by_layer():
            module.table.catch_up()

    def close(self) -> None:
        """Let go of threads and files; rows cannot be asked for afterwards. Who shares them may go on."""
        self.drop_fetches()
        for module in self.modules_by_layer():
            module.table.close()

    def hash_ids(
        self,
        ids_BT: Tensor,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Step:
        """The row numbers of a forward for all layers, nothing fetched yet."""
        first = self.layer(self.cfg.layers[0])
        device = first.hash.sizes.device
        hashes = [module.hash for module in self.modules_by_layer()]
        borders = {"segment_ids": segment_ids, "blocked": blocked, "mask": mask, "history": history}
        by_layer = rows_of_layers(hashes, ids_BT, **borders)
        rows = dict(zip(self.cfg.layers, by_layer, strict=True))
        keep_BT = None if mask is None else mask.to(device).bool()
        if blocked is not None:
            live_BT = ~blocked.to(device).bool()
            keep_BT = live_BT if keep_BT is None else keep_BT & live_BT
        segment_BT = None
        if segment_ids is not None and self.cfg.boundary != "none":
            segment_BT = segment_ids.to(device)
        return Step(rows, segment_BT=segment_BT, keep_BT=keep_BT, asked=(ids_BT, segment_ids, blocked, mask, history))

    def _launch(self, step: Step, ahead: bool) -> None:
        """Start the fetch of every layer, the earliest deadline first."""
        for layer in sorted(self.cfg.layers):
            module = self.layer(layer)
            if module.table.fetcher is not None:
                ids_n, device = step.rows_BTC[layer].reshape(-1), module.hash.sizes.device
                step.tickets[layer] = module.table.fetcher.launch(ids_n, ahead, device)

    def _take_ahead(self, asked: tuple[Tensor | None, ...]) -> Step | None:
        """The step that was prefetched for this forward, if there is one; others stay for theirs."""
        index = self._find_ahead(asked)
        return None if index is None else self._ahead.pop(index)

    def _find_ahead(self, asked: tuple[Tensor | None, ...]) -> int | None:
        for index, step in enumerate(self._ahead):
            if all(_same(a, b) for a, b in zip(step.asked, asked, strict=True)):
                return index
        return None

    @torch.compiler.disable
    def bypass(self) -> Step:
        """The forward that begins now runs without memory."""
        return self._begin(Step(off=True))

    def forward(self, layer: int, x: Tensor, step: Step | None = None) -> Tensor:
        """Update for the hidden state [B, T, D] (or [B, T, S, D]) of block `layer`; the caller adds it.

        The same step may be asked again (activation recomputation). Raises RuntimeError before the first `start`, and
        in a recomputation when several forwards are pending and `step` does not say which one it is.
        """
        module = self.layer(layer)
        current = self._current(layer, step)
        if current.off:
            return x.new_zeros(*x.shape[:-1], module.width)
        segment_BT, keep_BT = current.segment_BT, current.keep_BT
        rows_BTC, ticket = current.rows_BTC[layer], current.tickets.get(layer)
        return cast(Tensor, module(x, rows_BTC, _on(segment_BT, x), _on(keep_BT, x), ticket, current.state))

    def forget_state(self) -> None:
        """The latest forward will not be continued."""
        if self._step is not None:
            self._step.state = None

    @torch.compiler.disable
    def finish(self) -> None:
        """End of a forward. Raises RuntimeError when a memory layer was never reached in it."""
        missing = self._missing()
        if missing:
            self._step = None
            raise RuntimeError(
                f"memory layer(s) {sorted(missing)} were attached but never reached in this forward: the host skipped "
                f"those blocks, or calls them without running their hooks"
            )

    def check_learning(self) -> None:
        """Raise RuntimeError when trainable rows have never been updated: call it after training steps."""
        still = [m.layer for m in self.modules_by_layer() if m.table.trainable and m.table.updates == 0]
        if still:
            raise RuntimeError(
                f"the rows of memory layer(s) {still} have not been updated by any training step; {HELP}"
            )

    def stats(self) -> dict[int, dict[str, Any]]:
        """Layer -> rows, row width, bytes held by place, optimizer updates, ids masked to the filler, forwards.

        Tables that are fetched from add "store" and "fetch" (see engram.prefetch.Counters, and the share hidden), which
        counts every model that shares the rows.
        """
        masked = int(self.layer(self.cfg.layers[0]).hash.masked)  # one window serves all layers
        return {
            m.layer: {
                "rows": m.table.store.spec.rows,
                "width": m.table.store.spec.width,
                "bytes": m.table.store.bytes_held(),
                "updates": m.table.updates,
                "ids_masked": masked,
                "forwards": self.forwards,
                **_fetch_stats(m.table),
            }
            for m in self.modules_by_layer()
        }

    def modules_by_layer(self) -> list[Engram]:
        """The memory layers in the order of the configuration."""
        return [self.layer(layer) for layer in self.cfg.layers]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles begin without forwards under way: fetches cannot be copied."""
        return {**self.__dict__, "_step": None, "_ahead": [], "number": secrets.token_hex(8)}

    def _begin(self, step: Step) -> Step:
        if self._step is not None:
            for ticket in self._step.tickets.values():
                ticket.drop()
        step.with_grad = torch.is_grad_enabled()
        if self._recomputed:  # the backward of the forwards so far has run
            self._pending, self._recomputed = 0, False
        self._pending += step.with_grad
        self._step = step
        return step

    @torch.compiler.disable
    def _current(self, layer: int, step: Step | None) -> Step:
        current = self._step if step is None else step
        if current is None:
            raise RuntimeError(f"memory layer {layer} was called before start(ids): its rows are not known")
        if inside_backward():
            self._recomputed = True
            if step is None and (self._pending > 1 or not current.with_grad):
                raise RuntimeError(
                    f"memory layer {layer} is recomputed inside backward, but the latest forward is not the one "
                    f"that is differentiated; run each backward before the next forward, or pass the step: "
                    f"step = memory.start(ids); memory(layer, x, step)"
                )
        current.reached.add(layer)
        return current

    def _missing(self) -> set[int]:
        return set() if self._step is None or self._step.off else set(self.cfg.layers) - self._step.reached

    def _check_reached(self) -> None:
        """A few incomplete forwards may be exceptions half way; the same layer missing each time is a mistake."""
        missing = self._missing()
        self._unreached = {layer: self._unreached.get(layer, 0) + 1 for layer in missing}
        often = [layer for layer, count in self._unreached.items() if count >= UNREACHED_LIMIT]
        if often:
            self._unreached = {}
            raise RuntimeError(
                f"memory layer(s) {sorted(often)} were not called in the last {UNREACHED_LIMIT} forwards: "
                f"add x = x + memory({min(often)}, x) before that block"
            )

    def _check_applied(self) -> None:
        for module in self.modules_by_layer():
            proxy = module.table.proxy
            if module.table.trainable and (proxy.arrived > self.idle_limit or proxy.dropped > DROPPED_LIMIT):
                arrived, dropped = proxy.arrived, proxy.dropped
                proxy.applied()
                raise RuntimeError(
                    f"the rows of memory layer {module.layer} got {arrived} gradients and no optimizer applied one "
                    f"({dropped} were dropped); {HELP}, or raise memory.idle_limit for longer accumulation"
                )


HELP = "build the optimizer with engram.optim.build(model, ...), or freeze the rows with layer.table.trainable = False"


def inside_backward() -> bool:
    """Whether autograd is running: a forward there is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def _fetch_stats(table: Table) -> dict[str, Any]:
    if table.fetcher is None:
        return {"store": table.store.kind}
    counters = table.fetcher.settle()
    return {"store": table.store.kind, "fetch": {**asdict(counters), "hidden": counters.hidden}}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and torch.equal(a.to(b.device), b))


def _on(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(x.device)
