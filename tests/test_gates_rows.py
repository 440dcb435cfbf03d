"""Gate values and row usage, on a real attached memory and on tables counted by hand with plain dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engram.attaching import attach
from engram.compress import TokenMap
from engram.config import EngramConfig
from engram.eval.gates import gate_sample, gate_summary, gate_values
from engram.eval.lens import logit_lens
from engram.eval.loss import held_out_loss
from engram.eval.rows import BLANK, count_ngrams, row_usage, text_rows, windows_of
from engram.hashing import NgramHash

VOCAB = 64
CFG = EngramConfig(hidden_size=16, layers=(0, 1), orders=(2, 3), heads=2, head_dim=4, rows=31, init="normal")


def tokenizer() -> Tokenizer:
    """One token per byte of the printable range, cut to VOCAB: ids are readable by eye."""
    alphabet = [chr(c) for c in range(ord("!"), ord("!") + VOCAB)]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def attached(cfg: EngramConfig = CFG) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    handle = attach(model, cfg)
    for layer in handle.memory.modules_by_layer():
        nn.init.normal_(layer.value.weight)  # it starts at zero beside rows that do not
    return model, handle


def batch(seed: int = 1, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, 9, (2, length), generator=generator)
    labels_BT = torch.randint(0, VOCAB, (2, length), generator=generator)
    positions_T = torch.cat([torch.arange(5), torch.arange(length - 5)])
    return {"input_ids": ids_BT, "labels": labels_BT, "position_ids": positions_T.expand(2, -1)}


# ---- gates ----


def test_gate_values_are_those_of_the_forward() -> None:
    model, handle = attached()
    one = batch()
    gates = gate_values(model, handle, one)
    with torch.no_grad(), handle.taps() as taps:
        model.eval()(input_ids=one["input_ids"], position_ids=one["position_ids"], use_cache=False)
    assert set(gates) == {0, 1}
    for layer, gate_BTS in gates.items():
        assert gate_BTS.shape == (2, 12, 1) and gate_BTS.dtype == torch.float32
        assert torch.equal(gate_BTS, taps[layer]["gate"])
        assert 0 < gate_BTS.min() < gate_BTS.max() < 1


def test_gate_sample_lists_every_token_and_layer() -> None:
    model, handle = attached()
    sample = gate_sample(model, handle, tokenizer(), "<B>\"&'</B>", max_tokens=6)
    assert sample["tokens"] == list("<B>\"&'")
    assert list(sample["layers"]) == ["0", "1"]
    assert all(len(rows) == 6 and all(len(row) == 1 for row in rows) for rows in sample["layers"].values())
    ids = torch.tensor([sample["ids"]])
    direct = gate_values(model, handle, {"input_ids": ids, "position_ids": torch.arange(6)[None]})
    assert sample["layers"]["1"] == [[pytest.approx(v, abs=1e-4)] for v in direct[1][0, :, 0].tolist()]
    with pytest.raises(ValueError, match="has no tokens"):
        gate_sample(model, handle, tokenizer(), "")


def test_gate_summary_against_numpy_and_by_count() -> None:
    model, handle = attached()
    one, other = batch(1), batch(2)
    one["labels"][0, :4] = -100
    counts = count_ngrams(handle.memory.layer(0).hash, [batch(1), batch(1), batch(1), batch(3)])
    summary = gate_summary(model, handle, [one, other], counts)
    keep = np.concatenate([(b["labels"] != -100).flatten().numpy() for b in (one, other)])
    assert summary["tokens"] == keep.sum() == 44
    for layer in (0, 1):
        flat = np.concatenate([gate_values(model, handle, b)[layer].flatten().numpy() for b in (one, other)])[keep]
        got = summary["layers"][str(layer)]
        assert got["mean"] == pytest.approx(flat.mean(), abs=1e-6)
        assert got["std"] == pytest.approx(flat.std(), abs=1e-6)
        assert got["quantiles"]["0.5"] == pytest.approx(float(np.median(flat)), abs=1e-6)
        for order in ("2", "3"):
            buckets = got["by_count"][order]
            assert sum(bucket["tokens"] for bucket in buckets) == 44
            total = sum(bucket["tokens"] * bucket["mean"] for bucket in buckets)
            assert total / 44 == pytest.approx(got["mean"], abs=1e-6)
        assert {bucket["from"] for bucket in got["by_count"]["3"]} >= {0, 1}, "unseen and seen n-grams are told apart"
        seen = by_hand(handle.memory.layer(0).hash, [batch(1), batch(1), batch(1), batch(3)])[2]
        queries = windows_of(handle.memory.layer(0).hash, [one, other])
        times = [seen[tuple(window[:2])] for window in np.concatenate(list(queries))[keep].tolist()]
        assert {0, 1, 3} <= set(times), "each kind of bucket is tried at its ends"
        for bucket in got["by_count"]["2"]:
            inside = [bucket["from"] <= count <= bucket["to"] for count in times]
            assert bucket["tokens"] == sum(inside) and bucket["mean"] == pytest.approx(flat[inside].mean(), abs=1e-6)
    assert gate_summary(model, handle, [one, other], max_tokens=7)["tokens"] == 7
    with pytest.raises(ValueError, match="no counted token"):
        gate_summary(model, handle, [])


def test_a_memory_without_gates_is_an_error() -> None:
    model, handle = attached(CFG.replace(gate="none"))
    with pytest.raises(ValueError, match=r"layers \[0, 1\] gave no gate values"):
        gate_values(model, handle, batch())


# ---- the lens and an attached memory ----


def test_lens_reads_an_attached_memory_and_leaves_it_alone() -> None:
    model, handle = attached()
    one = batch()
    before = held_out_loss(model, [one])
    forwards = handle.memory.forwards
    curves = logit_lens(model, [one])
    assert handle.memory.forwards == forwards + 1
    assert curves.cross_entropy[-1] == pytest.approx(before.nats, abs=1e-5)
    assert held_out_loss(model, [one]) == before
    with handle.disabled():
        without = logit_lens(model, [one])
    assert curves.entropy[0] == without.entropy[0] and curves.entropy[1] != without.entropy[1]
    handle.detach()
    assert logit_lens(model, [one]) == without


# ---- rows ----


def by_hand(ngram_hash: NgramHash, batches: list[dict[str, torch.Tensor]]) -> dict[int, Counter[tuple[int, ...]]]:
    """Order -> n-gram (newest first, the filler where a document begins) -> count, one position at a time."""
    found: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for one in batches:
        for ids, positions in zip(one["input_ids"].tolist(), one["position_ids"].tolist(), strict=True):
            for t in range(len(ids)):
                for order in ngram_hash.cfg.orders:
                    gram = tuple(ids[t - k] if positions[t] >= k else ngram_hash.filler for k in range(order))
                    found[order][gram] += 1
    return found


def test_counts_equal_a_dictionary() -> None:
    ngram_hash = NgramHash(CFG, 1, vocab_size=VOCAB)
    batches = [batch(seed) for seed in range(5)]
    want, got = by_hand(ngram_hash, batches), count_ngrams(ngram_hash, batches)
    for order in (2, 3):
        table = {tuple(w): c for w, c in zip(got[order].windows_Uo.tolist(), got[order].counts_U.tolist(), strict=True)}
        assert table == dict(want[order])
        windows = np.concatenate(list(windows_of(ngram_hash, [batch(3), batch(99)])))
        lookup = got[order].of(windows).tolist()
        assert lookup == [want[order][tuple(w[:order])] for w in windows.tolist()]
        assert 0 in lookup and max(lookup) > 1
    assert sum(count_ngrams(ngram_hash, batches, max_tokens=31)[2].counts_U.tolist()) == 31
    with pytest.raises(ValueError, match="no token"):
        count_ngrams(ngram_hash, [])


def test_counts_merge_over_buffers_and_large_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of 10 positions gives the same tables; so do 2^31 classes, where three of them overflow 63 bits."""
    batches = [batch(seed) for seed in range(4)]
    want = by_hand(NgramHash(CFG, 1, vocab_size=VOCAB), batches)
    monkeypatch.setattr("engram.lookup.BUFFER", 10)
    for ngram_hash in (NgramHash(CFG, 1, vocab_size=VOCAB), NgramHash(CFG, 1)):
        got = count_ngrams(ngram_hash, batches)
        for order in (2, 3):
            assert sorted(got[order].counts_U.tolist()) == sorted(want[order].values())


