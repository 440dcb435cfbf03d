"""Released weights into memories in every store, and the way back; whatever does not fit is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from released_files import (
    MAP,
    QWEN,
    V41,
    V41_JSON,
    Stored,
    back,
    qwen_memory,
    raw,
    unpacked,
    v41_tensors,
    write_tensors,
)
from safetensors.torch import load_file

import engram
from engram import releasing
from engram.config import ConfigError, EngramConfig
from engram.hashing import total_rows
from engram.layer import Engram
from engram.memory import Memory

ONE = V41.replace(layers=(1,))
IDS = torch.arange(total_rows(ONE, 1))


@pytest.fixture
def v41(tmp_path: Path) -> Path:
    """One file with layer 1 of V41, and other tensors of a host."""
    tensors = {**v41_tensors(ONE, 1, len(IDS), "model."), "model.norm.weight": raw(torch.ones(4))}
    return write_tensors(tmp_path / "v41.safetensors", tensors)


def _values(path: Path) -> torch.Tensor:
    """All rows, by the judge's decoder."""
    stored = {name: tensor.view(torch.uint8) for name, tensor in load_file(path).items() if ".embed." in name}
    return unpacked(stored["model.layers.1.engram.embed.weight"], stored["model.layers.1.engram.embed.scale"])


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("row_dtype", ["fp8_e4m3", "fp32", "bf16"])
def test_rows_are_the_same_in_every_store(
    v41: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any, row_dtype: Any
) -> None:
    monkeypatch.setattr(releasing, "PIECE", 64 * 100)  # seven pieces, the last one short
    folder = str(tmp_path / "rows") if placement == "disk" else None
    memory = Memory(ONE.replace(placement=placement, path=folder, row_dtype=row_dtype, init="zeros"), token_map=MAP)
    assert engram.load_released(memory, v41)["layers"][1]["kept"] == row_dtype
    assert torch.equal(memory.layer(1).table.read(IDS).double(), _values(v41))
    memory.close()
    if placement == "disk":  # and the rows are still there when the file is opened again
        again = Memory(memory.cfg, token_map=MAP)
        assert torch.equal(again.layer(1).table.read(IDS).double(), _values(v41))
        again.close()


@pytest.mark.parametrize(
    ("scale", "code", "fine"),
    [(245, 0x7E, True), (246, 0x7E, False), (246, 0x08, True), (255, 0, False), (120, 0x7F, False), (120, 0xFF, False)],
)
def test_rows_of_codes_that_no_store_takes(tmp_path: Path, scale: int, code: int, fine: bool) -> None:
    codes = torch.zeros(len(IDS), 64, dtype=torch.uint8)
    scales = torch.full((len(IDS), 2), 120, dtype=torch.uint8)
    codes[200, 40], scales[200, 1] = code, scale
    rows = {"embed.weight": raw(codes, "F8_E4M3"), "embed.scale": raw(scales, "F8_E8M0")}
    _changed(tmp_path / "x.safetensors", lambda t: t.update({f"layers.1.engram.{k}": v for k, v in rows.items()}))
    memory = Memory(ONE, token_map=MAP)
    if fine:
        engram.load_released(memory, tmp_path)
        return
    with pytest.raises(ValueError, match="row 200 holds NaN, infinity or a magnitude above"):
        engram.load_released(memory, tmp_path)


@pytest.mark.parametrize(
    ("bits", "fine"),
    [
        (0x7F00, True),
        (0x7F01, False),
        (0xFF00, True),
        (0xFF01, False),
        (0x7F80, False),
        (0x7FC0, False),
        (0xFF80, False),
    ],
)
def test_bf16_rows_that_no_store_takes(tmp_path: Path, bits: int, fine: bool) -> None:
    engram.export_released(qwen_memory(), "qwen3.8-flash-next", tmp_path / "out", shards=3)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = {name: raw(tensor) for name, tensor in load_file(file).items()}
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight"
    dtype, shape, content = tensors[name]
    tensors[name] = (dtype, shape, content[:-2] + bits.to_bytes(2, "little"))
    write_tensors(file, tensors)
    memory = Memory(QWEN)
    if fine:
        engram.load_released(memory, tmp_path / "out")
        return
    with pytest.raises(ValueError, match=f"row {2 * shape[0] - 1} holds NaN"):
        engram.load_released(memory, tmp_path / "out")


