"""Shared by all tests: no network, one compute thread, fixed seeds, and `gpu` tests that skip without a device."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything imports torch or transformers. One thread: tiny sizes are faster so, and sums keep their order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["MPLBACKEND"] = "Agg"

import pytest

SEED = 1234
NAN_FILLED = ("empty", "empty_like", "empty_strided")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device; torch is imported only when there are such tests."""
    on_device = [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get("ENGRAM_GPU_REHEARSAL") == "1":  # tests/gpu/test_gpu.py: on a CPU, as far as that goes
        return
    if on_device:
        import torch

        if not torch.cuda.is_available():
            for item in on_device:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its relatives hand out NaN (integers: a huge negative number), so a hole shows."""
    import torch

    def filled(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            if not tensor.is_meta and tensor.numel():
                with torch.no_grad():
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype != torch.bool:
                        tensor.fill_(torch.iinfo(tensor.dtype).min)
            return tensor

        return call

    for name in NAN_FILLED:
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """Builds a small randomly initialised causal LM of transformers: `tiny_model("llama", vocab_size=64, seed=0)`.

    Kinds: every entry of engram/hosts.py, by model_type. Two blocks, hidden size 32; a family with sliding windows has
    them of 8.
    """
    return _tiny_model


def _tiny_model(kind: str = "llama", vocab_size: int = 64, seed: int = 0, layers: int = 2, **changes: Any) -> Any:
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    gpt2 = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": layers, "n_head": 2, "n_positions": 128}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    neox = {key: value for key, value in common.items() if key != "num_key_value_heads"}
    few_experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    window = {"sliding_window": 8}
    half = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "head_dim": 16, **window}
    streams = {
        "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hc_mult": 4,
        "num_hash_layers": 1, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, **window,
    }  # fmt: skip
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", common),
        "mistral": ("Mistral", {**common, **window}),
        "mixtral": ("Mixtral", {**common, **few_experts}),
        "qwen2": ("Qwen2", common),
        "qwen3": ("Qwen3", {**common, "head_dim": 16}),
        "qwen3_moe": (
            "Qwen3Moe",
            {**common, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
        "gemma2": ("Gemma2", {**common, **half, "query_pre_attn_scalar": 16}),
        "gemma3_text": ("Gemma3", {**common, **half, "query_pre_attn_scalar": 16}),
        "gpt2": ("GPT2", gpt2),
        "gpt_neox": ("GPTNeoX", neox),
        "olmo2": ("Olmo2", common),
        "phi3": ("Phi3", {**common, "pad_token_id": 0}),
        "smollm3": ("SmolLM3", {**common, "pad_token_id": 0}),
        "deepseek_v3": ("DeepseekV3", {**common, **experts}),
        "deepseek_v4": ("DeepseekV4", {**common, **streams}),
        "gpt_oss": ("GptOss", {**common, **half, **few_experts}),
    }
    kinds["qwen4_exp_text"] = (
        "Qwen4Exp",
        {
            **common, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "hc_count": 4, "hc_lowrank": 8, "ple_layer_ids": [],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "indexed_attention"] * (layers // 2),
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    )  # fmt: skip
    name, fields = kinds[kind]
    configs = {"gemma3_text": "Gemma3TextConfig", "qwen4_exp_text": "Qwen4ExpTextConfig"}
    config = getattr(transformers, configs.get(kind, f"{name}Config"))(**{**fields, **changes})
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    # Weights are drawn from the global generator: the seed is set last, and the caller's state put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, f"{name}{head}")(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Any:
    """200 short documents of one .jsonl file, about 6,000 training tokens."""
    from small_corpus import small_config, small_texts, write_jsonl

    from engram.train.data import prepare

    return prepare(small_config(folder, source=str(write_jsonl(folder / "text.jsonl", small_texts(200)))), seed=3)
