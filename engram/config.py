"""The configuration of a memory: frozen, strict, and free of torch.

Letters used for shapes everywhere: B batch, T time, N longest n-gram, C columns (orders x heads, order-major),
W row width (`head_dim`), M = C * W memory width, D hidden width, S residual streams (`branches`).
Layer numbers are 0-based decoder-block indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engram.strict import ConfigError, apply_overrides, check_fields, from_dict, load_yaml, require, to_dict

ANY_ID = 2**31 - 1
"""Vocabulary bound used when none is given: every 31-bit id is valid, and products still fit into int64."""


@dataclass(frozen=True)
class HashConfig:
    """How windows of ids become row numbers (docs/hashing.md has the table of families).

    engine        "xor": row = (t0*m0 ^ t1*m1 ^ ...) mod size. "polynomial": row = (sum of t_s * c_s) mod size.
    multipliers   XOR only. "pcg64": NumPy's default generator (DeepSeek); "splitmix64" (Qwen3.8).
    layer_key     what enters the seed beside it: the 0-based "layer", or the layer's "position" in `layers`.
    sizes         "next_prime": next unused primes from `rows`; "odd": rows + 2i + 1 (LongCat); "constant" (BLT).
    width         integer width of draws, products and mix: 64, or 32 (MaxText).
    base          polynomial base; None is the vocabulary size (LongCat). BLT uses a prime near 10^9.
    oldest_first  polynomial: exponent 0 belongs to the oldest id of the window (BLT) instead of the current one.
    reduce        polynomial: coefficients are reduced modulo the table size (LongCat); else they wrap in int64 (BLT).
    pad_rows_to   the table's total rows are padded to a multiple of this (Qwen3.8: 128); padding is never addressed.
    version       version of this specification; a change of any rule above changes it.
    """

    engine: Literal["xor", "polynomial"] = "xor"
    multipliers: Literal["pcg64", "splitmix64"] = "pcg64"
    layer_key: Literal["layer", "position"] = "layer"
    sizes: Literal["next_prime", "odd", "constant"] = "next_prime"
    width: Literal[32, 64] = 64
    base: int | None = None
    oldest_first: bool = False
    reduce: bool = True
    pad_rows_to: int = 1
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        check_fields(self, "hash")
        require(self.pad_rows_to >= 1, f"hash.pad_rows_to: {self.pad_rows_to} must be at least 1")
        require(self.base is None or self.base >= 2, f"hash.base: {self.base} must be at least 2")
        require(
            self.width == 64 or self.engine == "xor",
            "hash.width: 32 exists for the xor engine only; use 64 with the polynomial engine",
        )


@dataclass(frozen=True)
class EngramConfig:
    """One memory: where it sits, what it hashes, how large its tables are and how a fetched row is used.

    hidden_size   D of the host model.
    layers        0-based decoder blocks that get a memory, in this order (the order enters the table sizes).
    orders        n-gram orders, ascending; 1 is a unigram table.
    heads         hash heads per order.
    head_dim      W, values per row.
    rows          base from which each head's table size is derived: one int, or one per order.
    branches      S, residual streams; S > 1 expects hidden states [B, T, S, D].
    gate          "signed_sqrt" (demo, V4.1, Qwen3.8), "sigmoid" (the paper's formula) or "none".
    conv_kernel   taps of the causal depthwise convolution (dilation = longest order); 0 turns it off.
    bias          biases on the key and value projections (the demo has them).
    gate_eps, conv_eps   epsilons of the norms; None is the dtype's own epsilon (the demo's gate norms).
    site          "residual" (before the block's attention), "value", or "embedding" (input-level families, layer 0).
    combine       "concat": rows are concatenated and projected; "sum": rows are added up, W = D, no projection (BLT).
    mix           "add": x + memory; "mean": (x + memory) / (1 + C), the LongCat rule.
    compress      hash canonical ids of a TokenMap instead of raw ids.
    filler        class that fills blocked look-back slots; None reserves a class of its own (V + 1 classes).
    eos           ids that close a text, used by boundary "eos".
    boundary      "segment": packed documents cut the window; "eos": also the ids of `eos`; "none": neither.
    init, init_std  rows start at zero, or normal with this standard deviation.
    placement, path, row_dtype   where and how rows are stored.
    prefetch      rows fetched for a later forward: "exact" patches those that were updated meanwhile, "stale" does not.
    vocab_size    ids (classes, with `compress`) that are hashed; None is taken from the model or tokenizer.
    seed          seed of multipliers and of initial values.
    """

    hidden_size: int
    layers: tuple[int, ...] = (1,)
    orders: tuple[int, ...] = (2, 3)
    heads: int = 4
    head_dim: int = 16
    rows: int | tuple[int, ...] = 20_000
    branches: int = 1
    gate: Literal["signed_sqrt", "sigmoid", "none"] = "signed_sqrt"
    conv_kernel: int = 4
    bias: bool = False
    gate_eps: float | None = 1e-6
    conv_eps: float | None = 1e-5
    site: Literal["residual", "value", "embedding"] = "residual"
    combine: Literal["concat", "sum"] = "concat"
    mix: Literal["add", "mean"] = "add"
    compress: bool = False
    filler: int | None = None
    eos: tuple[int, ...] = ()
    boundary: Literal["segment", "eos", "none"] = "segment"
    init: Literal["zeros", "normal"] = "zeros"
    init_std: float = 0.02
    placement: Literal["device", "pinned", "host", "disk"] = "device"
    path: str | None = None
    prefetch: Literal["exact", "stale"] = "exact"
    row_dtype: Literal["fp32", "bf16", "fp8_e4m3", "int8", "lut3"] = "fp32"
    vocab_size: int | None = None
    seed: int = 0
    hash: HashConfig = field(default_factory=HashConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "heads", "head_dim", "branches"):
            value = getattr(self, name)
            require(value >= 1, f"{name}: {value} must be at least 1")
        self._check_sites()
        self._check_ngrams()
        require(self.seed >= 0, f"seed: {self.seed} must not be negative")
        require(self.init_std >= 0, f"init_std: {self.init_std} must not be negative")
        require(self.conv_kernel >= 0, f"conv_kernel: {self.conv_kernel} must be 0 (off) or a number of taps")
        require(
            self.vocab_size is None or 1 <= self.vocab_size <= ANY_ID,
            f"vocab_size: {self.vocab_size} must lie in 1..{ANY_ID}",
        )
        require(
            self.filler is None or self.filler >= 0,
            f"filler: {self.filler} must be a class number, or null for a reserved class",
        )
        require(
            self.boundary != "eos" or bool(self.eos),
            "boundary: 'eos' needs the list of end-of-text ids in `eos`, for example eos: [2]",
        )

    def _check_sites(self) -> None:
        require(bool(self.layers), "layers: at least one 0-based block index is needed, for example [1]")
        require(all(layer >= 0 for layer in self.layers), f"layers: {list(self.layers)} has a negative block index")
        require(len(set(self.layers)) == len(self.layers), f"layers: {list(self.layers)} names a block twice")
        require(
            self.site != "embedding" or self.layers == (0,),
            f"layers: {list(self.layers)} with site 'embedding'; an input-level memory uses layers: [0]",
        )
        require(
            self.combine == "concat" or self.head_dim == self.hidden_size,
            f"head_dim: {self.head_dim} must equal hidden_size {self.hidden_size} when combine is 'sum'",
        )
        require(
            self.combine == "concat" or (self.gate == "none" and self.branches == 1),
            "combine: 'sum' adds rows without a projection; it needs gate 'none' and branches 1",
        )

    def _check_ngrams(self) -> None:
        require(bool(self.orders), "orders: at least one n-gram order is needed, for example [2, 3]")
        require(
            list(self.orders) == sorted(set(self.orders)) and self.orders[0] >= 1,
            f"orders: {list(self.orders)} must be ascending, without repeats, and start at 1 or more",
        )
        bases = self.bases
        require(
            len(bases) == len(self.orders),
            f"rows: {list(bases)} has {len(bases)} entries for {len(self.orders)} orders; give one int or one each",
        )
        least = 1 if self.hash.sizes == "constant" else 2
        for base in bases:
            require(
                base >= least, f"rows: {base} must be at least {least} (a table of one row needs hash.sizes constant)"
            )

    @property
    def bases(self) -> tuple[int, ...]:
        """Table-size base of each order."""
        return (self.rows,) * len(self.orders) if isinstance(self.rows, int) else self.rows

    @property
    def columns(self) -> int:
        """C: rows read per token and layer."""
        return len(self.orders) * self.heads

    @property
    def memory_width(self) -> int:
        """M: width of the memory vector that reaches the layer."""
        return self.head_dim if self.combine == "sum" else self.columns * self.head_dim

    @property
    def max_order(self) -> int:
        """N: longest n-gram; also the dilation of the convolution."""
        return self.orders[-1]

    def replace(self, **changes: Any) -> EngramConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_dict`."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngramConfig:
        """Strict inverse of `to_dict`. Raises ConfigError on an unknown key or a wrong type."""
        return from_dict(cls, data)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: tuple[str, ...] = ()) -> EngramConfig:
        """Read a YAML file (with `base:`), apply `key=value` overrides, build. Raises ConfigError."""
        return from_dict(cls, apply_overrides(load_yaml(path), overrides))


__all__ = ["ANY_ID", "ConfigError", "EngramConfig", "HashConfig"]
