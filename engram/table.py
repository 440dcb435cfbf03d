"""Row numbers -> memory vector. Owns the shape, the initial values and the way gradients reach the rows.

    memory_BTM = table(rows_BTC)

Rows are no `nn.Parameter`: casts and a plain optimizer would take them, and a dense gradient has the table's size. The
gathered values are the autograd leaf. Each table registers one small proxy parameter; a hook on every gathered leaf
sums duplicates (fp32, fixed order) into `proxy.grad` [U, W] with the row numbers beside it, a second backward merges,
and `engram.optim` applies the pair. The proxy makes rows visible to clipping, scalers and `zero_grad`; it has no
elements and stays out of `state_dict`.

Stored rows times `table.scale` are the values. It is 1 until the optimizer decays all rows at once, which changes this
one number instead of the table.

Shapes: B batch, T time, C columns, W row width, M = C * W, n = B * T * C, U distinct rows.
"""

from __future__ import annotations

import logging
import math
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.config import ConfigError, EngramConfig
from engram.hashing import splitmix64, total_rows
from engram.kernels.dispatch import on_kernels, sum_duplicates
from engram.prefetch import Fetcher, Ticket
from engram.stores import DeferredDiskStore, DeviceStore, HostStore, PinnedStore, Store, TableSpec
from engram.stores.formats import round_stochastic

log = logging.getLogger("engram")
TRAINED = ("fp32", "bf16")
"""Row formats that can be trained; the others are read."""


class RowProxy(nn.Parameter):
    """A parameter without elements whose `grad` is the summed gradient [U, W] of the rows in `row_ids` [U].

    Overriding `grad` lets a gradient of another shape stand on it: torch itself refuses that on assignment.

    table      weak reference to the table, for the optimizer.
    arrived    gradients that came in since the optimizer last applied one; a number that only grows means no one does.
    dropped    how many of those were thrown away unapplied, one after another.
    """

    row_ids: Tensor | None
    row_values: Tensor | None
    read_at: int
    table: weakref.ref[Table] | None
    arrived: int
    dropped: int
    _row_grad: Tensor | None

    def __new__(cls, data: Tensor, requires_grad: bool = True, **_: Any) -> RowProxy:
        # never on the meta device: it has no elements, and a tensor cannot leave that device in place
        data = torch.empty(0, data.shape[-1], device="cpu") if data.is_meta else data
        proxy: RowProxy = torch.Tensor._make_subclass(cls, data, requires_grad)
        proxy.row_ids = proxy.row_values = proxy._row_grad = proxy.table = None
        proxy.arrived = proxy.dropped = proxy.read_at = 0
        return proxy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Other optimizers begin with a state like the parameter: say what to use, before shapes fail."""
        if func is torch.zeros_like:
            raise RuntimeError("rows cannot be given to this optimizer; use engram.optim.build(model, ...) instead")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._row_grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.dropped += self._row_grad is not None and self.arrived > 0
            self.row_ids = self.row_values = None
        self._row_grad = value

    def collect(self, ids_n: Tensor, grads_nW: Tensor, values_nW: Tensor | None = None, read_at: int = 0) -> None:
        """Sum duplicates of one backward and merge them with what is already there.

        values_nW, read_at  what was read, and after how many writes: while none follows, the optimizer need not read
        the rows again, which from a slow store would cost a second fetch.
        """
        unique_U, sums_UW, first_U = sum_duplicates(ids_n, grads_nW)
        values_UW = None if values_nW is None else values_nW[first_U]
        # `zero_grad(set_to_none=False)` leaves zeros behind, whose rows are no longer touched
        if self._row_grad is not None and self.row_ids is not None and bool(self._row_grad.any()):
            ids, sums = torch.cat([self.row_ids, unique_U]), torch.cat([self._row_grad.float(), sums_UW])
            unique_U, sums_UW, first_U = sum_duplicates(ids, sums)
            if values_UW is not None and self.row_values is not None and read_at == self.read_at:
                values_UW = torch.cat([self.row_values, values_UW])[first_U]
            else:
                values_UW = None
        self._row_grad, self.row_ids = sums_UW, unique_U
        self.row_values, self.read_at = values_UW, read_at
        self.arrived += 1

    def applied(self) -> None:
        """The optimizer has used the gradient."""
        self.arrived = self.dropped = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RowProxy:
        copy = RowProxy(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (RowProxy, (self.data, self.requires_grad))


SMALLEST_SCALE = 2.0**-32
"""Below it stored rows take up its power of two, which is exact: once in 150,000 steps of a decay of 1.5e-4 each."""
PIECE = 1 << 22
"""Values that are read and written at a time where a whole table is gone through."""

ROW_FIELDS = (
    "layers", "orders", "heads", "head_dim", "rows", "compress", "filler", "eos", "boundary", "hash", "seed",
    "init", "init_std", "placement", "path", "row_dtype", "prefetch",
)  # fmt: skip
"""What decides which row an n-gram reads and what it holds. Widths, gate, convolution and site may differ."""


def require_same_rows(ours: EngramConfig, theirs: EngramConfig) -> None:
    """Raise ConfigError naming the first field in which two memories would not have the same rows."""
    for name in ROW_FIELDS:
        field = "bases" if name == "rows" else name  # one number and the same one for each order are equal
        if getattr(ours, field) != getattr(theirs, field):
            raise ConfigError(
                f"{name}: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} in rows_of; "
                f"models that share rows must agree on it"
            )


class Common:
    """What the tables of one store have in common: who they are, oldest first, and the scale of the stored rows.

    The rows move with the oldest table that is still there, and the last one to close closes the store. Copies begin
    without members and gather the copied tables, so that what was copied together shares and nothing else does.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[Table]] = []
        self.scale = 1.0

    def members(self) -> list[Table]:
        """The tables that use the store, oldest first."""
        return [table for member in self._members if (table := member()) is not None]

    def join(self, table: Table) -> None:
        """One more table uses the store."""
        self._members = [weakref.ref(member) for member in (*self.members(), table)]

    def leave(self, table: Table) -> bool:
        """This table no longer does -> whether none is left."""
        self._members = [weakref.ref(member) for member in self.members() if member is not table]
        return not self._members

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": []}