def test_rows_are_replaced_whatever_was_going_on(v41: Path) -> None:
    """A scale of decayed rows, a gradient that waits, a fetch under way: none of it reaches the loaded rows."""
    memory = Memory(ONE.replace(placement="host", row_dtype="fp32"), token_map=MAP)
    table = memory.layer(1).table
    table.common.scale = 0.5
    ids, x = torch.randint(0, 300, (1, 9)), torch.randn(1, 9, 2, 40)
    memory.prefetch(ids)
    memory.start(ids)
    memory(1, x).sum().backward()
    assert table.proxy.grad is not None
    step = memory.start(ids)
    engram.load_released(memory, v41)
    assert table.proxy.grad is None and table.scale == 1
    expected = _values(v41)[step.rows_BTC[1]].flatten(-2)
    for _ in range(2):
        memory.layer(1).tapping = True
        memory(1, x, step)
        assert torch.equal(memory.layer(1).taps["memory"].double(), expected)
        step = memory.start(ids)
    memory.close()


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_rows_in_place_are_read_and_never_written(v41: Path, tmp_path: Path, placement: Any) -> None:
    content = v41.read_bytes()
    cfg = ONE.replace(placement=placement, path=str(tmp_path / "rows") if placement == "disk" else None, init="zeros")
    memory, copied = Memory(cfg, token_map=MAP), Memory(ONE, token_map=MAP)
    assert engram.load_released(memory, v41, rows="in place")["layers"][1]["kept"] == "fp8_e4m3"
    engram.load_released(copied, v41)
    ids, x = torch.randint(0, 300, (2, 30)), torch.randn(2, 30, 2, 40)
    for one in (memory, copied):
        one.prefetch(ids)
        one.start(ids)
    assert torch.equal(memory(1, x), copied(1, x))
    assert not any(name.endswith("store.rows") for name in memory.state_dict())
    assert memory.stats()[1]["store"] == "released" and memory.stats()[1]["bytes"] == {"released": len(IDS) * 66}
    assert not (tmp_path / "rows").exists()
    table = memory.layer(1).table
    trained = Memory(cfg.replace(row_dtype="bf16"), token_map=MAP)
    engram.load_released(trained, v41, rows="in place")
    assert not trained.layer(1).table.trainable
    trained.close()
    table.write(IDS[:1], torch.zeros(1, 64))
    with pytest.raises(RuntimeError, match="read-only|writing rows"):
        table.flush()
    assert v41.read_bytes() == content
    memory.close()
    with pytest.raises(ConfigError, match="rows: 'there' is not known"):
        engram.load_released(copied, v41, rows="there")  # type: ignore[arg-type]


def test_empty_look_ups_and_copies_of_rows_in_place(v41: Path) -> None:
    import copy

    memory = Memory(ONE, token_map=MAP)
    engram.load_released(memory, v41, rows="in place")
    other = copy.deepcopy(memory)
    assert memory.layer(1).table.read(IDS[:0]).shape == (0, 64)
    memory.close()
    assert torch.equal(other.layer(1).table.read(IDS).double(), _values(v41))
    other.close()
    for wrong in ([0.5], [True], torch.tensor([1.0])):
        with pytest.raises(TypeError, match="row_ids: expected integers"):
            engram.released_rows(v41, 1, wrong)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match=f"row {len(IDS)} is outside"):
        engram.released_rows(v41, 1, [0, len(IDS)])
    with pytest.raises(ConfigError, match=r"layer: 2 is not in .*; it has \[1\]"):
        engram.released_rows(v41, 2, [0])


