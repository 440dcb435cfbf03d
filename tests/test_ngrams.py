"""The n-gram floor: against a naive implementation, by hand, and on real text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from engram.eval.ngrams import discounts, fit
from engram.train.data import DataConfig, make_batch, position_ids, prepare

EOT = 0


def _stream(rng: np.random.Generator, documents: int, vocab_size: int, longest: int = 30) -> np.ndarray:
    """Zipf-like documents whose next token depends on the one before."""
    out: list[int] = []
    for _ in range(documents):
        out.append(EOT)
        for _ in range(int(rng.integers(1, longest))):
            jump = int(rng.zipf(1.6))
            out.append(1 + (out[-1] * 3 + jump) % (vocab_size - 1))
    return np.array(out)


class Naive:
    """Interpolated modified Kneser-Ney with dictionaries, written from the formulas alone."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self.v = vocab_size
        one: Counter[tuple[int, ...]] = Counter()
        two: Counter[tuple[int, ...]] = Counter()
        three: Counter[tuple[int, ...]] = Counter()
        for i in range(1, len(tokens)):
            one[(tokens[i],)] += 1
            two[(tokens[i - 1], tokens[i])] += 1
            if i >= 2 and tokens[i - 1] != EOT:
                three[(tokens[i - 2], tokens[i - 1], tokens[i])] += 1
        left_one: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        left_two: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for u, w in two:
            left_one[(w,)].add(u)
        for t, u, w in three:
            left_two[(u, w)].add(t)
        self.one, self.two, self.three = dict(one), dict(two), dict(three)
        self.left_one = {k: len(s) for k, s in left_one.items()}
        self.left_two = {k: len(s) for k, s in left_two.items()}

    @staticmethod
    def _discount(table: dict[tuple[int, ...], int], count: int) -> float:
        n = [sum(1 for c in table.values() if c == k) for k in range(5)]
        y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
        if all(n[1:]):
            triple = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
            if all(0 < d <= k for k, d in enumerate(triple, 1)):
                return triple[min(count, 3) - 1]
        return y

    def _level(self, table: dict[tuple[int, ...], int], context: tuple[int, ...], w: int, lower: float) -> float:
        followers = {key: c for key, c in table.items() if key[:-1] == context}
        total = sum(followers.values())
        if not total:
            return lower
        count = followers.get((*context, w), 0)
        kept = count - self._discount(table, count) if count else 0.0
        rest = sum(self._discount(table, c) for c in followers.values())
        return kept / total + rest / total * lower

    def chances(self, context: list[int], w: int) -> tuple[float, float, float]:
        """Unigram, bigram, trigram probability of w after `context` (its last one or two ids count)."""
        unigram = self._level(self.one, (), w, 1 / self.v)
        left = self._level(self.left_one, (), w, 1 / self.v)
        bigram = self._level(self.two, (context[-1],), w, left)
        if len(context) == 1 or context[-1] == EOT:
            return unigram, bigram, bigram
        middle = self._level(self.left_two, (context[-1],), w, left)
        return unigram, bigram, self._level(self.three, tuple(context[-2:]), w, middle)


