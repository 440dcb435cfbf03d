"""Start a fetch as soon as ids are known, wait inside the layer, and count what was hidden.

    ticket = fetcher.launch(ids_n)        # a worker gathers while earlier layers compute
    values_nW = ticket.wait()             # in the layer: the rows, as if they had been read now

One worker (a thread; a side stream for rows that a GPU reads in place) serves one store, first come first served, so a
gather sees every update that was submitted before it, also those of another model that uses the same rows. A ticket
launched before an update (the next batch, fetched while this one is trained) is **exact** all the same: the worker
patches the rows that the update changed, from the values that are written and before it writes them, so that no layer
waits for a slow write. "stale" leaves them as they were read.

Where the host gathers and a GPU computes, row numbers come and values go on streams of their own: the thread that
computes waits for neither, and the layer's stream waits for its own rows alone.

Shapes: n looked-up rows (with duplicates), U distinct rows, W row width.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engram.kernels.dispatch import BufferPool
from engram.stores import Store
from engram.streams import Download, Fetched, StreamWorker, copy_to, over_the_link, page_locked

TIMEOUT = 600.0
"""Seconds after which a wait for rows gives up: a lost worker is an error, not a hang."""


@dataclass
class Counters:
    """What one table's fetches cost. Times are seconds, summed.

    fetches, rows, bytes   gathers done, rows read with duplicates, bytes of values that came back
    fetch_seconds          time the worker spent in them
    exposed_seconds        time a layer waited for them
    ahead                  fetches launched for a later forward and used by it
    patched_rows           rows of such fetches that an update had changed meanwhile
    updates                writes of the optimizer
    """

    fetches: int = 0
    rows: int = 0
    bytes: int = 0
    fetch_seconds: float = 0.0
    exposed_seconds: float = 0.0
    ahead: int = 0
    patched_rows: int = 0
    updates: int = 0

    @property
    def hidden(self) -> float | None:
        """Share of the fetch time that no layer waited for; None before the first fetch."""
        return None if not self.fetch_seconds else max(0.0, 1.0 - self.exposed_seconds / self.fetch_seconds)


@dataclass
class Ticket:
    """A fetch under way: `wait` gives the rows, and gives them again to a recomputation, as a tensor of its own.

    asked     the row numbers [n], or their way to the host.
    device    where the values are wanted besides; None where the store has them.
    included  number of writes that the values include, once `patches` are done or as of the last `wait`.
    patches   writes since the launch, on their way into values that were not handed out yet.
    """

    fetcher: Fetcher
    asked: Tensor | Download
    future: Any
    included: int
    loads: int
    ahead: bool = False
    device: torch.device | None = None
    patches: list[Any] = field(default_factory=list, repr=False)
    fetched: Fetched | None = field(default=None, repr=False)

    def wait(self) -> Tensor:
        """The values [n, W] of the rows as of now. Raises RuntimeError naming store, rows and cause if it failed.

        Values that were handed out before are given again only while no write came in between.
        """
        if self.fetched is None or self.fetcher.outdated(self):
            self.fetched = self.fetcher.finish(self)
        return self.fetched.values_nW.detach()

    def sent(self) -> Tensor | None:
        """The same values on `device`, for work that is queued there from here on; None without one. After `wait`."""
        if self.fetched is None or self.fetched.sent is None:
            return None
        values_nW: Tensor = self.fetched.sent.result()
        return values_nW.detach()

    @property
    def ids_n(self) -> Tensor:
        """The row numbers where the store wants them."""
        return self.asked.result() if isinstance(self.asked, Download) else self.asked

    def arrive(self) -> None:
        """Wait until the rows as they were asked for are there, on the device that wants them, too."""
        fetched = self.future.result()
        if fetched.sent is not None:
            fetched.sent.ended.synchronize()

    def drop(self) -> None:
        """Writes need not be patched into this ticket; if it is asked all the same, it reads again."""
        self.fetcher.forget(self)


class Fetcher:
    """Gathers and updates of one store, in order: on one worker thread, or on a side stream of the GPU that reads it.

    worker  who runs them; None is a StreamWorker where the store's device is a GPU, else a thread.
    exact   patch rows that were updated after a fetch was launched; False is the stale mode.
    """

    def __init__(self, store: Store, name: str, exact: bool = True, worker: StreamWorker | None = None) -> None:
        self.store, self.name, self.exact = store, name, exact
        self.counters = Counters()
        self._pool = BufferPool()
        self._worker: ThreadPoolExecutor | StreamWorker
        if worker is not None or store.device.type == "cuda":
            self._worker = worker or StreamWorker(store.device)
        else:  # one thread inside the gather too: on few cores it would take them from the layers that compute
            self._worker = ThreadPoolExecutor(
                1, thread_name_prefix=f"engram-{name}", initializer=torch.set_num_threads, initargs=(gather_threads(),)
            )
        self._copies: dict[torch.device, StreamWorker] = {}
        self._patched: Tensor | None = None
        self._lock = threading.Lock()
        self._number = self._loads = 0
        self._failure: RuntimeError | None = None
        self._pid = os.getpid()
        # weak: a model that is let go with fetches under way must not make the other one patch them for ever
        self._open: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._writes: deque[Any] = deque()

    def settle(self) -> Counters:
        """The counters, with the times and patched rows that a GPU has finished counting by now."""
        if isinstance(self._worker, StreamWorker):
            times = self._worker.times()
            self.counters.fetch_seconds += times.get(self._gather.__name__, 0.0)
            self.counters.exposed_seconds += times.get("wait", 0.0)
            if self._patched is not None:
                self.counters.patched_rows += self._worker.number(self._patched)
                self._patched = None
        for copies in self._copies.values():
            times = copies.times()
            self.counters.exposed_seconds += times.pop("wait", 0.0)
            self.counters.fetch_seconds += sum(times.values())
        return self.counters

    def launch(self, ids_n: Tensor, ahead: bool = False, device: torch.device | None = None) -> Ticket:
        """Start fetching rows [n]; returns at once. `device` is where their values will be wanted."""
        self._check_writes()
        here = self.store.device
        asked = Download(ids_n.detach()) if over_the_link(here, ids_n.device) else ids_n.detach().to(here)
        device = device if over_the_link(here, device) else None
        if device is not None and device not in self._copies:  # they need nothing that the GPU has queued
            self._copies[device] = StreamWorker(device, behind=False)
        with self._lock:
            future = self._submit(self._gather, asked, device)
            ticket = Ticket(self, asked, future, self._number, self._loads, ahead, device)
            self._open[id(ticket)] = ticket
        return ticket

    def read(self, ids_n: Tensor) -> Tensor:
        """Values [n, W] as of now, every update so far included."""
        return self.launch(ids_n).wait()

    def write(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows, ascending; returns before they are in their place, but in order.

        Raises RuntimeError when an earlier write failed.
        """
        self._check_writes()
        ids_U, values_UW = ids_U.detach().to(self.store.device), values_UW.detach().to(self.store.device)
        with self._lock:
            self._number += 1
            for ticket in self._open.values() if self.exact else ():
                if ticket.loads == self._loads:
                    patched = self._submit(self._patch, ticket.future, ids_U, values_UW)
                    ticket.patches.append(patched)
                    ticket.included = self._number
            self._writes.append(self._submit(self.store.update, ids_U, values_UW))
            self.counters.updates += 1

    @property
    def written(self) -> int:
        """Writes submitted so far; replacing the rows counts as one."""
        return self._number

    def drain(self) -> None:
        """Wait until every write has reached the store."""
        self._check_writes(wait=True)

    def flush(self) -> None:
        """Wait until every write has reached the store, and the store its place."""
        self.drain()
        self._result(self._submit(self.store.flush), "flushing", None)

    def replaced(self) -> None:
        """The store's rows were replaced from outside (a state was loaded): fetches under way are no longer right."""
        with self._lock:
            self._loads += 1
            self._number += 1

    def outdated(self, ticket: Ticket) -> bool:
        """Whether a load (or, when exact, a write) came after what this ticket's values include."""
        return ticket.loads != self._loads or (self.exact and ticket.included != self._number)

    def close(self) -> None:
        """End the worker and close the store. `flush` before it tells whether every write has succeeded."""
        self._worker.shutdown()
        self.store.close()

    def ended(self) -> Fetcher:
        """A stand-in for a table that was closed while another goes on with the store: every call raises."""
        stand_in = Fetcher(self.store, self.name, self.exact)
        stand_in._worker.shutdown()
        return stand_in

    def finish(self, ticket: Ticket) -> Fetched:
        """Wait for a ticket's rows and bring them up to date; see `Ticket.wait`."""
        began = time.perf_counter()
        with self._lock:  # later writes are not patched into it any more
            self._open.pop(id(ticket), None)
            now, loads = self._number, self._loads
            first = ticket.fetched is None
            current = loads == ticket.loads and (not self.exact or now == ticket.included)
        fetched: Fetched = self._result(ticket.future, "fetching", ticket)
        if first and current:
            for patched in ticket.patches:
                self._result(patched, "patching", ticket)
        else:  # written to after it was handed out or dropped: read again
            fetched = self._result(self._submit(self._gather, ticket.asked, ticket.device), "fetching", ticket)
        ticket.patches.clear()
        ticket.included, ticket.loads = now, loads
        if not isinstance(self._worker, StreamWorker):  # whose waiting is the GPU's, not the host's
            self.counters.exposed_seconds += time.perf_counter() - began
        self.counters.ahead += ticket.ahead and first
        return fetched

    def forget(self, ticket: Ticket) -> None:
        """Updates need not be patched into this ticket any longer."""
        with self._lock:
            self._open.pop(id(ticket), None)

    def _patch(self, future: Any, ids_U: Tensor, values_UW: Tensor) -> None:
        fetched: Fetched = future.result()
        if fetched.values_nW.is_cuda:
            found = patch_on_gpu(fetched.values_nW, fetched.ids_n, ids_U, values_UW)
            self._patched = found if self._patched is None else self._patched + found
            return
        found_k, new_kW = patch(fetched.values_nW, fetched.ids_n, ids_U, values_UW)
        self.counters.patched_rows += len(found_k)
        if fetched.sent is not None and len(found_k):
            copies = self._copies[fetched.sent.worker.device]
            fetched.sent = copies.submit(_put, fetched.sent.value, found_k, new_kW)

    def _gather(self, asked: Tensor | Download, device: torch.device | None = None) -> Fetched:
        ids_n = asked.result() if isinstance(asked, Download) else asked
        began = time.perf_counter()
        out = None
        if self.store.device.type == "cpu":
            take = self._pool.take if device is None else page_locked
            out = take(len(ids_n), self.store.spec.width)
        values_nW = self.store.gather(ids_n, out)
        sent = None if device is None else self._copies[device].submit(copy_to, values_nW, device)
        self.counters.fetches += 1
        self.counters.rows += len(ids_n)
        self.counters.bytes += values_nW.numel() * values_nW.element_size()
        if not isinstance(self._worker, StreamWorker):
            self.counters.fetch_seconds += time.perf_counter() - began
        return Fetched(values_nW, ids_n, sent)

    def _check_writes(self, wait: bool = False) -> None:
        """Raise if a write has failed, now and ever after: the rows are no longer what the optimizer made them."""
        if self._failure is not None:
            raise RuntimeError(f"{self._where()}: an earlier write failed") from self._failure
        while self._writes and (wait or self._writes[0].done()):
            try:
                self._result(self._writes.popleft(), "writing rows", None)
            except RuntimeError as error:
                self._failure = error
                raise

    def _submit(self, call: Callable[..., Any], *args: Any) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._where()}: made by process {self._pid}; build the memory in this one")
        try:
            return self._worker.submit(call, *args)
        except RuntimeError as error:
            raise RuntimeError(f"{self._where()}: its worker has ended ({error})") from error

    def _result(self, future: Any, doing: str, ticket: Ticket | None) -> Any:
        try:
            return future.result(TIMEOUT)
        except BaseException as error:
            ids_n = None if ticket is None else ticket.ids_n
            rows = "" if ids_n is None or not len(ids_n) else f" rows {int(ids_n.min())}..{int(ids_n.max())}"
            if isinstance(error, FutureTimeout):
                raise RuntimeError(f"{self._where()}: {doing}{rows} did not end within {TIMEOUT:.0f} s") from error
            raise RuntimeError(f"{self._where()}: {doing}{rows} failed: {error!r}") from error

    def _where(self) -> str:
        return f"{self.store.kind} store of {self.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Fetcher:
        import copy

        self.flush()
        return Fetcher(copy.deepcopy(self.store, memo), self.name, self.exact)


