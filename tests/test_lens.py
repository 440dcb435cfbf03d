"""The logit lens on tiny models: the last depth is the model, distances by hand, norm of each depth, hooks gone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engram.eval import lens as lens_file
from engram.eval.lens import LensError, entropy_of, js_divergence, kl_divergence, logit_lens
from engram.eval.loss import CHUNK_VALUES, held_out_loss

VOCAB = 67
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(tie: bool = False) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tie))


def llama_tied() -> Any:
    return llama(tie=True)


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=2))


def deepseek() -> Any:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SMALL,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=None,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def gemma2() -> Any:
    """A soft-cap low enough to bend the logits (its own default, 30, would hardly show at this size)."""
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5))


def llama_with_bias() -> Any:
    model = llama()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    return model


MODELS: list[Callable[[], Any]] = [llama, llama_tied, llama_with_bias, qwen3, gpt2, deepseek, gemma2]


def build(maker: Callable[[], Any]) -> Any:
    """Random norms and large weights, so that a forgotten norm, weight or bias moves the logits."""
    torch.manual_seed(0)
    model = maker().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.ndim == 2:
                parameter.mul_(8)
    return model


def batch(seed: int = 1, length: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels_BT = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels_BT[0, 3] = -100
    positions_T = torch.cat([torch.arange(4), torch.arange(length - 4)])
    return {"input_ids": ids_BT, "labels": labels_BT, "position_ids": positions_T.expand(2, -1)}


def forward(model: Any, one: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(one["input_ids"], position_ids=one["position_ids"], use_cache=False, **kwargs)


@pytest.mark.parametrize("maker", MODELS, ids=lambda maker: maker.__name__)
def test_last_depth_is_the_model(maker: Callable[[], Any]) -> None:
    model, batches = build(maker), [batch(1), batch(2, 7)]
    curves = logit_lens(model, batches)
    loss = held_out_loss(model, batches)
    assert curves.depths == (0, 1, 2, 3) and curves.tokens == loss.tokens == 2 * 17 - 2
    assert curves.cross_entropy[-1] == pytest.approx(loss.nats, abs=1e-5)
    assert curves.kl[-1] == pytest.approx(0, abs=1e-6) and curves.js[-1] == pytest.approx(0, abs=1e-6)
    assert all(kl > 1e-3 for kl in curves.kl[:-1])
    assert all(js < math.log(2) for js in curves.js)


@pytest.mark.parametrize("maker", [llama, gpt2, deepseek], ids=lambda maker: maker.__name__)
def test_curves_equal_a_plain_computation_in_float64(maker: Callable[[], Any]) -> None:
    """The judge: transformers' own hidden states, the norm and head called as they are, sums written out."""
    model, one = build(maker), batch()
    curves = logit_lens(model, [one])
    model = model.double()
    if hasattr(model.config, "n_routed_experts"):
        model.set_experts_implementation("eager")  # grouped_mm has no float64
    out = forward(model, one, output_hidden_states=True)
    body = model.base_model
    norm = body.ln_f if hasattr(body, "ln_f") else body.norm
    states = list(out.hidden_states)  # the last one is normed already
    keep = one["labels"] != -100
    final = out.logits[keep].softmax(-1)
    for depth, state in enumerate(states):
        with torch.no_grad():
            logits = model.lm_head(state if depth == len(states) - 1 else norm(state))[keep]
        guess = logits.softmax(-1)
        labels = one["labels"][keep].unsqueeze(-1)
        assert curves.kl[depth] == pytest.approx((final * (final / guess).log()).sum(-1).mean().item(), abs=1e-5)
        middle = (final + guess) / 2
        js = ((final * (final / middle).log()).sum(-1) + (guess * (guess / middle).log()).sum(-1)) / 2
        assert curves.js[depth] == pytest.approx(js.mean().item(), abs=1e-5)
        assert curves.entropy[depth] == pytest.approx(-(guess * guess.log()).sum(-1).mean().item(), abs=1e-5)
        assert curves.cross_entropy[depth] == pytest.approx(-guess.gather(-1, labels).log().mean().item(), abs=1e-5)


def test_norm_statistics_are_those_of_each_depth() -> None:
    """Scaling the embedding by 1000 changes nothing at depth 0 for a scale-free norm: 15.6 bits where 0.5 is right was
    the symptom of a lens that divides every depth by the statistics of the last one."""
    model = build(llama)
    for block in model.model.layers:  # blocks add nothing, so every depth is the embedding
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    curves = logit_lens(model, [batch()])
    model.model.embed_tokens.weight.data.mul_(1000)
    scaled = logit_lens(model, [batch()])
    assert max(curves.kl) < 1e-6
    assert scaled.entropy[0] == pytest.approx(curves.entropy[0], abs=1e-3)


def test_entropy_at_depth_zero() -> None:
    """A head that ignores its input is a uniform guess; a tied head with sharp embeddings is nearly certain."""
    model = build(llama)
    model.lm_head.weight.data.zero_()
    curves = logit_lens(model, [batch()])
    assert curves.entropy == pytest.approx((math.log(VOCAB),) * 4, abs=1e-6)
    assert curves.cross_entropy == pytest.approx((math.log(VOCAB),) * 4, abs=1e-6)
    sharp = build(llama_tied)
    sharp.model.norm.weight.data.fill_(1)
    sharp.model.embed_tokens.weight.data = torch.nn.functional.normalize(torch.randn(VOCAB, 16), dim=-1) * 20
    one = batch()
    own = {**one, "labels": one["input_ids"]}
    curves = logit_lens(sharp, [own])
    assert curves.entropy[0] < 0.1 and curves.cross_entropy[0] < 0.1


