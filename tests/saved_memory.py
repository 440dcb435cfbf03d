"""A small memory saved into a folder, and what tells two memories apart, for the tests of saving and loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engram
from engram.config import EngramConfig
from engram.memory import Memory

VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211, init="normal", init_std=1.0)
TinyModel = Callable[..., Any]


def some_ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 12))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def placed(cfg: EngramConfig, placement: str, folder: Path) -> EngramConfig:
    return cfg.replace(placement=placement, path=str(folder) if placement == "disk" else None)


def rows_of(memory: Memory) -> dict[int, Tensor]:
    tables = {module.layer: module.table for module in memory.modules_by_layer()}
    return {n: table.read(torch.arange(table.store.spec.rows)).clone() for n, table in tables.items()}


def changed(handle: engram.Handle) -> engram.Handle:
    """Dense weights and some rows as no initialisation makes them."""
    for module in handle.memory.modules_by_layer():
        for parameter in module.parameters():
            if parameter.numel():
                parameter.data.add_(torch.randn_like(parameter))
        ids = torch.arange(0, module.table.store.spec.rows, 3)
        module.table.write(ids, torch.randn(len(ids), module.table.cfg.head_dim))
    return handle


def assert_same_rows(a: Memory, b: Memory) -> None:
    ours, theirs = rows_of(a), rows_of(b)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[layer], theirs[layer]) for layer in ours)


def small_map() -> engram.TokenMap:
    return engram.TokenMap([i // 2 for i in range(VOCAB)])


def save_small(tiny_model: TinyModel, folder: Path) -> Path:
    """A small memory in a folder, two shards a layer, with a token map."""
    handle = engram.attach(tiny_model("llama"), CFG.replace(compress=True), token_map=small_map())
    return changed(handle).save_pretrained(folder / "saved", max_shard_size=20_000)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / "engram.json").read_text(encoding="utf-8"))
    change(data)
    (folder / "engram.json").write_text(json.dumps(data), encoding="utf-8")
