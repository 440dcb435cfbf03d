"""Decoding is the same function: with any cache and in any mode, logits and rows are those of the whole sequence.

One suite over all hosts. The judge is the forward of the whole text without a cache. A mode that fails in the host
itself is asserted to fail there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_models import TOLERANCE, some_text, whole_text
from torch import Tensor
from transformers import DynamicCache, StaticCache

import engram
from engram.config import EngramConfig
from engram.decoding import Columns
from engram.hosts import ENTRIES

ONE_OF_EACH_KIND = ("llama", "gpt2", "gemma3_text", "deepseek_v4")
"""Plain, learned positions, sliding windows, residual streams; `make test-all` runs the others, too."""
HOSTS = [kind if kind in ONE_OF_EACH_KIND else pytest.param(kind, marks=pytest.mark.slow) for kind in ENTRIES]
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211)
TinyModel = Callable[..., Any]


@pytest.fixture
def build(tiny_model: TinyModel) -> Callable[..., tuple[Any, engram.Handle]]:
    def made(kind: str, seed: int = 0, **changes: Any) -> tuple[Any, engram.Handle]:
        model = tiny_model(kind, seed=seed)
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        streams = ENTRIES[kind].streams
        branches = 1 if streams is None or "site" in changes else getattr(model.config, streams)
        handle = engram.attach(model, CFG.replace(branches=branches, **changes))
        for layer in handle.memory.modules_by_layer():
            layer.table.store.rows.normal_()
            if layer.conv is not None:
                layer.conv.data.normal_()
            if layer.value is not None:
                layer.value.weight.data.normal_(std=0.05)
        return model, handle

    return made


@torch.no_grad()
def _in_pieces(model: Any, handle: Any, ids: Tensor, sizes: list[int], cache: Any, mask: Any = None) -> dict[str, Any]:
    """Logits and rows of `ids` read in pieces, the rest token by token, and the cache that is then there."""
    logits, rows, start = [], [], 0
    sizes = sizes + [1] * (ids.shape[1] - sum(sizes))
    for size in sizes:
        kwargs = {} if mask is None else {"attention_mask": mask[:, : start + size]}
        if mask is not None:
            kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, start : start + size]
        out = model(ids[:, start : start + size], cache=cache, use_cache=True, **kwargs)
        cache, start = out.cache, start + size
        logits.append(out.logits)
        if handle is not None:
            rows.append(torch.stack([handle.taps()[layer]["rows"] for layer in handle.memory.cfg.layers]))
    return {"logits": torch.cat(logits, dim=1), "rows": torch.cat(rows, dim=2) if rows else None, "cache": cache}


def _rows(handle: engram.Handle, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return torch.stack([layer.hash.rows(ids, mask=mask) for layer in handle.memory.modules_by_layer()])


def _host_fails(kind: str, mode: str, call: Callable[[], Tensor]) -> bool:
    """Whether the untouched host fails in this mode, which its entry must say: its error, or what it raises."""
    if mode not in ENTRIES[kind].fails:
        return False
    try:
        error = float(call().abs().max())
    except Exception:
        error = float("inf")
    assert error > 1e-3, f"{kind} does not fail in mode {mode}"
    return True


CACHES: dict[str, Callable[[Any], Any]] = {
    "made by the host": lambda config: None,
    "dynamic": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", HOSTS)
def test_reading_in_pieces(kind: str, cache: str, build: Any, tiny_model: TinyModel) -> None:
    ids = some_text()
    plain = tiny_model(kind)
    made = CACHES[cache]
    if _host_fails(
        kind,
        cache,
        lambda: _in_pieces(plain, None, ids, [5, 3], made(plain.config))["logits"] - whole_text(plain, ids),
    ):
        return
    model, handle = build(kind)
    judge, rows = whole_text(model, ids), _rows(handle, ids)
    assert float((judge - whole_text(plain, ids)).abs().max()) > 0.01, "the memory does nothing"
    for sizes in ([20], [1], [2, 2], [3, 3, 3], [7, 7], [5, 1, 9]):
        found = _in_pieces(model, handle, ids, sizes, made(model.config))
        assert torch.equal(found["rows"], rows), f"rows in pieces {sizes}"
        torch.testing.assert_close(found["logits"], judge, rtol=TOLERANCE, atol=TOLERANCE, msg=f"pieces {sizes}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", HOSTS)
def test_padding_and_unequal_prompts(kind: str, side: str, build: Any, tiny_model: TinyModel) -> None:
    """On the left: each text gets the logits of that text alone. Inside: those of the same padded text, read whole."""
    ids, mask = some_text(), torch.ones(2, 20, dtype=torch.int64)
    if side == "left":
        mask[1, :6], ids[1, :6] = 0, 0
    else:  # padding between the prompt and what is decoded
        mask[1, 4:8], ids[1, 4:8] = 0, 0
    plain = tiny_model(kind)

    def error(model: Any, handle: Any) -> Tensor:
        found = _in_pieces(model, handle, ids, [8, 2], DynamicCache(config=model.config), mask)
        if handle is not None:
            live = mask.bool()
            assert torch.equal(found["rows"][:, live], _rows(handle, ids, mask)[:, live])
        alone = whole_text(model, ids[1:, mask[1].bool()])
        if side == "left" or handle is None:
            return found["logits"][1, mask[1].bool()] - alone[0]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        whole = whole_text(model, ids, attention_mask=mask, position_ids=positions)  # a barrier for the look-back
        return found["logits"][mask.bool()] - whole[mask.bool()]

    if _host_fails(kind, f"{side} padding", lambda: error(plain, None)):
        return
    assert float(error(*build(kind)).abs().max()) < TOLERANCE


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "sampled beams": {"num_beams": 3, "do_sample": True, "temperature": 1.5},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "offloaded": {"do_sample": False, "cache_implementation": "offloaded"},
}


NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="offloaded caches need a GPU")


@pytest.mark.parametrize("mode", [pytest.param(m, marks=NEEDS_A_GPU) if m == "offloaded" else m for m in GENERATE])
@pytest.mark.parametrize("kind", HOSTS)
def test_generating(kind: str, mode: str, build: Any, tiny_model: TinyModel) -> None:
    """Left-padded prompts of unequal length, with the mode's cache and with none at all: the same texts."""
    ids, mask = some_text(length=9), torch.ones(2, 9, dtype=torch.int64)
    if "left padding" not in ENTRIES[kind].fails:
        mask[1, :4], ids[1, :4] = 0, 0
    options = {"max_new_tokens": 9, "output_logits": True, "return_dict_in_generate": True, **GENERATE[mode]}

    def difference(model: Any) -> Tensor:
        without = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "cache_implementation")}
        found = []
        for given in (options, {**without, "use_cache": False}):
            torch.manual_seed(7)
            out = model.generate(ids, attention_mask=mask, **given)
            found.append((out.sequences, torch.stack(out.logits)))
        if found[0][0].shape != found[1][0].shape or not torch.equal(found[0][0], found[1][0]):
            return torch.tensor(float("inf"))
        return found[0][1] - found[1][1]

    if _host_fails(kind, mode, lambda: difference(tiny_model(kind))):
        return
    assert float(difference(build(kind)[0]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("way", ["assistant", "prompt look-up"])
@pytest.mark.parametrize("kind", HOSTS)
def test_drafts_with_rejections(kind: str, way: str, build: Any, tiny_model: TinyModel) -> None:
    """An assistant that knows nothing is rejected most of the time; what comes out is the greedy text."""
    ids = some_text(1, 10)
    ids[:, 5:] = ids[:, :5]  # so that the prompt can be looked up

    def texts(model: Any, assistant: Any) -> tuple[Tensor, Tensor]:
        options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        drafts = {"assistant_model": assistant} if way == "assistant" else {"prompt_lookup_num_tokens": 3}
        return model.generate(ids, **options, **drafts), model.generate(ids, **options, use_cache=False)

    def difference() -> Tensor:
        drafted, greedy = texts(tiny_model(kind), tiny_model(kind, seed=5))
        return (drafted - greedy) * 1.0 if drafted.shape == greedy.shape else torch.tensor(float("inf"))

    if _host_fails(kind, "drafts", difference):
        return
    model, _ = build(kind)
    drafted, greedy = texts(model, build(kind, seed=5)[0])
    assert torch.equal(drafted, greedy)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_prefix_is_used_again(kind: str, build: Any) -> None:
    """Copies of a cache go on by themselves; a cache rolled back goes on as if nothing had been."""
    model, handle = build(kind)
    prefix, one, two = some_text(2, 6), some_text(2, 5, seed=1), some_text(2, 5, seed=2)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    _in_pieces(model, handle, prefix, [6], cache)
    copied = copy.deepcopy(cache)
    for text, used in ((one, cache), (two, copied)):
        judge = whole_text(model, torch.cat([prefix, text], dim=1))[:, 6:]
        found = _in_pieces(model, handle, text, [2], used)["logits"]
        torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)
    if "drafts" in ENTRIES[kind].fails:
        return
    cache.crop(-5)
    found = _in_pieces(model, handle, two, [1, 3], cache)["logits"]
    torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_full_cache_is_rolled_back_without_having_been_told_before(build: Any) -> None:
    model, handle = build("llama")
    text, other = some_text(2, 12), some_text(2, 4, seed=3)
    cache = _in_pieces(model, handle, text, [12], None)["cache"]
    cache.crop(-9)
    found = _in_pieces(model, handle, other, [2], cache)["logits"]
    judge = whole_text(model, torch.cat([text[:, :3], other], dim=1))[:, 3:]
    torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)
    state = cache.layers[-1].state
    state.settle()
    assert cache.get_seq_length() == state.length == 7


