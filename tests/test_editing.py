"""Rows looked up and changed: against rows counted with plain dictionaries, through every store, and back again."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import engram
from engram import editing
from engram.config import ConfigError, EngramConfig
from engram.stores.formats import FORMATS

VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=23, init="normal", init_std=1.0)
TinyModel = Callable[..., Any]
IDS = [5, 9, 5, 9, 7]


@pytest.fixture
def handle(tiny_model: TinyModel) -> engram.Handle:
    return engram.attach(tiny_model("llama"), CFG)


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _memory_of(model: Any, handle: engram.Handle, ids: list[int], layer: int) -> Tensor:
    """The memory vectors [T, M] that a forward reads."""
    with handle.taps() as taps, torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    return taps[layer]["memory"][0].clone()


def test_the_rows_are_those_of_a_forward(handle: engram.Handle) -> None:
    found = handle.rows_for(torch.tensor(IDS))
    handle.model(torch.tensor([IDS]), use_cache=False)
    assert len(found) == 2 * len(IDS) * 2 and {address.layer for address in found} == {0, 1}
    for address in found:
        first = 2 * CFG.orders.index(address.order)
        rows = handle.taps()[address.layer]["rows"][0, address.position, first : first + 2]
        assert list(address.rows) == rows.tolist() and address.text is None and address.shared is None
        padded = [None, None, *IDS]
        assert list(address.ids) == padded[address.position + 3 - address.order : address.position + 3]
    assert handle.rows_for(IDS, layer=1) == [address for address in found if address.layer == 1]
    assert int(handle.memory.layer(0).hash.masked) == 0


def test_text_is_shown_as_text(handle: engram.Handle) -> None:
    found = handle.rows_for("w5 w9 w7", layer=0, tokenizer=_words())
    assert [address.text for address in found if address.order == 3] == ["∅∅w5", "∅w5 w9", "w5 w9 w7"]
    assert json.loads(json.dumps(found[-1].to_dict()))["ids"] == [5, 9, 7]


def test_collisions_in_a_corpus_are_those_counted_by_hand(handle: engram.Handle) -> None:
    corpus = torch.randint(0, 12, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    hasher = handle.memory.layer(1).hash
    for order, first in ((2, 0), (3, 2)):
        ngrams: Counter[tuple[int | None, ...]] = Counter()
        readers: dict[int, set[tuple[int | None, ...]]] = defaultdict(set)
        for document in corpus:
            rows = hasher.rows(torch.tensor([document]))[0]
            padded = [None, None, *document]
            for position in range(len(document)):
                ngram = tuple(padded[position + 3 - order : position + 3])
                ngrams[ngram] += 1
                for row in rows[position, first : first + 2].tolist():
                    readers[row].add(ngram)
        assert max(map(len, readers.values())) > 1, "the test wants collisions"
        found = [a for a in handle.rows_for(corpus[0], 1, corpus, most=1000) if a.order == order]
        for address in found:
            assert address.shared is not None and address.sharing is not None
            for row, shared, count in zip(address.rows, address.shared, address.sharing, strict=True):
                assert {other.ids for other in shared} == readers[row] - {address.ids} and len(shared) == count
                assert all(other.count == ngrams[other.ids] for other in shared)
                assert [other.count for other in shared] == sorted((o.count for o in shared), reverse=True)
        few = [a for a in handle.rows_for(corpus[0], 1, corpus, most=1) if a.order == order]
        assert all(len(shared) <= 1 for a in few for shared in a.shared or ())
        assert [a.sharing for a in few] == [a.sharing for a in found]
    whole = handle.rows_for(corpus[0], 1, torch.tensor(corpus), most=1000)
    assert whole == handle.rows_for(corpus[0], 1, [torch.tensor(d) for d in corpus], most=1000)


@pytest.mark.parametrize("row_dtype", list(FORMATS))
@pytest.mark.parametrize("placement", ["device", "host", "pinned", "disk"])
def test_an_edit_is_what_forwards_read_and_can_be_undone(
    placement: str, row_dtype: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    path = str(tmp_path / "rows") if placement == "disk" else None
    handle = engram.attach(model, CFG.replace(placement=placement, path=path, row_dtype=row_dtype, layers=(1,)))
    before = _memory_of(model, handle, IDS, 1)
    table = handle.memory.layer(1).table
    everything = torch.arange(table.store.spec.rows)
    all_rows = table.read(everything).clone()
    ahead = None if table.fetcher is None else table.fetcher.launch(everything, ahead=True)
    value = (torch.randint(-4, 5, (16,)) * 0.25).float()
    edit = handle.edit([5, 9], value)
    exact = row_dtype in ("fp32", "bf16")
    wanted = value.view(2, 8)
    torch.testing.assert_close(edit.new, wanted, rtol=0, atol=0 if exact else 0.15)
    after = _memory_of(model, handle, IDS, 1)
    for position in (1, 3):  # both places of the bigram
        assert torch.equal(after[position, :16], edit.new.flatten())
        assert torch.equal(before[position, :16], edit.old.flatten())
        assert torch.equal(after[position, 16:], before[position, 16:])
    expected = all_rows.clone()
    expected[list(edit.rows)] = edit.new
    assert torch.equal(table.read(everything), expected), "no other row has changed"
    if ahead is not None:
        assert torch.equal(ahead.wait(), expected), "rows fetched ahead are patched"
    undone = handle.edit([5, 9], edit.old)
    assert torch.equal(undone.old, edit.new) and torch.equal(table.read(everything), all_rows)


def test_bf16_rows_take_the_nearest_value_and_not_a_random_one(tiny_model: TinyModel) -> None:
    handle = engram.attach(tiny_model("llama"), CFG.replace(row_dtype="bf16"))
    value = torch.randn(2, 8)
    for layer in (0, 1):
        assert torch.equal(handle.edit([1, 2], value, layer).new, value.bfloat16().float())


def test_an_edit_says_who_else_it_changes(handle: engram.Handle) -> None:
    corpus = torch.randint(0, 12, (1, 300), generator=torch.Generator().manual_seed(2))
    hasher, ids = handle.memory.layer(0).hash, corpus[0].tolist()
    edit = handle.edit(ids[10:13], torch.ones(2, 8), layer=0, corpus=corpus, most=1000)
    rows = hasher.rows(corpus)[0, :, 2:].tolist()
    padded = [None, None, *ids]
    readers = {tuple(padded[p : p + 3]) for p in range(300) if set(rows[p]) & set(edit.rows)} - {tuple(ids[10:13])}
    assert edit.changed is not None and {other.ids for other in edit.changed} == readers and readers
    assert edit.changes == len(readers)
    assert handle.edit(ids[10:13], edit.old, layer=0).changed is None


def test_edits_of_decayed_rows_are_values(tiny_model: TinyModel) -> None:
    handle = engram.attach(tiny_model("llama"), CFG)
    table = handle.memory.layer(1).table
    table.write(torch.tensor([0]), torch.ones(1, 8), decay=0.75)
    edit = handle.edit([5, 9], torch.ones(2, 8), layer=1)
    torch.testing.assert_close(edit.new, torch.ones(2, 8))
    assert table.scale == 0.75
    torch.testing.assert_close(handle.edit([5, 9], edit.old, layer=1).new, edit.old)


def test_token_maps_and_boundaries_are_those_of_the_memory(tiny_model: TinyModel) -> None:
    tmap = engram.TokenMap([i // 2 for i in range(VOCAB)])
    cfg = CFG.replace(compress=True, boundary="eos", eos=(3,))
    handle = engram.attach(tiny_model("llama"), cfg, token_map=tmap)
    assert handle.edit([10, 20], torch.ones(16), 0).rows == handle.edit([11, 21], torch.ones(16), 0).rows
    found = handle.rows_for([10, 20], 0, corpus=[[11, 21], [10, 20]], most=9)
    assert all(other.ids != (10, 20) for address in found for shared in address.shared or () for other in shared)
    with pytest.raises(ValueError, match="cut by an end of text"):
        handle.edit([3, 20], torch.ones(16), 0)


def test_what_cannot_be_edited_is_refused_and_nothing_written(handle: engram.Handle, tmp_path: Path) -> None:
    before = [layer.table.store.rows.clone() for layer in handle.memory.modules_by_layer()]
    one = torch.ones(2, 8)
    for args, kwargs, message in (
        (([1, 2], torch.ones(8), 0), {}, r"value: \[8\]; an n-gram of order 2 reads 2 rows of 8 values"),
        (([1, 2], torch.ones(8, 2), 0), {}, r"\[2, 8\] or \[16\]"),
        (([1, 2], [1.0], 0), {}, "value: list"),
        (([1, 2], one * float("nan"), 0), {}, "holds nan"),
        (([1], one, 0), {}, r"has 1 ids; the orders of this memory are \[2, 3\]"),
        (([1, 64], one, 0), {}, "id 64 lies outside the vocabulary 0..63"),
        (([-1, 2], one, 0), {}, "id -1"),
        (([1, 2], one), {}, "say which one"),
        (([1, 2], one, 5), {}, "block 5 has no memory"),
        (("w1 w2", one, 0), {}, "needs tokenizer"),
        ((torch.ones(2), one, 0), {}, "integer ids"),
        (([1, 2], one, 0), {"corpus": "w1 w2"}, "needs tokenizer"),
        (([1, 2], one, 0), {"corpus": []}, "no token"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            handle.edit(*args, **kwargs)  # type: ignore[arg-type]
    for layer, rows in zip(handle.memory.modules_by_layer(), before, strict=True):
        assert torch.equal(layer.table.store.rows, rows)
    with pytest.raises(ValueError, match="has no tokens"):
        handle.rows_for([])
    with pytest.raises(ValueError, match="the list is empty"):
        handle.export_rows(tmp_path / "x", [])


def test_a_value_that_the_format_cannot_hold_does_not_break_the_table(tiny_model: TinyModel) -> None:
    handle = engram.attach(tiny_model("llama"), CFG.replace(row_dtype="int8", placement="host"))
    with pytest.raises(ValueError, match="at most"):
        handle.edit([1, 2], torch.full((2, 8), 3e38), 0)
    torch.testing.assert_close(handle.edit([1, 2], torch.ones(2, 8), 0).new, torch.ones(2, 8), rtol=1e-3, atol=0)


def test_exported_rows_are_the_values_and_say_what_they_are(
    handle: engram.Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = handle.edit([5, 9], torch.randn(2, 8), layer=1)
    data, listing = handle.export_rows(tmp_path / "some.safetensors", [[5, 9], "w1 w2 w3", [1, 2]], tokenizer=_words())
    assert (data.name, listing.name) == ("some.safetensors", "some.json")
    tensors, about = load_file(data), json.loads(listing.read_text(encoding="utf-8"))
    assert set(tensors) == {
        f"layer.{n}.order.{o}.{what}" for n in (0, 1) for o in (2, 3) for what in ("rows", "values")
    }
    assert torch.equal(tensors["layer.1.order.2.values"][0], edit.new)
    assert tensors["layer.1.order.2.rows"][0].tolist() == list(edit.rows)
    assert [entry["text"] for entry in about["ngrams"] if entry["layer"] == 1] == ["w5 w9", "w1 w2 w3", "w1 w2"]
    third = about["ngrams"][2]
    assert (third["order"], third["index"], third["ids"]) == (2, 1, [1, 2])
    assert about["identity"]["1"] == handle.memory.layer(1).table.identity
    table = handle.memory.layer(0).table
    assert torch.equal(tensors["layer.0.order.3.values"][0], table.read(tensors["layer.0.order.3.rows"][0]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(editing, "write_tensors", broken)
    with pytest.raises(OSError, match="No space"):
        handle.export_rows(tmp_path / "some", [[1, 2]])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
