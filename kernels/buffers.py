"""Reused buffers for gathered rows: memory that is real already.

A fresh output of 32 MiB costs four to eight times the gather itself, in page faults. A buffer is handed out again when
nothing refers to its storage any more: not a view, not a graph that saved it for the backward.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LEAST = 1 << 16  # bytes of the smallest buffer


class BufferPool:
    """Hands out tensors [n, W] over reused memory; thread-safe. `held` counts its bytes."""

    def __init__(self) -> None:
        self._slots: list[tuple[bytearray, StorageWeakRef | None]] = []
        self._lock = threading.Lock()

    def take(self, count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor [count, width]; its memory comes back by itself."""
        size = dtype.itemsize * count * width
        if not size:
            return torch.empty(count, width, dtype=dtype, device="cpu")
        with self._lock:
            free = [
                index
                for index, (block, user) in enumerate(self._slots)
                if len(block) >= size and (user is None or user.expired())
            ]
            if free:
                index = min(free, key=lambda i: len(self._slots[i][0]))
                block = self._slots[index][0]
            else:
                index, block = len(self._slots), bytearray(max(LEAST, 1 << (size - 1).bit_length()))
                self._slots.append((block, None))
            tensor = torch.frombuffer(block, dtype=dtype, count=count * width).view(count, width)
            self._slots[index] = (block, StorageWeakRef(tensor.untyped_storage()))
        return tensor

    @property
    def held(self) -> int:
        """Bytes of all buffers, used or free."""
        return sum(len(block) for block, _ in self._slots)
