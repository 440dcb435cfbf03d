"""Small files in the released layouts, byte by byte, for the tests of what reads them.

The header, the decoder of fp8 and the formulas are written out here a second time on purpose: they are the judges.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram import families
from engram.compress import TokenMap
from engram.config import EngramConfig
from engram.memory import Memory

Stored = tuple[str, list[int], bytes]
"""dtype, shape and bytes of one tensor."""
NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
V41 = families.get("deepseek-v4.1").replace(
    hidden_size=40, layers=(1, 3), heads=2, head_dim=64, rows=101, branches=2, vocab_size=300, row_dtype="fp8_e4m3"
)
"""Three streams of 40: no part of the fused projection begins on a block of 32."""
QWEN = families.get("qwen3.8-flash-next").replace(
    hidden_size=16, layers=(1,), heads=4, head_dim=6, rows=500, branches=3, filler=7, eos=(7,), vocab_size=300
)
LONGCAT = families.get("longcat-flash-lite").replace(hidden_size=48, heads=2, head_dim=8, rows=2 * 300, vocab_size=300)
DEMO = families.get("deepseek-demo").replace(
    hidden_size=20, heads=4, head_dim=4, rows=300, branches=3, vocab_size=300, row_dtype="fp32"
)
MAP = TokenMap(range(300))


def raw(tensor: Tensor, name: str = "") -> Stored:
    """A tensor as it stands in a file; `name` says what its bytes are meant to be."""
    flat = tensor.contiguous().view(-1)
    return name or NAMES[tensor.dtype], list(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def write_tensors(path: Path, tensors: dict[str, Stored], **changes: Any) -> Path:
    """A safetensors file; `changes` replace entries of its header ({"name": {...}})."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps({**header, **changes}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_index(folder: Path, files: dict[str, dict[str, Stored]]) -> Path:
    """A folder of files with an index."""
    for name, tensors in files.items():
        write_tensors(folder / name, tensors)
    where = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def e4m3(code: int) -> float:
    """One FP8 E4M3 code as the standard defines it: sign, four bits of exponent (bias 7), three of significand."""
    sign, exponent, digits = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and digits == 7:
        return float("nan")
    return sign * (digits / 8 * 2.0**-6 if exponent == 0 else (1 + digits / 8) * 2.0 ** (exponent - 7))


VALUE_OF_CODE = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def random_codes(*shape: int) -> Tensor:
    """Codes E4M3 that are numbers, uint8."""
    codes = torch.randint(0, 256, shape)
    return torch.where((codes & 127) == 127, codes - 1, codes).to(torch.uint8)


def random_scales(*shape: int) -> Tensor:
    """E8M0 bytes around 2^-7: with random codes, numbers of a few units."""
    return torch.randint(118, 123, shape).to(torch.uint8)


def unpacked(codes: Tensor, scales: Tensor, height: int = 1) -> Tensor:
    """Codes [a, b] and scales of blocks of `height` x 32 -> values, float64."""
    power = 2.0 ** (scales.double() - 127)
    power = power.repeat_interleave(height, 0)[: codes.shape[0]].repeat_interleave(32, 1)[:, : codes.shape[1]]
    return VALUE_OF_CODE[codes.long()] * power


def v41_tensors(cfg: EngramConfig, layer: int, rows: int, prefix: str = "") -> dict[str, Stored]:
    """One layer of DeepSeek-V4.1, random, with `rows` rows."""
    height, width = (cfg.branches + 1) * cfg.hidden_size, cfg.memory_width
    name = f"{prefix}layers.{layer}.engram."
    norm = (cfg.branches, cfg.hidden_size)
    blocks = (-(-height // 32), -(-width // 32))
    return {
        f"{name}embed.weight": raw(random_codes(rows, cfg.head_dim), "F8_E4M3"),
        f"{name}embed.scale": raw(random_scales(rows, cfg.head_dim // 32), "F8_E8M0"),
        f"{name}wkv.weight": raw(random_codes(height, width), "F8_E4M3"),
        f"{name}wkv.scale": raw(random_scales(*blocks), "F8_E8M0"),
        f"{name}q_weight": raw((1 + 0.3 * torch.randn(norm)).bfloat16()),
        f"{name}k_weight": raw((1 + 0.3 * torch.randn(norm)).bfloat16()),
    }


def back(stored: Stored) -> Tensor:
    """The tensor of a `Stored`; fp8 as its bytes."""
    dtype, shape, content = stored
    kind = next(kind for kind, name in NAMES.items() if name == dtype)
    kind = torch.uint8 if dtype.startswith("F8") else kind
    return torch.frombuffer(bytearray(content), dtype=kind).view(shape)


V41_JSON = {
    "model_type": "anything", "hidden_size": 40, "hc_mult": 2, "rms_norm_eps": 1e-6, "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 64, "engram_vocab_size": 101,
    "engram_compressed_vocab_size": 300, "engram_pad_token_id": 2,
}  # fmt: skip


def qwen_memory(**changes: Any) -> Memory:
    """A Qwen memory with random weights, trained rows, norm weights near 1, near 0 and negative."""
    memory = Memory(QWEN.replace(**changes))
    generator = torch.Generator().manual_seed(3)
    for module in memory.modules_by_layer():
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name != "table.proxy":
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        ids = torch.arange(module.table.store.spec.rows)
        module.table.store.update(ids, torch.randn(len(ids), QWEN.head_dim, generator=generator))
    return memory
