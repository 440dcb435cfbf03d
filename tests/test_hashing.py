"""Row numbers: literal vectors from outside, transformers' own n-gram code as a judge, boundaries, causality."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from engram import families
from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig, HashConfig
from engram.hashing import NgramHash, multipliers, table_sizes, total_rows

GOLDEN = families.golden()
CASES = [(name, layer) for name, g in GOLDEN.items() for layer in g.get("by_layer", {"input": 0})]
CFG = EngramConfig(hidden_size=8, layers=(1,), orders=(2, 3), heads=2, head_dim=4, rows=97)


@pytest.mark.parametrize(("family", "layer"), CASES)
def test_golden_rows(family: str, layer: str) -> None:
    golden = GOLDEN[family]
    expected = golden["by_layer"][layer] if "by_layer" in golden else golden
    cfg = families.get(family)
    module = NgramHash(cfg, 0 if layer == "input" else int(layer))
    ids = torch.tensor([golden["ids"]])
    blocked = torch.zeros_like(ids, dtype=torch.bool)
    blocked[:, golden.get("blocked_positions", [])] = True
    rows = module.rows(ids, blocked=blocked)[0]
    if family == "blt":  # published per group size, without offsets
        rows = rows - module.offsets
    assert rows.tolist() == expected["rows"]
    for name in ("sizes", "offsets", "multipliers"):
        if name in expected:
            assert getattr(module, name).tolist() == expected[name]
    if "total_rows" in expected:
        assert module.total_rows == expected.get("padded_rows", expected["total_rows"])


def test_maxtext_multipliers_are_32_bit() -> None:
    cfg = families.get("maxtext")  # literal numbers of the family table, 98,627 classes
    assert multipliers(cfg, 1, 98_627) == (3265, 17925, 13497)
    assert multipliers(cfg, 15, 98_627) == (21413, 6765, 18761)


def test_32_bit_products_wrap() -> None:
    module = NgramHash(families.get("maxtext"), 1)
    ids = torch.tensor([[7, 98_626, 98_625]])

    def wrap(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    mix = wrap(98_625 * 3265) ^ wrap(98_626 * 17925)
    assert module.rows(ids)[0, 2, 0].item() == mix % 646_403


def test_multiplier_zero_belongs_to_the_current_token() -> None:
    """Ids 4, 6, 10 with multipliers 11, 7, 3, filler 0 and sizes 23, 29: pairing from the oldest id gives (5, 12)."""
    cfg = EngramConfig(hidden_size=4, orders=(2, 3), heads=1, head_dim=2, rows=(23, 29), filler=0, boundary="none")
    module = NgramHash(cfg, 1, vocab_size=16)
    module.constants = dataclasses.replace(module.constants, multipliers_KN=torch.tensor([[11, 7, 0], [11, 7, 3]]))
    rows = module.rows(torch.tensor([[4, 6, 10]])) - module.offsets
    assert module.sizes.tolist() == [23, 29]
    assert rows[0].tolist() == [[21, 15], [2, 7], [22, 14]]


def _qwen(vocab: int, layers: tuple[int, ...], eos: int) -> tuple[EngramConfig, Qwen4ExpTextConfig]:
    theirs = Qwen4ExpTextConfig(
        vocab_size=vocab,
        hidden_size=32,
        ple_layer_ids=[layer + 1 for layer in layers],
        ple_embed_dim=48,
        ngram_size=4,
        heads_per_ngram=2,
        ngram_vocab_size_base=500,
        make_ngram_vocab_size_divisible_by=128,
        seed=1234,
        eos_token_id=eos,
        hc_count=2,
        num_hidden_layers=4,
    )
    ours = families.get("qwen3.8-flash-next").replace(
        hidden_size=32, layers=layers, orders=(2, 3, 4), heads=2, head_dim=8, rows=500, filler=eos, eos=(eos,),
        vocab_size=vocab, branches=2,
    )  # fmt: skip
    return ours, theirs


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_transformers_qwen4_exp_reads_the_same_rows(position: int, padding: str) -> None:
    ours, theirs = _qwen(vocab=300, layers=(1, 2), eos=7)
    judge = Qwen4ExpTextNGramEmbedding(theirs, theirs.ple_embed_dim, ours.layers[position], position)
    module = NgramHash(ours, ours.layers[position])
    assert judge.layer_multipliers.tolist() == module.multipliers.tolist()
    assert judge.ngram_embedding.num_embeddings == module.total_rows
    generator = torch.Generator().manual_seed(position)
    ids = torch.randint(0, 300, (6, 40), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = 7
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :9] = mask[3, :1] = 0
    elif padding == "right":
        mask[2, 30:] = 0
    elif padding == "holes":
        mask = (torch.rand(ids.shape, generator=generator) > 0.15).long()
    with torch.no_grad():
        judge.ngram_embedding.weight.copy_(torch.arange(judge.ngram_embedding.num_embeddings).float().unsqueeze(1))
        read = judge(torch.where(mask.bool(), ids, 7), None)[..., ::8].long()  # each row holds its own number
    assert torch.equal(module.rows(ids, mask=mask), read)


def test_changing_one_id_changes_no_earlier_row_and_order_n_rows_depend_on_n_ids() -> None:
    cfg = CFG.replace(orders=(1, 2, 3, 4), rows=100_003)
    module = NgramHash(cfg, 1, vocab_size=50_000)
    ids = torch.randint(0, 50_000, (1, 30), generator=torch.Generator().manual_seed(0))
    base = module.rows(ids)
    for t in (0, 11, 29):
        changed = ids.clone()
        changed[0, t] = (changed[0, t] + 12_345) % 50_000
        differs = (module.rows(changed) != base)[0]
        for column in range(cfg.columns):
            order = cfg.orders[column // cfg.heads]
            assert differs[:, column].nonzero().flatten().tolist() == list(range(t, min(t + order, 30)))


def test_packed_documents_read_what_they_read_alone() -> None:
    module = NgramHash(CFG, 1, vocab_size=100)
    a, b = torch.randint(0, 100, (1, 7)), torch.randint(0, 100, (1, 9))
    packed = torch.cat([a, b], dim=1)
    segments = torch.tensor([[0] * 7 + [1] * 9])
    rows = module.rows(packed, segment_ids=segments)
    assert torch.equal(rows, torch.cat([module.rows(a), module.rows(b)], dim=1))
    assert not torch.equal(rows, module.rows(packed))
    none = NgramHash(CFG.replace(boundary="none"), 1, vocab_size=100)
    assert torch.equal(none.rows(packed, segment_ids=segments), none.rows(packed))


def test_left_padding_reads_what_the_text_reads_alone() -> None:
    module = NgramHash(CFG, 1, vocab_size=100)
    text = torch.randint(0, 100, (1, 8))
    padded = torch.cat([torch.full((1, 5), 3), text], dim=1)
    mask = torch.tensor([[0] * 5 + [1] * 8])
    assert torch.equal(module.rows(padded, mask=mask)[:, 5:], module.rows(text))


def test_every_id_of_an_eos_list_is_a_boundary() -> None:
    cfg = CFG.replace(boundary="eos", eos=(5, 9))
    module = NgramHash(cfg, 1, vocab_size=100)
    for eos in (5, 9):
        ids = torch.tensor([[1, 2, eos, 3, 4]])
        alone = torch.tensor([[3, 4]])
        assert torch.equal(module.rows(ids)[:, 3:], module.rows(alone))
        assert torch.equal(module.rows(ids)[:, :3], NgramHash(CFG, 1, vocab_size=100).rows(ids)[:, :3])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("family", ["deepseek-v4.1", "qwen3.8-flash-next", "longcat-flash-lite", "blt"])
def test_history_in_chunks_equals_the_whole(family: str, chunk: int) -> None:
    cfg = families.get(family)
    module = NgramHash(cfg, cfg.layers[0])
    size = min(module.vocab_size, 1000)
    ids = torch.randint(0, size, (2, 15), generator=torch.Generator().manual_seed(1))
    if cfg.eos:
        ids[0, 4] = ids[1, 8] = cfg.eos[0]
    blocked = torch.zeros_like(ids, dtype=torch.bool)
    blocked[1, 6:8] = True
    whole = module.rows(ids, blocked=blocked)
    history = torch.full((2, cfg.max_order - 1), -1)
    parts = []
    for start in range(0, 15, chunk):
        new, dead = ids[:, start : start + chunk], blocked[:, start : start + chunk]
        parts.append(module.rows(new, blocked=dead, history=history))
        history = torch.cat([history, new.masked_fill(dead, -1)], dim=1)[:, -(cfg.max_order - 1) :]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_ids_outside_the_vocabulary_get_the_filler_and_are_counted() -> None:
    module = NgramHash(CFG, 1, vocab_size=100)
    bad = torch.tensor([[1, -100, 2, 100, 3, 2**40]])
    rows = module.rows(bad)
    assert int(module.masked) == 3
    window = module.window(bad)
    assert window.max() == module.filler == 100 and window.min() >= 0
    assert ((rows >= 0) & (rows < module.total_rows)).all()


def test_rows_stay_inside_their_head_up_to_the_largest_id() -> None:
    for cfg in (families.get("deepseek-v4.1"), families.get("longcat-flash-lite"), families.get("blt"), CFG):
        module = NgramHash(cfg, cfg.layers[0])
        top = module.vocab_size - 1
        ids = torch.randint(0, top + 1, (4, 64))
        ids[:, ::3] = top
        local = module.rows(ids) - module.offsets
        assert (local >= 0).all() and (local < module.sizes).all()
        if cfg.hash.engine == "xor":
            assert (module.classes - 1) * max(module.multipliers.tolist()) < 2**63


def test_any_31_bit_id_is_valid_without_a_vocabulary() -> None:
    module = NgramHash(CFG, 1)
    module.rows(torch.tensor([[0, 2**31 - 2, 17]]))
    assert int(module.masked) == 0


def test_no_prime_is_used_twice_across_layers() -> None:
    sizes = table_sizes(CFG.replace(layers=(3, 0, 1)))
    flat = [size for layer in (3, 0, 1) for size in sizes[layer]]
    assert len(set(flat)) == len(flat) and flat == sorted(flat)
    assert total_rows(CFG.replace(hash=HashConfig(pad_rows_to=64)), 1) % 64 == 0


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_constants_survive_casts(cast: str) -> None:
    module = NgramHash(families.get("deepseek-v4.1"), 1)
    expected = module.multipliers.tolist()
    getattr(module, cast)()
    module.type(torch.float16)
    assert module.multipliers.dtype == torch.int64 and module.multipliers.tolist() == expected


def test_constants_survive_the_meta_device_and_a_junk_filled_allocator(nan_empty: None) -> None:
    cfg = families.get("toy")
    with torch.device("meta"):
        module = NgramHash(cfg, 15)
    assert module.multipliers.is_meta
    module.to_empty(device="cpu")
    golden = GOLDEN["toy"]
    assert module.rows(torch.tensor([golden["ids"]]))[0].tolist() == golden["by_layer"]["15"]["rows"]
    module.to_empty(device="cpu")
    assert module.rows(torch.tensor([golden["ids"]]))[0].tolist() == golden["by_layer"]["15"]["rows"]


def test_saved_constants_are_checked_not_copied() -> None:
    saved = NgramHash(CFG, 1, vocab_size=100).state_dict()
    NgramHash(CFG, 1, vocab_size=100).load_state_dict(saved)
    for other in (CFG.replace(seed=1), CFG.replace(rows=89)):
        with pytest.raises(RuntimeError, match="hash constants differ"):
            NgramHash(other, 1, vocab_size=100).load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        NgramHash(CFG, 1, vocab_size=100).load_state_dict({})


def test_bad_input_names_the_field_and_the_value() -> None:
    module = NgramHash(CFG, 1, vocab_size=100)
    with pytest.raises(TypeError, match="float"):
        module.rows(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"\[4\]"):
        module.rows(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="segment_ids"):
        module.rows(torch.zeros(1, 4, dtype=torch.int64), segment_ids=torch.zeros(1, 3, dtype=torch.int64))
    for name in ("segment_ids", "mask", "blocked"):
        with pytest.raises(TypeError, match=name):
            module.rows(torch.zeros(1, 4, dtype=torch.int64), **{name: torch.full((1, 4), -1e9)})
    with pytest.raises(ConfigError, match="layer: 2"):
        NgramHash(CFG, 2)
    with pytest.raises(ConfigError, match="re-addressed"):
        NgramHash(families.get("deepseek-demo"), 1, token_map=TokenMap(list(range(5))))
    with pytest.raises(ConfigError, match="deepseek-demo"):
        families.get("deepseek-dem")


def test_empty_sequences_and_small_integer_types() -> None:
    module = NgramHash(CFG, 1, vocab_size=100)
    assert module.rows(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, CFG.columns)
    ids = torch.tensor([[3, 99, 7]])
    assert torch.equal(module.rows(ids.to(torch.int16)), module.rows(ids))
    assert torch.equal(module.rows(ids.to(torch.uint8)), module.rows(ids))


def test_a_token_map_makes_ids_raw() -> None:
    tmap = TokenMap([0, 1, 2, 1, 0])
    raw, canonical = NgramHash(CFG, 1, token_map=tmap), NgramHash(CFG, 1, vocab_size=3)
    ids = torch.tensor([[0, 3, 4, 2, 1]])
    assert torch.equal(raw.rows(ids), canonical.rows(tmap.map[ids]))
    assert torch.equal(raw.rows(torch.tensor([[7, 1]]))[:, 1], raw.rows(torch.tensor([[-1, 1]]))[:, 1])


def test_an_average_of_weights_cannot_change_the_constants() -> None:
    module = NgramHash(families.get("toy"), 1)
    average = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    for _ in range(3):
        average.update_parameters(module)
    golden = GOLDEN["toy"]
    assert average.module.rows(torch.tensor([golden["ids"]]))[0].tolist() == golden["by_layer"]["1"]["rows"]


def test_assigning_a_state_dict_to_a_module_on_the_meta_device_makes_it_real() -> None:
    saved = NgramHash(families.get("toy"), 1).state_dict()
    with torch.device("meta"):
        module = NgramHash(families.get("toy"), 1)
    module.load_state_dict(saved, assign=True)
    golden = GOLDEN["toy"]
    assert module.rows(torch.tensor([golden["ids"]]))[0].tolist() == golden["by_layer"]["1"]["rows"]


def test_a_state_of_another_map_filler_or_boundary_is_refused() -> None:
    """Maps of equal size give equal multipliers: only a digest tells them apart."""
    a, b = TokenMap([0, 1, 2, 1, 0]), TokenMap([0, 0, 1, 1, 2])
    saved = NgramHash(CFG, 1, token_map=a).state_dict()
    NgramHash(CFG, 1, token_map=a).load_state_dict(saved)
    for other, tmap in ((CFG, b), (CFG.replace(filler=1), a), (CFG.replace(boundary="eos", eos=(4,)), a)):
        with pytest.raises(RuntimeError, match=r"digest|multipliers"):
            NgramHash(other, 1, token_map=tmap).load_state_dict(saved)


def test_vocabularies_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="50 differs from 1000"):
        NgramHash(CFG.replace(vocab_size=1000), 1, vocab_size=50)
    with pytest.raises(ConfigError, match="no room for multipliers"):
        NgramHash(CFG.replace(hash=HashConfig(width=32)), 1)
    tmap = TokenMap([0, 1, 2, 1, 0])
    assert NgramHash(CFG, 1, vocab_size=5, token_map=tmap).vocab_size == 3, "the number of raw ids is no disagreement"
    with pytest.raises(ConfigError, match="vocab_size: 4 classes"):
        NgramHash(CFG, 1, vocab_size=4, token_map=tmap)


def test_constants_made_or_moved_in_inference_mode_work_outside_it() -> None:
    with torch.inference_mode():
        module = NgramHash(CFG, 1, vocab_size=100)
        module.to("cpu")
    module.rows(torch.tensor([[1, 1000]]))
    assert int(module.masked) == 1


def test_the_prime_search_of_the_largest_family_walks_a_few_hundred_numbers() -> None:
    """24 heads above 20 million: consecutive primes, found without walking far."""
    cfg = CFG.replace(orders=(2, 3, 4), heads=8, rows=20_000_000)
    sizes = table_sizes(cfg)[1]
    assert len(sizes) == 24 and sizes[0] == 20_000_003 and sizes[-1] - sizes[0] < 1000
