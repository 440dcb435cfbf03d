"""Checkpoints of a training run: safetensors and JSON, written aside and renamed, the last good one kept.

    save(folder, model, optimizer, {"step": 40, "reader": reader.state()})
    state = load(folder, model, optimizer)

A folder `checkpoint/` holds model.safetensors (weights, buffers and rows), optimizer.safetensors, random.safetensors
and state.json. Rows on disk stay in files of their own, which can go back to the state that belongs to the checkpoint.
It is complete or absent: a new one is written as `checkpoint.new`, the old one steps aside as `checkpoint.old` while
the two are exchanged, and a reader takes whichever is whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engram.stores import DeferredDiskStore
from engram.strict import ConfigError
from engram.table import Table

NAME, NEW, OLD = "checkpoint", "checkpoint.new", "checkpoint.old"
FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
FORMAT = 1


def save(run: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
    """Model, optimizer, every random state and plain `state` -> run/checkpoint. Raises OSError when it cannot be
    written;
    the checkpoint before it is then still there."""
    run = Path(run)
    new, old, final = run / NEW, run / OLD, run / NAME
    if old.exists() and not final.exists():  # a kill between the two renames: the old one is the last good one
        os.rename(old, final)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    aliases = _save_tensors(new / "model.safetensors", model.state_dict())
    files = _row_files(model)
    generations = {name: store.prepare_checkpoint() for name, store in files.items()}
    packed = optimizer.state_dict()
    tensors, numbers = _split_state(packed["state"])
    _save_tensors(new / "optimizer.safetensors", tensors)
    _save_tensors(new / "random.safetensors", _random_tensors())
    about = {
        "format": FORMAT,
        "aliases": aliases,
        "optimizer": {"state": numbers, "param_groups": packed["param_groups"]},
        "random": _random_numbers(),
        "row_files": generations,
        "state": state,
    }
    _write_text(new / "state.json", json.dumps(about))
    _sync(new)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    _sync(run)
    for name, store in files.items():
        store.commit_checkpoint(generations[name])
    shutil.rmtree(old, ignore_errors=True)
    return final


def find(run: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    for name in (NAME, OLD):
        if all((Path(run) / name / file).is_file() for file in FILES):
            return Path(run) / name
    return None


def read_state(run: str | Path) -> dict[str, Any] | None:
    """The plain `state` of the newest checkpoint, without loading a tensor; None where there is none."""
    folder = find(run)
    return None if folder is None else dict(_about(folder)["state"])


def load(run: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Fill model (and optimizer and random states, when an optimizer is given) in place -> the saved plain `state`.

    Raises ConfigError when there is no checkpoint, it is damaged, or it belongs to another model.
    """
    folder = find(run)
    if folder is None:
        raise ConfigError(f"checkpoint: {run} holds none")
    about = _about(folder)
    for name, store in _row_files(model).items():
        store.open(about["row_files"][name])
    try:
        weights = _load_tensors(folder / "model.safetensors")
        weights.update({alias: weights[name] for alias, name in about["aliases"].items()})
        model.load_state_dict(weights)
        del weights
        if optimizer is not None:
            tensors = _load_tensors(folder / "optimizer.safetensors")
            optimizer.load_state_dict(_join_state(about["optimizer"], tensors))
            _restore_random(about["random"], _load_tensors(folder / "random.safetensors"))
    except (SafetensorError, RuntimeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"checkpoint: {folder} does not fit this model: {error}") from error
    return dict(about["state"])


def _row_files(model: nn.Module) -> dict[str, DeferredDiskStore]:
    """Tables whose rows are in files of their own: those keep their own checkpoints, named by a number here.

    A file that two tables share is listed once, under the first of them: it has one checkpoint.
    """
    files: dict[int, tuple[str, DeferredDiskStore]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Table):
            module.flush()
            if isinstance(module.store, DeferredDiskStore):
                files.setdefault(id(module.store), (name, module.store))
    return dict(files.values())


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint: {folder} is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise ConfigError(f"checkpoint: {folder} has format {about.get('format')!r}, this version reads {FORMAT}")
    return dict(about)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write each storage once; returns alias -> name for tensors that share one (tied embeddings)."""
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        kept[name] = tensor.detach().contiguous()
    save_file(kept, path)
    _sync(path)
    return aliases


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _split_state(state: dict[int, dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Optimizer state by parameter number -> tensors named "number.key", and what is no tensor."""
    tensors = {f"{i}.{k}": v for i, entry in state.items() for k, v in entry.items() if isinstance(v, Tensor)}
    numbers = {str(i): {k: v for k, v in entry.items() if not isinstance(v, Tensor)} for i, entry in state.items()}
    return tensors, numbers


def _join_state(packed: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(i): dict(entry) for i, entry in packed["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state[int(index)][key] = tensor
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in packed["param_groups"]]
    return {"state": state, "param_groups": groups}


def _random_tensors() -> dict[str, Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(cuda)}}


def _random_numbers() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]}


def _restore_random(numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    cuda = [tensors[f"cuda.{i}"] for i in range(len(tensors) - 1)]
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """A rename may reach the disk before the content does: flush both."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
