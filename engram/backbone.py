"""Small transformers models built from a config: nothing downloaded, initial values equal by parameter name.

    model = build(BackboneConfig(kind="moe", hidden_size=128, blocks=6), vocab_size=4096, seed=0)

"moe" is `DeepseekV3ForCausalLM` (shared + routed experts behind leading dense blocks, the paper's own shape) and
"dense" is `LlamaForCausalLM`. This file also counts a backbone's parameters and the matmul FLOPs of one token, in the
same split, because the iso-budget planner must agree with what is built.

Letters: D hidden width, F width of a dense FFN, V vocabulary, h width of an attention head.
"""

from __future__ import annotations

import hashlib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from engram.strict import ConfigError, choice, from_dict, require, to_dict

Backbone: TypeAlias = "BackboneConfig | nn.Module"

_EXPERT_STACK = re.compile(r"(^|\.)experts\.\w+$")
_ROUTER = re.compile(r"(^|\.)mlp\.gate\.weight$")


@dataclass(frozen=True)
class BackboneConfig:
    """The shape of a backbone; every width that is null is derived from the head width h = hidden_size / heads.

    kind               "moe" (DeepseekV3) or "dense" (Llama). Fields about experts and MLA act in "moe" only.
    hidden_size        D.
    blocks             decoder blocks, leading dense ones included.
    heads, kv_heads    attention heads; kv_heads (dense only) shares keys and values among groups of heads.
    ffn_width          F of the dense FFN: every block of "dense", the `first_dense` leading blocks of "moe".
    experts, top_k     routed experts of a block, and how many of them one token uses.
    shared_experts     experts that every token uses.
    expert_width       FFN width of one expert, routed or shared.
    first_dense        leading blocks with a dense FFN instead of experts.
    routed_scale       factor on the routed experts' normalised weights (DeepSeek-V3 has 2.5 for 8 of 256).
    q_lora_rank        rank of the query projection; null = one full matrix.
    kv_lora_rank       rank of the shared key/value projection; null = half of D.
    qk_rope_dim, qk_nope_dim, v_dim   head widths with and without rotation, and of values; null = h/2, h/2, h.
    max_position       longest sequence.
    experts_implementation   "grouped_mm": 7 times as fast as "batched_mm" and 1.4 times as "eager" on a CPU.
    """

    kind: Literal["moe", "dense"] = "moe"
    hidden_size: int = 128
    blocks: int = 6
    heads: int = 4
    kv_heads: int | None = None
    ffn_width: int = 384
    experts: int = 22
    top_k: int = 2
    shared_experts: int = 1
    expert_width: int = 64
    first_dense: int = 1
    routed_scale: float = 1.0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_dim: int | None = None
    qk_nope_dim: int | None = None
    v_dim: int | None = None
    max_position: int = 1024
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    experts_implementation: Literal["grouped_mm", "eager", "batched_mm"] = "grouped_mm"

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if typing.get_origin(hint) is Literal:
                choice(name, value, typing.get_args(hint))
            elif hint is int or (hint == (int | None) and value is not None):
                least = 0 if name == "first_dense" else 1
                good = isinstance(value, int) and not isinstance(value, bool) and value >= least
                require(good, f"{name}: {value!r} must be an integer of at least {least}")
        require(
            self.hidden_size % self.heads == 0,
            f"heads: {self.heads} does not divide hidden_size {self.hidden_size}; "
            f"{_nearest(self.hidden_size, self.heads)}",
        )
        for name in ("initializer_range", "norm_eps", "rope_theta", "routed_scale"):
            require(getattr(self, name) > 0, f"{name}: {getattr(self, name)} must be greater than 0")
        if self.kind == "moe":
            self._check_moe()
        else:
            self._check_dense()

    def _check_dense(self) -> None:
        groups = self.kv_heads or self.heads
        require(self.heads % groups == 0, f"kv_heads: {groups} does not divide heads {self.heads}")
        require(
            (self.hidden_size // self.heads) % 2 == 0,
            f"heads: {self.heads} gives heads of width {self.hidden_size // self.heads}; rotation needs an even width",
        )

    def _check_moe(self) -> None:
        require(self.kv_heads is None, f"kv_heads: {self.kv_heads} exists for kind 'dense' only; MLA shares a latent")
        require(
            self.first_dense < self.blocks,
            f"first_dense: {self.first_dense} leaves no block with experts among {self.blocks}; use kind 'dense'",
        )
        require(
            self.experts >= max(2, self.top_k),
            f"experts: {self.experts} must be at least 2 and at least top_k {self.top_k}",
        )
        require(
            self.rope_width % 2 == 0,
            f"qk_rope_dim: {self.rope_width} must be even (null takes half of the head width "
            f"{self.hidden_size // self.heads})",
        )

    @property
    def rope_width(self) -> int:
        """Rotated width of a query or key head."""
        return self.qk_rope_dim or max(2, self.hidden_size // self.heads // 2)

    @property
    def nope_width(self) -> int:
        """Unrotated width of a query or key head."""
        return self.qk_nope_dim or max(1, self.hidden_size // self.heads - self.rope_width)

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.v_dim or self.hidden_size // self.heads

    @property
    def latent_width(self) -> int:
        """Rank of the shared key/value projection."""
        return self.kv_lora_rank or max(1, self.hidden_size // 2)

    @property
    def dense_blocks(self) -> int:
        """Blocks with a dense FFN."""
        return self.blocks if self.kind == "dense" else self.first_dense

    @property
    def moe_blocks(self) -> int:
        """Blocks with experts."""
        return self.blocks - self.dense_blocks

    @property
    def inactive_experts(self) -> int:
        """Routed experts of a block that one token does not use."""
        return self.experts - self.top_k if self.kind == "moe" else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_dict`."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BackboneConfig:
        """Strict inverse of `to_dict`. Raises ConfigError on an unknown key or a wrong type."""
        return from_dict(cls, data)


def hf_config(cfg: BackboneConfig, vocab_size: int) -> Any:
    """The transformers config (DeepseekV3Config or LlamaConfig) of `cfg` for `vocab_size` ids. Raises ConfigError."""
    from transformers import DeepseekV3Config, LlamaConfig

    require(vocab_size >= 1, f"vocab_size: {vocab_size} must be at least 1")
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.blocks,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.ffn_width,
        "max_position_embeddings": cfg.max_position,
        "initializer_range": cfg.initializer_range,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if cfg.kind == "dense":
        return LlamaConfig(num_key_value_heads=cfg.kv_heads or cfg.heads, **common)
    common["experts_implementation"] = cfg.experts_implementation
    return DeepseekV3Config(
        num_key_value_heads=cfg.heads,
        moe_intermediate_size=cfg.expert_width,
        n_shared_experts=cfg.shared_experts,
        n_routed_experts=cfg.experts,
        num_experts_per_tok=cfg.top_k,
        routed_scaling_factor=cfg.routed_scale,
        first_k_dense_replace=cfg.first_dense,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        q_lora_rank=cfg.q_lora_rank,
        kv_lora_rank=cfg.latent_width,
        qk_rope_head_dim=cfg.rope_width,
        qk_nope_head_dim=cfg.nope_width,
        v_head_dim=cfg.value_width,
        num_mtp_layers=0,
        **common,
    )


def build(cfg: BackboneConfig, vocab_size: int, seed: int = 0) -> Any:
    """A transformers CausalLM of shape `cfg` over `vocab_size` ids, in fp32 on the CPU, initialised by `reseed`.

    The global random state is left as it was. Raises ConfigError where the shape cannot be built.
    """
    from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM

    config = hf_config(cfg, vocab_size)
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config) if cfg.kind == "dense" else DeepseekV3ForCausalLM(config)
    reseed(model, seed)
    return model


def config_of(model: nn.Module) -> BackboneConfig:
    """The BackboneConfig of a built or loaded model. Raises ConfigError for an architecture that is no backbone."""
    config = typing.cast(Any, model).config
    kind = {"llama": "dense", "deepseek_v3": "moe"}.get(config.model_type)
    if kind is None:
        raise ConfigError(f"model_type: {config.model_type!r} is no backbone; known are 'deepseek_v3' and 'llama'")
    require(not config.attention_bias, "attention_bias: backbones have none, this model has biases")
    common: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "blocks": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "ffn_width": config.intermediate_size,
        "max_position": config.max_position_embeddings,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "initializer_range": config.initializer_range,
        "norm_eps": config.rms_norm_eps,
        "tie_embeddings": config.tie_word_embeddings,
    }
    if kind == "dense":
        return BackboneConfig(kind="dense", kv_heads=config.num_key_value_heads, **common)
    return BackboneConfig(
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        shared_experts=config.n_shared_experts,
        expert_width=config.moe_intermediate_size,
        first_dense=config.first_k_dense_replace,
        routed_scale=config.routed_scaling_factor,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_dim=config.qk_rope_head_dim,
        qk_nope_dim=config.qk_nope_head_dim,
        v_dim=config.v_head_dim,
        experts_implementation=config._experts_implementation or "grouped_mm",
        **common,
    )


@torch.no_grad()
def reseed(model: nn.Module, seed: int, initializer_range: float | None = None) -> list[str]:
    """Refill every non-constant parameter with normal values that depend on (seed, name) alone; returns their names.

    The standard deviation is the parameter's own attribute `init_std`, else `initializer_range`, else the model
    config's (0.02 without one). Left alone: empty parameters, constant ones (ones of a norm, zeros of a bias or of a
    convolution) and `init_std` 0. Call it on a fresh model, before training; it is also right after a memory was
    attached. Experts and router rows are drawn one by one, and down projections column by column, so that two models
    with different numbers of experts or FFN widths agree in everything that both have.
    Raises ValueError on a parameter without storage (meta device).
    """
    if initializer_range is None:
        initializer_range = float(getattr(getattr(model, "config", None), "initializer_range", 0.02))
    filled = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name}: lies on the meta device; give the model storage (to_empty) before it is seeded")
        std = float(getattr(parameter, "init_std", initializer_range))
        if parameter.numel() == 0 or std == 0 or bool((parameter == parameter.flatten()[0]).all()):
            continue
        parameter.copy_(_values(name, seed, tuple(parameter.shape)) * std)
        filled.append(name)
    return filled


def _values(name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal fp32 values for a parameter name."""
    if (_EXPERT_STACK.search(name) and len(shape) == 3) or _ROUTER.search(name):
        return torch.stack([_draw(f"{name}[{i}]", seed, shape[1:]) for i in range(shape[0])])
    if name.endswith("down_proj.weight") and len(shape) == 2:
        return _draw(name, seed, shape[::-1]).T
    return _draw(name, seed, shape)


def _draw(name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """NumPy's generator, not torch's: it takes the whole 128-bit seed (torch's CPU generator keeps 32 bits)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def parameter_counts(backbone: Backbone, vocab_size: int | None = None) -> dict[str, int]:
    """Parameters of a config (with its `vocab_size`) or of a model, split by part.

    "attention", "norms", "dense_ffn", "shared", "routed", "router" add up to "total"; "active" is what one token uses
    and "inactive_routed" the rest. "embedding" and "head" stand beside the total, as in the paper (section 3.1); a tied
    head counts 0. Memory that is attached to a model is not in here.
    """
    cfg, vocab_size = _resolve(backbone, vocab_size)
    width, moe = cfg.hidden_size, cfg.moe_blocks
    expert = 3 * width * cfg.expert_width
    norms = 2 * width * cfg.blocks + width
    if cfg.kind == "moe":
        norms += cfg.blocks * (cfg.latent_width + (cfg.q_lora_rank or 0))
    parts = {
        "attention": cfg.blocks * _attention(cfg),
        "norms": norms,
        "dense_ffn": cfg.dense_blocks * 3 * width * cfg.ffn_width,
        "shared": moe * cfg.shared_experts * expert,
        "routed": moe * cfg.experts * expert,
        "router": moe * cfg.experts * width,
    }
    total, inactive = sum(parts.values()), moe * cfg.inactive_experts * expert
    embedding = vocab_size * width
    return {
        **parts,
        "total": total,
        "active": total - inactive,
        "inactive_routed": inactive,
        "embedding": embedding,
        "head": 0 if cfg.tie_embeddings else embedding,
    }


def active_flops(backbone: Backbone, seq_len: int, vocab_size: int | None = None) -> dict[str, int]:
    """Forward matmul FLOPs of one token (2 per multiply-add) in a sequence of `seq_len` tokens, split by part.

    "attention" (projections), "scores" (queries times keys, weights times values, at the average causal context of
    seq_len / 2), "dense_ffn", "shared", "routed" (the top_k that a token uses) and "router" add up to "total". Beside
    it, outside the budget as in the paper: "head", and "embedding" (a lookup, 0). Element-wise work is not counted.
    """
    require(seq_len >= 1, f"seq_len: {seq_len} must be at least 1")
    cfg, vocab_size = _resolve(backbone, vocab_size)
    width, moe = cfg.hidden_size, cfg.moe_blocks
    expert = 6 * width * cfg.expert_width
    head = cfg.hidden_size // cfg.heads
    read = cfg.rope_width + cfg.nope_width + cfg.value_width if cfg.kind == "moe" else 2 * head
    parts = {
        "attention": 2 * cfg.blocks * _attention(cfg),
        "scores": cfg.blocks * cfg.heads * read * seq_len,
        "dense_ffn": cfg.dense_blocks * 6 * width * cfg.ffn_width,
        "shared": moe * cfg.shared_experts * expert,
        "routed": moe * cfg.top_k * expert,
        "router": 2 * moe * cfg.experts * width,
    }
    return {**parts, "total": sum(parts.values()), "embedding": 0, "head": 2 * vocab_size * width}


def _resolve(backbone: Backbone, vocab_size: int | None) -> tuple[BackboneConfig, int]:
    if isinstance(backbone, BackboneConfig):
        return backbone, vocab_size or 0
    return config_of(backbone), vocab_size or int(typing.cast(Any, backbone).config.vocab_size)


def _attention(cfg: BackboneConfig) -> int:
    """Weights of one block's attention projections; each is used once a token."""
    width, heads = cfg.hidden_size, cfg.heads
    if cfg.kind == "dense":
        return 2 * width * width + 2 * width * (cfg.kv_heads or heads) * (width // heads)
    query_width = heads * (cfg.rope_width + cfg.nope_width)
    query = cfg.q_lora_rank * (width + query_width) if cfg.q_lora_rank else width * query_width
    down = width * (cfg.latent_width + cfg.rope_width)
    up = cfg.latent_width * heads * (cfg.nope_width + cfg.value_width)
    return query + down + up + heads * cfg.value_width * width


def _nearest(width: int, heads: int) -> str:
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    below = max(d for d in divisors if d <= heads) if heads >= 1 else 1
    above = min((d for d in divisors if d >= heads), default=width)
    return f"{below} or {above} would" if below != above else f"{below} would"
