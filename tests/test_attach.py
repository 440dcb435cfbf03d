"""Memory inside transformers models: bit-identical when zero, out again without a trace, loud where wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engram
import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.hosts import ENTRIES
from engram.memory import UNREACHED_LIMIT, Memory

ONE_OF_EACH_KIND = ("llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen4_exp_text")
HOSTS = [kind if kind in ONE_OF_EACH_KIND else pytest.param(kind, marks=pytest.mark.slow) for kind in ENTRIES]
VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211)
TinyModel = Callable[..., Any]


def _cfg(kind: str) -> EngramConfig:
    return CFG.replace(branches=4 if ENTRIES[kind].streams else 1)


def _ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length))


def _logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=kwargs.pop("use_cache", False), **kwargs).logits


def _filled(handle: engram.Handle) -> engram.Handle:
    for layer in handle.memory.layers.values():
        layer.table.store.rows.normal_()
        layer.conv.data.normal_()
    return handle


@pytest.mark.parametrize("kind", HOSTS)
def test_zero_memory_leaves_the_logits_bit_identical_and_detach_restores(kind: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model(kind), _ids()
    keys, base = list(model.state_dict()), _logits(model, ids)
    handle = engram.attach(model, _cfg(kind))
    assert torch.equal(_logits(model, ids), base)
    assert model.engram is handle.memory and any(key.startswith("engram.") for key in model.state_dict())
    _filled(handle)
    assert not torch.allclose(_logits(model, ids), base)
    with handle.disabled():
        assert torch.equal(_logits(model, ids), base)
    handle.detach()
    handle.detach()
    assert torch.equal(_logits(model, ids), base) and list(model.state_dict()) == keys


@pytest.mark.parametrize("kind", HOSTS)
def test_a_fresh_memory_learns_from_the_first_step(kind: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model(kind).train(), _ids()
    handle = engram.attach(model, _cfg(kind))
    optimizer = engram.optim.build(model, lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        handle.memory.check_learning()
    assert losses[-1] < losses[0]
    for layer, stats in handle.stats().items():
        assert stats["updates"] == 6 and stats["forwards"] == 6
        touched = torch.unique(handle.memory.layer(layer).hash.rows(ids[:, :-1]))  # no label at the end
        changed = handle.memory.layer(layer).table.store.rows.any(dim=1).nonzero().flatten()
        assert torch.equal(touched, changed), "rows change if and only if they are touched"


@pytest.mark.parametrize("kind", HOSTS)
def test_packed_documents_do_not_leak_through_hash_convolution_or_attention(kind: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model(kind), _ids()
    _filled(engram.attach(model, _cfg(kind)))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    other = ids.clone()
    other[:, :5] = (other[:, :5] + 7) % VOCAB
    if "packing" in ENTRIES[kind].fails:
        with pytest.raises(ValueError, match="sees across documents"):
            _logits(model, ids, position_ids=positions)
        return
    packed = _logits(model, ids, position_ids=positions)
    assert torch.equal(packed[:, 5:], _logits(model, other, position_ids=positions)[:, 5:])
    torch.testing.assert_close(packed[:, 5:], _logits(model, ids[:, 5:]), rtol=1e-4, atol=1e-5)
    segments = (torch.arange(12) >= 5).long().expand(2, -1)
    assert torch.equal(_logits(model, ids, segment_ids=segments), packed)


@pytest.mark.parametrize("kind", HOSTS)
def test_left_padded_batches_compute_what_single_texts_do(kind: str, tiny_model: TinyModel) -> None:
    model, text = tiny_model(kind), _ids(1, 8)
    _filled(engram.attach(model, _cfg(kind)))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), text], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = _logits(model, padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(logits[:, 4:], _logits(model, text), rtol=1e-4, atol=1e-5)


def test_packed_documents_with_a_cache_or_a_mask_are_refused(tiny_model: TinyModel) -> None:
    model, ids = tiny_model("llama"), _ids()
    engram.attach(model, CFG)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    for use_cache in (None, True):
        with pytest.raises(ValueError, match="use_cache=False"):
            model(ids, position_ids=positions, use_cache=use_cache)
    with pytest.raises(ValueError, match="without an attention_mask"):
        model(ids, segment_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_recomputation_gives_the_same_gradients(reentrant: bool, tiny_model: TinyModel) -> None:
    ids, gradients = _ids(), []
    for checkpointing in (False, True):
        torch.manual_seed(5)
        model = tiny_model("llama").train()
        handle = _filled(engram.attach(model, CFG))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert all(layer.table.proxy.row_ids is not None for layer in handle.memory.layers.values())
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_the_memory_follows_the_model_in_dtype_and_device(tiny_model: TinyModel) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    handle = engram.attach(model, CFG)
    layer = handle.memory.layer(0)
    assert layer.value.weight.dtype == torch.bfloat16 and layer.table.store.rows.dtype == torch.float32
    assert _logits(model, _ids()).dtype == torch.bfloat16


@pytest.mark.parametrize("mix", ["add", "mean"])
def test_input_level_memory_acts_on_the_embedding(mix: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model("llama"), _ids()
    cfg = CFG.replace(layers=(0,), site="embedding", gate="none", conv_kernel=0, mix=mix)
    handle = _filled_embedding(engram.attach(model, cfg))
    with handle.taps() as taps, torch.no_grad():
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states[0]
    words = nn.functional.embedding(ids, model.model.embed_tokens.weight)
    expected = words + taps[0]["output"]
    torch.testing.assert_close(hidden, expected / (1 + cfg.columns) if mix == "mean" else expected)


def _filled_embedding(handle: engram.Handle) -> engram.Handle:
    handle.memory.layer(0).table.store.rows.normal_()
    return handle


def test_one_hash_per_forward_serves_all_layers(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), _ids()
    handle = engram.attach(model, CFG)
    calls = []
    original = engram.hashing.hash_rows
    monkeypatch.setattr(engram.hashing, "hash_rows", lambda *a: calls.append(1) or original(*a))
    _logits(model, ids)
    assert len(calls) == 1
    for layer in CFG.layers:
        assert torch.equal(handle.taps()[layer]["rows"], handle.memory.layer(layer).hash.rows(ids))


def test_compression_uses_the_tokenizer_of_the_model(tiny_model: TinyModel) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"{'Ab'[i % 2]}{i // 2}": i for i in range(50)}, unk_token="A0"))
    model = tiny_model("llama")
    handle = engram.attach(model, CFG.replace(compress=True), tokenizer=tokenizer)
    tmap = handle.memory.token_map
    assert tmap is not None and len(tmap) == VOCAB and tmap.unmapped == VOCAB - 50
    assert handle.memory.layer(0).hash.vocab_size == tmap.size
    handle.detach()
    with pytest.raises(ConfigError, match="tokenizer"):
        engram.attach(model, CFG.replace(compress=True))


def test_attach_refuses_and_leaves_the_model_as_it_was(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    keys = list(model.state_dict())
    for changes, message in (
        ({"layers": (2,)}, r"block 2 does not exist.*0\.\.1"),
        ({"hidden_size": 16}, "16 differs from the model's 32"),
        ({"branches": 4}, "has 1 stream"),
        ({"site": "value", "branches": 2}, "has 1 stream"),
        ({"placement": "disk"}, "needs the folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            engram.attach(model, CFG.replace(**changes))
    assert list(model.state_dict()) == keys and not model.model._forward_pre_hooks
    with pytest.raises(ConfigError, match=r"deepseek_v3, .*llama.*does not count num_hidden_layers"):
        engram.attach(nn.Linear(3, 3), CFG)
    with pytest.raises(ConfigError, match="OptimizedModule is a wrapper; attach to the model first"):
        engram.attach(torch.compile(model), CFG)
    with pytest.raises(ConfigError, match="DataParallel is a wrapper"):
        engram.attach(nn.DataParallel(model), CFG)
    engram.attach(model, CFG)
    with pytest.raises(ConfigError, match="has a memory already"):
        engram.attach(model, CFG)


def test_ids_are_needed(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    engram.attach(model, CFG)
    with pytest.raises(ValueError, match="pass input_ids"):
        model(inputs_embeds=torch.randn(1, 4, 32), use_cache=False)
    with pytest.raises(ValueError, match=r"\[1, 1, 3, 4\]"):
        model(_ids(1, 4), attention_mask=torch.ones(1, 1, 3, 4), use_cache=False)


def test_a_memory_that_is_never_reached_is_an_error(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    engram.attach(model, CFG)
    model.model.layers = nn.ModuleList([model.model.layers[0]])
    with pytest.raises(RuntimeError, match=r"layer\(s\) \[1\] were attached but never reached"):
        model(_ids(), use_cache=False)


def test_rows_that_nobody_updates_are_an_error(tiny_model: TinyModel) -> None:
    model = tiny_model("llama").train()
    handle = engram.attach(model, CFG)
    handle.memory.idle_limit = 3
    plain = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.1)
    for _ in range(4):
        model(_ids(), use_cache=False).logits.sum().backward()
        plain.step()
    with pytest.raises(RuntimeError, match="got 4 gradients and no optimizer applied one"):
        model(_ids(), use_cache=False)
    with pytest.raises(RuntimeError, match="not been updated by any training step"):
        handle.memory.check_learning()
    for layer in handle.memory.layers.values():
        layer.table.trainable = False
    for _ in range(5):
        model(_ids(), use_cache=False).logits.sum().backward()
    handle.memory.check_learning()


def test_row_gradients_that_are_dropped_again_and_again_are_an_error(tiny_model: TinyModel) -> None:
    model = tiny_model("llama").train()
    engram.attach(model, CFG)
    plain = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)  # does nothing to rows, without a word
    with pytest.raises(RuntimeError, match="33 were dropped"):
        for _ in range(40):
            model(_ids(1, 4), use_cache=False).logits.sum().backward()
            plain.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
def test_a_plain_adam_says_which_optimizer_to_use(fused: bool, tiny_model: TinyModel) -> None:
    model = tiny_model("llama").train()
    engram.attach(model, CFG)
    plain = torch.optim.AdamW(model.parameters(), fused=fused)
    model(_ids(), use_cache=False).logits.sum().backward()
    with pytest.raises(RuntimeError, match=r"engram.optim.build"):
        plain.step()


def test_a_learning_rate_of_zero_is_no_update(tiny_model: TinyModel) -> None:
    model = tiny_model("llama").train()
    handle = engram.attach(model, CFG)
    optimizer = engram.optim.build(model, lr=0.0)
    model(_ids(), use_cache=False).logits.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="not been updated"):
        handle.memory.check_learning()


class OwnModel(nn.Module):
    """A plain torch model: the six lines of the README."""

    def __init__(self, cfg: EngramConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, cfg.hidden_size)
        self.blocks = nn.ModuleList(nn.Linear(cfg.hidden_size, cfg.hidden_size) for _ in range(3))
        self.memory = Memory(cfg)

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.memory.start(ids_BT)
        x_BTD = self.embed(ids_BT)
        for i, block in enumerate(self.blocks):
            if i in self.memory.cfg.layers:
                x_BTD = x_BTD + self.memory(i, x_BTD)
            x_BTD = x_BTD + block(x_BTD).relu()
        return x_BTD


def test_memory_in_a_model_of_ones_own() -> None:
    model = OwnModel(CFG)
    optimizer = engram.optim.build(model, lr=1e-2)
    ids = _ids()
    first = model(ids).square().sum()
    first.backward()
    optimizer.step()
    assert model.memory.layer(1).table.updates == 1 and not torch.equal(model(ids).square().sum(), first)


def test_a_layer_forgotten_in_ones_own_model_is_an_error() -> None:
    memory = Memory(CFG)
    x = torch.zeros(2, 12, 32)
    with pytest.raises(RuntimeError, match="before start"):
        memory(0, x)
    with pytest.raises(ConfigError, match="block 5 has no memory"):
        memory(5, x)
    for _ in range(UNREACHED_LIMIT):
        memory.start(_ids())
        memory(0, x)
    with pytest.raises(RuntimeError, match=r"\[1\] were not called in the last 8 forwards"):
        memory.start(_ids())


class Recomputed(nn.Module):
    """Two blocks that ask for their memory inside an activation checkpoint."""

    def __init__(self, checkpointing: bool, explicit: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, 32)
        self.memory = Memory(CFG.replace(init="normal", init_std=1.0))
        self.checkpointing, self.explicit = checkpointing, explicit

    def forward(self, ids_BT: Tensor) -> Tensor:
        step = self.memory.start(ids_BT)
        x_BTD = self.embed(ids_BT)
        for i in CFG.layers:
            args = (i, x_BTD, step if self.explicit else None)
            if self.checkpointing:
                x_BTD = checkpoint(lambda i, x, s: x + self.memory(i, x, s).tanh(), *args, use_reentrant=False)
            else:
                x_BTD = x_BTD + self.memory(*args).tanh()
        return x_BTD.square().sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("explicit", [False, True])
def test_recomputation_around_the_memory_itself(explicit: bool) -> None:
    a, b = _ids(), _ids()
    found = []
    for checkpointing in (False, True):
        model = Recomputed(checkpointing, explicit)
        for ids in (a, b):  # accumulation: each backward before the next forward
            model(ids).backward()
        found.append(_gradients(model))
    assert len(found[0]) > 8
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_two_pending_forwards_are_right_with_their_steps_and_an_error_without() -> None:
    a, b = _ids(), _ids()
    plain, recomputed = Recomputed(False, True), Recomputed(True, True)
    for model in (plain, recomputed):
        (model(a) + model(b)).backward()
    theirs = _gradients(recomputed)
    for name, gradient in _gradients(plain).items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    model = Recomputed(True, False)
    with pytest.raises(RuntimeError, match="pass the step"):
        (model(a) + model(b)).backward()
    model = Recomputed(True, False)
    loss = model(a)
    with torch.no_grad():
        model(b)
    with pytest.raises(RuntimeError, match="pass the step"):
        loss.backward()


def test_arguments_by_position_are_read_like_those_by_name(tiny_model: TinyModel) -> None:
    model, ids = tiny_model("llama"), _ids()
    _filled(engram.attach(model, CFG))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with torch.no_grad():
        by_name = model.model(ids, position_ids=positions, use_cache=False).last_hidden_state
        assert torch.equal(model.model(ids, None, positions, None, None, False).last_hidden_state, by_name)
        whole = model.model(ids, use_cache=False).last_hidden_state
        past = model.model(ids[:, :8], use_cache=True).cache
        last = model.model(ids[:, 8:], None, None, past).last_hidden_state
        torch.testing.assert_close(last, whole[:, 8:], rtol=1e-5, atol=1e-5)


def test_restarting_positions_with_a_mask_are_refused(tiny_model: TinyModel) -> None:
    model, ids = tiny_model("llama"), _ids()
    engram.attach(model, CFG)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with pytest.raises(ValueError, match="without an attention_mask"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


def test_maps_tokenizers_and_sizes_must_agree(tiny_model: TinyModel) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(
        models.WordLevel({f"w{i // 2}" if i % 2 else f"W{i // 2}": i for i in range(50)}, unk_token="W0")
    )
    model, on = tiny_model("llama"), CFG.replace(compress=True)
    right = engram.TokenMap.from_tokenizer(tokenizer, VOCAB)
    other = engram.TokenMap(list(range(VOCAB)))
    for cfg, kwargs, message in (
        (on, {"tokenizer": tokenizer, "token_map": other}, "is not the map of this tokenizer"),
        (on, {"token_map": engram.TokenMap([0, 1, 2])}, "covers 3 ids, the model has 64"),
        (CFG, {"token_map": right}, "set compress: true"),
        (CFG.replace(vocab_size=10), {}, "less than the 64 ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            engram.attach(model, cfg, **kwargs)
    assert engram.attach(model, on, tokenizer=tokenizer, token_map=right).memory.token_map is not None
    with pytest.raises(ConfigError, match="needs a token_map"):
        Memory(on, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="set compress: true"):
        Memory(CFG, token_map=right)


def test_taps_keep_what_was_recorded(tiny_model: TinyModel) -> None:
    model, a, b = tiny_model("llama"), _ids(), _ids()
    handle = _filled(engram.attach(model, CFG))
    with handle.taps() as taps:
        _logits(model, a)
        assert all("value" in stages for stages in taps.values())
    kept = {name: tensor.clone() for name, tensor in taps[0].items()}
    _logits(model, b)
    assert taps[0].keys() == kept.keys() and all(torch.equal(taps[0][name], kept[name]) for name in kept)
    assert torch.equal(handle.taps()[0]["rows"], handle.memory.layer(0).hash.rows(b))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_the_number_of_compiled_graphs_does_not_grow_with_the_calls(tiny_model: TinyModel, placement: Any) -> None:
    model = tiny_model("llama").train()
    _filled(engram.attach(model, CFG.replace(placement=placement)))
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled, ids = torch.compile(model, backend=count), _ids()
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
    first = len(graphs)
    for _ in range(12):
        compiled(_ids(), use_cache=False).logits.sum().backward()
        model.zero_grad()
        for layer in model.engram.layers.values():
            layer.table.proxy.applied()
    assert len(graphs) == first, "a counter that dynamo guards on would compile anew at every call"


def test_a_copied_model_learns_on_its_own(tiny_model: TinyModel) -> None:
    model, ids = tiny_model("llama").train(), _ids()
    handle = engram.attach(model, CFG)
    optimizer = engram.optim.build(model, lr=1e-2)
    model(ids, use_cache=False).logits.sum().backward()
    copied_memory, copied_optimizer = copy.deepcopy((handle.memory, optimizer))
    optimizer.step()
    before = handle.memory.layer(0).table.store.rows.clone()
    copied_memory.start(ids)
    copied_memory(0, torch.randn(2, 12, 32)).sum().backward()
    copied_optimizer.step()
    assert copied_memory.layer(0).table.updates == 1
    assert torch.equal(handle.memory.layer(0).table.store.rows, before)
