"""Windows of a token stream: their order, batches, resuming, ranks, validation."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_corpus import small_config

from engram.strict import ConfigError
from engram.train.data import (
    Corpus,
    TokenShards,
    WindowReader,
    make_batch,
    permuted,
    position_ids,
    prepare,
    validation_batches,
    validation_starts,
)


def test_position_ids_restart_at_every_eot_and_window() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, size=(20, 13))
    got = position_ids(ids, 0)
    for b in range(20):
        count = -1
        for t in range(13):
            count = 0 if ids[b, t] == 0 or t == 0 else count + 1
            assert got[b, t] == count


def test_batches_hold_shifted_labels_and_int64(corpus: Corpus) -> None:
    batch = next(corpus.reader())
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), ((4, 16), torch.int64)
    )
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    want = position_ids(batch["input_ids"].numpy(), corpus.eot)
    assert batch["position_ids"].tolist() == want.tolist() and (batch["position_ids"][:, 0] == 0).all()
    stream = np.asarray(corpus.train.tokens).tolist()
    for row, label in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert any(stream[i : i + 17] == [*row, label[-1]] for i in range(0, len(stream), 16))


@pytest.mark.parametrize("n", [*range(1, 40), 255, 256, 257, 5000])
def test_the_window_order_is_a_permutation(n: int) -> None:
    order = permuted(np.arange(n), n, seed=7)
    assert sorted(order.tolist()) == list(range(n))
    assert permuted(np.arange(n)[::-1], n, seed=7).tolist() == order.tolist()[::-1]  # each index by itself


def test_the_window_order_is_fixed_and_looks_random() -> None:
    assert permuted(np.arange(10), 10, 0).tolist() == [7, 4, 3, 8, 2, 0, 6, 5, 9, 1]
    assert permuted(np.arange(6), 10**12, 5, epoch=2).tolist() == [
        225394974112,
        842094407782,
        637769359666,
        345300633128,
        862733860421,
        841723166561,
    ]
    n = 4000
    orders = [permuted(np.arange(n), n, seed, epoch) for seed, epoch in ((0, 0), (1, 0), (0, 1), (-1, 0))]
    for i, one in enumerate(orders):
        for two in [np.arange(n), *orders[:i]]:
            assert abs(np.corrcoef(one, two)[0, 1]) < 0.06  # 4 standard deviations of a random order
        steps = np.diff(one)
        assert (np.abs(steps) < n // 10).mean() == pytest.approx(0.19, abs=0.03)


def test_an_epoch_covers_every_window_once(corpus: Corpus) -> None:
    reader = WindowReader(corpus.train, 16, 4, seed=1)
    tokens_N = np.asarray(corpus.train.tokens).astype(np.int64)
    batches = list(reader)
    assert len(batches) == len(reader) == reader.windows // 4
    got = sorted(tuple(row) for b in batches for row in b["input_ids"].tolist())
    every = sorted(tuple(tokens_N[i * 16 : i * 16 + 16].tolist()) for i in range(reader.windows))
    assert len(got) == len(every) - reader.windows % 4
    assert not set(got) - set(every)
    with pytest.raises(StopIteration):
        next(reader)
    seen = WindowReader(corpus.train, 16, 4, seed=1)
    first, second = next(seen), next(seen)
    both = torch.cat([first["input_ids"], second["input_ids"]])
    assert seen.consumed_windows()[:, :-1].tolist() == both.tolist()


def test_the_order_depends_on_seed_and_data_alone(corpus: Corpus) -> None:
    def rows(**changes: Any) -> list[list[int]]:
        options: dict[str, Any] = {"batch_size": 4, "seed": 1, **changes}
        reader = WindowReader(corpus.train, 16, **options)
        return [row for _ in range(48 // options["batch_size"]) for row in next(reader)["input_ids"].tolist()]

    assert rows() == rows() == rows(batch_size=12)
    assert rows() != rows(seed=2)


def test_ranks_share_each_step(corpus: Corpus) -> None:
    whole = WindowReader(corpus.train, 16, 6, seed=1)
    parts = [WindowReader(corpus.train, 16, 2, seed=1, rank=r, world_size=3) for r in range(3)]
    for _ in range(5):
        want = next(whole)["input_ids"].tolist()
        assert [row for part in parts for row in next(part)["input_ids"].tolist()] == want
    assert len(parts[0]) == len(whole) and parts[0].cursor == whole.cursor
    with pytest.raises(ConfigError, match=r"rank: 3 must lie in 0\.\.2"):
        WindowReader(corpus.train, 16, 2, rank=3, world_size=3)


def test_resuming_twice_equals_an_uninterrupted_run(corpus: Corpus) -> None:
    def reader() -> WindowReader:
        return WindowReader(corpus.train, 16, 4, seed=5, epochs=2)

    whole = reader()
    own = hashlib.sha256()
    for batch in whole:
        own.update(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes())
    parts, part, parted = [0, 1, 13, len(whole)], reader(), hashlib.sha256()
    for start, end in itertools.pairwise(parts):
        state = json.loads(json.dumps(part.state()))
        part = reader()
        part.load_state(state)
        for _ in range(end - start):
            part.peek()  # one batch ahead is never part of the state
            batch = next(part)
            parted.update(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes())
        part.peek()
    assert parted.hexdigest() == own.hexdigest()
    assert part.consumed_sha256 == whole.consumed_sha256 and part.state() == whole.state()
    assert part.peek() is None
    shorter = reader()
    next(shorter)
    assert shorter.consumed_sha256 != whole.consumed_sha256


def test_peeking_changes_nothing(corpus: Corpus) -> None:
    reader = WindowReader(corpus.train, 16, 4, seed=5)
    before = reader.state()
    ahead = reader.peek()
    assert ahead is not None and reader.state() == before
    again = reader.peek()
    batch = next(reader)
    assert again is not None and all(torch.equal(ahead[k], batch[k]) and torch.equal(again[k], batch[k]) for k in batch)
    reader.peek()
    reader.load_state(before)
    assert torch.equal(next(reader)["input_ids"], batch["input_ids"])


def test_a_state_of_another_run_is_refused(corpus: Corpus) -> None:
    state = WindowReader(corpus.train, 16, 4, seed=5).state()
    for name, other in (
        ("seed", WindowReader(corpus.train, 16, 4, seed=6)),
        ("batch_size", WindowReader(corpus.train, 16, 8, seed=5)),
        ("seq_len", WindowReader(corpus.train, 8, 4, seed=5)),
        ("data_sha256", WindowReader(corpus.validation, 16, 4, seed=5)),
    ):
        with pytest.raises(ConfigError, match=f"{name}: the saved reader state has"):
            other.load_state(state)
    reader = WindowReader(corpus.train, 16, 4, seed=5)
    with pytest.raises(ConfigError, match="expected the keys"):
        reader.load_state({"cursor": 3})
    with pytest.raises(ConfigError, match="cursor -1"):
        reader.load_state({**state, "cursor": -1})


def test_repeating_data_is_said_once_an_epoch_and_reordered(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    shards = TokenShards.of([[1, 2, 3, 4, 5, 6, 7, 8]] * 5, 0, 9)
    single = WindowReader(shards, 4, 3)
    assert single.windows == 11 and len(list(single)) == 3
    assert capsys.readouterr().err == ""
    reader = WindowReader(shards, 4, 3, epochs=3)
    batches = list(reader)
    assert len(batches) == 11
    said = capsys.readouterr().err
    assert said.count("WARNING: the training data repeats") == 2 and "epoch 2 of 3" in said and "epoch 3 of 3" in said
    starts = reader._starts(np.arange(33)) // 4
    assert all(sorted(starts[e * 11 : e * 11 + 11].tolist()) == list(range(11)) for e in range(3))
    assert starts[:11].tolist() != starts[11:22].tolist()
    assert len(reader.consumed_windows()) == 11  # every window once, however often it was read


def test_too_little_data_is_an_error(corpus: Corpus, folder: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than one batch of 4000"):
        WindowReader(corpus.train, 16, 4000)
    with pytest.raises(ConfigError, match=r"seq_len: 5000 needs 5001 validation tokens"):
        prepare(small_config(folder, source=corpus.config.source, seq_len=5000, validation_tokens=5000))


def test_validation_windows_are_spread_over_all_documents(corpus: Corpus) -> None:
    for total, seq_len, wanted in ((1000, 10, 300), (1000, 10, 990), (1001, 10, 1000), (11, 10, 10), (5000, 7, 1400)):
        starts = validation_starts(total, seq_len, wanted)
        assert len(starts) == min(wanted, total - 1) // seq_len
        gaps = np.diff(starts)
        assert all(gap in (gaps.min(), gaps.min() + 1) and gap >= seq_len for gap in gaps)
        if len(starts) > 1:
            assert starts[0] == 0 and starts[-1] == total - 1 - seq_len
    assert len(validation_starts(100, 10, 10**6)) == 9  # what there is
    batches = list(validation_batches(corpus.validation, 16, 5, 256))
    assert [len(b["labels"]) for b in batches] == [5, 5, 5, 1]
    again = list(corpus.validation_batches(5))
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(batches, again, strict=True))
    stream = np.asarray(corpus.validation.tokens)
    starts = validation_starts(len(stream), 16, 256)
    assert batches[0]["input_ids"][2].tolist() == stream[starts[2] : starts[2] + 16].tolist()
    touched = np.unique(np.searchsorted(corpus.validation.offsets, starts, side="right"))
    assert len(touched) > 10 and touched[-1] == corpus.validation.documents


def test_less_validation_text_than_asked_is_said(
    corpus: Corpus, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prepare(small_config(folder, source=corpus.config.source, validation_tokens=10**6))
    assert "validation_tokens: 1000000 asked" in capsys.readouterr().err
    count = sum(b["labels"].numel() for b in made.validation_batches())
    assert count == made.description["validation_tokens"] == (len(made.validation) - 1) // 16 * 16


def test_make_batch_owns_its_memory() -> None:
    window = np.arange(10, dtype=np.uint16).reshape(2, 5)
    batch = make_batch(window, 0)
    batch["input_ids"].zero_()
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]] and window[0, 1] == 1
