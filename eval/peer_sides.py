"""The two sides of `engram bench --peers`: engram and the registry package engram-peft in the same tiny Llama.

A side puts memory of one shape into a Llama and answers the same questions: a training step, the rows of ids, what a
table holds, saving. It is used in a process of its own (eval/peer_worker.py), so that imports and allocators do not
mix. The peer is used as its own pages say: `get_engram_model` with the backbone frozen, its collator, its sparse
optimizer (`get_optimizer`: SparseAdam and Adam); what its forward hashes a second time is part of its step.

Both follow the paper's demo in the sizes of tables, and the benchmark checks that these are equal: equally many
look-ups in equally many rows. Row numbers differ, which is one of the checks (eval/peer_checks.py).

Shapes: B batch, T time, C columns, W row width, R rows, U distinct rows, n look-ups.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import engram.checkpoint
import engram.optim
from engram import families
from engram.attaching import attach
from engram.compress import TokenMap
from engram.config import EngramConfig
from engram.hashing import NgramHash

PEER, PEER_VERSION = "engram_peft", "1.2.7"
PAD = 0
LEARNING_RATE, ROW_LR_MULTIPLIER, INIT_STD = 4e-4, 5.0, 0.02
"""The peer's defaults, which are the paper's."""


@dataclass(frozen=True)
class Shape:
    """A Llama, the memory in it, and a batch.

    layers, orders, heads, head_dim, rows   as in EngramConfig; `rows` a head, from which both take the next primes.
    batch, length  texts, and tokens of a text.
    """

    vocab_size: int = 4096
    hidden_size: int = 128
    blocks: int = 4
    attention_heads: int = 4
    ffn_width: int = 384
    layers: tuple[int, ...] = (1, 2)
    orders: tuple[int, ...] = (2, 3)
    heads: int = 8
    head_dim: int = 32
    rows: int = 20_000
    batch: int = 8
    length: int = 128

    @property
    def columns(self) -> int:
        """C: rows read per token and layer."""
        return len(self.orders) * self.heads


def bare_model(shape: Shape, seed: int = 0) -> Any:
    """The Llama without memory, its weights drawn from `seed`; it never ends a text by itself."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.attention_heads,
        num_key_value_heads=shape.attention_heads,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


