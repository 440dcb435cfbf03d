"""The layouts of released files as data: what each family calls the weights of its memory, and in which shape.

Each entry of LAYOUTS says how tensor names are taken apart, where every weight of `engram.layer.Engram` is, which saved
constants can be compared with ours, and how the family's config.json becomes an EngramConfig. No torch in here.

A tensor name is a module's prefix ("model.layers.1.engram.") and a part of that module ("embed.weight").

Sources: the demo's module (deepseek-ai/Engram, engram_demo_v1.py), the published tensor names and shapes of
DeepSeek-V4.1-Flash, Qwen3.8-Flash-Next (transformers' qwen4_exp reads it) and LongCat-Flash-Lite.

Letters of shapes: R rows, W row width, C columns, M = C * W, D hidden width, S residual streams, K taps.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engram import families
from engram.config import EngramConfig

Fields = Mapping[str, Any]
MOST = 64
"""Largest n-gram order and number of heads that a config.json may ask for."""


@dataclass(frozen=True)
class Weight:
    """Where one weight of ours is.

    ours    name of the parameter of `engram.layer.Engram`.
    part    name in the module; "{s}" is one tensor for each residual stream, "{c}" one for each column.
    shape   of each such tensor, in letters; a product ("SD") is written as its letters, "F" is S + 1.
    axis    along which several tensors are put together.
    first, count   which rows of a fused tensor, in letters; everything where `count` is empty.
    plus    what is added to the stored numbers: 1 where the family stores norm weights around zero.
    scale   part with one power of two (E8M0) for each block of 32 x 32 numbers stored as fp8.
    """

    ours: str
    part: str
    shape: tuple[str, ...]
    axis: int = 0
    first: str = ""
    count: str = ""
    plus: float = 0.0
    scale: str = ""


@dataclass(frozen=True)
class ReleasedLayout:
    """One released layout.

    family        name in engram.families.
    prefix        regular expression for the end of a module's prefix; its group, if any, is the 0-based layer.
    tables        spellings of the rows' tensors as regular expressions; a group is the number of a shard.
    one_a_column  the shards are the columns' tables; otherwise they are any cut of one row space.
    block_scale   part with one E8M0 scale for 32 values of a row.
    one_scale     part with one number by which all fp8 rows are multiplied.
    shard_count   field of config.json with the number of shards of a layer's rows.
    constants     part -> the constant of `engram.hashing.NgramHash` that it must equal.
    skipped       parts that are no weights: statistics, look-up tables, the host's own embedding.
    config        fields of config.json and the family's configuration -> the configuration of these files.
    fields        configuration -> the same fields, for a config.json of ours; None where export is not offered.
    known_by      a field of config.json that a file of this family has.
    """

    family: str
    prefix: str
    tables: tuple[str, ...]
    weights: tuple[Weight, ...]
    config: Callable[[Fields, EngramConfig], EngramConfig]
    known_by: str = ""
    one_a_column: bool = False
    block_scale: str = ""
    one_scale: str = ""
    shard_count: str = ""
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped: str = "(?!)"
    fields: Callable[[EngramConfig], dict[str, Any]] | None = None

    def parts(self, branches: int, columns: int) -> dict[str, tuple[str, ...]]:
        """Our weight -> the parts that hold it, in order."""
        numbers = {"{s}": range(branches), "{c}": range(columns)}
        found = {}
        for weight in self.weights:
            mark = next((mark for mark in numbers if mark in weight.part), "")
            names = [weight.part.replace(mark, str(i)) for i in numbers[mark]] if mark else [weight.part]
            found[weight.ours] = tuple(names)
        return found

    def split(self, name: str) -> tuple[str, str, int | None] | None:
        """Tensor name -> (prefix, part, shard) where it is one of the rows' tensors, else None."""
        for spelling in self.tables:
            match = re.search(f"^(?P<prefix>.*?)(?P<part>{spelling})$", name)
            if match and re.search(self.prefix, match["prefix"]):
                shard = match.groupdict().get("shard")
                return match["prefix"], match["part"], None if shard is None else int(shard)
        return None

    def skips(self, part: str) -> bool:
        """Whether a part of a module is known to be no weight."""
        return re.fullmatch(self.skipped, part) is not None

    def layer(self, prefix: str) -> int | None:
        """The 0-based decoder block in a module's prefix; None where it has no number."""
        match = re.search(self.prefix, prefix)
        return int(match[1]) if match and match.groups() and match[1] is not None else None


def _few(fields: Fields, name: str, default: int) -> int:
    """A field that counts orders or heads. Raises ValueError for one that no release has: hashing would not end."""
    value = fields.get(name, default)
    if not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"config.json: {name}: {value!r} must be a whole number of 1..{MOST}")
    return value


def _demo(fields: Fields, cfg: EngramConfig) -> EngramConfig:
    return cfg  # the demo saves no config.json


