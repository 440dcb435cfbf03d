"""Picks the implementation of each operation and says once which; the only file of kernels/ that engram/ imports.

ENGRAM_KERNELS=auto|reference      auto is the reference as long as no faster version is installed
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

from engram.kernels.reference import (
    elementwise_adam,
    gate,
    rms_norm,
    rowwise_adagrad,
    rowwise_adam,
    short_conv,
    sum_duplicates,
)

VARIABLE = "ENGRAM_KERNELS"


@lru_cache(maxsize=1)
def backend() -> str:
    """Name of the implementation that runs, logged at the first call. Raises ValueError on an unknown choice."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "reference"):
        raise ValueError(f"{VARIABLE}: {wanted!r} is not known; choose auto or reference")
    logging.getLogger("engram").info("kernels: reference (plain torch), chosen by %s=%s", VARIABLE, wanted)
    return "reference"


__all__ = [
    "backend",
    "elementwise_adam",
    "gate",
    "rms_norm",
    "rowwise_adagrad",
    "rowwise_adam",
    "short_conv",
    "sum_duplicates",
]
