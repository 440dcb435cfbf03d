"""Released layouts, read: transformers' module for Qwen, formulas in float64 for the others, literal bytes for all."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from released_files import (
    DEMO,
    LONGCAT,
    MAP,
    QWEN,
    V41,
    V41_JSON,
    Stored,
    back,
    raw,
    unpacked,
    v41_tensors,
    write_index,
    write_tensors,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextPLELayer

import engram
from engram import families
from engram.hashing import NgramHash, total_rows
from engram.layer import Engram
from engram.memory import Memory

PREFIX = "model.language_model.layers.1.ple."
SPELLINGS = ("shard_{}.weight", "shard_{:02d}.weight", "shards.{}.weight", "shard.{}.weight", "{}.weight", "weight")


def _rms(x: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _their_config(**changes: Any) -> Qwen4ExpTextConfig:
    fields: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 16, "ple_layer_ids": [2], "ple_embed_dim": 48, "ngram_size": 3,
        "heads_per_ngram": 4, "ngram_vocab_size_base": 500, "seed": 1234, "eos_token_id": [7, 9], "hc_count": 3,
        "num_hidden_layers": 3, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return Qwen4ExpTextConfig(**{**fields, **changes})


def _their_layer() -> Qwen4ExpTextPLELayer:
    theirs = Qwen4ExpTextPLELayer(_their_config(), 1, 0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.02 if "ngram_embedding" in name else 0.3))
    return theirs


def _qwen_tensors(
    theirs: Qwen4ExpTextPLELayer, spelling: str = "shard_{}.weight", shards: int = 5
) -> dict[str, Stored]:
    """The state dict of their module under the names of the release, the rows cut into shards."""
    tensors = {PREFIX + name: raw(tensor.detach()) for name, tensor in theirs.state_dict().items()}
    rows = back(tensors.pop(f"{PREFIX}ple_embedding.ngram_embedding.weight"))
    for i, part in enumerate([rows] if spelling == "weight" else rows.chunk(shards)):
        tensors[f"{PREFIX}ple_embedding.ngram_embedding.{spelling.format(i)}"] = raw(part)
    return tensors


def _with_eos() -> tuple[Tensor, Tensor, Tensor]:
    """Ids with several ends of text (the first id of the list; 9, the second, is an ordinary id), and left padding."""
    ids = torch.randint(0, 300, (3, 31))
    ids[:, [4, 12, 13, 25]], ids[0, 8] = 7, 9
    mask = torch.ones_like(ids)
    mask[1, :6] = mask[2, :1] = 0
    return ids, mask, torch.randn(3, 31, 3, 16)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_qwen_is_what_transformers_computes(tmp_path: Path, spelling: str) -> None:
    theirs = _their_layer()
    path = write_tensors(tmp_path / "model.safetensors", _qwen_tensors(theirs, spelling))
    ours = Engram(QWEN.replace(row_dtype="fp32"), 1)
    engram.load_released(ours, path)
    ids, mask, x = _with_eos()
    rows = ours.hash.rows(ids, mask=mask)
    seen = torch.where(mask.bool(), ids, 7)
    with torch.no_grad():
        assert torch.equal(ours.table(rows), theirs.ple_embedding(seen, None))
        update = ours(x, rows, keep_BT=mask.bool()).flatten(-2)
        expected = theirs(x.flatten(-2), seen, None, conv_mask=mask)
    live = mask.bool()
    torch.testing.assert_close(update[live], expected[live], rtol=1e-6, atol=1e-6)
    assert expected[live].abs().mean() > 0.01
    assert torch.equal(
        engram.released_rows(path, 1, rows.flatten()), theirs.ple_embedding.ngram_embedding.weight[rows.flatten()]
    )


def _their_model() -> Any:
    """A whole tiny model of theirs, its n-gram part random."""
    config = _their_config(
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, hc_lowrank=8,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"], indexer_n_heads=2,
        indexer_head_dim=16, indexer_kv_heads=1, indexer_budget=8, indexer_compress_ratio=2, pad_token_id=0,
        split_ngram_parts=6,
    )  # fmt: skip
    model = Qwen4ExpForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers[1].ple.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def test_logits_of_transformers_model_with_its_ngram_part_replaced(tmp_path: Path) -> None:
    model = _their_model()
    path = write_tensors(tmp_path / "model.safetensors", _qwen_tensors(model.model.layers[1].ple))
    ids, mask, _ = _with_eos()
    with torch.no_grad():
        expected = [model(ids, attention_mask=m, use_cache=False).logits for m in (None, mask)]
    ours = Engram(QWEN.replace(row_dtype="fp32"), 1)
    engram.load_released(ours, path)

    class Replaced(torch.nn.Module):
        def forward(self, hidden: Tensor, seen: Tensor, cache: Any, conv_mask: Tensor | None = None) -> Tensor:
            rows = ours.hash.rows(seen, mask=conv_mask)
            keep = None if conv_mask is None else conv_mask.bool()
            update: Tensor = ours(hidden.unflatten(-1, (3, 16)), rows, keep_BT=keep).flatten(-2)
            return update

    with torch.no_grad():
        without = model.model.layers[1].ple = Replaced()
        found = [model(ids, attention_mask=m, use_cache=False).logits for m in (None, mask)]
        without.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)  # type: ignore[method-assign]
        changed = model(ids, use_cache=False).logits
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][mask.bool()], expected[1][mask.bool()], rtol=1e-5, atol=1e-6)
    assert (changed - expected[0]).abs().max() > 1e-2


def _in_pieces(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None) -> Tensor:
    """Logits with the model's own cache, read in pieces, the rest token by token."""
    logits, cache, start = [], None, 0
    for size in [*sizes, *[1] * (ids.shape[1] - sum(sizes))]:
        seen = None if mask is None else mask[:, : start + size]
        out = model(ids[:, start : start + size], attention_mask=seen, cache=cache, use_cache=True)
        cache, start = out.cache, start + size
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def test_our_memory_attached_to_their_model_without_its_own_computes_and_decodes_the_same(tmp_path: Path) -> None:
    """Prefill, several pieces, step by step, several ends of text, left padding: their cache and ours."""
    theirs = _their_model()
    theirs.save_pretrained(tmp_path / "theirs")
    config = copy.deepcopy(theirs.config)
    config.ple_layer_ids = []
    plain = Qwen4ExpForCausalLM(config).eval()
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if ".ple." not in name}
    plain.load_state_dict(weights)
    handle = engram.attach(plain, engram.released_config(tmp_path / "theirs"))
    engram.load_released(handle.memory, tmp_path / "theirs")
    ids, padded, _ = _with_eos()
    with torch.no_grad():
        for mask in (None, padded):
            live = torch.ones_like(ids).bool() if mask is None else mask.bool()
            expected = theirs(ids, attention_mask=mask, use_cache=False).logits
            found = plain(ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(found[live], expected[live], rtol=1e-5, atol=1e-6)
            # their own model is off by 0.1 when padding is read token by token: a prompt is read in one piece
            for sizes in ([31], [7, 1, 9], [1] if mask is None else [8]):
                expected, found = (_in_pieces(model, ids, sizes, mask) for model in (theirs, plain))
                torch.testing.assert_close(found[live], expected[live], rtol=1e-5, atol=2e-6)
        with handle.disabled():
            assert (plain(ids, use_cache=False).logits - theirs(ids, use_cache=False).logits).abs().max() > 1e-2


def test_we_read_what_transformers_saves_and_it_reads_what_we_export(tmp_path: Path) -> None:
    model, folder = _their_model(), tmp_path / "theirs"
    model.save_pretrained(folder)
    cfg = engram.released_config(folder)
    assert cfg == QWEN.replace(row_dtype="fp32", init="zeros")
    memory = Memory(cfg)
    engram.load_released(memory, folder)
    engram.export_released(memory, "qwen3.8-flash-next", tmp_path / "ours", shards=6)
    saved = load_file(folder / "model.safetensors")
    rest = {name: tensor for name, tensor in saved.items() if ".ple." not in name}
    ours = {
        name: tensor for file in (tmp_path / "ours").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert len(rest) + len(ours) == len(saved)
    save_file({**rest, **ours}, folder / "model.safetensors", metadata={"format": "pt"})
    loaded: Any = Qwen4ExpForCausalLM.from_pretrained(folder, output_loading_info=True)
    again, about = loaded
    assert not any(about.values())  # nothing missing, nothing unexpected
    ids, mask, _ = _with_eos()
    with torch.no_grad():
        expected, found = (one(ids, attention_mask=mask, use_cache=False).logits for one in (model, again.eval()))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_qwen_rows_of_the_releases(tmp_path: Path, dtype: torch.dtype) -> None:
    """BF16, and FP8 with one bf16 scale for all rows, as the two releases have them."""
    tensors = _qwen_tensors(_their_layer())
    names = sorted(name for name in tensors if "shard_" in name)
    stored = {name: (back(tensors[name]) * 40).to(dtype) for name in names}
    tensors.update({name: raw(tensor) for name, tensor in stored.items()})
    norm = (torch.randn(48) * 0.01).bfloat16()
    tensors[f"{PREFIX}norm_key.weight"] = raw(norm)
    scale = 1.0
    if dtype != torch.bfloat16:
        scale = float(torch.tensor(0.013).bfloat16())
        tensors[f"{PREFIX}ple_embedding.ngram_embedding.weight_scale"] = raw(torch.tensor([0.013]).bfloat16())
    path = write_tensors(tmp_path / "x.safetensors", tensors)
    rows = torch.cat([stored[name].float() for name in names]) * scale
    ids = torch.tensor([0, total_rows(QWEN, 1) - 1, 17, 17, 3000])
    assert torch.equal(engram.released_rows(path, 1, ids), rows[ids])
    ours = Engram(QWEN.replace(row_dtype="fp32" if scale != 1 else "bf16", placement="host"), 1)
    assert engram.load_released(ours, path)["layers"][1]["rows"] == total_rows(QWEN, 1)
    assert torch.equal(ours.table.read(torch.arange(len(rows))), rows)
    assert ours.key_norm is not None and torch.equal(ours.key_norm.flatten(), 1 + norm.float())
    ours.table.close()


def test_v41_is_the_published_formula(tmp_path: Path) -> None:
    files = {"a.safetensors": v41_tensors(V41, 1, total_rows(V41, 1)), "b.safetensors": {}}
    files["b.safetensors"] = {**v41_tensors(V41, 3, total_rows(V41, 3)), "norm.weight": raw(torch.ones(3))}
    write_index(tmp_path, files)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": V41_JSON}))
    cfg = engram.released_config(tmp_path)
    assert cfg == V41.replace(init="zeros")
    memory = Memory(cfg, token_map=MAP)
    about = engram.load_released(memory, tmp_path)
    assert about["layers"][3]["stored"] == about["layers"][3]["kept"] == "fp8_e4m3"
    memory.double()
    ids = torch.randint(0, 300, (2, 19))
    blocked = torch.zeros_like(ids, dtype=torch.bool)
    blocked[1, 5:8] = True
    step = memory.start(ids, blocked=blocked)
    x = torch.randn(2, 19, 2, 40, dtype=torch.float64)
    for layer, name in ((1, "a.safetensors"), (3, "b.safetensors")):
        prefix = f"layers.{layer}.engram."
        stored = {key.removeprefix(prefix): back(value) for key, value in files[name].items()}
        table = unpacked(stored["embed.weight"], stored["embed.scale"])
        rows = step.rows_BTC[layer]
        read = engram.released_rows(tmp_path, layer, rows.flatten())
        assert torch.equal(read.double(), table[rows.flatten()])  # the product of code and scale is exact
        fused = table[rows].flatten(-2) @ unpacked(stored["wkv.weight"], stored["wkv.scale"], 32).T
        *keys, value = fused.split(40, dim=-1)
        expected = torch.zeros_like(x)
        for c, key in enumerate(keys):
            q, k = stored["q_weight"][c].double(), stored["k_weight"][c].double()
            rho = (x[:, :, c].square().mean(-1) + 1e-6) ** -0.5 * (key.square().mean(-1) + 1e-6) ** -0.5
            z = 40**-0.5 * rho * (x[:, :, c] * q * k * key).sum(-1)
            gate = torch.sigmoid(torch.copysign(z.abs().clamp_min(1e-6).sqrt(), z))
            expected[:, :, c] = gate.unsqueeze(-1) * value * ~blocked.unsqueeze(-1)
        torch.testing.assert_close(memory(layer, x), expected, rtol=1e-10, atol=1e-12)
        norms = dict(memory.layer(layer).named_parameters())
        for ours, name in (("key_norm", "k_weight"), ("query_norm", "q_weight")):  # the gate sees their product alone
            assert torch.equal(norms[ours], stored[name].double())


def test_v41_scale_bytes_0_and_255(tmp_path: Path) -> None:
    """0 is 2^-127; 255 is NaN: reading gives it, a memory does not take it."""
    cfg = V41.replace(layers=(1,))
    tensors = v41_tensors(cfg, 1, total_rows(cfg, 1))
    scales, codes = (back(tensors[f"layers.1.engram.embed.{name}"]) for name in ("scale", "weight"))
    scales[5, 0], codes[5, :2] = 0, torch.tensor([0x38, 0xB1])  # 1 and -(1 + 1/8) / 2
    tensors["layers.1.engram.embed.weight"] = raw(codes, "F8_E4M3")
    tensors["layers.1.engram.embed.scale"] = raw(scales, "F8_E8M0")
    path = write_tensors(tmp_path / "x.safetensors", tensors)
    assert engram.released_rows(path, 1, [5])[0, :2].tolist() == [2.0**-127, -1.125 * 2.0**-128]
    memory = Memory(cfg, token_map=MAP)
    engram.load_released(memory, path)
    assert memory.layer(1).table.read(torch.tensor([5]))[0, :2].tolist() == [2.0**-127, -1.125 * 2.0**-128]
    assert torch.equal(memory.layer(1).table.store.rows, torch.cat([codes, scales], dim=1))  # byte for byte
    scales[9, 1] = 255
    tensors["layers.1.engram.embed.scale"] = raw(scales, "F8_E8M0")
    write_tensors(path, tensors)
    read = engram.released_rows(path, 1, [9])[0]
    assert bool(read[32:].isnan().all()) and bool(read[:32].isfinite().all())
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    with pytest.raises(ValueError, match="row 9 holds NaN"):
        engram.load_released(memory, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())
    engram.load_released(memory, path, rows="in place")
    assert memory.layer(1).table.read(torch.tensor([8])).isfinite().all()
    with pytest.raises(RuntimeError, match="row 9 holds NaN"):
        memory.layer(1).table.read(torch.tensor([8, 9]))
    memory.close()


def _demo_tensors(rows: int, prefix: str) -> dict[str, Stored]:
    width, hidden = DEMO.memory_width, DEMO.hidden_size
    tensors: dict[str, Tensor] = {
        "multi_head_embedding.embedding.weight": torch.randn(rows, 4),
        "multi_head_embedding.offsets": NgramHash(DEMO, 1).offsets,
        "value_proj.weight": torch.randn(hidden, width),
        "value_proj.bias": torch.randn(hidden),
        "short_conv.conv.weight": torch.randn(3 * hidden, 1, 4),
    }
    for s in range(3):
        tensors |= {f"key_projs.{s}.weight": torch.randn(hidden, width), f"key_projs.{s}.bias": torch.randn(hidden)}
        tensors |= {f"{name}.{s}.weight": torch.randn(hidden) for name in ("norm1", "norm2", "short_conv.norms")}
    return {prefix + name: raw(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["", "blocks.1.engram."])
def test_the_demo_is_its_own_formula(tmp_path: Path, prefix: str) -> None:
    tensors = _demo_tensors(total_rows(DEMO, 1), prefix)
    path = write_tensors(tmp_path / "demo.safetensors", tensors)
    layer = Engram(DEMO, 1, token_map=MAP)
    engram.load_released(layer, path)
    layer.double()
    w = {name.removeprefix(prefix): back(value).double() for name, value in tensors.items()}
    ids, x = torch.randint(0, 300, (2, 23)), torch.randn(2, 23, 3, 20, dtype=torch.float64)
    rows = layer.hash.rows(ids)
    memory = w["multi_head_embedding.embedding.weight"][rows].flatten(-2)
    value = memory @ w["value_proj.weight"].T + w["value_proj.bias"]
    gated = []
    for s in range(3):
        key = _rms(memory @ w[f"key_projs.{s}.weight"].T + w[f"key_projs.{s}.bias"], None) * w[f"norm1.{s}.weight"]
        score = (key * _rms(x[:, :, s], None) * w[f"norm2.{s}.weight"]).sum(-1) / 20**0.5
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt())
        gated.append(gate.unsqueeze(-1) * value)
    normed = torch.cat([_rms(u, 1e-5) * w[f"short_conv.norms.{s}.weight"] for s, u in enumerate(gated)], dim=-1)
    conv = torch.zeros_like(normed)
    for t in range(23):
        for tap in range(4):  # causal, dilation 3: the last tap is the current position
            if (earlier := t - 3 * (3 - tap)) >= 0:
                conv[:, t] += normed[:, earlier] * w["short_conv.conv.weight"][:, 0, tap]
    expected = torch.cat(gated, dim=-1) + conv * torch.sigmoid(conv)
    torch.testing.assert_close(layer(x, rows).flatten(-2), expected, rtol=1e-10, atol=1e-10)
    assert layer.key_norm is not None and torch.equal(layer.key_norm[2], w["norm1.2.weight"])


def test_longcat_is_the_sum_of_projected_rows(tmp_path: Path) -> None:
    sizes = [601, 603, 605, 607, 609, 611]  # ratio * V + 2 i + 1
    name = "model.ngram_embeddings"
    tables = [torch.randn(size, 8).bfloat16() for size in sizes]
    projections = [torch.randn(48, 8).bfloat16() for _ in sizes]
    tensors = {f"{name}.embedders.{i}.weight": raw(table) for i, table in enumerate(tables)}
    tensors |= {f"{name}.post_projs.{i}.weight": raw(projection) for i, projection in enumerate(projections)}
    tensors["model.embed_tokens.weight"] = raw(torch.randn(300, 48))
    path = write_tensors(tmp_path / "model.safetensors", tensors)
    about = {"hidden_size": 48, "vocab_size": 300, "ngram_vocab_size_ratio": 2, "emb_split_num": 2, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert engram.released_config(tmp_path) == LONGCAT.replace(init="zeros")
    memory = Memory(LONGCAT)
    engram.load_released(memory, path)
    memory.double()
    ids = [10, 20, 2, 40, 41, 42, 43]
    memory.start(torch.tensor([ids]))
    update = memory(0, torch.zeros(1, len(ids), 48, dtype=torch.float64))[0]
    for t in range(len(ids)):
        expected = torch.zeros(48, dtype=torch.float64)
        for i, (table, projection) in enumerate(zip(tables, projections, strict=True)):
            order, row = 2 + i // 2, 0
            for back_by in range(order):
                if t - back_by < 0 or (back_by and ids[t - back_by] == 2):
                    break
                row += ids[t - back_by] * 300**back_by
            expected += projection.double() @ table[row % sizes[i]].double()
        torch.testing.assert_close(update[t], expected, rtol=1e-12, atol=1e-12)


def test_rows_of_the_real_v41_table_are_read_in_little_memory(tmp_path: Path) -> None:
    """384,006,168 rows of 264 bytes: a sparse file with a real header, and the literal rows of golden.json in it."""
    rows, width = 384_006_168, 256
    shapes: dict[str, tuple[str, list[int]]] = {
        "embed.weight": ("F8_E4M3", [rows, width]),
        "embed.scale": ("F8_E8M0", [rows, 8]),
        "wkv.weight": ("F8_E4M3", [25_600, 6144]),
        "wkv.scale": ("F8_E8M0", [800, 192]),
        "q_weight": ("BF16", [4, 5120]),
        "k_weight": ("BF16", [4, 5120]),
    }
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = torch.Size(shape).numel() * (2 if dtype == "BF16" else 1)
        header[f"layers.1.engram.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path, start = tmp_path / "model.safetensors", 8 + len(text)
    golden = sorted({row for line in families.golden()["deepseek-v4.1"]["by_layer"]["1"]["rows"] for row in line})
    assert len(golden) > 150 and golden[-1] > 2**28
    with path.open("wb") as file:
        file.truncate(start + end)
        file.write(len(text).to_bytes(8, "little") + text)
        for place, row in enumerate(golden):
            file.seek(start + row * width)
            file.write(bytes([0x38]) * width)  # 1
            file.seek(start + rows * width + row * 8)
            file.write(bytes([127 + place % 7]) * 8)
    program = f"""
import resource, time, torch
import engram
from engram.inspecting import inspect_files
engram.released_rows({str(path)!r}, 1, [0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
began = time.perf_counter()
values = engram.released_rows({str(path)!r}, 1, {golden} + [0, {rows - 1}])
took = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
expected = torch.tensor([2.0 ** (i % 7) for i in range({len(golden)})] + [0.0, 0.0])
assert torch.equal(values, expected.unsqueeze(1).expand(-1, {width}))
assert used < 16 << 10, used  # KiB
assert took < 1, took
found = inspect_files({str(path)!r})
assert found["failed"] == [] and found["layers"][0]["table_bytes"] == {rows * 264}
assert engram.released_config({str(path)!r}) == engram.families.get("deepseek-v4.1").replace(init="zeros")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert path.stat().st_blocks * 512 < 1 << 24