def test_a_bounded_past_is_kept_bounded_and_rolling_back_past_it_raises(build: Any) -> None:
    """Sliding windows forget: convolution inputs are kept as far as the next forward looks, unless all are recorded."""
    model, handle = build("mistral")
    taps = (CFG.conv_kernel - 1) * CFG.max_order
    for recording in (False, True):
        cache = DynamicCache(config=model.config)
        if recording:
            cache.activate_past_recording()
        _in_pieces(model, handle, some_text(1, 30), [4], cache)
        state = cache.layers[-1].state
        state.settle()
        kept = len(state._inputs[0])
        assert kept == (30 if recording else taps)
        if not recording:
            with pytest.raises(RuntimeError, match="activate_past_recording"):
                cache.layers[-1].crop(-3)
    cache.crop(-3)
    assert len(state._inputs[0]) == taps and state.length == 27
    assert cache.layers[-1].record_past  # transformers clears it when it hands a cache out
    cache.layers[-1].record_past = False
    assert not state.recording


def test_texts_are_repeated_selected_and_reordered(build: Any) -> None:
    model, handle = build("llama")
    prefix, text = some_text(2, 7), some_text(4, 4, seed=1)
    cache = _in_pieces(model, handle, prefix, [7], None)["cache"]
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1, 3]))
    order = torch.tensor([1, 0, 1])
    found = _in_pieces(model, handle, text[:3], [1, 2], cache)["logits"]
    judge = whole_text(model, torch.cat([prefix[order], text[:3]], dim=1))[:, 7:]
    torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)
    cache.reset()
    again = _in_pieces(model, handle, text, [4], cache)["logits"]
    torch.testing.assert_close(again, whole_text(model, text), rtol=TOLERANCE, atol=TOLERANCE)


