"""`engram inspect`: what is in files of a released layout, what is wrong with them, and the exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from released_files import QWEN, V41, V41_JSON, qwen_memory, raw, v41_tensors, write_index, write_tensors
from safetensors.torch import load_file

import engram
from engram.cli import main
from engram.hashing import NgramHash, total_rows
from engram.memory import Memory

ONE = V41.replace(layers=(1,))
ROWS = total_rows(ONE, 1)


@pytest.fixture
def v41(tmp_path: Path) -> Path:
    """One file with layer 1 of V41, and another tensor of a host."""
    tensors = {**v41_tensors(ONE, 1, ROWS, "model."), "model.norm.weight": raw(torch.ones(4))}
    return write_tensors(tmp_path / "v41.safetensors", tensors)


def _inspect(capsys: pytest.CaptureFixture[str], path: Path, status: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", str(path), "--json"]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(path)]) == status  # what a person sees is left for the caller to read
    return result


def test_inspect_says_what_is_there(v41: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V41_JSON, "engram_layer_ids": [1]}))
    result = _inspect(capsys, v41, 0)
    assert "family deepseek-v4.1" in capsys.readouterr().out
    (layer,) = result["layers"]
    hasher = NgramHash(ONE, 1)
    assert result["family"] == "deepseek-v4.1" and result["others"] == 1 and not result["unplaced"]
    assert result["config"] == json.loads(json.dumps(ONE.to_dict()))
    expected = {"layer": 1, "rows": ROWS, "width": 64, "row_format": "fp8_e4m3", "row_bytes": 66, "shards": 1}
    assert expected.items() <= layer.items() and layer["multipliers"] == hasher.multipliers.tolist()
    assert layer["table_bytes"] == 66 * ROWS and layer["agrees"]
    assert layer["dense"]["wkv.weight"] == {"dtype": "F8_E4M3", "shape": [120, 384]}


def test_inspect_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engram.export_released(qwen_memory(), "qwen3.8-flash-next", tmp_path / "out", shards=3)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = {name: raw(tensor) for name, tensor in load_file(file).items()}
    prefix = "model.language_model.layers.1.ple."
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    tensors[f"{prefix}ple_embedding.token_lookup"] = raw(torch.ones(2))
    tensors[f"{prefix}something"] = tensors["model.engram_new"] = raw(torch.ones(2))
    write_tensors(file, tensors)
    result = _inspect(capsys, tmp_path / "out", 0)
    assert result["unplaced"] == [f"{prefix}something", "model.engram_new"]
    assert len(result["layers"][0]["saved_constants"]) == 3 and result["layers"][0]["shards"] == 3
    assert "could not place: model.language_model" in capsys.readouterr().out

    wrong = dict(tensors)
    wrong[f"{prefix}ple_embedding.layer_multipliers"] = raw(torch.tensor([1, 2, 3]))
    write_tensors(file, wrong)
    result = _inspect(capsys, tmp_path / "out", 1)
    assert "layer_multipliers: saved [1] at place 0 of 3" in result["failed"][0]
    with pytest.raises(ValueError, match="every row would be addressed wrongly"):
        engram.load_released(Memory(QWEN), file)

    wrong = dict(tensors)
    wrong[f"{prefix}ple_embedding.ngram_embedding.shard_00.weight"] = raw(torch.ones(4, 6).bfloat16())
    write_tensors(file, wrong)
    assert "its rows are there twice" in _inspect(capsys, tmp_path / "out", 1)["failed"][0]
    wrong.pop(f"{prefix}ple_embedding.ngram_embedding.shard_00.weight")
    wrong.pop(f"{prefix}ple_embedding.ngram_embedding.shard_1.weight")
    write_tensors(file, wrong)
    assert "shard 1 of its rows is missing" in _inspect(capsys, tmp_path / "out", 1)["failed"][0]


def test_inspect_of_parts_damage_and_nothing(v41: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    tensors = v41_tensors(ONE, 1, ROWS)
    rows = {name: tensors.pop(name) for name in list(tensors) if ".embed." in name}
    write_index(folder, {"a.safetensors": rows, "b.safetensors": tensors, "c.safetensors": {"x": raw(torch.ones(1))}})
    (folder / "c.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(V41_JSON))
    result = _inspect(capsys, folder, 1)  # config.json says layers 1 and 3
    assert result["absent"] == ["c.safetensors"] and result["layers"][0]["agrees"] is True
    assert result["failed"] == ["config.json names memory in layers [3] (0-based), whose tensors are not there"]
    (folder / "b.safetensors").unlink()
    assert "b.safetensors, which is not there" in " ".join(_inspect(capsys, folder, 1)["failed"])
    with (folder / "a.safetensors").open("r+b") as file:
        file.truncate(5000)
    assert "a.safetensors" in _inspect(capsys, folder, 1)["error"]
    shutil.rmtree(folder)
    assert "nothing here" in _inspect(capsys, folder, 2)["error"]
    other = write_tensors(tmp_path / "other.safetensors", {"engram.unknown": raw(torch.ones(1))})
    result = _inspect(capsys, other, 1)
    assert result["family"] is None and result["unplaced"] == ["engram.unknown"]
    both = write_tensors(
        tmp_path / "both.safetensors", {**rows, "ngram_embeddings.embedders.0.weight": raw(torch.ones(2, 2))}
    )
    assert "two layouts: deepseek-v4.1, longcat-flash-lite" in _inspect(capsys, both, 1)["error"]
    (tmp_path / "config.json").write_text('{"engram_layer_ids": "one"}')
    assert "layers" in _inspect(capsys, v41, 2)["error"]
    for fields, said in (
        ({"engram_n_heads": 10**9}, "engram_n_heads: 1000000000 must be"),
        ({"engram_max_ngram_size": "4"}, "engram_max_ngram_size: '4' must be"),
        ({"engram_pad_token_id": 5}, "only the pad id 2"),
        ({"engram_vocab_size": None}, "rows: "),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**V41_JSON, **fields}))
        assert said in _inspect(capsys, v41, 2 if said == "rows: " else 1)["error"]
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in _inspect(capsys, v41, 1)["error"]
