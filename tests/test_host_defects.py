"""What a hostile reader of the hosts found: threads, graphs compiled before, masks of one's own, early exits, copies.

Each was a silent wrong number or a wrong error once.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_models import VOCAB, near, some_text, whole_text
from transformers import DynamicCache, StaticCache

import engram
from engram.config import ConfigError, EngramConfig

CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211)
TinyModel = Callable[..., Any]
Build = Callable[..., tuple[Any, engram.Handle]]


@pytest.fixture
def build(tiny_model: TinyModel) -> Build:
    def made(kind: str = "llama", seed: int = 0, model: Any = None, **changes: Any) -> tuple[Any, engram.Handle]:
        model = tiny_model(kind, seed=seed) if model is None else model
        torch.manual_seed(seed)
        handle = engram.attach(model, CFG.replace(**changes))
        generator = torch.Generator().manual_seed(seed)
        for layer in handle.memory.modules_by_layer():
            layer.table.store.rows.normal_(generator=generator)
            layer.conv.data.normal_(generator=generator)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return model, handle

    return made


@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_graphs_that_were_compiled_before_run_the_memory_too(how: str, tiny_model: TinyModel, build: Build) -> None:
    """torch does not look for hooks that came after a graph; after `detach` none may be left in one."""
    model, ids = tiny_model(), some_text()
    if how == "compile":
        model.compile(backend="eager")
        call = model
    else:
        call = torch.compile(model, backend="eager")
    base = whole_text(call, ids)
    _, handle = build(model=model)
    with_memory = whole_text(call, ids)
    assert (with_memory - base).abs().max() > 0.01 and handle.stats()[0]["forwards"] == 1
    handle.detach()
    assert torch.equal(whole_text(call, ids), base)


def test_threads_take_turns(build: Build) -> None:
    """Two forwards of one model, one of which is stopped half way while the other begins."""
    model, _ = build(layers=(1,))
    texts = [some_text(1, 12, seed=n) for n in (1, 2)]
    judges, found = [whole_text(model, text) for text in texts], {}
    inside, go = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            go.wait(5)

    hook = model.model.layers[0].register_forward_hook(pause)
    workers = [threading.Thread(target=lambda n=n: found.update({n: whole_text(model, texts[n])})) for n in (0, 1)]
    workers[0].start()
    inside.wait(5)
    workers[1].start()
    workers[1].join(0.3)
    assert 1 not in found, "the second forward has not waited"
    go.set()
    for worker in workers:
        worker.join(20)
    hook.remove()
    for n, judge in enumerate(judges):
        assert torch.equal(found[n], judge)


def test_a_thread_does_not_wait_for_ever(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram import handles

    model, handle = build()
    monkeypatch.setattr(handles, "TURN_TIMEOUT", 0.05)
    hook = model.model.layers[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        whole_text(model, some_text())
    hook.remove()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            whole_text(model, some_text())
        except RuntimeError as error:
            errors.append(error)

    worker = threading.Thread(target=other)
    worker.start()
    worker.join(20)
    assert "another thread has not ended" in str(errors[0])
    whole_text(model, some_text())  # the thread that was interrupted goes on, and gives its turn back
    assert handle._holder == 0


def test_replicas_are_refused(build: Build) -> None:
    model, _ = build()
    replica = copy.copy(model.model)
    with pytest.raises(RuntimeError, match="replica"):
        replica(some_text())


def test_documents_in_a_mask_of_attention_cut_hash_and_convolution(build: Build) -> None:
    model, _ = build()
    ids = some_text()
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[8:, :8] = False
    other = ids.clone()
    other[:, :8] = (other[:, :8] + 7) % VOCAB
    added = torch.zeros(20, 20).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, added):
        given = given.expand(2, 1, 20, 20)
        packed = whole_text(model, ids, attention_mask=given)
        assert torch.equal(packed[:, 8:], whole_text(model, other, attention_mask=given)[:, 8:])
        positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
        alone = whole_text(model, ids[:, 8:])
        rotated = whole_text(model, ids, position_ids=positions)  # without a mask: what the host itself isolates
        near(rotated[:, 8:], alone)
    assert model(ids, attention_mask=mask.expand(2, 1, 20, 20), use_cache=True).cache.layers[-1].is_initialized


def test_a_tree_of_drafts_is_refused(build: Build) -> None:
    model, _ = build()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[4, 3] = False  # a sibling of the token before it
    with pytest.raises(ValueError, match="a tree of drafts"):
        whole_text(model, some_text(1, 6), attention_mask=mask.view(1, 1, 6, 6))
    cache = model(some_text(1, 4), use_cache=True).cache
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[2, 5] = mask[1, 6] = mask[0, 5:] = False
    with pytest.raises(ValueError, match="a tree of drafts"):
        model(some_text(1, 3), cache=cache, attention_mask=mask.view(1, 1, 3, 7))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 5] = mask[1, 4] = False  # two branches of the text in the cache
    with pytest.raises(ValueError, match="packed documents cannot be continued"):
        model(some_text(1, 2), cache=cache, attention_mask=mask.view(1, 1, 2, 6))


def test_additive_masks_are_read_by_what_they_hide(build: Build) -> None:
    """A bias, also on a token's own place, hides nothing; a head that does not see itself is not padding."""
    model, _ = build()
    ids = some_text()
    hidden = torch.finfo(torch.float32).min
    causal = torch.zeros(20, 20).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), hidden)
    plain = whole_text(model, ids)
    near(whole_text(model, ids, attention_mask=(causal + 1.0).expand(2, 1, 20, 20)), plain)
    heads = causal.expand(1, 2, 20, 20).clone()
    heads[0, 0].diagonal()[1:] = hidden
    found = whole_text(model, ids, attention_mask=heads)
    rows = model.engram.layer(0).taps["rows"]
    assert torch.equal(rows, model.engram.layer(0).hash.rows(ids)) and bool(found.isfinite().all())


