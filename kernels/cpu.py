"""The row update on a CPU in one pass per row (numba): sums of duplicates, and the row-wise rules.

Same results as kernels/reference.py up to the rounding of one mean: sums run in the same fixed order, in fp32. In plain
torch the update of 16,384 look-ups in a 2M x 64 table is eleven passes over [U, W]; here it is two. Releases the GIL.

Shapes: n looked-up rows (with duplicates), U distinct rows, W row width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Functions = dict[str, Callable[..., Any]]


def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@lru_cache(maxsize=1)
def _functions() -> Functions:
    """The compiled passes; importing and compiling take about two seconds once, and are cached on disk."""
    import numba  # late: a second, which reading configurations should not cost
    import numpy as np

    @numba.njit(cache=True, nogil=True)
    def sum_sorted(order_n: Any, starts_U: Any, grads_nW: Any, sums_UW: Any) -> None:
        for u in range(len(starts_U) - 1):
            for k in range(starts_U[u], starts_U[u + 1]):
                row = order_n[k]
                for w in range(grads_nW.shape[1]):
                    sums_UW[u, w] += grads_nW[row, w]

    @numba.njit(cache=True, nogil=True)
    def adam(values_UW: Any, grads_UW: Any, v_U: Any, lr: Any, beta2: Any, eps: Any, new_UW: Any, new_v_U: Any) -> None:
        width = values_UW.shape[1]
        for u in range(values_UW.shape[0]):
            total = 0.0
            for w in range(width):
                total += np.float64(grads_UW[u, w]) * np.float64(grads_UW[u, w])
            square = np.float32(total / width)
            v = square if v_U[u] == 0 else beta2 * v_U[u] + (np.float32(1) - beta2) * square
            new_v_U[u] = v
            scale = lr / (np.sqrt(v) + eps)
            for w in range(width):
                new_UW[u, w] = values_UW[u, w] - scale * grads_UW[u, w]

    @numba.njit(cache=True, nogil=True)
    def adagrad(values_UW: Any, grads_UW: Any, v_U: Any, lr: Any, eps: Any, new_UW: Any, new_v_U: Any) -> None:
        width = values_UW.shape[1]
        for u in range(values_UW.shape[0]):
            total = 0.0
            for w in range(width):
                total += np.float64(grads_UW[u, w]) * np.float64(grads_UW[u, w])
            v = v_U[u] + np.float32(total / width)
            new_v_U[u] = v
            scale = lr / (np.sqrt(v) + eps)
            for w in range(width):
                new_UW[u, w] = values_UW[u, w] - scale * grads_UW[u, w]

    return {"sum_sorted": sum_sorted, "adam": adam, "adagrad": adagrad}


def compile_passes() -> None:
    """Compile (or load from numba's cache) every pass, on one row."""
    one = torch.ones(1, 1)
    sum_duplicates(torch.zeros(1, dtype=torch.int64), one)
    rowwise_adam(one, one, one[0], 0.0, 0.0, 1.0)
    rowwise_adagrad(one, one, one[0], 0.0, 1.0)


def serves(*tensors: Tensor) -> bool:
    """Whether these tensors can go through this file: fp32 or integers, on the CPU, outside tracing."""
    return all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.int64) for t in tensors)


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As in kernels/reference.py."""
    order_n = torch.argsort(ids_n, stable=True)
    unique_U, counts_U = torch.unique_consecutive(ids_n[order_n], return_counts=True)
    starts = torch.zeros(len(counts_U) + 1, dtype=torch.int64)
    torch.cumsum(counts_U, 0, out=starts[1:])
    sums_UW = torch.zeros(len(unique_U), grads_nW.shape[1])
    grads = grads_nW.contiguous().numpy()
    _functions()["sum_sorted"](order_n.numpy(), starts.numpy(), grads, sums_UW.numpy())
    return unique_U, sums_UW, order_n[starts[:-1]]


def rowwise_adam(
    values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, beta2: float, eps: float
) -> tuple[Tensor, Tensor]:
    """As in kernels/reference.py."""
    return _rule("adam", values_UW, grads_UW, v_U, lr, beta2, eps)


def rowwise_adagrad(values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, eps: float) -> tuple[Tensor, Tensor]:
    """As in kernels/reference.py."""
    return _rule("adagrad", values_UW, grads_UW, v_U, lr, eps)


def _rule(name: str, values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
    import numpy as np

    new_UW, new_v_U = torch.empty_like(values_UW), torch.empty_like(v_U)
    arrays = [t.detach().contiguous().numpy() for t in (values_UW, grads_UW, v_U)]
    _functions()[name](*arrays, *(np.float32(number) for number in numbers), new_UW.numpy(), new_v_U.numpy())
    return new_UW, new_v_U