def open_store(cfg: EngramConfig, layer: int, spec: TableSpec, identity: str) -> Store:
    """The store of one layer's rows, as the configuration places them. Raises ConfigError.

    "disk" keeps `path`/layer-<n>.safetensors, which is opened at its first use.
    """
    if cfg.placement == "disk":
        if cfg.path is None:
            raise ConfigError("path: placement 'disk' needs the folder of its row files")
        return DeferredDiskStore(Path(cfg.path) / f"layer-{layer}.safetensors", spec, identity, format=cfg.row_dtype)
    made = {"device": DeviceStore, "host": HostStore, "pinned": PinnedStore}[cfg.placement]
    return made(spec, cfg.row_dtype)


def _fits(store: Any, saved: Tensor) -> bool:
    return bool(store.fits(saved))


class Table(nn.Module):
    """The rows of one layer and their access: `table(rows_BTC)` -> memory vector [B, T, M] (or [B, T, W] with "sum").

    `trainable` False freezes the rows on purpose. `updates` counts optimizer steps at a learning rate above 0.
    identity  what a file of rows must belong to (placement "disk"): the digest of the hash that addresses it.
    rows_of   the table of another model, whose store and worker this one uses; its rows are frozen here at first.
    Raises ConfigError for a placement or row format that this version does not have, and for `rows_of` with other rows.
    """

    def __init__(self, cfg: EngramConfig, layer: int, identity: str = "", rows_of: Table | None = None) -> None:
        super().__init__()
        self.cfg, self.layer, self.identity = cfg, layer, identity
        self.store: Any
        self.fetcher: Fetcher | None = None
        if rows_of is None:
            seed = splitmix64((cfg.seed << 20) ^ layer) >> 1
            spec = TableSpec(total_rows(cfg, layer), cfg.head_dim, seed, cfg.init_std, zeros=cfg.init == "zeros")
            self.store = open_store(cfg, layer, spec, identity)
            if cfg.placement != "device":
                self.fetcher = Fetcher(self.store, f"memory layer {layer}", exact=cfg.prefetch == "exact")
            self.common = Common()
        else:
            require_same_rows(cfg, rows_of.cfg)
            if (layer, identity) != (rows_of.layer, rows_of.identity):
                raise ConfigError(
                    f"vocab_size: the hash of layer {layer} addresses other rows than that of layer {rows_of.layer} in "
                    f"rows_of; share rows layer by layer, with one vocab_size (or one token map) for both models"
                )
            self.store, self.fetcher, self.common = rows_of.store, rows_of.fetcher, rows_of.common
        self.common.join(self)
        self.proxy = RowProxy(torch.empty(0, cfg.head_dim, device=self.store.device))
        self.proxy.table = weakref.ref(self)
        self.updates = 0
        if rows_of is not None:
            self.trainable = False
        if cfg.row_dtype not in TRAINED:
            log.info("memory layer %d: rows are stored as %s and frozen", layer, cfg.row_dtype)
            self.trainable = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a deep copy or unpickling the proxy's way back to its table is set again."""
        super().__setstate__(state)
        self.proxy.table = weakref.ref(self)
        self.common.join(self)

    @property
    def trainable(self) -> bool:
        return self.proxy.requires_grad

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if value and not self.may_train:
            raise ConfigError(f"row_dtype: rows stored as {self.cfg.row_dtype!r} cannot be trained in this version")
        self.proxy.requires_grad_(value)

    @property
    def may_train(self) -> bool:
        """Whether the format of the rows can be trained."""
        return self.cfg.row_dtype in TRAINED

    @property
    def scale(self) -> float:
        """What stored rows are multiplied by to give the values: 1, unless all rows have decayed."""
        return self.common.scale

    @torch.compiler.disable
    def forward(self, rows_BTC: Tensor, ticket: Ticket | None = None, device: torch.device | None = None) -> Tensor:
        """Row numbers [B, T, C] -> memory vector [B, T, M]; the gathered values are an autograd leaf when training.

        ticket  the fetch of just these rows, started earlier.
        device  where the caller wants the vector, which may come out on the store's device all the same.
        Raises RuntimeError when a fetch failed, and under `torch.func`, whose stand-ins for parameters cannot collect
        row gradients.
        """
        ids_n = rows_BTC.reshape(-1)
        if ticket is None and self.fetcher is not None:
            ticket = self.fetcher.launch(ids_n, device=device)
        if ticket is None:
            ids_n = ids_n.to(self.store.device)
            leaf_nW = values_nW = self._scaled(self.store.gather(ids_n))
        else:
            values_nW, ids_n, sent_nW = self._scaled(ticket.wait()), ticket.ids_n, ticket.sent()
            leaf_nW = values_nW if sent_nW is None else self._scaled(sent_nW)
        if torch.is_grad_enabled() and self.trainable:
            if not isinstance(self.proxy, RowProxy):
                raise RuntimeError("table: functional calls replace the row proxy; rows learn by loss.backward() only")
            leaf_nW.requires_grad_()
            collector = _Collector(self.proxy, ids_n, values_nW.detach(), self._read_at(ticket))
            leaf_nW.register_post_accumulate_grad_hook(collector)
        values_BTCW = leaf_nW.view(*rows_BTC.shape, self.cfg.head_dim)
        return values_BTCW.sum(dim=-2) if self.cfg.combine == "sum" else values_BTCW.flatten(-2)

    def _read_at(self, ticket: Ticket | None) -> int | None:
        """Number of writes that a ticket's values include; None where reading again is free, or may differ (stale)."""
        return None if ticket is None or not ticket.fetcher.exact else ticket.included

    def touched_values(self) -> Tensor:
        """Current values [U, W] of the rows in `proxy.row_ids`: those of the forward, unless a write came between."""
        proxy = self.proxy
        if proxy.row_values is not None and self.fetcher is not None and proxy.read_at == self.fetcher.written:
            return proxy.row_values
        assert proxy.row_ids is not None
        return self.read(proxy.row_ids)

    def read(self, ids_n: Tensor) -> Tensor:
        """Values [n, W] of rows as of now, a tensor of their own."""
        return self._scaled(self.stored(ids_n))

    def stored(self, ids_n: Tensor) -> Tensor:
        """Rows [n, W] as the store holds them now: the values, divided by `scale`."""
        return self.store.gather(ids_n) if self.fetcher is None else self.fetcher.read(ids_n)

    def moves_in_place(self) -> bool:
        """Whether a kernel may change rows where they are: device rows that are stored as they are."""
        return self.store.kind == "device" and self.scale == 1 and on_kernels(self.store.rows)

    def write(self, ids_U: Tensor, values_UW: Tensor, step: int = 0, decay: float = 1.0) -> None:
        """New values of distinct rows, ascending; a later read sees them.

        decay  what every other row of the table is multiplied by, above 0: only `scale` changes.

        bf16 rows are rounded stochastically, by bits that depend on seed, row, column and `step` alone: rounding to the
        nearest would lose every update smaller than half a step of the format.
        """
        self.common.scale *= decay
        if self.scale < SMALLEST_SCALE:
            self._take_up(2.0 ** math.frexp(self.scale)[1])
        self._store(ids_U, values_UW if self.scale == 1 else values_UW / self.scale, step)

    def catch_up(self) -> None:
        """Multiply the stored rows by `scale`, which is then 1: for whoever reads file or tensor without this class.

        Goes through the whole table. Values stay what they are, up to the rounding of the row format.
        """
        if self.scale != 1:
            self._take_up(self.scale)

    def _take_up(self, factor: float) -> None:
        """Multiply every stored row by `factor` and divide the scale by it. Rows of zeros are not written."""
        if self.fetcher is not None:
            self.fetcher.replaced()  # fetches under way are of the old scale; nor is the table kept to patch them
        step = max(1, PIECE // self.cfg.head_dim)
        for start in range(0, self.store.spec.rows, step):
            ids = torch.arange(start, min(start + step, self.store.spec.rows), device=self.store.device)
            rows_nW = self.stored(ids)
            changed = rows_nW.any(dim=1)
            self._store(ids[changed], rows_nW[changed] * factor, 0)
        self.common.scale /= factor

    def _scaled(self, rows_nW: Tensor) -> Tensor:
        """Stored rows -> values, in memory of their own where they differ: a ticket hands out its rows again."""
        return rows_nW if self.scale == 1 else rows_nW * self.scale

    def _store(self, ids_U: Tensor, rows_UW: Tensor, step: int) -> None:
        if self.cfg.row_dtype == "bf16":
            rows_UW = round_stochastic(rows_UW.float(), self.store.spec.seed, ids_U, step).float()
        if self.fetcher is None:
            self.store.update(ids_U, rows_UW)
        else:
            self.fetcher.write(ids_U, rows_UW)

    def flush(self) -> None:
        """Every write has reached its place: called before rows are saved."""
        if self.fetcher is not None:
            self.fetcher.flush()

    def close(self) -> None:
        """Let go of threads and files, unless another table uses them: the last one to close ends them."""
        last = self.common.leave(self)
        if self.fetcher is not None and last:
            self.fetcher.close()
        elif self.fetcher is not None:
            self.fetcher = self.fetcher.ended()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The rows are saved by their store, with every write in place; the proxy, without elements, is left out.

        A scale of 1 is left out, too.
        """
        self.flush()
        if self.scale != 1:
            destination[prefix + "scale"] = torch.tensor(self.scale, dtype=torch.float64, device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the scale of the saved rows; what was read or is still being written is no longer right.

        Rows in a file are not in the dictionary: it has their scale, which is taken until the table has been written.
        """
        saved, rows = state_dict.get(prefix + "scale"), state_dict.get(prefix + "store.rows")
        scale = 1.0 if saved is None else float(saved)
        if isinstance(self.store, nn.Module):
            if rows is not None and _fits(self.store, rows):
                self.common.scale = scale
        elif saved is not None and self.fetcher is not None and not self.fetcher.counters.updates:
            self.common.scale = scale
        self.renew(self.scale)

    def renew(self, scale: float) -> None:
        """The stored rows were replaced from outside: `scale` is theirs, fetches and gradients under way are void."""
        self.common.scale = scale
        if self.fetcher is not None:
            self.flush()
            self.fetcher.replaced()
        for table in self.common.members() or [self]:
            table.proxy.grad = None

    def _apply(self, fn: Any, recurse: bool = True) -> Table:
        """Follow device moves; rows and proxy keep their dtype.

        Shared rows move with the oldest of their models alone: another one may be set aside on a CPU meanwhile.
        """
        self.flush()
        members = self.common.members()
        if isinstance(self.store, nn.Module) and (not members or members[0] is self):
            before = self.store.restarts
            self.store._apply(fn)
            if self.store.restarts != before:
                self.common.scale = 1.0
        device = self.store.device
        for table in members or [self]:
            if table.proxy.device != device and device.type != "meta":
                table.proxy.data = table.proxy.data.to(device)
                table.proxy.grad = None
        return self

    def extra_repr(self) -> str:
        return f"layer={self.layer}, trainable={self.trainable}"


class _Collector:
    """Post-accumulate hook of one gathered leaf: hands its gradient to the proxy and lets go of it.

    Row numbers and values are those on the store's device, which the leaf may have left; the gradient comes back there.
    """

    def __init__(self, proxy: RowProxy, ids_n: Tensor, values_nW: Tensor, read_at: int | None) -> None:
        self.proxy, self.ids_n, self.values_nW, self.read_at = weakref.ref(proxy), ids_n, values_nW, read_at

    def __call__(self, leaf_nW: Tensor) -> None:
        proxy, grad_nW = self.proxy(), leaf_nW.grad
        leaf_nW.grad = None
        if proxy is None or grad_nW is None:
            return
        grad_nW = grad_nW.to(self.ids_n.device)
        if self.read_at is None:
            proxy.collect(self.ids_n, grad_nW)
        else:
            proxy.collect(self.ids_n, grad_nW, self.values_nW, self.read_at)