def test_depth_zero_is_before_a_memory_added_by_an_earlier_hook() -> None:
    model, one = build(llama), batch()
    plain = logit_lens(model, [one])

    def add(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] + 1.0, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 1.0}

    model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)
    added = logit_lens(model, [one])
    assert added.entropy[0] == plain.entropy[0]
    assert added.entropy[1] != plain.entropy[1]


def test_one_forward_a_batch_and_no_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build(gpt2), []
    model.register_forward_hook(lambda *_: calls.append(1))
    model.transformer.ln_f.register_forward_hook(lambda *_: calls.append(2))

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks()
    logit_lens(model, [batch(1), batch(2)])
    assert calls.count(1) == 2 and calls.count(2) == 2, "the lens ran somebody else's hooks"
    assert hooks() == before
    monkeypatch.setattr(lens_file, "forward_logits", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        logit_lens(model, [batch()])
    assert hooks() == before


def test_chunks_and_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = build(qwen3), [batch(1), batch(2)]
    whole = logit_lens(model, batches)
    monkeypatch.setitem(CHUNK_VALUES, "cpu", 3 * VOCAB)
    chunked = logit_lens(model, batches)
    assert chunked.tokens == whole.tokens
    for name in ("kl", "js", "cross_entropy", "entropy"):
        assert getattr(chunked, name) == pytest.approx(getattr(whole, name), abs=1e-6)
    assert logit_lens(model, batches, max_tokens=22).tokens == 22
    few = logit_lens(model, batches, max_tokens=5)
    assert few.cross_entropy[-1] == pytest.approx(held_out_loss(model, batches, max_tokens=5).nats, abs=1e-5)


@pytest.mark.parametrize("maker", [llama, llama_tied, gpt2], ids=lambda maker: maker.__name__)
def test_bf16_model_is_read_in_fp32(maker: Callable[[], Any]) -> None:
    """The fp32 copies are the lens's own: weights stay bf16, curves stay close to those of the same weights in fp32."""
    model = build(maker).bfloat16()
    one = batch()
    low = logit_lens(model, [one])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    high = logit_lens(model.float(), [one])
    assert low.entropy == pytest.approx(high.entropy, abs=0.1)
    assert 0 <= low.kl[-1] < 0.01


def test_a_model_the_lens_does_not_know_is_an_error() -> None:
    model = build(gemma2)
    model.config.final_logit_softcapping = None
    forward_with_cap = model.lm_head.forward
    model.lm_head.register_forward_hook(lambda _m, _a, out: torch.tanh(out / 0.5) * 0.5)
    with pytest.raises(LensError, match="not the model's output"):
        logit_lens(model, [batch()])
    assert forward_with_cap == model.lm_head.forward
    with pytest.raises(LensError, match="expected a transformers causal language model"):
        logit_lens(model.model, [batch()])
    model = build(llama)
    model.model.final = model.model.norm
    del model.model.norm
    with pytest.raises(LensError, match="no final norm found"):
        logit_lens(model, [batch()])


@pytest.mark.parametrize("how", ["no batch", "labels", "mask"])
def test_nothing_to_count_is_an_error(how: str) -> None:
    one = batch()
    if how == "labels":
        one["labels"] = torch.full_like(one["labels"], -100)
    if how == "mask":
        one["mask"] = torch.zeros_like(one["labels"], dtype=torch.bool)
    with pytest.raises(ValueError, match="no counted token"):
        logit_lens(build(llama), [] if how == "no batch" else [one])


def test_masked_positions_stay_out() -> None:
    model, one = build(llama), batch()
    mask = torch.zeros_like(one["labels"], dtype=torch.bool)
    mask[:, 6:] = True
    masked = logit_lens(model, [{**one, "mask": mask}])
    labels = one["labels"].clone()
    labels[:, :6] = -100
    assert masked == logit_lens(model, [{**one, "labels": labels}])
    assert masked.tokens == 8


def test_distances_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    assert kl_divergence(p, q).tolist() == pytest.approx([0.25 * math.log(2), math.log(2)], abs=1e-7)
    assert kl_divergence(p, p).tolist() == [0.0, 0.0]
    assert entropy_of(p).tolist() == pytest.approx([1.5 * math.log(2), 0.0], abs=1e-7)
    one, other = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log()
    assert js_divergence(one, other).tolist() == pytest.approx([math.log(2)], abs=1e-7)
    assert js_divergence(p, q).tolist() == pytest.approx(js_divergence(q, p).tolist(), abs=1e-9)
    assert kl_divergence(q, p)[1] == math.inf


def test_kl_of_nearly_equal_logits_is_not_negative() -> None:
    """bf16 logits 4 x 50,000 with 1e-3 noise gave -0.002 to -0.010 elsewhere; upcast they stay within rounding of 0."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 50_000, generator=generator) * 3).bfloat16()
    near = (logits.float() + 1e-3 * torch.randn(4, 50_000, generator=generator)).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kl = kl_divergence(logits.float().log_softmax(-1), near.float().log_softmax(-1))
    want = (logits.double().softmax(-1) * (logits.double().log_softmax(-1) - near.double().log_softmax(-1))).sum(-1)
    assert kl.tolist() == pytest.approx(want.tolist(), abs=1e-6) and (kl >= 0).all()
    with pytest.warns(RuntimeWarning, match="no normalised"):
        wrong = kl_divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.9]]).log())
    assert wrong.tolist() == [0.0]