def gather_threads() -> int:
    """Threads of one gather: a quarter of the cores, at least one."""
    return max(1, (os.cpu_count() or 1) // 4)


def patch(values_nW: Tensor, ids_n: Tensor, ids_U: Tensor, new_UW: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite the rows of `ids_n` that occur in the ascending `ids_U` with their new values, in place.

    -> (places [k] that were overwritten, what with [k, W]). On a CPU.
    """
    if not len(ids_U) or not len(ids_n):
        return ids_n[:0], values_nW[:0]
    # Few rows are in both, and looking all of them up costs as much as the gather itself: marks, by the last bits of a
    # row number, leave a sixteenth of the others to look up. The first layers wait for this, so it is `index_select`,
    # which takes half of the time of indexing (65,536 rows of 512 B, a twentieth in both: 2.5 ms; it was 8.3).
    size = 1 << (16 * len(ids_U)).bit_length()
    marks = torch.zeros(size, dtype=torch.bool, device=ids_U.device)
    marks.index_fill_(0, ids_U & (size - 1), True)
    maybe_m = marks.index_select(0, ids_n & (size - 1)).nonzero().flatten()
    ids_m = ids_n.index_select(0, maybe_m)
    at_m = torch.searchsorted(ids_U, ids_m).clamp_max_(len(ids_U) - 1)
    same_m = ids_U.index_select(0, at_m) == ids_m
    found_k = maybe_m[same_m]
    new_kW = new_UW.index_select(0, at_m[same_m]).to(values_nW.dtype)
    if len(found_k):
        values_nW.index_copy_(0, found_k, new_kW)
    return found_k, new_kW


def patch_on_gpu(values_nW: Tensor, ids_n: Tensor, ids_U: Tensor, new_UW: Tensor) -> Tensor:
    """The same without waiting for the GPU: every row is written -> how many were found, a number that is there."""
    if not len(ids_U) or not len(ids_n):
        return torch.zeros((), dtype=torch.int64, device=values_nW.device)
    at_n = torch.searchsorted(ids_U, ids_n).clamp_max(len(ids_U) - 1)
    found_n = ids_U[at_n] == ids_n
    values_nW.copy_(torch.where(found_n.unsqueeze(-1), new_UW[at_n].to(values_nW.dtype), values_nW))
    return found_n.sum()


def _put(values_nW: Tensor, found_k: Tensor, new_kW: Tensor) -> Tensor:
    """Patched rows into values that were copied to another device before they were."""
    device = values_nW.device
    return values_nW.index_copy_(0, found_k.to(device), new_kW.to(device))
