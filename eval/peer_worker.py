"""One side of `engram bench --peers` in a process of its own: a server of single measurements.

Requests are lines of JSON on standard input, {"do": "step"}; answers are lines of JSON on what was standard output when
it started. Everything that libraries print goes to standard error. It is started by eval/peers.py, two at a time, and
computes only while it is asked, so that the two sides can take turns although they share no process.

Memory is resident memory of this process as Linux counts it. "imports" is what is there after two training steps of the
smallest model there can be: everything a step imports or compiles, on both sides.

Shapes: B batch, T time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engram.eval.peer_checks import run_checks
from engram.eval.peer_sides import PAD, SIDES, Shape, bare_model
from engram.strict import from_dict

SMALLEST = Shape(64, 16, 3, 1, 16, heads=1, head_dim=2, rows=11, batch=1, length=8)
WARM_UP = 3
HASHES = 10
"""Batches hashed in one timing."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory now, or ("VmHWM") at most since `forget_peak`."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """The peak of resident memory begins anew, at what is resident now."""
    CLEAR.write_text("5")


def tidy() -> None:
    """Collect garbage, and give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Worker:
    """The side `name`; `folder` holds tokenizer.json and ids.safetensors, and gets what the side writes."""

    def __init__(self, name: str, folder: Path, shape: Shape) -> None:
        self.side_class, self.folder, self.shape = SIDES[name], folder, shape
        self.taken = 0

    def about(self) -> dict[str, Any]:
        """What the side is. Raises ImportError where its package is not there."""
        self.side_class(bare_model(SMALLEST), SMALLEST)
        about = {"python": sys.version.split()[0], "threads": torch.get_num_threads()}
        return {**self.side_class.about(), **about}

    def prepare(self) -> dict[str, Any]:
        """Build everything and train a few steps -> bytes at each stage, shapes of tables, distinct rows of a batch.

        "bare" and "peak" are peaks: of a step of the Llama without memory, and of steps with it.
        """
        small = self.side_class(bare_model(SMALLEST), SMALLEST)
        small_step, ids_BT = small.stepper(), torch.arange(8)[None]
        for _ in range(2):
            small_step(small.batch(ids_BT))
        small.hash(ids_BT)
        del small, small_step
        self.ids_n = load_file(self.folder / "ids.safetensors")["ids"].long()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"), pad_token="<pad>")
        if tokenizer.pad_token_id != PAD or len(tokenizer) > self.shape.vocab_size:
            raise RuntimeError("peers: the tokenizer does not fit the model")
        tidy()
        found = {"imports": resident()}
        base = bare_model(self.shape)
        found["model"] = resident()
        forget_peak()
        self._bare_step(base)
        found["bare"] = resident("VmHWM")
        tidy()
        forget_peak()
        self.side = self.side_class(base, self.shape, tokenizer)
        self.train = self.side.stepper()
        for _ in range(WARM_UP):
            self.train(self.side.batch(self._ids()))
        found["peak"] = resident("VmHWM")
        self.bare = bare_model(self.shape)
        distinct = {str(layer): len(rows_BTC.unique()) for layer, rows_BTC in self.side.hash(self._ids()).items()}
        sizes = {str(layer): list(self.side.values(layer).shape) for layer in self.shape.layers}
        return {"memory": found, "distinct": distinct, "tables": sizes}

    def _ids(self) -> Tensor:
        """The next batch [B, T] of the text."""
        size = self.shape.batch * self.shape.length
        start = self.taken * size % (len(self.ids_n) - size)
        self.taken += 1
        return self.ids_n[start : start + size].view(self.shape.batch, self.shape.length)

    def _bare_step(self, base: Any, ids_BT: Tensor | None = None) -> None:
        """Forward and backward of the Llama without memory, back to where the first memory would be added.

        For that, and nothing else, the norm there is trained; nothing is updated.
        """
        ids_BT = self._ids() if ids_BT is None else ids_BT
        base.requires_grad_(False)
        weight = base.model.layers[self.shape.layers[0]].input_layernorm.weight.requires_grad_(True)
        mask_BT = torch.ones_like(ids_BT)
        base.train()(input_ids=ids_BT, attention_mask=mask_BT, labels=ids_BT, use_cache=False).loss.backward()
        weight.grad = None
        base.requires_grad_(True).eval()

    def bare_step(self) -> list[float]:
        """One step of the Llama without memory -> seconds, and seconds that this process computed."""
        ids_BT = self._ids()
        began, busy = time.perf_counter(), time.process_time()
        self._bare_step(self.bare, ids_BT)
        return [time.perf_counter() - began, time.process_time() - busy]

    def step(self) -> list[float]:
        """One training step -> seconds, and seconds that this process computed."""
        batch = self.side.batch(self._ids())
        began, busy = time.perf_counter(), time.process_time()
        self.train(batch)
        return [time.perf_counter() - began, time.process_time() - busy]

    def hash(self) -> list[float]:
        """Hash batches of raw ids for all layers -> seconds (and of computing) for 1,000 tokens."""
        batches = [self._ids() for _ in range(HASHES)]
        began, busy = time.perf_counter(), time.process_time()
        for ids_BT in batches:
            self.side.hash(ids_BT)
        took = time.perf_counter() - began, time.process_time() - busy
        return [1000 * seconds / (HASHES * batches[0].numel()) for seconds in took]

    def save(self) -> dict[str, Any]:
        """Save the memory without its base -> bytes of all files, and bytes of each."""
        target = self.folder / f"saved-{os.getpid()}"
        self.side.save(target)
        files = {str(path.relative_to(target)): path.stat().st_size for path in sorted(target.rglob("*"))}
        return {"bytes": sum(files.values()), "files": files}

    def checks(self) -> dict[str, Any]:
        """Every correctness check."""
        return run_checks(self.side_class)

    def busy(self) -> float:
        """Seconds that this process computed."""
        return time.process_time()


def serve(name: str, folder: str, shape: dict[str, Any]) -> None:
    """Answer requests until standard input ends; an error is an answer {"error": ...}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    worker = Worker(name, Path(folder), from_dict(Shape, shape))
    for line in sys.stdin:
        try:
            answer = {"answer": getattr(worker, json.loads(line)["do"])()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
