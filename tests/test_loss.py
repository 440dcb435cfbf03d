"""Held-out loss: against plain cross-entropy in float64, masks, modes and empty input."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from engram.eval.loss import counted_positions, evaluating, held_out_loss, token_losses

VOCAB = 61


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def batch(seed: int, length: int = 12, ignored: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels_BT = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels_BT[:, list(ignored)] = -100
    return {"input_ids": ids_BT, "labels": labels_BT, "position_ids": torch.arange(length).expand(2, -1)}


def test_equals_cross_entropy_in_float64() -> None:
    model = llama()
    batches = [batch(1, 12, (0, 5)), batch(2, 9)]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for one in batches:
            logits = model.eval()(one["input_ids"], position_ids=one["position_ids"], use_cache=False).logits.double()
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), one["labels"].flatten(), reduction="none", ignore_index=-100
            )
            total += losses.sum().item()
            tokens += int((one["labels"] != -100).sum())
    result = held_out_loss(model, batches, per_token=True)
    assert result.tokens == tokens == 2 * 10 + 2 * 9
    assert result.nats == pytest.approx(total / tokens, abs=1e-6)
    assert result.total == pytest.approx(total, abs=1e-4)
    assert result.per_token is not None and result.per_token.shape == (tokens,)
    assert result.per_token.astype("float64").sum() == pytest.approx(result.total, rel=1e-12)


def test_packed_documents_do_not_see_each_other() -> None:
    """The loss of a document is the same alone and behind another one: positions that restart isolate it."""
    model = llama()
    one, two = batch(1, 8), batch(2, 8)
    packed = {key: torch.cat([one[key], two[key]], dim=1) for key in one}
    alone = held_out_loss(model, [one, two])
    together = held_out_loss(model, [packed])
    assert together.nats == pytest.approx(alone.nats, abs=1e-6)
    unpacked = {**packed, "position_ids": torch.arange(16).expand(2, -1)}
    assert abs(held_out_loss(model, [unpacked]).nats - alone.nats) > 1e-6


def test_mask_and_max_tokens_leave_positions_out() -> None:
    model = llama()
    one = batch(3)
    full = held_out_loss(model, [one], per_token=True)
    assert full.per_token is not None
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[1, 4:6] = True
    masked = held_out_loss(model, [{**one, "mask": mask}])
    assert masked.tokens == 2
    assert masked.nats == pytest.approx(float(full.per_token[12 + 4 : 12 + 6].astype("float64").mean()), rel=1e-6)
    first = held_out_loss(model, [one, one], max_tokens=7, per_token=True)
    assert first.tokens == 7 and first.per_token is not None
    assert first.per_token.tolist() == full.per_token[:7].tolist()


def test_modes_come_back_module_by_module_even_after_an_error() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    first, second = (held_out_loss(model, [batch(1)]).nats for _ in range(2))
    assert first == second, "dropout was active"
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError, match="stop"), evaluating(model):
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == before


def test_bf16_logits_are_upcast_before_the_loss() -> None:
    logits_PV = (torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    labels = torch.randint(0, 500, (64,), generator=torch.Generator().manual_seed(1))
    got = token_losses(logits_PV, torch.arange(64), labels)
    want = torch.nn.functional.cross_entropy(logits_PV.double(), labels, reduction="none")
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, atol=1e-5)
    low = torch.nn.functional.cross_entropy(logits_PV, labels, reduction="none")
    assert (low.double() - want).abs().max() > 1e-3, "the comparison would not notice a bf16 loss"


@pytest.mark.parametrize("batches", [[], [batch(1, 4, (0, 1, 2, 3))]])
def test_nothing_to_count_is_an_error(batches: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="no counted token"):
        held_out_loss(llama(), batches)


def test_bad_batches_are_named() -> None:
    model = llama()
    with pytest.raises(ValueError, match="no 'labels'"):
        held_out_loss(model, [{"input_ids": torch.zeros(1, 3, dtype=torch.long)}])
    with pytest.raises(ValueError, match=r"labels \[1, 3\] does not fit input_ids \[1, 4\]"):
        counted_positions({"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 3)})
    wrong = batch(1)
    wrong["labels"][0, 0] = VOCAB
    with pytest.raises(ValueError, match=f"do not fit a vocabulary of {VOCAB}"):
        held_out_loss(model, [wrong])
