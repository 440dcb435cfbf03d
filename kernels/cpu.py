"""Hashing and the row update on a CPU in one pass (numba): row numbers, sums of duplicates, the row-wise rules.

Row numbers are those of kernels/reference_rows.py; sums and rules are those of kernels/reference.py up to the rounding
of one mean: sums run in the same fixed order, in fp32. In plain torch hashing is about 39 passes over [B, T, C], and
the update of 16,384 look-ups in a 2M x 64 table eleven over [U, W]; here they are one and two. Releases the GIL.

Shapes: n looked-up rows (with duplicates), U distinct rows, W row width; B, T, N, C, G, K as in reference_rows.py.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engram.kernels.buffers import BufferPool
from engram.kernels.reference_rows import HashConstants

_numbers = BufferPool()
"""Row numbers go into memory that is real already: page faults of a fresh 2 MiB are a third of the time of hashing."""

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

    return {"sum_sorted": sum_sorted, "adam": adam, "adagrad": adagrad, "hash_lines": _hash_lines(numba, np)}


def _hash_lines(numba: Any, np: Any) -> Callable[..., Any]:
    # one function: a closure over another compiled one would be compiled and cached anew by every process
    @numba.njit(cache=True, nogil=True)
    def hash_lines(
        ids_BT: Any, class_of: Any, pad_BT: Any, dead_BT: Any, segment_BT: Any, eos_E: Any, multipliers_KN: Any,
        sizes_K: Any, reciprocals_K: Any, offsets_K: Any, order_C: Any, skip: Any, limit: Any, filler: Any, xor: Any,
        narrow: Any, exact: Any, out_GBTC: Any,
    ) -> Any:  # fmt: skip
        low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        longest, columns, masked = multipliers_KN.shape[1], out_GBTC.shape[3], 0
        slots, mixes = np.empty(longest, np.int64), np.empty(longest + 1, np.int64)
        mapped, class_T = class_of.size > 0, np.empty(ids_BT.shape[1], np.int64)
        for b in range(ids_BT.shape[0]):
            if mapped:  # once a token, not once a slot: the map is a megabyte
                for t in range(ids_BT.shape[1]):
                    token = ids_BT[b, t]
                    class_T[t] = class_of[token] if 0 <= token < limit else filler
            for t in range(skip, ids_BT.shape[1]):
                unblocked = True
                for s in range(longest):
                    slots[s] = filler
                    if s > t or not unblocked:
                        unblocked = False
                        continue
                    token = ids_BT[b, t - s]
                    padded = pad_BT.size > 0 and pad_BT[b, t - s]
                    outside = token < 0 or token >= limit
                    if s == 0:
                        masked += outside and not padded
                    elif padded or (segment_BT.size > 0 and segment_BT[b, t - s] != segment_BT[b, t]):
                        unblocked = False
                    if dead_BT.size > 0 and dead_BT[b, t - s]:
                        unblocked = False
                    if s > 0:
                        for e in range(len(eos_E)):
                            if token == eos_E[e]:
                                unblocked = False
                    if unblocked and not outside and not padded:
                        slots[s] = class_T[t - s] if mapped else token
                for g in range(out_GBTC.shape[0]):
                    if xor:  # every column of an order has the same mix, and the last column all multipliers
                        mix = np.int64(0)
                        for s in range(longest):
                            product = slots[s] * multipliers_KN[(g + 1) * columns - 1, s]
                            mix ^= np.int64(np.int32(product)) if narrow else product
                            mixes[s + 1] = mix
                    for c in range(columns):
                        k = g * columns + c
                        if xor:
                            mix = mixes[order_C[c]]
                        else:
                            mix = np.int64(0)
                            for s in range(order_C[c]):
                                mix += slots[s] * multipliers_KN[k, s]
                        size = sizes_K[k]
                        if exact:  # the upper 64 bits of mix * reciprocal, from products of halves
                            a, r = np.uint64(mix), np.uint64(reciprocals_K[k])
                            middle = (a >> half) * (r & low) + (((a & low) * (r & low)) >> half)
                            carry = ((a & low) * (r >> half) + (middle & low)) >> half
                            high = (a >> half) * (r >> half) + (middle >> half) + carry
                            rest = mix - np.int64(high) * size
                            if rest >= size:
                                rest -= size
                        else:
                            rest = mix % size  # numba's remainder floors, as Python's
                        out_GBTC[g, b, t - skip, c] = rest + offsets_K[k]
        return masked

    return hash_lines


def hash_rows(
    ids_BT: Tensor,
    constants: HashConstants,
    pad_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    skip: int = 0,
    masked: Tensor | None = None,
) -> Tensor:
    """See kernels/reference_rows.py."""
    batch, length = ids_BT.shape
    shape = (constants.groups, batch, length - skip, constants.columns)
    out_GBTC = _numbers.take(math.prod(shape), 1, torch.int64).view(shape)
    flags, numbers = (torch.empty(0, 0, dtype=kind, device="cpu") for kind in (torch.bool, torch.int64))
    class_of = numbers.view(0) if constants.class_of is None else constants.class_of
    orders_C = torch.tensor(constants.orders, device="cpu").repeat_interleave(constants.heads)
    tensors = [ids_BT.contiguous(), class_of]
    tensors += [absent if t is None else t.contiguous() for t, absent in ((pad_BT, flags), (dead_BT, flags))]
    tensors += [numbers if segment_BT is None else segment_BT.contiguous(), constants.eos_E]
    tensors += [constants.multipliers_KN, constants.sizes_K, constants.reciprocals_K, constants.offsets_K, orders_C]
    counted = _functions()["hash_lines"](
        *(tensor.numpy() for tensor in tensors),
        skip,
        constants.limit,
        constants.filler,
        constants.xor,
        constants.narrow,
        constants.exact_reciprocal,
        out_GBTC.numpy(),
    )
    if masked is not None:
        masked += counted
    return out_GBTC


def compile_passes() -> None:
    """Compile (or load from numba's cache) every pass, on one row."""
    one = torch.ones(1, 1, device="cpu")
    sum_duplicates(torch.zeros(1, dtype=torch.int64, device="cpu"), one)
    rowwise_adam(one, one, one[0], 0.0, 0.0, 1.0)
    rowwise_adagrad(one, one, one[0], 0.0, 1.0)
    line_1, none = (torch.ones(size, dtype=torch.int64, device="cpu") for size in (1, 0))
    switches = {"xor": True, "narrow": False, "exact_reciprocal": False}
    constants = HashConstants(line_1.view(1, 1), line_1, line_1, line_1, none, None, (1,), 1, 1, 0, **switches)
    hash_rows(line_1.view(1, 1), constants)


def serves(*tensors: Tensor) -> bool:
    """Whether these tensors can go through this file: fp32 or integers, on the CPU, outside tracing."""
    return all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.int64) for t in tensors)


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As in kernels/reference.py."""
    order_n = torch.argsort(ids_n, stable=True)
    unique_U, counts_U = torch.unique_consecutive(ids_n[order_n], return_counts=True)
    starts = torch.zeros(len(counts_U) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts_U, 0, out=starts[1:])
    sums_UW = torch.zeros(len(unique_U), grads_nW.shape[1], device="cpu")
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
