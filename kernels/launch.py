"""What every Triton file needs: Triton where it is installed, and whether tensors can go through it here.

    from engram.kernels.launch import runs, tl, triton

Kernels run on CUDA (and ROCm) tensors. With TRITON_INTERPRET=1 in the environment before this file is imported they run
in Triton's interpreter, on CPU tensors: slowly, as a test. Where Triton is not installed the kernels cannot be started,
but their files can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels over activations read and write; they compute in fp32, so float64 stays with plain torch."""

TILE = 512
"""Elements of a warp's tile: 1 KiB in 16 bits, two 128-bit loads for each of its 32 threads."""

FEW_ROWS = 2048
"""About 16 rows for each of the 132 processors of an H100: below, short tiles, so that more processors have work."""


class _Missing:
    """Stands in for `triton` and `triton.language` where they are not installed: decorators give functions back."""

    def __getattr__(self, name: str) -> Any:
        return _Missing()

    def constexpr(self, value: Any) -> Any:
        return value

    def jit(self, function: Any = None, **_: Any) -> Any:
        return function if function is not None else (lambda wrapped: wrapped)


NO_FUSION = {"enable_fp_fusion": False}
"""Option of every launch: products and sums are rounded one by one, as in plain torch; Triton's default is changing."""


def at_most(registers: int) -> dict[str, int]:
    """Launch option for NVIDIA: left alone, ptxas aims at a number of resident warps and may spill for it."""
    return {} if torch.version.hip else {"maxnreg": registers}


triton: Any = importlib.import_module("triton") if INSTALLED else _Missing()
tl: Any = importlib.import_module("triton.language") if INSTALLED else _Missing()


def runs(*tensors: Tensor) -> bool:
    """Whether a kernel can be started on these tensors: all on one GPU, or on the CPU inside the interpreter."""
    if not INSTALLED:
        return False
    kinds = {tensor.device.type for tensor in tensors}
    return kinds == ({"cpu"} if INTERPRETED else {"cuda"})


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count` (and at least 1): block sizes are powers of two."""
    return 1 << max(0, count - 1).bit_length()


def on(tensor: Tensor) -> Any:
    """A context in which kernels start on the GPU of `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the interpreter, so that it runs few, large programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_count(name: str, count: int) -> None:
    """Places in a batch are 32-bit inside the kernels (addresses are 64-bit), and loops pass the end by a tile or so.

    Raises ValueError for 2^30 look-ups and more.
    """
    if count >= 2**30:
        raise ValueError(f"{name}: {count:,} look-ups in one call; a kernel takes fewer than 2^30, so split the batch")


def serves(*tensors: Tensor) -> bool:
    """Whether kernels over activations can take these tensors: `runs`, and all of them fp32, bf16 or fp16."""
    return runs(*tensors) and all(tensor.dtype in FLOATS for tensor in tensors)


def tile(rows: int, width: int) -> dict[str, Any]:
    """One program's tile of a matrix of `rows` rows of `width` numbers: ROWS and BLOCK (columns), and launch options.

    A program is one warp, so that sums over a row or over a tile's rows need no barrier and no shared memory; wide rows
    are walked in blocks of 256 columns, in 16 bits one 128-bit load a thread. Few rows get wider tiles and four warps:
    there a program's own latency counts. The interpreter gets 64 rows: it pays by the program.
    """
    rows_wanted, block, warps = 64, min(power_of_two(width), 256), 1
    if not INTERPRETED:
        rows_wanted = min(TILE // block, 128)
        if rows < FEW_ROWS:
            rows_wanted, block, warps = 2, min(power_of_two(width), 1024), 4
    return {"ROWS": rows_wanted, "BLOCK": block, "num_warps": warps, **NO_FUSION}


def variant(
    name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], registers: int | None = None
) -> dict[str, Any]:
    """A launch as a compiler needs it without a GPU: argument types in order, `constants` as given to the launch.

    registers  what a thread may take on an NVIDIA GPU, None for no limit.
    """
    fixed = {key: value for key, value in constants.items() if key not in ("num_warps", *NO_FUSION)}
    return {
        "name": name,
        "kernel": kernel,
        "signature": {**types, **dict.fromkeys(fixed, "constexpr")},
        "constexprs": fixed,
        "aligned": [key for key, kind in types.items() if kind.startswith("*")],
        "num_warps": constants["num_warps"],
        "registers": registers,
    }
