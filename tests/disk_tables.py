"""A small table on disk and every way to read it, for the tests of the disk store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engram.stores.base import TableSpec
from engram.stores.disk import DiskStore
from engram.stores.queues import IoUring, KernelAio, queue_works

RING = pytest.mark.skipif(not queue_works(IoUring), reason="io_uring is not permitted here")
AIO = pytest.mark.skipif(not queue_works(KernelAio), reason="kernel aio is not permitted here")
WAYS = [
    pytest.param({"backend": "mapping"}, id="mapping"),
    pytest.param({"backend": "threads"}, id="threads-direct"),
    pytest.param({"backend": "threads", "direct": False}, id="threads-cached"),
    pytest.param({"backend": "io_uring"}, id="io_uring-direct", marks=RING),
    pytest.param({"backend": "io_uring", "direct": False}, id="io_uring-cached", marks=RING),
    pytest.param({"backend": "aio"}, id="aio-direct", marks=AIO),
]
THREADS = {"backend": "threads", "direct": False, "threads": 2}
SPEC = TableSpec(1000, 66, seed=5)
"""264 bytes a row: 15 a page, with a gap."""


def all_rows(store: DiskStore) -> Tensor:
    return store.gather(torch.arange(store.spec.rows))


def wrote_all(path: Path, **options: Any) -> tuple[DiskStore, Tensor]:
    """A committed table of SPEC with every row written, and its values."""
    store = DiskStore(path, SPEC, **options)
    values = torch.randn(SPEC.rows, SPEC.width)
    store.update(torch.arange(SPEC.rows), values)
    store.commit_checkpoint(store.prepare_checkpoint())
    return store, values