def test_usage_equals_a_dictionary_of_rows() -> None:
    ngram_hash = NgramHash(CFG, 1, vocab_size=VOCAB)
    batches = [batch(seed) for seed in range(5)]
    usage = row_usage(ngram_hash, batches, tokenizer(), top=3)
    reads: dict[int, Counter[int]] = defaultdict(Counter)
    grams: dict[int, dict[int, set[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(set))
    for one in batches:
        positions = one["position_ids"]
        segments = (positions == 0).cumsum(-1)
        rows_BTC = ngram_hash.rows(one["input_ids"], segment_ids=segments)
        for b in range(2):
            for t in range(12):
                for c in range(4):
                    order = CFG.orders[c // 2]
                    ids = one["input_ids"][b].tolist()
                    gram = tuple(ids[t - k] if positions[b, t] >= k else -1 for k in range(order))
                    row = int(rows_BTC[b, t, c])
                    reads[c][row] += 1
                    grams[c][row].add(gram)
    assert usage.tokens == 5 * 24 and usage.layer == 1 and len(usage.heads) == 4
    assert usage.touched == sum(map(len, reads.values()))
    assert usage.rows == int(ngram_hash.sizes.sum()) and usage.share == usage.touched / usage.rows
    for c, head in enumerate(usage.heads):
        assert (head.order, head.head, head.size) == (CFG.orders[c // 2], c % 2, int(ngram_hash.sizes[c]))
        assert head.reads == 120 and head.touched == len(reads[c])
        distinct = sum(len(g) for g in grams[c].values())
        shared = {row for row, g in grams[c].items() if len(g) > 1}
        assert head.ngrams == distinct and head.most_ngrams == max(len(g) for g in grams[c].values())
        assert head.collided == pytest.approx(sum(len(grams[c][row]) for row in shared) / distinct)
        assert head.collided_reads == pytest.approx(sum(reads[c][row] for row in shared) / 120)
        assert head.heaviest == max(reads[c].values()) / 120
        assert head.expected == pytest.approx(1 - (1 - 1 / head.size) ** distinct)
        assert [entry["reads"] for entry in head.top] == sorted(reads[c].values(), reverse=True)[:3]
        for entry in head.top:
            assert reads[c][entry["row"]] == entry["reads"] and len(grams[c][entry["row"]]) == entry["ngrams"]
            assert len(entry["examples"]) == min(3, entry["ngrams"])
            assert all(isinstance(text, str) and count >= 1 for text, count in entry["examples"])
    classes = row_usage(ngram_hash, batches, top=1).heads[0].top[0]["examples"][0][0]
    assert isinstance(classes, list) and len(classes) == 2


def test_text_rows_show_each_ngram_with_its_rows() -> None:
    ngram_hash = NgramHash(CFG, 1, vocab_size=VOCAB)
    shown = text_rows(ngram_hash, tokenizer(), "ABCAB")
    assert shown["tokens"] == list("ABCAB")
    assert shown["ngrams"]["2"] == [BLANK + "A", "AB", "BC", "CA", "AB"]
    assert shown["ngrams"]["3"] == [BLANK * 2 + "A", BLANK + "AB", "ABC", "BCA", "CAB"]
    assert shown["rows"] == ngram_hash.rows(torch.tensor([shown["ids"]]))[0].tolist()
    assert shown["rows"][1][:2] == shown["rows"][4][:2] and shown["rows"][1][2:] != shown["rows"][4][2:]
    assert [c["order"] for c in shown["columns"]] == [2, 2, 3, 3]
    assert shown["columns"][1]["offset"] == shown["columns"][0]["size"]


def test_a_token_map_groups_what_it_merges_and_the_counter_of_masked_ids_stays() -> None:
    """Classes are what is counted: ids 0 and 1, which the map merges, make one n-gram and no collision."""
    class_of = [0, 0, *range(1, VOCAB - 1)]
    ngram_hash = NgramHash(CFG.replace(compress=True), 1, token_map=TokenMap(class_of))
    ids = torch.tensor([[0, 5, 1, 5, 0, 5, VOCAB + 3, 7]])
    usage = row_usage(ngram_hash, [{"input_ids": ids}], tokenizer(), top=9)
    assert usage.heads[0].ngrams == 5
    examples = [tuple(example) for entry in usage.heads[0].top for example in entry["examples"]]
    assert set(examples) == {(BLANK + "!", 1), ("!&", 3), ("&!", 2), ("&" + BLANK, 1), (BLANK + "(", 1)}
    assert int(ngram_hash.masked) == 0
    shown = text_rows(ngram_hash, tokenizer(), [0, VOCAB + 3, 5])
    assert shown["ngrams"]["3"] == [BLANK * 2 + "!", BLANK + "!" + BLANK, "!" + BLANK + "&"]
    assert int(ngram_hash.masked) == 0