def test_generating_goes_on_after_generating(build: Any) -> None:
    model, _ = build("llama")
    ids = some_text(1, 6)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **options)
    told = torch.cat([first.sequences, some_text(1, 3, seed=9)], dim=1)
    mask = torch.ones_like(told)
    more = model.generate(told, attention_mask=mask, max_new_tokens=5, cache=first.past_key_values, **options)
    judge = model.generate(told, attention_mask=mask, max_new_tokens=5, use_cache=False, do_sample=False)
    assert torch.equal(more.sequences, judge)


@pytest.mark.parametrize(
    "changes",
    [
        {"orders": (1,)},
        {"orders": (2, 3, 4), "conv_kernel": 0},
        {"gate": "none"},
        {"boundary": "eos", "eos": (5, 9)},
        {"site": "embedding", "layers": (0,)},
        {"site": "value"},
        {"placement": "host"},
        {"head_dim": 32, "combine": "sum", "gate": "none"},
        {"head_dim": 32, "combine": "sum", "gate": "none", "mix": "mean", "site": "embedding", "layers": (0,)},
    ],
    ids=str,
)
def test_every_form_of_memory(changes: dict[str, Any], build: Any) -> None:
    for kind in ("llama", "gpt_neox", "phi3", "gpt2") if changes.get("site") == "value" else ("llama",):
        model, handle = build(kind, **changes)
        ids = some_text(seed=4)
        judge = whole_text(model, ids)
        for sizes in ([1], [4, 2]):
            found = _in_pieces(model, handle, ids, sizes, None)
            assert torch.equal(found["rows"], _rows(handle, ids))
            torch.testing.assert_close(found["logits"], judge, rtol=TOLERANCE, atol=TOLERANCE)


