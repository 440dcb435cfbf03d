"""The Triton kernels against plain torch: on a GPU where there is one, else in Triton's interpreter on CPU tensors.

    make test                                    # starts this folder in a process of its own
    TRITON_INTERPRET=1 .venv/bin/pytest tests/triton

Without a GPU and without TRITON_INTERPRET=1 every test here skips itself. The interpreter takes about 4 ms a program:
tests use few, large programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engram.kernels.launch import INSTALLED, INTERPRETED

HERE = Path(__file__).parent
RUNS = INSTALLED and (INTERPRETED or torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not RUNS and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1 in a process of its own"))


@pytest.fixture
def device() -> torch.device:
    """Where kernels run here: the CPU in the interpreter, else the GPU."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """`torch.empty` is filled with NaN (largest integers), so that a value that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
