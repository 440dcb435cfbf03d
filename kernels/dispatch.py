"""Picks the implementation of each operation and says once which; the only file of kernels/ that engram/ imports.

    ENGRAM_KERNELS=auto|reference|numba

"auto" takes the numba passes for row updates on a CPU where numba is installed, and plain torch for everything else.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

import torch
from torch import Tensor

from engram.kernels import cpu, reference
from engram.kernels.reference import elementwise_adam, gate, rms_norm, short_conv

VARIABLE = "ENGRAM_KERNELS"
CHOICES = ("auto", "reference", "numba")


@lru_cache(maxsize=1)
def backend() -> str:
    """Name of the implementation of row updates, logged at the first call. Raises ValueError on an unknown choice."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{VARIABLE}: {wanted!r} is not known; choose one of {', '.join(CHOICES)}")
    if wanted == "numba" and not cpu.available():
        raise ValueError(f"{VARIABLE}: 'numba' is chosen, but numba is not installed")
    chosen = "numba" if wanted != "reference" and cpu.available() else "reference"
    said = "numba passes on a CPU, plain torch elsewhere" if chosen == "numba" else "plain torch"
    logging.getLogger("engram").info("kernels: %s (%s=%s)", said, VARIABLE, wanted)
    return chosen


def prepare() -> None:
    """Compile what row updates need, so that the first step is not the slow one."""
    if backend() == "numba":
        cpu.compile_passes()


def _numba(*tensors: Tensor) -> bool:
    return backend() == "numba" and cpu.serves(*tensors)


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/reference.py."""
    grads_nW = grads_nW.float() if grads_nW.dtype in (torch.bfloat16, torch.float16) else grads_nW
    return (cpu if _numba(ids_n, grads_nW) and len(ids_n) else reference).sum_duplicates(ids_n, grads_nW)


def rowwise_adam(
    values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, beta2: float, eps: float
) -> tuple[Tensor, Tensor]:
    """See kernels/reference.py."""
    chosen = cpu if _numba(values_UW, grads_UW, v_U) else reference
    return chosen.rowwise_adam(values_UW, grads_UW, v_U, lr, beta2, eps)


def rowwise_adagrad(values_UW: Tensor, grads_UW: Tensor, v_U: Tensor, lr: float, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels/reference.py."""
    chosen = cpu if _numba(values_UW, grads_UW, v_U) else reference
    return chosen.rowwise_adagrad(values_UW, grads_UW, v_U, lr, eps)


__all__ = [
    "backend",
    "elementwise_adam",
    "gate",
    "prepare",
    "rms_norm",
    "rowwise_adagrad",
    "rowwise_adam",
    "short_conv",
    "sum_duplicates",
]