class Side(ABC):
    """Memory of `shape` in the Llama `base`, which is changed in place.

    tokenizer  of transformers; with it canonical ids are hashed, without it raw ones.
    """

    name: ClassVar[str]
    model: Any
    """What is called like a model of transformers, with `generate`."""
    network: nn.Module
    """What is cast and set to training."""

    def __init__(self, base: Any, shape: Shape, tokenizer: Any = None) -> None:
        self.base, self.shape, self.tokenizer = base, shape, tokenizer
        self.attach()

    @classmethod
    @abstractmethod
    def about(cls) -> dict[str, str]:
        """What this side is: package, version, and everything that was set for it."""

    @abstractmethod
    def attach(self) -> None:
        """Put the memory in, as a user would."""

    @classmethod
    @abstractmethod
    def load(cls, base: Any, shape: Shape, folder: Path) -> Side:
        """The memory saved in `folder`, in the plain `base`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Save the memory without its base."""

    @abstractmethod
    def optimizer(self, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
        """The side's own optimizer, for the memory alone."""

    @abstractmethod
    def batch(self, ids_BT: Tensor) -> dict[str, Any]:
        """What a training forward takes; the peer's collator hashes here, outside of the step."""

    @abstractmethod
    def hash(self, ids_BT: Tensor) -> dict[int, Tensor]:
        """Layer -> row numbers [B, T, C] of raw ids, each head's rows behind those of the head before."""

    @classmethod
    @abstractmethod
    def demo_rows(cls, facts: Mapping[str, Any], layer: int) -> Tensor:
        """Row numbers [1, T, C] of the canonical ids in `facts` (engram/golden.json) at the paper's demo's settings."""

    @abstractmethod
    def rows_read(self) -> dict[int, Tensor]:
        """Layer -> row numbers [B, T, C] that the latest forward looked up."""

    @abstractmethod
    def values(self, layer: int) -> Tensor:
        """A copy of the table's values [R, W], fp32."""

    @abstractmethod
    def row_gradient(self, layer: int, rows_BTC: Tensor, upstream_BTM: Tensor) -> tuple[Tensor, Tensor]:
        """Look rows up and send a gradient back -> distinct rows [U], ascending, and their gradients [U, W]."""

    @abstractmethod
    def parts(self) -> dict[str, list[Tensor]]:
        """What `fill` draws: "rows", "values" (value projections) and "taps" (of the convolution)."""

    def fill(self, taps: bool = True, seed: int = 1) -> None:
        """Memory as after training: rows, value projection and, with `taps`, the convolution are not zero."""
        draw = torch.Generator().manual_seed(seed)
        spread = {"rows": 1.0, "values": 0.05, "taps": float(taps)}
        with torch.no_grad():
            for name, tensors in self.parts().items():
                for tensor in tensors:
                    tensor.copy_(torch.randn(tensor.shape, generator=draw) * spread[name])

    @torch.no_grad()
    def logits(self, ids_BT: Tensor, **kwargs: Any) -> Tensor:
        """Logits [B, T, V] of a forward in evaluation mode, without a cache unless one is given."""
        return typing.cast(Tensor, self.model(input_ids=ids_BT, **{"use_cache": False, **kwargs}).logits)

    def generate(self, ids_BT: Tensor, **kwargs: Any) -> Any:
        """`generate` of the side's model, greedy unless said otherwise, with a dictionary as output."""
        fixed = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        mask = kwargs.pop("attention_mask", torch.ones_like(ids_BT))
        return self.model.generate(input_ids=ids_BT, attention_mask=mask, **{**fixed, **kwargs})

    def stepper(self, lr: float = LEARNING_RATE) -> Callable[[Mapping[str, Any]], None]:
        """A training step: forward, backward, optimizer, gradients dropped."""
        optimizer = self.optimizer(lr)
        self.network.train()

        def step(batch: Mapping[str, Any]) -> None:
            self.model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


class Ours(Side):
    """engram: `attach`, `engram.optim.build`, `handle.save_pretrained`."""

    name = "ours"
    extra: ClassVar[dict[str, Any]] = {}
    """Changes of the configuration; none where the two sides are compared."""

    @classmethod
    def about(cls) -> dict[str, str]:
        said = {"package": "engram", "version": engram.__version__, "optimizer": "row-wise Adam, AdamW without decay"}
        return {**said, **{key: str(value) for key, value in cls.extra.items()}}

    def attach(self) -> None:
        shape = self.shape
        token_map = None
        if self.tokenizer is not None:
            token_map = TokenMap.from_tokenizer(self.tokenizer, shape.vocab_size)
        cfg = EngramConfig(
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            orders=shape.orders,
            heads=shape.heads,
            head_dim=shape.head_dim,
            rows=shape.rows,
            compress=token_map is not None,
            filler=PAD if token_map is None else int(token_map.map[PAD]),
            init="normal",
            init_std=INIT_STD,
        ).replace(**self.extra)
        self._use(attach(self.base, cfg, token_map=token_map, trainable="memory"))

    def _use(self, handle: Any) -> None:
        self.handle, self.model, self.network = handle, self.base, self.base

    @classmethod
    def load(cls, base: Any, shape: Shape, folder: Path) -> Ours:
        side = cls.__new__(cls)
        side.base, side.shape, side.tokenizer = base, shape, None
        side._use(engram.checkpoint.load(base, folder))
        return side

    def save(self, folder: Path) -> None:
        self.handle.save_pretrained(folder)

    def optimizer(self, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
        return engram.optim.build(
            self.base, lr=lr, row_lr_multiplier=ROW_LR_MULTIPLIER, betas=(0.9, 0.999), weight_decay=0.0
        )

    def batch(self, ids_BT: Tensor) -> dict[str, Any]:
        return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT.clone()}

    def hash(self, ids_BT: Tensor) -> dict[int, Tensor]:
        return dict(self.handle.memory.hash_ids(ids_BT).rows_BTC)

    @classmethod
    def demo_rows(cls, facts: Mapping[str, Any], layer: int) -> Tensor:
        return NgramHash(families.get("deepseek-demo"), layer).rows(torch.tensor([facts["ids"]]))

    def rows_read(self) -> dict[int, Tensor]:
        return {layer: found["rows"] for layer, found in self.handle.taps().items()}

    def _table(self, layer: int) -> Any:
        return self.handle.memory.layer(layer).table

    def values(self, layer: int) -> Tensor:
        table = self._table(layer)
        return typing.cast(Tensor, table.read(torch.arange(table.store.spec.rows)).float().clone())

    def row_gradient(self, layer: int, rows_BTC: Tensor, upstream_BTM: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table(layer)
        table(rows_BTC).backward(upstream_BTM)
        return table.proxy.row_ids, table.proxy.grad

    def parts(self) -> dict[str, list[Tensor]]:
        layers = self.handle.memory.modules_by_layer()
        return {
            "rows": [layer.table.store.rows for layer in layers],
            "values": [layer.value.weight for layer in layers],
            "taps": [layer.conv for layer in layers],
        }


class Theirs(Side):
    """engram-peft, as its README and tutorial use it; one branch, since the Llama has one residual stream."""

    name = "theirs"

    @classmethod
    def about(cls) -> dict[str, str]:
        return {
            "package": "engram-peft",
            "version": importlib.metadata.version("engram-peft"),
            "optimizer": "get_optimizer: SparseAdam for rows, Adam for the rest",
            "settings": "train_mode engram_only, hc_mult 1, sparse embeddings, EngramDataCollator outside of the step",
            "typing.override": "Python's own" if sys.version_info >= (3, 12) else "set from typing_extensions",
        }

    def attach(self) -> None:
        peer, shape = import_peer(), self.shape
        self.config = peer.EngramConfig(
            engram_vocab_size_per_ngram=[shape.rows * shape.heads for _ in shape.orders],
            ngram_sizes=list(shape.orders),
            n_head_per_ngram=shape.heads,
            embedding_dim=shape.columns * shape.head_dim,
            enable_tokenizer_compression=self.tokenizer is not None,
            target_layers=list(shape.layers),
            hc_mult=1,
            pad_id=PAD,
        )
        self._use(peer.get_engram_model(self.base, self.config, self.tokenizer, train_mode="engram_only"))

    def _use(self, model: Any) -> None:
        self.model = self.network = model.eval()
        self.config = model.config
        self._read: dict[int, Tensor] = {}
        for layer in self.shape.layers:
            self._table(layer).register_forward_pre_hook(self._reader(layer))
        self.collate: Any = None
        if self.tokenizer is not None:
            self.collate = import_peer().EngramDataCollator(self.tokenizer, self.config, model.compressor)

    def _reader(self, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._read[layer] = args[0]

        return keep

    @classmethod
    def load(cls, base: Any, shape: Shape, folder: Path) -> Theirs:
        side = cls.__new__(cls)
        side.base, side.shape, side.tokenizer = base, shape, None
        side._use(import_peer().EngramModel.from_pretrained(base, str(folder)))
        return side

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(str(folder))

    def optimizer(self, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = import_peer().get_optimizer(self.model, base_learning_rate=lr)
        return found

    def batch(self, ids_BT: Tensor) -> dict[str, Any]:
        if self.collate is None:
            return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT.clone()}
        return dict(self.collate([{"input_ids": line} for line in ids_BT.tolist()]))

    def hash(self, ids_BT: Tensor) -> dict[int, Tensor]:
        compressor = self.model.compressor
        found = self.model.hash_mapping.hash(ids_BT if compressor is None else compressor.compress(ids_BT))
        return {layer: torch.from_numpy(rows) + self._offsets(layer) for layer, rows in found.items()}

    @classmethod
    def demo_rows(cls, facts: Mapping[str, Any], layer: int) -> Tensor:
        import_peer()
        mapping = importlib.import_module(f"{PEER}.hashing").NgramHashMapping(
            compressed_vocab_size=facts["vocab"],
            engram_vocab_size_per_ngram=[base * facts["heads"] for base in facts["base"]],
            ngram_sizes=list(facts["orders"]),
            n_head_per_ngram=facts["heads"],
            layer_ids=list(facts["layers"]),
            pad_id=facts["filler"],
            seed=facts["seed"],
        )
        sizes = torch.tensor([size for order in mapping.prime_tables[layer] for size in order])
        return torch.from_numpy(mapping.hash(torch.tensor([facts["ids"]]))[layer]) + sizes.cumsum(0) - sizes

    def rows_read(self) -> dict[int, Tensor]:
        return dict(self._read)

    def _parts_of(self, layer: int) -> Any:
        return self.model.engram_layers[str(layer)]

    def _table(self, layer: int) -> Any:
        return self._parts_of(layer).multi_head_embedding.embedding

    def _offsets(self, layer: int) -> Tensor:
        found: Tensor = self._parts_of(layer).multi_head_embedding.offsets
        return found

    def values(self, layer: int) -> Tensor:
        return typing.cast(Tensor, self._table(layer).weight.detach().float().clone())

    def row_gradient(self, layer: int, rows_BTC: Tensor, upstream_BTM: Tensor) -> tuple[Tensor, Tensor]:
        look_up = self._parts_of(layer).multi_head_embedding
        look_up(rows_BTC - self._offsets(layer)).flatten(-2).backward(upstream_BTM)
        gradient = self._table(layer).weight.grad.coalesce()
        return gradient.indices()[0], gradient.values()

    def parts(self) -> dict[str, list[Tensor]]:
        layers = [self._parts_of(layer) for layer in self.shape.layers]
        return {
            "rows": [layer.multi_head_embedding.embedding.weight for layer in layers],
            "values": [layer.gating.w_v.weight for layer in layers],
            "taps": [layer.short_conv.conv.weight for layer in layers],
        }


class OursHalf(Ours):
    """engram with rows of 16 bits, which the peer's sparse optimizer does not have."""

    name = "ours, bf16 rows"
    extra: ClassVar[dict[str, Any]] = {"row_dtype": "bf16"}


SIDES: dict[str, type[Side]] = {side.name: side for side in (Ours, Theirs, OursHalf)}


def import_peer() -> Any:
    """The package engram_peft. Raises ImportError with the reason where it cannot be imported.

    It asks `typing` for `override`, which came with Python 3.12: on an older one this process, and nothing else, gets
    that of typing_extensions.
    """
    if not hasattr(typing, "override"):
        typing.override = importlib.import_module("typing_extensions").override  # type: ignore[attr-defined]
    return importlib.import_module(PEER)