def _changed(path: Path, change: Callable[[dict[str, Stored]], Any], layer: int = 1) -> None:
    tensors = v41_tensors(ONE, layer, len(IDS))
    change(tensors)
    write_tensors(path, tensors)


def _put(name: str, stored: Stored) -> Callable[[dict[str, Stored]], Any]:
    return lambda tensors: tensors.update({f"layers.1.engram.{name}": stored})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("layers.1.engram.embed.scale"), "no tensor layers.1.engram.embed.scale"),
        (lambda t: t.pop("layers.1.engram.wkv.scale"), "no tensor layers.1.engram.wkv.scale"),
        (lambda t: t.pop("layers.1.engram.q_weight"), "no tensor layers.1.engram.q_weight"),
        (_put("q_weight", raw(torch.ones(40, 2))), r"q_weight: shape \[40, 2\], expected \[2, 40\]"),
        (_put("q_weight", raw(torch.ones(2, 40).long())), "q_weight: dtype I64, expected one of F32, BF16"),
        (_put("q_weight", raw(torch.full((2, 40), torch.nan))), "q_weight: holds NaN"),
        (_put("wkv.weight", raw(torch.ones(120, 383))), r"wkv.weight: shape \[120, 383\]"),
        (_put("wkv.scale", raw(torch.ones(4, 12))), r"wkv.scale: F32 \[4, 12\], expected F8_E8M0 \[4, 12\]"),
        (_put("wkv.scale", raw(torch.full((4, 12), 255, dtype=torch.uint8), "F8_E8M0")), "wkv.weight: holds NaN"),
        (_put("embed.weight", raw(torch.ones(len(IDS) - 1, 64))), f"{len(IDS) - 1:,} rows, the hash of layer 1 addr"),
        (_put("embed.weight", raw(torch.ones(len(IDS), 32))), "expected rows of 64 values"),
        (_put("embed.weight", raw(torch.ones(len(IDS), 64).long())), "dtype I64, rows are read as"),
        (_put("embed.scale", raw(torch.ones(len(IDS), 1, dtype=torch.uint8), "F8_E8M0")), "expected F8_E8M0"),
    ],
)
def test_tensors_that_do_not_fit_leave_the_memory_as_it_was(
    tmp_path: Path, change: Callable[[dict[str, Stored]], Any], said: str
) -> None:
    _changed(tmp_path / "x.safetensors", change)
    memory = Memory(ONE, token_map=MAP)
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        engram.load_released(memory, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 1}, "heads: 1 in this configuration, 2 in config.json"),
        ({"rows": 99}, r"rows: \(99, 99, 99\) in this configuration"),
        ({"seed": 1}, "seed: 1 in this configuration, 0 in config.json"),
        ({"filler": 3}, "filler: 3 in this configuration"),
        ({"gate_eps": 1e-5}, "gate_eps: 1e-05 in this configuration"),
        ({"gate": "sigmoid"}, "gate: 'sigmoid' in this configuration"),
        ({"boundary": "none"}, "boundary: 'none' in this configuration"),
        ({"bias": True}, "bias: True in this configuration"),
        ({"conv_kernel": 4}, "conv_kernel: 4 in this configuration"),
        ({"layers": (1, 3)}, r"layers: \(1, 3\) in this configuration"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_files_is_named(
    v41: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V41_JSON, "engram_layer_ids": [1]}))
    engram.load_released(Engram(ONE, 1, token_map=MAP), v41)
    with pytest.raises(ConfigError, match=said):
        engram.load_released(Engram(ONE.replace(**changes), 1, token_map=MAP), v41)