@pytest.mark.parametrize("vocab_size", [7, 60])
def test_equals_the_naive_implementation_on_every_token(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    train, held = _stream(rng, 40, vocab_size), _stream(rng, 12, vocab_size)
    naive = Naive(train.tolist(), vocab_size)
    windows = held[: len(held) // 9 * 9].reshape(-1, 9)
    ids, labels = windows[:, :-1], windows[:, 1:]
    got = fit(train, vocab_size, EOT).nll(ids, labels, position_ids(ids, EOT))
    for b in range(ids.shape[0]):
        start = 0
        for t in range(ids.shape[1]):
            start = t if ids[b, t] == EOT else start
            context = ids[b, max(start, t - 1) : t + 1].tolist()
            want = naive.chances(context, int(labels[b, t]))
            for order, chance in zip(("unigram", "bigram", "trigram"), want, strict=True):
                assert got[order][b, t] == pytest.approx(-math.log(chance), rel=1e-10), (order, b, t)


def test_a_tiny_corpus_by_hand() -> None:
    # Stream 0 1 2 1 2 1 3, V = 4. Predicted: 1 2 1 2 1 3.
    models = fit(np.array([0, 1, 2, 1, 2, 1, 3]), vocab_size=4, eot=0)
    # Unigrams 1:3 2:2 3:1. n1 = 1, n2 = 1, n4 = 0: D = 1/3 for all; left over 3 * 1/3 / 6 = 1/6, spread over 4.
    third = Fraction(1, 3)
    unigram = [Fraction(1, 24), (3 - third) / 6 + Fraction(1, 24), (2 - third) / 6 + Fraction(1, 24)]
    unigram.append((1 - third) / 6 + Fraction(1, 24))
    got = models.distribution([1])
    assert got["unigram"] == pytest.approx([float(x) for x in unigram])
    # Bigrams 01:1 12:2 21:2 13:1: n1 = 2, n2 = 2, D = 1/3. Distinct left neighbours 1:2 2:1 3:1: D = 1/2.
    half = Fraction(1, 2)
    left_rest = 3 * half / 4 / 4
    left = [left_rest, (2 - half) / 4 + left_rest, half / 4 + left_rest, half / 4 + left_rest]
    after_one = [Fraction(0), Fraction(0), (2 - third) / 3, (1 - third) / 3]
    bigram = [kept + 2 * third / 3 * low for kept, low in zip(after_one, left, strict=True)]
    assert got["bigram"] == pytest.approx([float(x) for x in bigram])
    assert got["trigram"] == pytest.approx(got["bigram"])  # one token of context: no more can be known
    # Trigrams 012:1 121:2 212:1 213:1: n1 = 3, n2 = 1, D = 3/5. Their distinct left neighbours 12:2 21:1 13:1: D = 1/2.
    middle_after_one = [Fraction(0), Fraction(0), (2 - half) / 3, (1 - half) / 3]
    middle = [kept + 2 * half / 3 * low for kept, low in zip(middle_after_one, left, strict=True)]
    d = Fraction(3, 5)
    after_two_one = [Fraction(0), Fraction(0), (1 - d) / 2, (1 - d) / 2]
    trigram = [kept + 2 * d / 2 * low for kept, low in zip(after_two_one, middle, strict=True)]
    assert models.distribution([2, 1])["trigram"] == pytest.approx([float(x) for x in trigram])


def test_probabilities_sum_to_one_for_seen_and_unseen_contexts() -> None:
    rng = np.random.default_rng(1)
    models = fit(_stream(rng, 300, 50), 64, EOT)  # ids 50..63 never occur
    seen = [int(models.bigram.contexts_H[3]), int(models.trigram.contexts_H[10] // 64)]
    pair = divmod(int(models.trigram.contexts_H[5]), 64)
    unseen = [[63], [63, 62], [63, seen[0]], [seen[0], 63]]
    for context in ([EOT], [seen[0]], list(pair), [EOT, seen[0]], [5, EOT], *unseen):
        for order, chances in models.distribution(context).items():
            assert chances.sum() == pytest.approx(1, abs=1e-12), (order, context)
            assert chances.min() > 0, (order, context)


def test_contexts_stop_at_document_starts() -> None:
    rng = np.random.default_rng(2)
    models = fit(_stream(rng, 200, 30), 30, EOT)
    ids = np.array([[4, 9, EOT, 6, 7]])
    labels = np.array([[9, EOT, 6, 7, 3]])
    one = models.nll(ids, labels, position_ids(ids, EOT))["trigram"][0]
    other_ids = np.array([[8, 2, EOT, 6, 7]])
    other = models.nll(other_ids, labels, position_ids(other_ids, EOT))["trigram"][0]
    assert one[2:].tolist() == other[2:].tolist()  # nothing before the EOT is seen
    assert one[1] != other[1]
    crossing = np.array([[0, 1, 2, 3, 4]])  # position ids that do not restart do let the context through
    assert models.nll(ids, labels, crossing)["trigram"][0, 2] != one[2]
    bigram = models.nll(ids, labels, position_ids(ids, EOT))["bigram"][0]
    assert one[[0, 2]].tolist() == bigram[[0, 2]].tolist()
    assert one[3] != bigram[3]  # the EOT itself is a context


def test_counting_keeps_documents_and_windows_apart() -> None:
    across = fit(np.array([0, 1, 2, 0, 3, 4]), 5, 0)
    assert across.counts == {"tokens": 5, "bigrams": 5, "trigrams": 3}  # 012 120 034, not 203
    windows = fit(np.array([[0, 1, 2], [3, 4, 1]]), 5, 0)
    assert windows.counts == {"tokens": 4, "bigrams": 4, "trigrams": 2}
    joined = fit(np.array([0, 1, 2, 3, 4, 1]), 5, 0)
    assert joined.counts == {"tokens": 5, "bigrams": 5, "trigrams": 4}
    stream = np.array([0, 1, 2, 1, 3, 2, 2, 1])
    assert (
        fit(stream, 5, 0).distribution([2, 1])["trigram"].tolist()
        == fit(stream[None], 5, 0).distribution([2, 1])["trigram"].tolist()
    )


def test_no_overflow_near_the_largest_vocabulary() -> None:
    v = 2_000_000
    stream = np.array([0, *(v - 1 - np.array([0, 1, 2, 0, 1, 3, 0, 1, 2])).tolist()])
    small = np.array([0, *(10 - 1 - np.array([0, 1, 2, 0, 1, 3, 0, 1, 2])).tolist()])
    big_nll = fit(stream, v, 0).nll(stream[None, :-1], stream[None, 1:], np.arange(9)[None])
    naive = Naive(stream.tolist(), v)
    want = [-math.log(naive.chances(stream[max(0, t - 1) : t + 1].tolist(), int(stream[t + 1]))[2]) for t in range(9)]
    assert big_nll["trigram"][0] == pytest.approx(want)
    assert fit(small, 10, 0).counts == fit(stream, v, 0).counts


def test_discounts_fall_back_on_noisy_counts() -> None:
    assert discounts(np.array([1] * 100 + [2] * 40 + [3] * 20 + [4] * 10)) == pytest.approx(
        (1 - 2 * (5 / 9) * 0.4, 2 - 3 * (5 / 9) * 0.5, 3 - 4 * (5 / 9) * 0.5)
    )
    assert discounts(np.array([1, 1, 2, 5])) == (0.5, 0.5, 0.5)  # no 3, no 4: Y = 2 / 4
    assert discounts(np.array([7, 9])) == (0.5, 0.5, 0.5)
    negative_d3 = np.array([1] * 100 + [2] * 10 + [3] + [4] * 50)
    assert discounts(negative_d3) == pytest.approx((100 / 120,) * 3)


def test_ignored_labels_and_tensors() -> None:
    rng = np.random.default_rng(3)
    models = fit(torch.from_numpy(_stream(rng, 50, 20)), 20, EOT)
    batch = make_batch(_stream(rng, 40, 20)[:60].reshape(3, 20), EOT)
    whole = models.nll(batch["input_ids"], batch["labels"], batch["position_ids"])
    labels = batch["labels"].clone()
    labels[:, ::2] = -100
    part = models.nll(batch["input_ids"], labels, batch["position_ids"])
    for order in whole:
        assert np.isnan(part[order][:, ::2]).all()
        assert part[order][:, 1::2].tolist() == whole[order][:, 1::2].tolist()
    loss = models.loss(batch["input_ids"], labels, batch["position_ids"])
    assert loss["trigram"] == pytest.approx(whole["trigram"][:, 1::2].mean())
    with pytest.raises(ValueError, match="no token is predicted"):
        models.loss(batch["input_ids"], torch.full_like(labels, -100), batch["position_ids"])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"tokens: ids 0\.\.9 leave the vocabulary 0\.\.4"):
        fit(np.array([0, 9, 1]), 5, 0)
    with pytest.raises(ValueError, match="tokens: ids -1"):
        fit(np.array([0, -1]), 5, 0)
    with pytest.raises(ValueError, match="at least two tokens"):
        fit(np.array([0]), 5, 0)
    with pytest.raises(ValueError, match="integers"):
        fit(np.array([0.0, 1.0]), 5, 0)
    with pytest.raises(ValueError, match="vocab_size"):
        fit(np.array([0, 1]), 3_000_000, 0)
    with pytest.raises(ValueError, match="eot: 5"):
        fit(np.array([0, 1]), 5, 5)
    models = fit(np.array([0, 1, 2]), 5, 0)
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        models.nll(np.zeros((1, 3), int), np.zeros((1, 2), int), np.zeros((1, 3), int))
    with pytest.raises(ValueError, match="labels: ids"):
        models.nll(np.zeros((1, 1), int), np.full((1, 1), 7), np.zeros((1, 1), int))
    with pytest.raises(ValueError, match="context"):
        models.distribution([])


def test_every_longer_context_helps_on_real_text(tmp_path: Path) -> None:
    cfg = DataConfig(
        max_documents=150, vocab_size=512, holdout=0.1, seq_len=64, validation_tokens=8192, cache_dir=str(tmp_path)
    )
    corpus = prepare(cfg)
    models = fit(corpus.train.tokens, corpus.vocab_size, corpus.eot)
    batches = list(corpus.validation_batches(32))
    ids, labels, positions = (torch.cat([b[k] for b in batches]) for k in ("input_ids", "labels", "position_ids"))
    loss = models.loss(ids, labels, positions)
    assert loss["trigram"] < loss["bigram"] - 0.1 < loss["unigram"] - 0.5
    assert loss["unigram"] < math.log(corpus.vocab_size)
    seen = models.loss(*(torch.from_numpy(x) for x in _windows(corpus.train.tokens[:6401], 64)))
    assert seen["trigram"] < loss["trigram"] - 0.3  # fitted text is far easier than held-out text


def _windows(tokens: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.asarray(tokens, dtype=np.int64)
    ids, labels = tokens[:-1].reshape(-1, seq_len), tokens[1:].reshape(-1, seq_len)
    return ids, labels, position_ids(ids, EOT)