def test_ids_outside_the_vocabulary_stay_what_they_are_in_the_history(build: Any) -> None:
    _, handle = build("llama")
    with torch.no_grad():
        ids = some_text(1, 8)
        memory = handle.memory
        ids[0, 3] = -7  # hashed as the filler, and looked back at as such
        whole = [module.hash.rows(ids) for module in memory.modules_by_layer()]
        state = memory.new_state()
        for start in range(8):
            step = memory.start(ids[:, start : start + 1], state=state)
            x = torch.zeros(1, 1, 32)
            for layer, judge in zip(CFG.layers, whole, strict=True):
                memory(layer, x)
                assert torch.equal(step.rows_BTC[layer], judge[:, start : start + 1])


def test_rows_prefetched_for_a_text_that_begins_are_not_those_of_one_that_goes_on(build: Any) -> None:
    _, handle = build("llama", placement="host")
    memory, ids, layer = handle.memory, some_text(1, 6), CFG.layers[0]
    whole = memory.layer(layer).hash.rows(ids)
    state = memory.new_state()
    memory.start(ids[:, :4], state=state)
    for each in CFG.layers:
        memory(each, torch.zeros(1, 4, 32))
    memory.prefetch(ids[:, 4:])  # as the first tokens of another text
    step = memory.start(ids[:, 4:], state=state)
    assert torch.equal(step.rows_BTC[layer], whole[:, 4:]) and len(memory.ahead()) == 1
    begun = memory.start(ids[:, 4:])
    assert torch.equal(begun.rows_BTC[layer], memory.layer(layer).hash.rows(ids[:, 4:])) and not memory.ahead()
    assert not torch.equal(begun.rows_BTC[layer], whole[:, 4:])


def test_caches_that_do_not_belong_together_are_refused(build: Any, tiny_model: TinyModel) -> None:
    model, handle = build("llama")
    other, _ = build("llama", seed=3)
    ids = some_text()
    foreign = other(ids, use_cache=True).cache
    with pytest.raises(RuntimeError, match="a cache of 20 tokens that this memory did not see"):
        model(ids[:, :1], cache=foreign)
    with handle.disabled(), torch.no_grad():
        unseen = model(ids, use_cache=True).cache
    with pytest.raises(RuntimeError, match="did not see"):
        model(ids[:, :1], cache=unseen)
    cache = model(ids, use_cache=True).cache
    with handle.disabled(), torch.no_grad():
        model(ids[:, :1], cache=cache)
    with pytest.raises(RuntimeError, match="the cache holds 21 tokens, its memory has seen 20"):
        model(ids[:, :1], cache=cache)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="a batch of 1 continues a cache of 2 texts"):
        model(ids[:1, :1], cache=cache)
    with pytest.raises(ValueError, match="no list of layers"):
        model(ids, cache=((torch.zeros(1),),))
    with pytest.raises(ValueError, match=r"attention_mask: shape \[2, 3\]"):
        model(ids, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    state = handle.memory.new_state()
    with pytest.raises(ValueError, match="filled by another memory"):
        other.engram.start(ids, state=state)
    with pytest.raises(ValueError, match="packed documents cannot be continued"):
        handle.memory.start(ids, state=state, segment_ids=torch.zeros_like(ids))


def test_a_forward_that_died_leaves_a_cache_that_says_so(build: Any) -> None:
    model, handle = build("llama")
    ids = some_text()
    cache = model(ids[:, :4], use_cache=True).cache
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 4:6], cache=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match="did not reach layer|the cache holds"):
        model(ids[:, 4:6], cache=cache)
    judge = whole_text(model, ids)
    found = _in_pieces(model, handle, ids, [4], None)["logits"]
    torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)