def test_what_cannot_be_filled_is_refused(v41: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = Memory(ONE, token_map=MAP)
    with pytest.raises(ConfigError, match="on the meta device"):
        engram.load_released(empty, v41)
    with pytest.raises(ConfigError, match="on the meta device, and has no numbers"):
        engram.export_released(empty, "deepseek-v4.1", tmp_path / "out")
    nowhere = Memory(ONE.replace(placement="disk", path=str(v41 / "rows")), token_map=MAP)
    with pytest.raises((ConfigError, NotADirectoryError)):
        engram.load_released(nowhere, v41)
    with pytest.raises(ConfigError, match="layer: 3 is not in"):
        engram.load_released(Memory(V41, token_map=MAP), v41)
    first = Memory(ONE, token_map=MAP)
    second = Memory(ONE, token_map=MAP, rows_of=first)
    with pytest.raises(ConfigError, match="shares its rows"):
        engram.load_released(second, v41, rows="in place")
    engram.load_released(second, v41)
    assert torch.equal(first.layer(1).table.read(IDS).double(), _values(v41))
    engram.load_released(Memory(ONE, token_map=MAP), v41, rows="in place")
    write_tensors(tmp_path / "other.safetensors", {"x": raw(torch.ones(3))})
    with pytest.raises(ConfigError, match="no memory in a layout that we know"):
        engram.load_released(first, tmp_path / "other.safetensors")


def _same(one: Memory, other: Memory) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys() and len(first) > 8
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("row_dtype", "dtype"), [("bf16", "BF16"), ("fp32", "F32"), ("fp8_e4m3", "BF16"), ("int8", "F32"), ("lut3", "BF16")]
)
def test_qwen_there_and_back_is_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_dtype: Any, dtype: str
) -> None:
    monkeypatch.setattr(releasing, "FILE_BYTES", 20_000)
    memory = qwen_memory(row_dtype=row_dtype, layers=(1, 2))
    about = engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "out", shards=7)
    assert about["files"] > 3 and len(list((tmp_path / "out").iterdir())) == about["files"] + 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["split_ngram_parts"] == 7
    cfg = engram.released_config(tmp_path / "out")
    assert cfg.row_dtype == {"BF16": "bf16", "F32": "fp32"}[dtype]
    assert cfg.replace(row_dtype=row_dtype, init="normal") == memory.cfg
    again = Memory(memory.cfg)
    engram.load_released(again, tmp_path / "out")
    _same(again, memory)
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(file)  # the format's own library
    prefix = "model.language_model.layers.1.ple."
    rows = torch.cat([tensors[f"{prefix}ple_embedding.ngram_embedding.shard_{i}.weight"] for i in range(7)])
    assert rows.dtype == {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    assert torch.equal(rows.float(), again.layer(1).table.read(torch.arange(len(rows))))
    norm = tensors[f"{prefix}norm_key.weight"].double() + 1
    assert torch.equal(norm.float().view(3, 16), memory.layer(1).key_norm)  # type: ignore[arg-type]


def test_rows_that_have_decayed_are_exported_as_their_values(tmp_path: Path) -> None:
    memory = qwen_memory(row_dtype="fp32")
    table = memory.layer(1).table
    before = table.read(torch.arange(50))
    table.common.scale = 0.75
    engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "out")
    assert torch.equal(engram.released_rows(tmp_path / "out", 1, range(50)), 0.75 * before)


def test_norm_weights_are_stored_in_float64_only_where_that_is_needed(tmp_path: Path) -> None:
    memory = qwen_memory()
    with torch.no_grad():
        for name in ("key_norm", "query_norm"):
            getattr(memory.layer(1), name).copy_(1 + torch.randn(3, 16).bfloat16().float() * 0.1)
        memory.layer(1).query_norm[0, 0] = 2.0**-30  # type: ignore[index]
    engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "out")
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    dtypes = {name.split(".")[-2]: tensor.dtype for name, tensor in tensors.items() if "norm_" in name}
    assert dtypes["norm_key"] == torch.float32 and dtypes["norm_query"] == torch.float64


