"""Calls on a side stream of a GPU, in order, beside the layers: gathers of rows that it reads in place, other copies.

    future = StreamWorker(device).submit(store.gather, ids_n)     # returns at once: kernels are queued
    values_nW = future.result()                                   # the current stream waits; the host does not

    ids = Download(ids_n)                                         # in the thread that computes: returns at once
    future = StreamWorker(device, behind=False).submit(copy_to, values_nW, device)      # in the thread that gathers

The same interface as one thread of a ThreadPoolExecutor, so that engram/prefetch.py orders reads and writes in one way
for both. All workers of one GPU share a stream: two look-ups at once starve each other. Everything here may be captured
in a CUDA graph: the side stream is joined to the capture when a call is submitted, and joins it again in `result`.
A replay is not ordered after calls that were submitted outside of the graph: call `memory.flush()` between an update
and a replay.

Shapes: n looked-up rows, W row width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

KEPT_TIMES = 4096
"""Timed calls whose times are kept until somebody asks for them."""


@lru_cache(maxsize=16)
def side_stream(device: torch.device, use: str = "rows") -> Any:
    """The stream on which "rows" of tables (or the "numbers" of rows) are moved on this GPU."""
    return torch.cuda.Stream(device)


def over_the_link(host: torch.device, gpu: torch.device | None) -> bool:
    """Whether tensors go between a host and a GPU: streams of their own are worth it."""
    return gpu is not None and gpu.type == "cuda" and host.type == "cpu"


def copy_to(values_nW: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, which the host does not wait for if the values are page-locked."""
    return torch.empty_like(values_nW, device=device).copy_(values_nW, non_blocking=True)


def page_locked(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Host memory [count, width] for such copies; torch gives it to others only when they have ended."""
    return torch.empty(count, width, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


class Download:
    """Row numbers [n] on their way from a GPU to the host: whoever asks for them waits, not the thread that made them.

    On a stream of their own: they wait for what the GPU computes, which copies of rows must not.
    """

    def __init__(self, ids_n: Tensor) -> None:
        side = side_stream(ids_n.device, "numbers")
        side.wait_stream(torch.cuda.current_stream(ids_n.device))
        with torch.cuda.stream(side):
            self._ids = page_locked(len(ids_n), 1, ids_n.dtype).view(-1).copy_(ids_n, non_blocking=True)
            self._ended = torch.cuda.Event(enable_timing=False)
            self._ended.record(side)
        if ids_n.is_cuda:
            ids_n.record_stream(side)

    def result(self) -> Tensor:
        """The numbers, on the host."""
        self._ended.synchronize()
        return self._ids


@dataclass
class Fetched:
    """What a fetch brings: values [n, W] of the rows `ids_n` on the store's device, and their copy for another one."""

    values_nW: Tensor
    ids_n: Tensor
    sent: StreamFuture | None = None


class StreamFuture:
    """The result of a call on a side stream."""

    def __init__(self, worker: StreamWorker, name: str) -> None:
        self.worker, self.name = worker, name
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended: Any = None

    def result(self, timeout: float | None = None) -> Any:
        """What the call returned; work that is queued on the current stream from here on sees it. Raises its error."""
        if self.error is not None:
            raise self.error
        self.worker.join(self)
        return self.value

    def done(self) -> bool:
        """Whether the GPU has finished the call; not asked, and False, while a graph is captured."""
        if self.error is None and torch.cuda.is_current_stream_capturing():
            return False
        return self.error is not None or self.ended is None or bool(self.ended.query())


class StreamWorker:
    """Runs calls on the side stream of `device` in the order in which they are submitted.

    behind  calls run after everything that the current stream has queued; False for what needs nothing from there.
    """

    def __init__(self, device: torch.device, behind: bool = True) -> None:
        self.device, self.behind = device, behind
        self.open = True
        self._times: deque[tuple[str, Any, Any]] = deque(maxlen=KEPT_TIMES)

    def submit(self, call: Callable[..., Any], *args: Any) -> StreamFuture:
        """Queue a call. Raises RuntimeError after `shutdown`; an error of the call itself is raised by `result`."""
        if not self.open:
            raise RuntimeError("the stream worker was shut down")
        future = StreamFuture(self, call.__name__)
        try:
            self.run(future, call, args)
        except Exception as error:
            future.error = error
        return future

    def run(self, future: StreamFuture, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the call on the side stream."""
        side = side_stream(self.device)
        if self.behind:
            side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            began = self._mark(side)
            future.value = call(*args)
            future.ended = self._mark(side)
        for tensor in (one for one in args if isinstance(one, Tensor) and one.is_cuda):
            tensor.record_stream(side)  # its memory is not given to others while the side stream reads it
        self._keep(future.name, began, future.ended)

    def join(self, future: StreamFuture) -> None:
        """Make the current stream wait for a call, and count how long it does."""
        current = torch.cuda.current_stream(self.device)
        began = self._mark(current)
        current.wait_event(future.ended)
        self._keep("wait", began, self._mark(current))
        value = future.value.values_nW if isinstance(future.value, Fetched) else future.value
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(current)

    def _mark(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=not torch.cuda.is_current_stream_capturing())
        event.record(stream)
        return event

    def _keep(self, name: str, began: Any, ended: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._times.append((name, began, ended))

    def times(self) -> dict[str, float]:
        """Name of a call -> seconds of those that have ended since the last time; "wait": of streams that waited."""
        found: dict[str, float] = {}
        while self._times and self._times[0][2].query():
            name, began, ended = self._times.popleft()
            found[name] = found.get(name, 0.0) + float(began.elapsed_time(ended)) / 1e3
        return found

    def number(self, made_on_the_side: Tensor) -> int:
        """What an integer that calls have made is by now; waits for it."""
        with torch.cuda.stream(side_stream(self.device)):
            return int(made_on_the_side)

    def shutdown(self) -> None:
        """Take no more calls; what is queued still runs."""
        self.open = False
