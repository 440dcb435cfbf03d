"""Unigram and interpolated Kneser-Ney bigram and trigram models: the n-gram floor that a trained model has to beat.

    fit(tokens, vocab_size, eot).loss(input_ids, labels, position_ids) -> {"unigram": x, "bigram": y, "trigram": z}

Modified Kneser-Ney (Chen and Goodman 1999, section 3), interpolated down to the uniform distribution, so that every
token has a probability above zero. Each order uses raw counts when it is the highest order, and counts of distinct
left neighbours as the lower order of the next. A context ends where a document begins: the EOT that begins it may be
a context itself, but nothing before it. A model of order n predicts from as many tokens as there are, up to n - 1,
with the raw-count model of that shorter order: at a window's first token the trigram model is the bigram model.

Shapes: N training tokens, K windows, B batch, T time, V vocabulary, Q queries, G distinct n-grams, H contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_VOCABULARY = 2_097_151
"""A trigram is packed into one int64: V ** 3 must stay below 2 ** 63."""
ORDERS = ("unigram", "bigram", "trigram")


def discounts(counts_G: np.ndarray) -> tuple[float, float, float]:
    """Discounts of n-grams counted once, twice, and three times or more, from the counts of counts n1..n4.

    With Y = n1 / (n1 + 2 n2): D_k = k - (k + 1) Y n_(k+1) / n_k. Where one of n1..n4 is zero, or a D_k leaves (0, k]
    (as it does for the few hundred byte tokens of a unigram table), all three are Y, or 0.5 without n1 and n2.
    """
    n1, n2, n3, n4 = (int((counts_G == k).sum()) for k in (1, 2, 3, 4))
    single = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
    if min(n1, n2, n3, n4) > 0:
        d1, d2, d3 = 1 - 2 * single * n2 / n1, 2 - 3 * single * n3 / n2, 3 - 4 * single * n4 / n3
        if 0 < d1 <= 1 and 0 < d2 <= 2 and 0 < d3 <= 3:
            return d1, d2, d3
    return single, single, single


@dataclass(frozen=True)
class _Level:
    """Discounted counts of one order: keys_G (context * V + token, ascending); per context its total and its rest,
    the probability mass that the discounts leave to the lower order."""

    vocab_size: int
    keys_G: np.ndarray
    counts_G: np.ndarray
    discounts: tuple[float, float, float]
    contexts_H: np.ndarray
    totals_H: np.ndarray
    rest_H: np.ndarray

    @classmethod
    def of(cls, keys_G: np.ndarray, counts_G: np.ndarray, vocab_size: int) -> _Level:
        d = discounts(counts_G)
        context_G = keys_G // vocab_size
        first_H = np.flatnonzero(np.diff(context_G, prepend=-1))
        if not len(first_H):  # reduceat takes no empty input
            none = np.zeros(0)
            return cls(vocab_size, keys_G, counts_G, d, context_G, none, none)
        totals_H = np.add.reduceat(counts_G, first_H).astype(np.float64)
        taken_H = np.add.reduceat(np.array((0.0, *d))[np.minimum(counts_G, 3)], first_H)
        return cls(vocab_size, keys_G, counts_G, d, context_G[first_H], totals_H, taken_H / totals_H)

    def probability(self, context_Q: np.ndarray, token_Q: np.ndarray, lower_Q: np.ndarray) -> np.ndarray:
        """float64 [Q]: discounted relative frequency plus rest times `lower_Q`; `lower_Q` after an unseen context."""
        if not len(self.keys_G):
            return lower_Q
        row_Q, seen_Q = _find(self.contexts_H, context_Q)
        at_Q, known_Q = _find(self.keys_G, context_Q * self.vocab_size + token_Q)
        count_Q = np.where(known_Q, self.counts_G[at_Q], 0)
        kept_Q = count_Q - np.array((0.0, *self.discounts))[np.minimum(count_Q, 3)]
        return np.where(seen_Q, kept_Q / self.totals_H[row_Q] + self.rest_H[row_Q] * lower_Q, lower_Q)


def _find(sorted_G: np.ndarray, query_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at_Q = np.minimum(np.searchsorted(sorted_G, query_Q), len(sorted_G) - 1)
    return at_Q, sorted_G[at_Q] == query_Q


def _count(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, ascending, and how often each occurs; sorts `keys` in place."""
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[first], np.diff(first, append=len(keys))