def test_masks_longer_than_the_text_and_of_one_text(build: Build) -> None:
    model, _ = build()
    ids = some_text()
    near(whole_text(model, ids, attention_mask=torch.ones(1, 20)), whole_text(model, ids))
    cache = StaticCache(config=model.config, max_cache_len=24)
    long = torch.ones(2, 24, dtype=torch.int64)
    with torch.no_grad():
        found = [model(ids[:, :9], cache=cache, attention_mask=long).logits]
        found += [model(ids[:, 9:], cache=cache, attention_mask=long).logits]
    near(torch.cat(found, dim=1), whole_text(model, ids))


def test_hosts_that_remember_in_another_way_are_refused() -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    model = RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32))
    with pytest.raises(ConfigError, match="takes no cache of transformers"):
        engram.attach(model, CFG)
    assert not hasattr(model, "engram")


def test_recurrent_hosts_decode(build: Build) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, expand=1, time_step_rank=4
    )
    model, _ = build(model=MambaForCausalLM(config).eval())
    ids = some_text(1, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_a_first_forward_that_dies_leaves_other_caches_alone(build: Build) -> None:
    model, _ = build()
    ids = some_text()
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(some_text(seed=5), use_cache=True)
        hook.remove()
        found = model(ids[:, 6:8], cache=cache).logits
        assert sum(type(layer).__name__ == "StateLayer" for layer in cache.layers) == 1
        cache.crop(-1)
        copied = copy.deepcopy(cache)
        found = torch.cat([found[:, :1], model(ids[:, 7:], cache=copied).logits], dim=1)
    near(found, whole_text(model, ids)[:, 6:])


def test_after_an_error_the_embedding_is_itself_again(build: Build) -> None:
    model, _ = build(site="embedding", layers=(0,))
    ids, words = some_text(), model.get_input_embeddings()
    hook = model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole_text(model, ids)
    hook.remove()
    assert torch.equal(words(ids), words.weight[ids])


def test_an_early_exit_below_the_memory_is_an_error_before_anything_runs(build: Build) -> None:
    model, _ = build()
    ids = some_text(1, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(RuntimeError, match="runs 1 blocks in this forward"):
        model.generate(ids, assistant_early_exit=1, **options)
    model.config.num_hidden_layers = 2  # the host leaves its own config so, memory or not
    lower, _ = build(layers=(0,))
    assert torch.equal(lower.generate(ids, assistant_early_exit=1, **options), lower.generate(ids, **options))


def test_a_cache_beside_that_of_an_encoder(build: Build, tiny_model: TinyModel) -> None:
    model, _ = build(model=tiny_model("gpt2", add_cross_attention=True))
    ids = some_text()
    encoded = {"encoder_hidden_states": torch.randn(2, 5, 32)}
    judge = whole_text(model, ids, **encoded)
    with torch.no_grad():
        first = model(ids[:, :7], use_cache=True, **encoded)
        second = model(ids[:, 7:], cache=first.cache, **encoded)
    near(torch.cat([first.logits, second.logits], dim=1), judge)


def test_values_below_an_adapter_that_is_merged(build: Build, tiny_model: TinyModel) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["v_proj"]))
    handle = engram.attach(wrapped, CFG.replace(site="value"))
    for layer in handle.memory.modules_by_layer():
        layer.table.store.rows.normal_()
    ids = some_text()
    judge = whole_text(wrapped, ids)
    near(whole_text(wrapped.merge_and_unload(), ids), judge)
    assert handle.stats()[0]["forwards"] == 2


def test_a_copied_block_does_not_take_the_model_along(build: Build) -> None:
    model, _ = build()

    def models() -> int:
        gc.collect()
        return sum(type(one) is type(model) for one in gc.get_objects())

    before = models()
    block = copy.deepcopy(model.model.layers[0])
    assert models() == before and block._forward_pre_hooks
    ids = some_text()
    copied = copy.deepcopy(model)
    copied.engram.layer(0).table.store.rows.zero_()
    copied.engram.layer(1).table.store.rows.zero_()
    with_memory = whole_text(model, ids)
    assert (whole_text(copied, ids) - with_memory).abs().max() > 0.01
    assert torch.equal(whole_text(model, ids), with_memory)


