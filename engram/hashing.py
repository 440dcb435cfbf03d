"""Windows of ids -> row numbers. Two engines, integers only; every family is data (engram/families.py).

    rows_BTC = NgramHash(cfg, layer=1, vocab_size=129_280).rows(ids_BT)

XOR engine (DeepSeek, Qwen3.8):   mix_o = t0*m0 ^ t1*m1 ^ ... ^ t(o-1)*m(o-1);  row = mix_o mod size + offset.
Polynomial engine (LongCat, BLT): row = (t0*c0 + t1*c1 + ... + t(o-1)*c(o-1)) mod size + offset.
Multiplier 0 belongs to the current token. Columns are order-major: all heads of the first order, then the next.
The XOR multipliers are bounded so that (classes - 1) * m < 2^63: products of valid ids never wrap and the mix is never
negative. BLT wraps in int64 by design, and its remainder is the floor remainder.

Shapes: B batch, T time, N longest n-gram, C columns.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sympy import nextprime
from torch import Tensor, nn

from engram.compress import TokenMap
from engram.config import ANY_ID, ConfigError, EngramConfig
from engram.kernels.dispatch import HashConstants, hash_rows, reciprocals, rows_of_windows, stack, windows_of_ids

LAYER_STRIDE = 10007  # distance of the generator seeds of two layers, in every family of the XOR engine
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1


def splitmix64(value: int) -> int:
    """One output of the splitmix64 generator for the state `value`: 64 bits in, 64 bits out."""
    value = (value + GOLDEN_GAMMA) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def table_sizes(cfg: EngramConfig) -> dict[int, tuple[int, ...]]:
    """Layer -> its C table sizes. Sizes depend on all layers before it in `cfg.layers` (no prime is used twice)."""
    return _table_sizes(cfg.hash.sizes, cfg.layers, cfg.bases, cfg.heads)


@lru_cache(maxsize=256)
def _table_sizes(rule: str, layers: tuple[int, ...], bases: tuple[int, ...], heads: int) -> dict[int, tuple[int, ...]]:
    if rule == "constant":
        return {layer: tuple(base for base in bases for _ in range(heads)) for layer in layers}
    if rule == "odd":
        heads_in_order = [base for base in bases for _ in range(heads)]
        return {layer: tuple(base + 2 * i + 1 for i, base in enumerate(heads_in_order)) for layer in layers}
    used: set[int] = set()
    sizes: dict[int, tuple[int, ...]] = {}
    for layer in layers:
        columns: list[int] = []
        for base in bases:
            prime = base - 1
            for _ in range(heads):
                prime = int(nextprime(prime))
                while prime in used:
                    prime = int(nextprime(prime))
                used.add(prime)
                columns.append(prime)
        sizes[layer] = tuple(columns)
    return sizes


def total_rows(cfg: EngramConfig, layer: int) -> int:
    """Rows of the table of `layer`, padding included."""
    total = sum(table_sizes(cfg)[layer])
    pad = cfg.hash.pad_rows_to
    return -(-total // pad) * pad


def multipliers(cfg: EngramConfig, layer: int, classes: int) -> tuple[int, ...]:
    """The N multipliers of one layer for the XOR engine; `classes` is the size of the hashed id space."""
    key = layer if cfg.hash.layer_key == "layer" else cfg.layers.index(layer)
    seed = cfg.seed + LAYER_STRIDE * key
    half = (2 ** (cfg.hash.width - 1) - 1) // classes // 2
    if half < 2:  # every multiplier would be 1, and (a, b) would read the rows of (b, a)
        raise ConfigError(
            f"hash.width: {cfg.hash.width}-bit products leave no room for multipliers with {classes} classes; "
            f"use width 64, or give the real vocab_size"
        )
    if cfg.hash.multipliers == "pcg64":
        draws = np.random.default_rng(seed).integers(0, half, size=cfg.max_order, dtype=np.int64)
        return tuple(2 * int(draw) + 1 for draw in draws)
    states = (seed + GOLDEN_GAMMA * (i + 1) for i in range(cfg.max_order))
    return tuple(2 * (splitmix64(state & MASK_64) % half) + 1 for state in states)


def coefficients(cfg: EngramConfig, sizes: Sequence[int], classes: int) -> list[list[int]]:
    """The C x N coefficients of the polynomial engine, as signed int64; 0 where a slot lies beyond the order."""
    base = cfg.hash.base or classes
    table = []
    for column, size in enumerate(sizes):
        order = cfg.orders[column // cfg.heads]
        exponents = range(order - 1, -1, -1) if cfg.hash.oldest_first else range(order)
        powers = [pow(base, e, size) if cfg.hash.reduce else _wrap_int64(pow(base, e, 2**64)) for e in exponents]
        table.append(powers + [0] * (cfg.max_order - order))
    return table


def _wrap_int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class NgramHash(nn.Module):
    """Row numbers of one layer. Constants are int64 buffers that no cast, average or meta-device move can change.

    vocab_size  ids (classes) hashed; default: the token map's size, else `cfg.vocab_size`, else any 31-bit id.
    token_map   maps raw ids to classes; without one `rows` takes canonical ids.

    Ids outside the vocabulary (negative, padded, past the map) are replaced by the filler before hashing and counted in
    `masked`. Raises ConfigError when map, vocabulary and configuration disagree, or `layer` is not in `cfg.layers`.
    """

    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    digest: Tensor
    masked: Tensor
    class_of: Tensor | None
    constants: HashConstants

    def __init__(
        self, cfg: EngramConfig, layer: int, vocab_size: int | None = None, token_map: TokenMap | None = None
    ) -> None:
        super().__init__()
        if layer not in cfg.layers:
            raise ConfigError(f"layer: {layer} has no memory; the configuration lists layers {list(cfg.layers)}")
        self.cfg, self.layer, self.token_map = cfg, layer, token_map
        self.vocab_size = _vocabulary(cfg, vocab_size, token_map)
        self.filler = self.vocab_size if cfg.filler is None else cfg.filler
        self.classes = self.vocab_size + (cfg.filler is None)
        if self.filler >= self.classes:
            raise ConfigError(f"filler: class {self.filler} lies outside the {self.classes} classes that are hashed")
        sizes = table_sizes(cfg)[layer]
        self.total_rows = total_rows(cfg, layer)
        xor = cfg.hash.engine == "xor"
        self._constants: dict[str, Any] = {
            "sizes": sizes,
            "offsets": tuple(sum(sizes[:i]) for i in range(len(sizes))),
            # [N] of the XOR engine, or the coefficients [C, N] of the polynomial one
            "multipliers": multipliers(cfg, layer, self.classes) if xor else coefficients(cfg, sizes, self.classes),
            "digest": self._digest(),
        }
        self.stacked: tuple[list[HashConstants], HashConstants] | None = None  # of `rows_of_layers`
        self._build(torch.get_default_device())

    def _digest(self) -> tuple[int, ...]:
        """Four int64 words that identify what the other constants do not: id map, filler, boundaries, engine."""
        cfg = self.cfg
        tmap = None if self.token_map is None else self.token_map.sha256
        said = [cfg.hash.version, cfg.hash.engine, cfg.hash.width, list(cfg.orders), self.filler, cfg.boundary]
        text = json.dumps([*said, list(cfg.eos), self.classes, tmap])
        return struct.unpack("<4q", hashlib.sha256(text.encode()).digest())

    @property
    def identity(self) -> str:
        """One hash of every constant: rows that were trained under another one are addressed wrongly."""
        return hashlib.sha256(json.dumps(self._constants, sort_keys=True).encode()).hexdigest()

    def _build(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be counted up in the next normal forward
            for name, values in self._constants.items():
                self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device))
            self.register_buffer("masked", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
            class_of = None if self.token_map is None else self.token_map.map.to(device)
            self.register_buffer("class_of", class_of, persistent=False)
            self.constants = self._kernel_constants(device)
        self._written = {} if device.type == "meta" else {name: self._writes(name) for name in self._constants}

    def _kernel_constants(self, device: torch.device) -> HashConstants:
        """The same constants as the operations of kernels/ take them: one line of multipliers per column."""
        cfg, sizes = self.cfg, self._constants["sizes"]
        lines = self._constants["multipliers"]
        if cfg.hash.engine == "xor":
            orders = [order for order in cfg.orders for _ in range(cfg.heads)]
            lines = [list(lines[:order]) + [0] * (cfg.max_order - order) for order in orders]
            largest = 2 ** (cfg.hash.width - 1) - 1  # see `multipliers`
        else:
            wraps = any(number < 0 for line in lines for number in line)
            largest = 2**63 if wraps else max((self.classes - 1) * sum(line) for line in lines)
        inverse, exact = reciprocals(sizes, largest)
        eos = cfg.eos if cfg.boundary == "eos" else ()
        numbers = (torch.tensor(values, dtype=torch.int64, device=device) for values in (lines, inverse, eos))
        multipliers_KN, reciprocals_K, eos_E = numbers
        return HashConstants(
            multipliers_KN,
            self.sizes,
            self.offsets,
            reciprocals_K,
            eos_E,
            self.class_of,
            orders=cfg.orders,
            heads=cfg.heads,
            limit=self.vocab_size if self.class_of is None else len(self.class_of),
            filler=self.filler,
            xor=cfg.hash.engine == "xor",
            narrow=cfg.hash.width == 32,
            exact_reciprocal=exact,
        )

    def _writes(self, name: str) -> int:
        return int(getattr(self, name)._version)

    @torch.compiler.disable
    def _ensure_constants(self, device: torch.device) -> None:
        """Rebuild constants that something wrote into (an average of weights takes buffers along) or left on meta."""
        changed = any(self._writes(name) != version for name, version in self._written.items())
        if changed or (self.sizes.is_meta and device.type != "meta"):
            self._build(device if self.sizes.is_meta else self.sizes.device)

    def _apply(self, fn: Any, recurse: bool = True) -> NgramHash:
        """Follow a device move, ignore a dtype: `.half()`, `.type()` and `to_empty()` leave the constants exact."""
        masked = self.masked
        self._build(fn(torch.empty(0, device=masked.device)).device)
        if not masked.is_meta and not self.masked.is_meta:
            self.masked.copy_(masked)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Saved constants are checked against the derived ones and never replace them."""
        _, strict, missing, _, errors = args[:5]
        found = {name: state_dict[prefix + name] for name in self._constants if prefix + name in state_dict}
        if strict:
            missing.extend(prefix + name for name in self._constants if name not in found)
        different = [name for name, saved in found.items() if saved.tolist() != _listed(self._constants[name])]
        if different:
            what = "token map, filler, boundary or engine" if different == ["digest"] else "seed, vocabulary or sizes"
            errors.append(
                f"{prefix}{', '.join(different)}: the saved hash constants differ from those of this configuration "
                f"(another {what}); the rows would be addressed wrongly"
            )
        elif found and self.sizes.is_meta:
            self._build(next(iter(found.values())).device)

    @torch.no_grad()
    def window(
        self,
        ids_BT: Tensor,
        *,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """Ids [B, T] -> windows of classes [B, T, N], int64. Arguments as in `rows`."""
        asked = self._asked(ids_BT, segment_ids, blocked, mask, history)
        return windows_of_ids(asked[0], self.constants, *asked[1:], self.masked)

    def _asked(
        self,
        ids_BT: Tensor,
        segment_ids: Tensor | None,
        blocked: Tensor | None,
        mask: Tensor | None,
        history: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        """Arguments of `rows`, checked -> ids, padding, blocked positions, segments, and how many ids are history."""
        _check_ids(ids_BT)
        self._ensure_constants(ids_BT.device)
        ids_BT = ids_BT.to(self.sizes.device, torch.int64)
        keep_BT = _flags(mask, ids_BT, "mask")
        dead_BT = _flags(blocked, ids_BT, "blocked")
        segment_BT = _segments(segment_ids, ids_BT) if self.cfg.boundary != "none" else None
        length = ids_BT.shape[1]
        pad_BT = None if keep_BT is None else ~keep_BT
        if history is not None:
            ids_BT, pad_BT, dead_BT, segment_BT = _with_history(history, ids_BT, pad_BT, dead_BT, segment_BT)
        return ids_BT, pad_BT, dead_BT, segment_BT, ids_BT.shape[1] - length

    @torch.no_grad()
    def rows_of_window(self, window_BTN: Tensor) -> Tensor:
        """Windows of classes [B, T, N] -> row numbers [B, T, C], int64, head offsets included."""
        return rows_of_windows(window_BTN, self.constants)[0]

    @torch.no_grad()
    def rows(
        self,
        ids_BT: Tensor,
        *,
        segment_ids: Tensor | None = None,
        blocked: Tensor | None = None,
        mask: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """Token ids [B, T] -> row numbers [B, T, C], int64, head offsets included.

        ids_BT       any integer dtype; raw ids with a token map, classes without one.
        segment_ids  [B, T] packed-document numbers; windows do not cross them (not used with boundary "none").
        blocked      [B, T] bool, positions whose whole window is the filler and which nobody looks at (image spans).
        mask         [B, T], 0 at padding: hashed as filler, and a barrier for later positions.
        history      [B, H] ids before ids_BT, newest last, of the document of the first new id; a negative entry is a
                     blocked slot (text start, image span). An id that was outside the vocabulary stays visible as the
                     filler: pass it on as `vocab_size`, or any id past the map.

        Raises TypeError for ids, masks or segments that are no integers and ValueError for shapes that do not fit.
        """
        asked = self._asked(ids_BT, segment_ids, blocked, mask, history)
        return hash_rows(asked[0], self.constants, *asked[1:], self.masked)[0]

    def extra_repr(self) -> str:
        return f"layer={self.layer}, classes={self.classes}, rows={self.total_rows}, engine={self.cfg.hash.engine}"


@torch.no_grad()
def rows_of_layers(
    hashes: Sequence[NgramHash],
    ids_BT: Tensor,
    *,
    segment_ids: Tensor | None = None,
    blocked: Tensor | None = None,
    mask: Tensor | None = None,
    history: Tensor | None = None,
) -> list[Tensor]:
    """Row numbers [B, T, C] of the ids for several layers of one configuration, hashed at once; see `NgramHash.rows`.

    Ids outside the vocabulary are counted in the first layer's `masked` alone.
    """
    first = hashes[0]
    asked = first._asked(ids_BT, segment_ids, blocked, mask, history)
    for other in hashes[1:]:
        other._ensure_constants(ids_BT.device)
    constants = [one.constants for one in hashes]
    if first.stacked is None or any(a is not b for a, b in zip(first.stacked[0], constants, strict=True)):
        first.stacked = (constants, stack(constants))
    return list(hash_rows(asked[0], first.stacked[1], *asked[1:], first.masked))


def _vocabulary(cfg: EngramConfig, vocab_size: int | None, token_map: TokenMap | None) -> int:
    """The one place where map, argument and configuration must agree: a wrong size re-addresses every row."""
    given = [(n, v) for n, v in (("vocab_size", vocab_size), ("cfg.vocab_size", cfg.vocab_size)) if v is not None]
    for name, value in given:
        if not 1 <= value <= ANY_ID:
            raise ConfigError(f"{name}: {value} must lie in 1..{ANY_ID}")
    if token_map is not None:
        for name, value in given:
            raw_ids = name == "vocab_size" and value == len(token_map)
            if value != token_map.size and not raw_ids:
                raise ConfigError(
                    f"{name}: {value} classes are configured but the token map has {token_map.size}; every row would "
                    f"be re-addressed. Use the tokenizer that the configuration was made for"
                )
        return token_map.size
    if cfg.compress and not given:
        raise ConfigError("compress: true needs a token map (or canonical ids together with vocab_size)")
    if len({value for _, value in given}) > 1:
        raise ConfigError(
            f"vocab_size: {vocab_size} differs from {cfg.vocab_size} in the configuration; every row would be "
            f"re-addressed. Leave one of them out, or make them equal"
        )
    return given[0][1] if given else ANY_ID


def _listed(values: Any) -> list[Any]:
    return [_listed(v) if isinstance(v, (list, tuple)) else v for v in values]


def _check_ids(ids_BT: Tensor) -> None:
    _check_integers(ids_BT, "ids")
    if ids_BT.dtype == torch.bool:
        raise TypeError("ids: expected an integer tensor [B, T], got torch.bool")
    if ids_BT.ndim != 2:
        raise ValueError(f"ids: expected shape [B, T], got {list(ids_BT.shape)}")


def _check_integers(values: Tensor, name: str) -> None:
    if not isinstance(values, Tensor) or values.dtype.is_floating_point or values.dtype.is_complex:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name}: expected an integer tensor [B, T], got {kind}")


def _flags(flags: Tensor | None, ids_BT: Tensor, name: str) -> Tensor | None:
    """Booleans [B, T]. An additive float mask would be read the wrong way round: floats must be 0 or 1."""
    if flags is None:
        return None
    if not (isinstance(flags, Tensor) and flags.is_floating_point() and bool(((flags == 0) | (flags == 1)).all())):
        _check_integers(flags, name)
    if flags.shape != ids_BT.shape:
        raise ValueError(f"{name}: shape {list(flags.shape)} does not fit ids {list(ids_BT.shape)}")
    return flags.to(ids_BT.device).bool()


def _segments(segment_ids: Tensor | None, ids_BT: Tensor) -> Tensor | None:
    if segment_ids is None:
        return None
    _check_integers(segment_ids, "segment_ids")
    if segment_ids.shape != ids_BT.shape:
        raise ValueError(f"segment_ids: shape {list(segment_ids.shape)} does not fit ids {list(ids_BT.shape)}")
    return segment_ids.to(ids_BT.device, torch.int64)


def _with_history(
    history: Tensor, ids_BT: Tensor, pad_BT: Tensor | None, dead_BT: Tensor | None, segment_BT: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Prepend the history: its negative entries are dead, and it belongs to the document of the first new id."""
    _check_ids(history)
    if history.shape[0] != ids_BT.shape[0]:
        raise ValueError(f"history: batch {history.shape[0]} does not fit the batch {ids_BT.shape[0]} of the ids")
    history = history.to(ids_BT.device, torch.int64)
    false_BH = torch.zeros_like(history, dtype=torch.bool)
    dead = torch.cat([history < 0, torch.zeros_like(ids_BT, dtype=torch.bool) if dead_BT is None else dead_BT], dim=1)
    pad = None if pad_BT is None else torch.cat([false_BH, pad_BT], dim=1)
    segment = segment_BT
    if segment_BT is not None:
        segment = torch.cat([segment_BT[:, :1].expand(-1, history.shape[1]), segment_BT], dim=1)
    return torch.cat([history, ids_BT], dim=1), pad, dead, segment