def test_training_keeps_no_state_and_gradients_do_not_depend_on_the_cache(build: Any) -> None:
    gradients = []
    for use_cache in (False, True):
        torch.manual_seed(0)
        model, handle = build("llama")
        ids = some_text()
        model(ids, labels=ids, use_cache=use_cache).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        step = handle.memory._step
        assert step is not None and (step.state is None) == (not use_cache)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_decoding_in_a_compiled_model_compiles_nothing_new(build: Any) -> None:
    """A history and a convolution tail of fixed size: the second decoded token runs the graphs of the first."""
    model, handle = build("llama")
    ids, graphs = some_text(1, 20), []
    judge = whole_text(model, ids)

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, dynamic=False)
    cache, counted = StaticCache(config=model.config, max_cache_len=24), []
    with torch.no_grad():
        logits = [compiled(ids[:, :9], cache=cache, use_cache=True).logits]
        for position in range(9, 20):
            logits.append(compiled(ids[:, position : position + 1], cache=cache, use_cache=True).logits)
            counted.append(len(graphs))
    torch.testing.assert_close(torch.cat(logits, dim=1), judge, rtol=TOLERANCE, atol=TOLERANCE)
    assert counted[0] > 0 and counted[-1] == counted[3], counted
    assert handle.stats()[0]["forwards"] == 13


@pytest.mark.parametrize("package", ["quanto", "hqq"])
def test_quantised_caches(package: str, build: Any, tiny_model: TinyModel) -> None:
    """Rows are the same bits; logits are off by what the host's own are off."""
    pytest.importorskip("optimum.quanto" if package == "quanto" else "hqq")
    from transformers import QuantizedCache

    ids = some_text(1, 20)

    def cache(model: Any) -> Any:
        return QuantizedCache(package, model.config, nbits=4 if package == "quanto" else 8, residual_length=4)

    plain = tiny_model("llama", head_dim=64)
    own = (_in_pieces(plain, None, ids, [8], cache(plain))["logits"] - whole_text(plain, ids)).abs().max()
    model = tiny_model("llama", head_dim=64)
    handle = engram.attach(model, CFG)
    for layer in handle.memory.modules_by_layer():
        layer.table.store.rows.normal_()
        layer.conv.data.normal_()
    found = _in_pieces(model, handle, ids, [8], cache(model))
    assert torch.equal(found["rows"], _rows(handle, ids))
    assert float(own) > 0 and float((found["logits"] - whole_text(model, ids)).abs().max()) < 4 * float(own) + TOLERANCE


def test_columns_are_copied_seldom_and_counted_right() -> None:
    columns, judge = Columns(), torch.empty(2, 0)
    for n in range(100):
        new = torch.full((2, 1 + n % 3), float(n))
        columns.add(new)
        judge = torch.cat([judge, new], dim=1)
        assert len(columns) == judge.shape[1] and len(columns.pieces) < 12
        assert torch.equal(torch.cat(columns.last(7), dim=1), judge[:, -7:])
        if n % 10 == 9:
            columns.drop(5)
            judge = judge[:, :-5]
    columns.keep(3)
    assert torch.equal(torch.cat(columns.pieces, dim=1), judge[:, -3:])
    columns.keep(0)
    assert len(columns) == 0 and columns.last(4) == []
