"""Picks the implementation of each operation and says once which; the only file of kernels/ that engram/ imports.

    ENGRAM_KERNELS=auto|reference|numba|triton

"auto" takes the Triton kernels for tensors on a GPU, the numba passes for hashing and row updates on a CPU where numba
is installed, and plain torch for everything else. "triton" is the same, but an error without a GPU; in Triton's
interpreter (TRITON_INTERPRET=1) it takes the kernels for CPU tensors, too: slowly, as a test. "numba" is the same as
"auto" without Triton, and an error where numba is not installed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from engram.kernels import conv, cpu, gate, gather, launch, operators, reference, reference_rows, rows, scatter
from engram.kernels.buffers import BufferPool
from engram.kernels.reference import conv_term, elementwise_adam
from engram.kernels.reference_rows import (
    FP8,
    GAMMA,
    INT8,
    LUT3,
    PLAIN,
    RULES,
    HashConstants,
    Rule,
    decode_rows,
    mix64,
    power_of_two,
    reciprocals,
    round_stochastic,
    rows_of_windows,
    stack,
    windows_of_ids,
)

VARIABLE = "ENGRAM_KERNELS"
CHOICES = ("auto", "reference", "numba", "triton")


_chosen: dict[str, str] = {}  # no lru_cache: torch.compile warns of those


def backend() -> str:
    """What runs here, as in "triton+numba", logged at the first call. Raises ValueError on a bad choice."""
    if "here" not in _chosen:
        _chosen["here"] = _choose()
    return _chosen["here"]


def choose_again() -> None:
    """Look at the environment once more at the next call."""
    _chosen.clear()


def _choose() -> str:
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{VARIABLE}: {wanted!r} is not known; choose one of {', '.join(CHOICES)}")
    if wanted == "numba" and not cpu.available():
        raise ValueError(f"{VARIABLE}: 'numba' is chosen, but numba is not installed")
    gpu = launch.INSTALLED and torch.cuda.is_available()
    if wanted == "triton" and not (launch.INSTALLED and (launch.INTERPRETED or gpu)):
        lacking = "no GPU is here" if launch.INSTALLED else "Triton is not installed"
        raise ValueError(f"{VARIABLE}: 'triton' is chosen, but {lacking}; TRITON_INTERPRET=1 runs kernels on a CPU")
    kernels = wanted == "triton" or (wanted == "auto" and gpu and not launch.INTERPRETED)
    chosen = ["triton"] * kernels + ["numba"] * (wanted != "reference" and cpu.available()) or ["reference"]
    places = {"triton": "Triton on GPUs", "numba": "numba passes on a CPU", "reference": "plain torch"}
    if launch.INTERPRETED:
        places["triton"] = "Triton's interpreter on a CPU"
    said = ", ".join([places[one] for one in chosen] + ["plain torch elsewhere"] * (chosen != ["reference"]))
    if not torch.compiler.is_compiling():  # a graph holds no logger
        logging.getLogger("engram").info("kernels: %s (%s=%s)", said, VARIABLE, wanted)
    return "+".join(chosen)


def prepare() -> None:
    """Compile what hashing and row updates need on a CPU, so that the first step is not the slow one."""
    if "numba" in backend():
        cpu.compile_passes()


def _numba(*tensors: Tensor) -> bool:
    return "numba" in backend() and cpu.serves(*tensors)


def on_kernels(*tensors: Tensor) -> bool:
    """Whether Triton kernels take these tensors: all on one GPU (or, in the interpreter, on the CPU)."""
    return "triton" in backend() and launch.runs(*tensors)


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
    chosen: Any = reference_rows
    if on_kernels(ids_BT, constants.sizes_K):
        chosen = rows
    elif _numba(ids_BT, constants.sizes_K) and not torch.compiler.is_compiling():
        chosen = cpu
    found: Tensor = chosen.hash_rows(ids_BT, constants, pad_BT, dead_BT, segment_BT, skip, masked)
    return found


def gather_rows(table: Tensor, ids_n: Tensor, kind: int, width: int, background: bool = False) -> Tensor:
    """Rows of a table on the ids' device, or in pinned host memory, -> fp32 values [n, W] (kernels/gather.py).

    background  few programs at once, to leave the GPU to the layers that compute meanwhile.
    """
    if torch.compiler.is_compiling():
        values_nW: Tensor = operators.gather_rows_op(table, ids_n, kind, width, background)
        return values_nW
    if on_kernels(ids_n):
        return gather.gather_rows(table, ids_n, kind, width, programs=gather.BACKGROUND if background else None)
    return reference_rows.gather_rows(table, ids_n, kind, width)


def put_rows(table: Tensor, ids_U: Tensor, values_UW: Tensor) -> None:
    """Write values [U, W] over distinct rows of a table on their device, or in pinned host memory, in place."""
    if on_kernels(ids_U, values_UW):
        gather.put_rows(table, ids_U, values_UW)
    else:
        table.index_copy_(0, ids_U, values_UW.to(table.dtype))


def update_rows(table: Tensor, v_R: Tensor, ids_U: Tensor, grads_UW: Tensor, rule: Rule) -> None:
    """See kernels/reference_rows.py."""
    chosen = scatter if on_kernels(ids_U, grads_UW, v_R) else reference_rows
    chosen.update_rows(table, v_R, ids_U, grads_UW, rule)


def gated_value(
    x_BTSD: Tensor,
    key_BTSD: Tensor,
    value_BTD: Tensor,
    query_norm_SD: Tensor,
    key_norm_SD: Tensor,
    eps: float | None,
    kind: str,
    keep_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels/reference.py."""
    tensors = (x_BTSD, key_BTSD, value_BTD, query_norm_SD, key_norm_SD)
    one_width = value_BTD.shape[-1] == x_BTSD.shape[-1]  # attention values are often narrower than the hidden state
    chosen = gate if one_width and on_kernels(*tensors) and launch.serves(*tensors) else reference
    return chosen.gated_value(*tensors, eps, kind, keep_BT)


def conv_update(
    gated_BTSD: Tensor,
    norm_SD: Tensor,
    weight_SDK: Tensor,
    eps: float | None,
    dilation: int,
    segment_BT: Tensor | None = None,
) -> Tensor:
    """See kernels/reference.py."""
    tensors = (gated_BTSD, norm_SD, weight_SDK)
    chosen = conv if on_kernels(*tensors) and launch.serves(*tensors) else reference
    return chosen.conv_update(*tensors, eps, dilation, segment_BT)


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/reference.py."""
    if on_kernels(ids_n, grads_nW) and grads_nW.dtype != torch.float64:
        return scatter.sum_duplicates(ids_n, grads_nW)
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
    "FP8",
    "GAMMA",
    "INT8",
    "LUT3",
    "PLAIN",
    "RULES",
    "BufferPool",
    "HashConstants",
    "Rule",
    "backend",
    "choose_again",
    "conv_term",
    "conv_update",
    "decode_rows",
    "elementwise_adam",
    "gated_value",
    "gather_rows",
    "hash_rows",
    "mix64",
    "on_kernels",
    "power_of_two",
    "prepare",
    "put_rows",
    "reciprocals",
    "round_stochastic",
    "rows_of_windows",
    "rowwise_adagrad",
    "rowwise_adam",
    "stack",
    "sum_duplicates",
    "update_rows",
    "windows_of_ids",
]
