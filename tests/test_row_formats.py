"""Every row format in every store: the same values from each of them, saved and loaded; what is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engram import EngramConfig, Memory
from engram.config import ConfigError
from engram.stores import DeferredDiskStore, DeviceStore, HostStore, PinnedStore, TableSpec
from engram.stores.formats import FORMATS, get_format

SPEC = TableSpec(150, 33, seed=4)
PLACES: dict[str, Callable[[str, Path], Any]] = {
    "device": lambda name, _: DeviceStore(SPEC, name),
    "host": lambda name, _: HostStore(SPEC, name),
    "pinned": lambda name, _: PinnedStore(SPEC, name),
    "disk": lambda name, folder: DeferredDiskStore(folder / "rows.safetensors", SPEC, "id", format=name),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_values_in_every_store(name: str, place: str, tmp_path: Path) -> None:
    store, codec = PLACES[place](name, tmp_path), get_format(name, SPEC.width)
    ids = torch.randint(0, SPEC.rows, (400,))
    wanted = codec.decode(codec.encode(SPEC.initial(torch.arange(SPEC.rows))))
    assert torch.equal(store.gather(ids), wanted[ids])
    out = torch.empty(400, SPEC.width)
    assert store.gather(ids, out) is out and torch.equal(out, wanted[ids])
    unique = torch.tensor([0, 7, 149])
    values = torch.randn(3, SPEC.width)
    store.update(unique, values)
    wanted[unique] = codec.decode(codec.encode(values))
    assert torch.equal(store.gather(torch.arange(SPEC.rows)), wanted)
    if place != "disk":
        assert sum(store.bytes_held().values()) == SPEC.rows * codec.row_bytes
    store.close()


@pytest.mark.parametrize("place", ["device", "host", "pinned"])
@pytest.mark.parametrize("name", FORMATS)
def test_saved_rows_come_back_and_values_are_put_into_the_format(name: str, place: str, tmp_path: Path) -> None:
    store = PLACES[place](name, tmp_path)
    store.update(torch.tensor([3]), torch.randn(1, SPEC.width))
    again = PLACES[place](name, tmp_path)
    again.load_state_dict(store.state_dict())
    assert torch.equal(again.rows, store.rows)
    copied = copy.deepcopy(store)
    copied.update(torch.tensor([3]), torch.zeros(1, SPEC.width))
    assert torch.equal(again.gather(torch.tensor([3])), store.gather(torch.tensor([3])))
    values = torch.randn(SPEC.rows, SPEC.width)
    again.load_state_dict({"rows": values})
    codec = get_format(name, SPEC.width)
    assert torch.equal(again.gather(torch.arange(SPEC.rows)), codec.decode(codec.encode(values)))
    for wrong in (values[:-1], torch.zeros(SPEC.rows, 7, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match=rf"rows: saved .* in format {name}, and takes values \[150, 33\]"):
            again.load_state_dict({"rows": wrong})


def test_a_cast_or_a_move_does_not_change_bytes() -> None:
    store = DeviceStore(SPEC, "fp8_e4m3")
    before = store.rows.clone()
    for moved in (store.half(), store.to(torch.bfloat16), store.to("cpu"), store.double()):
        assert moved.rows.dtype == torch.uint8 and torch.equal(moved.rows, before)
    with torch.device("meta"):
        empty = DeviceStore(SPEC, "lut3")
    assert empty.rows.is_meta
    empty.load_state_dict(DeviceStore(SPEC, "lut3").state_dict(), assign=True)
    assert torch.equal(empty.rows, DeviceStore(SPEC, "lut3").rows)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_memory_reads_a_trained_memory_in_fewer_bits(placement: Any) -> None:
    """fp32 rows of a trained memory, loaded into a memory of int8 rows: near, frozen, dense parts as they were."""
    cfg = EngramConfig(hidden_size=12, layers=(0,), orders=(2,), heads=2, head_dim=6, rows=50, init="normal")
    trained = Memory(cfg, 100)
    fewer = Memory(cfg.replace(row_dtype="int8", placement=placement), 100)
    fewer.load_state_dict(trained.state_dict())
    table = fewer.layer(0).table
    assert not table.trainable and table.store.rows.dtype == torch.uint8
    with pytest.raises(ConfigError, match="cannot be trained"):
        table.trainable = True
    ids, x = torch.randint(0, 100, (2, 5)), torch.randn(2, 5, 12)
    found = []
    for memory in (trained, fewer):
        memory.start(ids)
        found.append(memory(0, x))
    difference = (found[0] - found[1]).detach().abs().max()
    assert 0 < float(difference) < 0.02 * float(found[0].detach().abs().max())
    found[1].sum().backward()
    assert table.proxy.grad is None and fewer.layer(0).value.weight.grad is not None
    fewer.close()