@dataclass(frozen=True)
class NgramModels:
    """Fitted models; `counts` says how many tokens, distinct bigrams and distinct trigrams they hold."""

    vocab_size: int
    eot: int
    counts: dict[str, int]
    unigram: _Level
    bigram: _Level
    trigram: _Level
    left_of_token: _Level
    left_of_bigram: _Level

    def nll(self, input_ids_BT: Any, labels_BT: Any, position_ids_BT: Any) -> dict[str, np.ndarray]:
        """Negative log probability in nats of every label, float64 [B, T] for each order; NaN at negative labels.

        Arguments are integer arrays or CPU tensors [B, T]: what the neural model got. Raises ValueError on unequal
        shapes and on ids outside the vocabulary.
        """
        ids_BT, labels_BT, position_BT = (
            np.asarray(x, dtype=np.int64) for x in (input_ids_BT, labels_BT, position_ids_BT)
        )
        if not (ids_BT.ndim == 2 and ids_BT.shape == labels_BT.shape == position_BT.shape):
            shapes = f"input_ids {ids_BT.shape}, labels {labels_BT.shape} and position_ids {position_BT.shape}"
            raise ValueError(f"{shapes} must be [B, T], all the same")
        predicted_BT = labels_BT >= 0
        _check_ids("input_ids", ids_BT, self.vocab_size)
        _check_ids("labels", labels_BT[predicted_BT], self.vocab_size)
        before_BT = np.concatenate([np.zeros_like(ids_BT[:, :1]), ids_BT[:, :-1]], axis=1)
        two_BT = (position_BT > 0) & (np.arange(ids_BT.shape[1]) > 0)
        chances = self._chances(
            before_BT[predicted_BT], ids_BT[predicted_BT], labels_BT[predicted_BT], two_BT[predicted_BT]
        )
        out = {}
        for order, chance_Q in chances.items():
            out[order] = np.full(labels_BT.shape, np.nan)
            out[order][predicted_BT] = -np.log(chance_Q)
        return out

    def loss(self, input_ids_BT: Any, labels_BT: Any, position_ids_BT: Any) -> dict[str, float]:
        """Mean nats per predicted token of each order; arguments as for `nll`. Raises ValueError if there is none."""
        nll = self.nll(input_ids_BT, labels_BT, position_ids_BT)
        if np.isnan(nll["unigram"]).all():
            raise ValueError("labels: no token is predicted (all are negative)")
        return {order: float(np.nanmean(values)) for order, values in nll.items()}

    def distribution(self, context: Sequence[int]) -> dict[str, np.ndarray]:
        """float64 [V] for each order: the probability of every token after these (at least one) ids of one window."""
        if not context:
            raise ValueError("context: at least one id is needed, for example [eot]")
        tokens_V = np.arange(self.vocab_size, dtype=np.int64)
        last = np.full(self.vocab_size, context[-1], dtype=np.int64)
        two = len(context) > 1 and context[-1] != self.eot
        before = np.full(self.vocab_size, context[-2] if two else 0, dtype=np.int64)
        return self._chances(before, last, tokens_V, np.full(self.vocab_size, two))

    def _chances(
        self, before_Q: np.ndarray, last_Q: np.ndarray, token_Q: np.ndarray, two_Q: np.ndarray
    ) -> dict[str, np.ndarray]:
        uniform_Q = np.full(len(token_Q), 1.0 / self.vocab_size)
        none_Q = np.zeros_like(token_Q)
        left_Q = self.left_of_token.probability(none_Q, token_Q, uniform_Q)
        bigram_Q = self.bigram.probability(last_Q, token_Q, left_Q)
        middle_Q = self.left_of_bigram.probability(last_Q, token_Q, left_Q)
        trigram_Q = self.trigram.probability(before_Q * self.vocab_size + last_Q, token_Q, middle_Q)
        return {
            "unigram": self.unigram.probability(none_Q, token_Q, uniform_Q),
            "bigram": bigram_Q,
            "trigram": np.where(two_Q, trigram_Q, bigram_Q),
        }


def fit(tokens_N: Any, vocab_size: int, eot: int) -> NgramModels:
    """Fit all three models on training ids: a stream [N], or [K, U] windows of which no context leaves its own.

    Sorting of packed int64 keys: 1 million tokens took 0.1 s and 30 million 5 s on one core, at about 60 bytes a token.
    Raises ValueError on fewer than two tokens, ids outside 0..V - 1, or a vocabulary too large.
    """
    tokens_KU = np.asarray(tokens_N)
    tokens_KU = tokens_KU[None] if tokens_KU.ndim == 1 else tokens_KU
    if tokens_KU.ndim != 2 or tokens_KU.shape[1] < 2 or not len(tokens_KU):
        raise ValueError(f"tokens: expected [N] or [K, U] with at least two tokens, got shape {np.shape(tokens_N)}")
    if not np.issubdtype(tokens_KU.dtype, np.integer):
        raise ValueError(f"tokens: expected integers, got {tokens_KU.dtype}")
    if not 1 <= vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size: {vocab_size} must lie in 1..{LARGEST_VOCABULARY}")
    if not 0 <= eot < vocab_size:
        raise ValueError(f"eot: {eot} must lie in 0..{vocab_size - 1}")
    _check_ids("tokens", tokens_KU, vocab_size)
    v = vocab_size
    ids_KU = tokens_KU.astype(np.int64)
    pairs_KT = ids_KU[:, :-1] * v + ids_KU[:, 1:]
    # a trigram whose middle is EOT would reach into the document before
    inside = ids_KU[:, 1:-1] != eot
    triples = (pairs_KT[:, :-1] * v + ids_KU[:, 2:])[inside]
    singles_V = np.bincount(ids_KU[:, 1:].ravel(), minlength=v)
    del ids_KU

    bigram_keys, bigram_counts = _count(pairs_KT.ravel())
    trigram_keys, trigram_counts = _count(triples)
    return NgramModels(
        vocab_size=v,
        eot=eot,
        counts={"tokens": int(singles_V.sum()), "bigrams": len(bigram_keys), "trigrams": len(trigram_keys)},
        unigram=_Level.of(np.flatnonzero(singles_V), singles_V[singles_V > 0], v),
        bigram=_Level.of(bigram_keys, bigram_counts, v),
        trigram=_Level.of(trigram_keys, trigram_counts, v),
        left_of_token=_Level.of(*_count(bigram_keys % v), v),
        left_of_bigram=_Level.of(*_count(trigram_keys % (v * v)), v),
    )


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{name}: ids {ids.min()}..{ids.max()} leave the vocabulary 0..{vocab_size - 1}")
