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


class _Missing:
    """Stands in for `triton` and `triton.language` where they are not installed: decorators give functions back."""

    def __getattr__(self, name: str) -> Any:
        return _Missing()

    def jit(self, function: Any) -> Any:
        return function


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
    """Places in a batch are 32-bit inside the kernels (addresses are 64-bit). Raises ValueError for more."""
    if count >= 2**31:
        raise ValueError(f"{name}: {count:,} look-ups in one call; a kernel takes fewer than 2^31, so split the batch")