def test_an_embedding_that_lies_elsewhere(tiny_model: TinyModel, build: Build, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    judge, _ = build()
    model = tiny_model()
    places = dict.fromkeys(("model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = dispatch_model(
        model, {"model.embed_tokens": "disk", **places}, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert next(model.parameters()).is_meta
    model, _ = build(model=model)
    judge.engram.load_state_dict(model.engram.state_dict())
    near(whole_text(model, some_text()), whole_text(judge, some_text()))


def test_attaching_twice_is_seen_from_inside_and_outside(build: Build) -> None:
    model, handle = build()
    for part in (model, model.model):
        with pytest.raises(ConfigError, match="has a memory already"):
            engram.attach(part, CFG)
    handle.detach()
    engram.attach(model.model, CFG)
    with pytest.raises(ConfigError, match="has a memory already"):
        engram.attach(model, CFG)


def test_a_static_window_is_rolled_back_while_it_has_forgotten_nothing(build: Build) -> None:
    model, handle = build("gemma3_text")
    ids = some_text(1, 12)
    cache = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(ids[:, :7], cache=cache)
        cache.crop(-3)
        found = model(ids[:, 4:7], cache=cache).logits
        near(found, whole_text(model, ids[:, :7])[:, 4:])
        model(ids[:, 7:], cache=cache)  # past the window of 8
        model(ids[:, :1], cache=cache)
    state = cache.layers[-1].state
    assert not state.free and state.owner == handle.memory.number


def test_a_cache_knows_its_memory_among_copies(build: Build) -> None:
    model, handle = build()
    ids = some_text()
    with torch.no_grad():
        cache = copy.deepcopy(model(ids, use_cache=True).cache)
        model(ids[:, :1], cache=cache)  # its own
        copied = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="did not see"):
            copied(ids[:, :1], cache=cache)
    assert copied.engram.number != handle.memory.number and len(handle.memory.number) == 16


def test_texts_that_end_at_different_times(build: Build) -> None:
    """A finished text gets padding while the others go on; theirs is not disturbed."""
    model, _ = build()
    ids = some_text(4, 8)
    options = {"max_new_tokens": 24, "do_sample": False}
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    end = int(greedy[0, 12])
    together = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=end, **options)
    for text, answer in zip(ids, together, strict=True):
        alone = model.generate(text[None], attention_mask=torch.ones(1, 8), eos_token_id=end, **options)[0]
        assert torch.equal(answer[: len(alone)], alone) and not answer[len(alone) :].any()


def test_gradients_through_a_cached_forward(build: Build) -> None:
    ids, found = some_text(), []
    for pieces in ([20], [8, 12]):
        model, handle = build()
        cache, loss, start = DynamicCache(config=model.config), torch.zeros(()), 0
        for size in pieces:
            out = model(ids[:, start : start + size], cache=cache, use_cache=True)
            loss, start = loss + out.logits.logsumexp(-1).sum(), start + size
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.numel() and p.grad is not None]
        found.append([*grads, handle.memory.layer(0).table.proxy.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_any_order_of_cache_calls(kind: str, build: Build) -> None:
    """Random forwards, crops, reorderings, copies, repetitions, selections against lists of ids kept by hand."""
    model, _ = build(kind)
    generator = torch.Generator().manual_seed(3)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    texts = torch.empty(2, 0, dtype=torch.int64)
    for _ in range(60):
        kind_of_call = draw(6)
        if kind_of_call == 1 and texts.shape[1] > 4 and kind == "llama":
            count = 1 + draw(3)
            cache.crop(-count)
            texts = texts[:, :-count]
        elif kind_of_call == 2 and texts.shape[1]:
            order = torch.randint(len(texts), (len(texts),), generator=generator)
            cache.reorder_cache(order)
            texts = texts[order]
        elif kind_of_call == 3:
            cache = copy.deepcopy(cache)
        elif kind_of_call == 4 and texts.shape[1] and len(texts) < 3:
            cache.batch_repeat_interleave(2)
            texts = texts.repeat_interleave(2, dim=0)
        elif kind_of_call == 5 and texts.shape[1] and len(texts) > 2:
            chosen = torch.tensor([0, len(texts) - 1])
            cache.batch_select_indices(chosen)
            texts = texts[chosen]
        new = some_text(len(texts), 1 + draw(3), seed=draw(1000))
        texts = torch.cat([texts, new], dim=1)
        with torch.no_grad():
            found = model(new, cache=cache, use_cache=True).logits
        near(found, whole_text(model, texts)[:, -new.shape[1] :])
        if texts.shape[1] > 60:
            cache.reset()
            texts = texts[:, :0]