def test_v41_there_and_back_is_bit_equal_after_one_rounding(v41: Path, tmp_path: Path) -> None:
    memory = Memory(ONE.replace(row_dtype="fp32"), token_map=MAP)
    with torch.no_grad():
        for name, parameter in memory.named_parameters():
            if not name.endswith("proxy"):
                parameter.copy_(torch.randn_like(parameter))
    memory.layer(1).table.store.update(IDS, torch.randn(len(IDS), 64))
    engram.export_released(memory, "deepseek-v4.1", tmp_path / "one")
    assert engram.released_config(tmp_path / "one") == ONE.replace(init="zeros")
    first, second = Memory(ONE, token_map=MAP), Memory(ONE, token_map=MAP)
    engram.load_released(first, tmp_path / "one")
    for name, error in (("value.weight", 0.06), ("key.weight", 0.06), ("key_norm", 0.0), ("query_norm", 0.0)):
        ours, theirs = (dict(m.layer(1).named_parameters())[name].detach() for m in (memory, first))
        # E4M3 rounds by 2^-4 of a number at most, or by half of its smallest step, 2^-9 of 2^-7
        assert ((ours - theirs).abs() <= error * ours.abs() + (error > 0) * 2.0**-14).all(), name
    row_error = (first.layer(1).table.read(IDS) - memory.layer(1).table.read(IDS)).abs()
    assert 0 < row_error.max() < 0.3
    engram.export_released(first, "deepseek-v4.1", tmp_path / "two")
    engram.load_released(second, tmp_path / "two")
    _same(first, second)
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    released = {name: back(stored) for name, stored in v41_tensors(ONE, 1, len(IDS)).items()}
    exported = load_file(tmp_path / "one" / "model-00001-of-00001.safetensors")
    assert {name: list(tensor.shape) for name, tensor in exported.items()} == {
        name: list(tensor.shape) for name, tensor in released.items()
    }
    assert exported["layers.1.engram.embed.scale"].dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("rows", ["copy", "in place"])
def test_released_fp8_rows_are_exported_as_they_were(v41: Path, tmp_path: Path, rows: Any) -> None:
    """The scales of a release may be larger than we would choose: rows keep their bytes, weights their values."""
    memory = Memory(ONE, token_map=MAP)
    engram.load_released(memory, v41, rows=rows)
    engram.export_released(memory, "deepseek-v4.1", tmp_path / "out")
    released, exported = load_file(v41), load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for name in ("embed.weight", "embed.scale"):
        one, other = released[f"model.layers.1.engram.{name}"], exported[f"layers.1.engram.{name}"]
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    again = Memory(ONE, token_map=MAP)
    engram.load_released(again, tmp_path / "out")
    for (name, weight), other in zip(memory.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other), name
    memory.close()


@pytest.mark.parametrize(
    ("cfg", "family", "said"),
    [
        (QWEN, "longcat-flash-lite", "no export; choose one of deepseek-v4.1, qwen3.8-flash-next"),
        (QWEN.replace(gate_eps=1e-5), "qwen3.8-flash-next", "conv_eps: 1e-06 is not expressible"),
        (QWEN.replace(boundary="segment"), "qwen3.8-flash-next", "boundary: 'segment' is not expressible"),
        (QWEN.replace(orders=(2, 4)), "qwen3.8-flash-next", "cannot hold this memory|orders"),
        (QWEN.replace(filler=8), "qwen3.8-flash-next", "eos: "),
        (QWEN.replace(hash=dataclasses.replace(QWEN.hash, layer_key="layer")), "qwen3.8-flash-next", "hash: "),
        (QWEN, "deepseek-v4.1", "compress: False is not expressible|cannot hold"),
    ],
)
def test_what_a_layout_cannot_say_is_not_exported(tmp_path: Path, cfg: EngramConfig, family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engram.export_released(Memory(cfg), family, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = qwen_memory()
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="is there; name a new one"):
        engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "there")
    with pytest.raises(ConfigError, match="is no folder"):
        engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "no" / "out")
    with torch.no_grad():
        memory.layer(1).key_norm[0, 0] = torch.nan  # type: ignore[index]
    with pytest.raises(ValueError, match="layer 1: key_norm holds NaN"):
        engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "out")
    monkeypatch.setattr(releasing, "_write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        engram.export_released(qwen_memory(), "qwen3.8-flash-next", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