def _v41(fields: Fields, cfg: EngramConfig) -> EngramConfig:
    if (pad := fields.get("engram_pad_token_id", fields.get("engram_pad_id", 2))) != 2:
        raise ValueError(
            f"engram_pad_token_id: {pad!r}; only the pad id 2, which is class 2, is known without tokenizer"
        )
    return cfg.replace(
        hidden_size=fields.get("hidden_size", cfg.hidden_size),
        layers=tuple(fields.get("engram_layer_ids", cfg.layers)),
        orders=tuple(range(2, _few(fields, "engram_max_ngram_size", 4) + 1)),
        heads=_few(fields, "engram_n_heads", cfg.heads),
        head_dim=fields.get("engram_head_dim", cfg.head_dim),
        rows=fields.get("engram_vocab_size", cfg.rows),
        branches=fields.get("hc_mult", cfg.branches),
        gate_eps=fields.get("rms_norm_eps", cfg.gate_eps),
        vocab_size=fields.get("engram_compressed_vocab_size", cfg.vocab_size),
    )


def _v41_fields(cfg: EngramConfig) -> dict[str, Any]:
    return {
        "hidden_size": cfg.hidden_size,
        "hc_mult": cfg.branches,
        "rms_norm_eps": cfg.gate_eps,
        "engram_layer_ids": list(cfg.layers),
        "engram_max_ngram_size": cfg.max_order,
        "engram_n_heads": cfg.heads,
        "engram_head_dim": cfg.head_dim,
        "engram_vocab_size": cfg.bases[0],
        "engram_compressed_vocab_size": cfg.vocab_size,
        "engram_pad_token_id": cfg.filler,
    }


def _qwen(fields: Fields, cfg: EngramConfig) -> EngramConfig:
    hidden = fields.get("hidden_size", cfg.hidden_size)
    orders = tuple(range(2, _few(fields, "ngram_size", 3) + 1))
    heads = _few(fields, "heads_per_ngram", cfg.heads)
    eps = fields.get("rms_norm_eps", cfg.gate_eps)
    eos = fields.get("eos_token_id", list(cfg.eos))
    eos = eos[0] if isinstance(eos, list) else eos  # of a list the first alone counts
    width = fields.get("ple_embed_dim") or hidden
    if width % (len(orders) * heads):
        raise ValueError(f"ple_embed_dim: {width} is no multiple of {len(orders) * heads} columns")
    return cfg.replace(
        hidden_size=hidden,
        layers=tuple(layer - 1 for layer in sorted(set(fields.get("ple_layer_ids", [2])))),  # theirs count from 1
        orders=orders,
        heads=heads,
        head_dim=width // (len(orders) * heads),
        rows=fields.get("ngram_vocab_size_base", cfg.rows),
        branches=fields.get("hc_count", cfg.branches),
        conv_kernel=fields.get("ple_conv_kernel_size", cfg.conv_kernel),
        gate_eps=eps,
        conv_eps=eps,
        filler=eos,
        eos=(eos,),
        vocab_size=fields.get("vocab_size", cfg.vocab_size),
        seed=fields.get("seed", cfg.seed),
        hash=dataclasses.replace(cfg.hash, pad_rows_to=fields.get("make_ngram_vocab_size_divisible_by", 128)),
    )


def _qwen_fields(cfg: EngramConfig) -> dict[str, Any]:
    return {
        "hidden_size": cfg.hidden_size,
        "hc_count": cfg.branches,
        "rms_norm_eps": cfg.gate_eps,
        "vocab_size": cfg.vocab_size,
        "eos_token_id": cfg.filler,
        "ple_layer_ids": [layer + 1 for layer in cfg.layers],
        "ple_embed_dim": cfg.memory_width,
        "ple_conv_kernel_size": cfg.conv_kernel,
        "ngram_size": cfg.max_order,
        "heads_per_ngram": cfg.heads,
        "ngram_vocab_size_base": cfg.bases[0],
        "make_ngram_vocab_size_divisible_by": cfg.hash.pad_rows_to,
        "seed": cfg.seed,
    }


def _longcat(fields: Fields, cfg: EngramConfig) -> EngramConfig:
    hidden = fields.get("hidden_size", cfg.hidden_size)
    vocab = fields.get("text_vocab_size", fields.get("vocab_size", cfg.vocab_size))
    ratio = fields.get("ngram_vocab_size_ratio", 78)
    orders = tuple(range(2, _few(fields, "emb_neighbor_num", 4) + 1))
    heads = _few(fields, "emb_split_num", cfg.heads)
    eos = fields.get("eos_token_id", list(cfg.eos))
    if int(ratio * vocab) != ratio * vocab or hidden % (len(orders) * heads):
        raise ValueError(
            f"ngram_vocab_size_ratio: {ratio} * {vocab} ids must be whole, and hidden_size {hidden} a multiple of "
            f"{len(orders) * heads} tables; others are not read"
        )
    return cfg.replace(
        hidden_size=hidden,
        orders=orders,
        heads=heads,
        head_dim=hidden // (len(orders) * heads),
        rows=int(ratio * vocab),
        eos=(eos[0] if isinstance(eos, list) else eos,),
        vocab_size=vocab,
    )


