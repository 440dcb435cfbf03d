"""The released families of hashed n-gram memory, as configurations. Each is data; none is a branch in the code.

    cfg = engram.families.get("deepseek-v4.1")

Layer numbers are 0-based decoder blocks. Qwen3.8's own files count from 1 (`ple_layer_ids: [2]` is block 1 here);
the paper's layers [2, 15] count from 1 too, while its demo's [1, 15] are 0-based. Golden rows: engram/golden.json.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from engram.config import ConfigError, EngramConfig, HashConfig

FAMILIES: dict[str, EngramConfig] = {
    # deepseek-ai/Engram, engram_demo_v1: V3 tokenizer in the demo, the V4-family map (99,092 classes) in golden.json.
    "deepseek-demo": EngramConfig(
        hidden_size=1024,
        layers=(1, 15),
        orders=(2, 3),
        heads=8,
        head_dim=64,
        rows=646_400,
        branches=4,
        bias=True,
        gate_eps=None,
        compress=True,
        filler=2,
        boundary="none",
        init="normal",
        init_std=1.0,
        vocab_size=99_092,
    ),
    # Look-back stops at text start and image spans; at packed documents in training. No convolution.
    "deepseek-v4.1": EngramConfig(
        hidden_size=5120,
        layers=(1, 14),
        orders=(2, 3, 4),
        heads=8,
        head_dim=256,
        rows=16_000_000,
        branches=4,
        conv_kernel=0,
        compress=True,
        filler=2,
        boundary="segment",
        init="normal",
        row_dtype="fp8_e4m3",
        vocab_size=99_092,
    ),
    # Raw ids; end of text resets the look-back and is the filler; splitmix64 seeded by the position in the layer list.
    "qwen3.8-flash-next": EngramConfig(
        hidden_size=2560,
        layers=(1,),
        orders=(2, 3),
        heads=8,
        head_dim=160,
        rows=20_000_000,
        branches=4,
        conv_eps=1e-6,
        filler=248_044,
        eos=(248_044,),
        boundary="eos",
        init="normal",
        row_dtype="bf16",
        vocab_size=248_320,
        seed=1234,
        hash=HashConfig(multipliers="splitmix64", layer_key="position", pad_rows_to=128),
    ),
    # Input level: (word + sum of projected rows) / (1 + 12). Blocked terms are absent, which filler 0 expresses.
    "longcat-flash-lite": EngramConfig(
        hidden_size=3072,
        layers=(0,),
        orders=(2, 3, 4),
        heads=4,
        head_dim=256,
        rows=78 * 131_072,
        gate="none",
        conv_kernel=0,
        site="embedding",
        mix="mean",
        filler=0,
        eos=(2,),
        boundary="eos",
        init="normal",
        row_dtype="bf16",
        vocab_size=131_072,
        hash=HashConfig(engine="polynomial", sizes="odd"),
    ),
    # Byte Latent Transformer's encoder: rows of byte groups 3..8 are summed onto the byte embedding; int64 wraps.
    "blt": EngramConfig(
        hidden_size=1024,
        layers=(0,),
        orders=(3, 4, 5, 6, 7, 8),
        heads=1,
        head_dim=1024,
        rows=500_002,
        gate="none",
        conv_kernel=0,
        site="embedding",
        combine="sum",
        filler=0,
        boundary="none",
        init="normal",
        vocab_size=260,
        hash=HashConfig(engine="polynomial", sizes="constant", base=1_000_000_007, oldest_first=True, reduce=False),
    ),
    # MaxText's 32-bit variant of the demo: other multipliers, so its rows are not interchangeable with the demo's.
    "maxtext": EngramConfig(
        hidden_size=1024,
        layers=(1, 15),
        orders=(2, 3),
        heads=8,
        head_dim=64,
        rows=646_400,
        bias=True,
        compress=True,
        filler=2,
        boundary="none",
        init="normal",
        vocab_size=98_627,
        hash=HashConfig(width=32),
    ),
    # The reference rule at a size that fits on paper.
    "toy": EngramConfig(
        hidden_size=64,
        layers=(1, 15),
        orders=(2, 3),
        heads=2,
        head_dim=16,
        rows=1000,
        filler=2,
        boundary="none",
        vocab_size=1000,
    ),
}
NAMES = tuple(FAMILIES)


def get(name: str) -> EngramConfig:
    """The configuration of a released family. Raises ConfigError with the known names and the closest one."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"family: {name!r} is not known{hint}; choose one of {', '.join(NAMES)}")
    return FAMILIES[name]


def golden() -> dict[str, Any]:
    """Golden constants and row numbers by family, literal numbers computed outside this code base."""
    text = (Path(__file__).parent / "golden.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
