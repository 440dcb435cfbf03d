"""What every Triton file needs: Triton where it is installed, and whether tensors can go through it here.

    from engram.kernels.launch import runs, tl, triton

Kernels run on CUDA (and ROCm) tensors. With TRITON_INTERPRET=1 in the environment before this file is imported they run
in Triton's interpreter, on CPU tensors: slowly, as a test. Where Triton is not installed the kernels cannot be started,
but their files can be imported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


class _Missing:
    """Stands in for `triton` and `triton.language` where they are not installed: decorators give functions back."""

    def __getattr__(self, name: str) -> Any:
        return _Missing()

    def jit(self, function: Any) -> Any:
        return function


triton: Any
tl: Any
if INSTALLED:
    import triton
    import triton.language as tl
else:
    triton, tl = _Missing(), _Missing()


def runs(*tensors: Tensor) -> bool:
    """Whether a kernel can be started on these tensors: all on one GPU, or on the CPU inside the interpreter."""
    if not INSTALLED:
        return False
    kinds = {tensor.device.type for tensor in tensors}
    return kinds == ({"cpu"} if INTERPRETED else {"cuda"})


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count` (and at least 1): block sizes are powers of two."""
    return 1 << max(0, count - 1).bit_length()