LAYOUTS: tuple[ReleasedLayout, ...] = (
    # The state_dict of the demo's module `Engram`, alone or inside a model; its norms and projections are lists.
    ReleasedLayout(
        family="deepseek-demo",
        prefix=r"(?:^|\.)(\d+)\.engram\.$|^(?:engram\.)?$",
        tables=(r"multi_head_embedding\.embedding\.weight",),
        weights=(
            Weight("value.weight", "value_proj.weight", ("D", "M")),
            Weight("value.bias", "value_proj.bias", ("D",)),
            Weight("key.weight", "key_projs.{s}.weight", ("D", "M")),
            Weight("key.bias", "key_projs.{s}.bias", ("D",)),
            Weight("key_norm", "norm1.{s}.weight", ("D",)),
            Weight("query_norm", "norm2.{s}.weight", ("D",)),
            Weight("conv_norm", "short_conv.norms.{s}.weight", ("D",)),
            Weight("conv", "short_conv.conv.weight", ("SD", "1", "K")),
        ),
        constants={"multi_head_embedding.offsets": "offsets"},
        config=_demo,
    ),
    # Rows of 256 fp8 codes and 8 scales; one projection [k0 | k1 | k2 | k3 | v]; plain norm weights; no convolution.
    ReleasedLayout(
        family="deepseek-v4.1",
        prefix=r"(?:^|\.)layers\.(\d+)\.engram\.$",
        tables=(r"embed\.weight",),
        block_scale="embed.scale",
        weights=(
            Weight("key.weight", "wkv.weight", ("FD", "M"), count="SD", scale="wkv.scale"),
            Weight("value.weight", "wkv.weight", ("FD", "M"), first="SD", count="D", scale="wkv.scale"),
            Weight("key_norm", "k_weight", ("S", "D")),
            Weight("query_norm", "q_weight", ("S", "D")),
        ),
        config=_v41,
        fields=_v41_fields,
        known_by="engram_layer_ids",
    ),
    # bf16 rows, or fp8 rows with one number for all of them, in any number of shards; norm weights around zero.
    ReleasedLayout(
        family="qwen3.8-flash-next",
        prefix=r"(?:^|\.)layers\.(\d+)\.ple\.$",
        tables=tuple(
            rf"ple_embedding\.ngram_embedding\.{spelling}"
            for spelling in (r"shards?[._](?P<shard>\d+)\.weight", r"(?P<shard>\d+)\.weight", "weight")
        ),
        one_scale="ple_embedding.ngram_embedding.weight_scale",
        shard_count="split_ngram_parts",
        weights=(
            Weight("value.weight", "value_proj.weight", ("D", "M")),
            Weight("key.weight", "key_proj.weight", ("SD", "M")),
            Weight("key_norm", "norm_key.weight", ("SD",), plus=1.0),
            Weight("query_norm", "norm_query.weight", ("SD",), plus=1.0),
            Weight("conv_norm", "norm_conv.weight", ("SD",), plus=1.0),
            Weight("conv", "conv1d.weight", ("SD", "1", "K")),
        ),
        constants={
            "ple_embedding.layer_multipliers": "multipliers",
            "ple_embedding.ngram_heads_vocab_sizes": "sizes",
            "ple_embedding.ngram_heads_offsets": "offsets",
        },
        skipped=r"ple_embedding\.(?:hashstats_\w+|token_lookup|.*statistics.*)",
        config=_qwen,
        fields=_qwen_fields,
        known_by="ple_layer_ids",
    ),
    # One table a column, each with a projection of its own: the sum of projected rows is one projection of them all.
    ReleasedLayout(
        family="longcat-flash-lite",
        prefix=r"(?:^|\.)ngram_embeddings\.$",
        tables=(r"embedders\.(?P<shard>\d+)\.weight",),
        one_a_column=True,
        weights=(Weight("value.weight", "post_projs.{c}.weight", ("D", "W"), axis=1),),
        skipped=r"word_embeddings\.weight",
        config=_longcat,
        known_by="ngram_vocab_size_ratio",
    ),
)
NAMES = tuple(layout.family for layout in LAYOUTS)


def find_layout(names: Iterable[str]) -> ReleasedLayout | None:
    """The layout one of whose tables is among the tensor names; None where there is none.

    Raises ValueError when the names hold tables of two layouts.
    """
    found = {layout.family: layout for name in names for layout in LAYOUTS if layout.split(name)}
    if len(found) > 1:
        raise ValueError(f"the tensors are of two layouts: {', '.join(sorted(found))}; name the files of one")
    return next(iter(found.values()), None)


def configured(layout: ReleasedLayout, fields: Fields | None) -> EngramConfig:
    """The configuration that config.json describes (None: the family's own). Raises ValueError naming the field."""
    cfg = families.get(layout.family)
    if fields is None:
        return cfg
    text = fields.get("text_config", fields)
    if not isinstance(text, Mapping) or layout.known_by not in text:
        return cfg
    try:
        return layout.config(text, cfg)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"config.json: a field of the memory has a value that does not fit: {error}") from error
