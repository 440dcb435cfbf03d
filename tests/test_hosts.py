"""Memory in every host: silent at first and learning; in values; frozen, sharded, wrapped, quantised, recomputed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engram
import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.hosts import ENTRIES
from engram.table import RowProxy

ONE_OF_EACH_KIND = ("llama", "gpt2", "gemma3_text", "deepseek_v4")
HOSTS = [kind if kind in ONE_OF_EACH_KIND else pytest.param(kind, marks=pytest.mark.slow) for kind in ENTRIES]
RECOMPUTED = [
    pytest.param(kind, site, marks=[] if kind in ONE_OF_EACH_KIND else pytest.mark.slow)
    for kind, site in [*((kind, "residual") for kind in ENTRIES), ("llama", "value"), ("gpt2", "value")]
]
WITH_VALUES = [kind for kind, entry in ENTRIES.items() if entry.values is not None]
VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211)
TinyModel = Callable[..., Any]


def _cfg(kind: str, **changes: Any) -> EngramConfig:
    return CFG.replace(branches=4 if ENTRIES[kind].streams else 1, **changes)


def _ids(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _filled(handle: engram.Handle) -> engram.Handle:
    for layer in handle.memory.modules_by_layer():
        layer.table.store.rows.normal_()
        if layer.conv is not None:
            layer.conv.data.normal_()
    return handle


def _step(model: Any, optimizer: Any, ids: Tensor) -> float:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("init", ["zeros", "normal"])
@pytest.mark.parametrize("kind", HOSTS)
def test_a_fresh_memory_is_silent_and_learns_with_either_start(kind: str, init: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model(kind), _ids()
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        handle = engram.attach(model, _cfg(kind, init=init))
        assert torch.equal(model(ids, use_cache=False).logits, base)
    optimizer = engram.optim.build(model.train(), lr=1e-2)
    before = [p.detach().clone() for p in handle.memory.parameters() if not isinstance(p, RowProxy)]
    rows = handle.memory.layer(0).table.store.rows.clone()
    _step(model, optimizer, ids)
    changed = [not torch.equal(a, b) for a, b in zip(before, _dense(handle), strict=True)]
    assert any(changed) or not torch.equal(rows, handle.memory.layer(0).table.store.rows)
    for _ in range(2):
        _step(model, optimizer, ids)
    assert not torch.equal(rows, handle.memory.layer(0).table.store.rows)
    with torch.no_grad():
        assert not torch.equal(model(ids, use_cache=False).logits, base)


def _dense(handle: engram.Handle) -> list[Tensor]:
    return [p for p in handle.memory.parameters() if not isinstance(p, RowProxy)]


def test_a_silent_start_survives_initial_values_drawn_anew(tiny_model: TinyModel) -> None:
    from engram.backbone import reseed

    model, ids = tiny_model("llama"), _ids()
    reseed(model, 3)
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        engram.attach(model, CFG.replace(init="normal"))
        reseed(model, 3)
        assert torch.equal(model(ids, use_cache=False).logits, base)


def test_rows_of_another_model_stay_frozen_until_they_are_asked_for(tiny_model: TinyModel) -> None:
    first = engram.attach(tiny_model("llama"), CFG, trainable="memory")
    second = engram.attach(tiny_model("llama", seed=1), CFG, rows_of=first, trainable="memory")
    tables = [handle.memory.layer(0).table for handle in (first, second)]
    assert [table.trainable for table in tables] == [True, False]
    second.set_trainable("all")
    assert not tables[1].trainable and second.trainable_parameters()["rows"] == 0


def test_what_changes_the_model_from_the_beginning_is_said(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = CFG.replace(layers=(0,), site="embedding", gate="none", conv_kernel=0)
    with caplog.at_level(logging.WARNING, logger="engram"):
        engram.attach(tiny_model(), cfg)
        assert not caplog.records
        engram.attach(tiny_model(), cfg.replace(mix="mean"))
        assert "divides the embedding by 5" in caplog.text
        engram.attach(tiny_model(), cfg.replace(combine="sum", head_dim=32, init="normal"))
        assert "summed rows start normal" in caplog.text


@pytest.mark.parametrize("kind", WITH_VALUES)
def test_the_update_is_added_to_the_values_and_to_nothing_else(kind: str, tiny_model: TinyModel) -> None:
    """The host's own way of cutting queries, keys and values apart is the judge."""
    model, ids = tiny_model(kind), _ids()
    handle = _filled(engram.attach(model, CFG.replace(site="value")))
    linear, seen = handle.host.values_of(1), []
    handle.detach()
    plain = linear.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    handle = _filled(engram.attach(model, CFG.replace(site="value")))
    linear.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    with torch.no_grad(), handle.taps() as taps:
        model(ids, use_cache=False)
    plain.remove()
    (_, before), (_, after) = seen
    update = taps[1]["output"]
    assert update.abs().max() > 0.01 and update.shape[-1] == handle.host.value_width
    heads, width = model.config.num_attention_heads, update.shape[-1]
    if ENTRIES[kind].fused == "v":
        parts = [before], [after]
    elif ENTRIES[kind].fused == "qkv":
        rest = before.shape[-1] - width
        parts = before.split([rest, width], dim=-1), after.split([rest, width], dim=-1)
    else:
        cut = [tensor.view(*ids.shape, heads, -1).chunk(3, dim=-1) for tensor in (before, after)]
        parts = [part.flatten(-2) for part in cut[0]], [part.flatten(-2) for part in cut[1]]
    for a, b in zip(parts[0][:-1], parts[1][:-1], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(parts[0][-1] + update, parts[1][-1])


def test_the_value_site_has_its_own_errors(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="DeepSeek-V3 has no linear layer of attention values"):
        engram.attach(tiny_model("deepseek_v3"), CFG.replace(site="value"))
    model = tiny_model("llama", num_key_value_heads=1)
    with pytest.raises(ConfigError, match="head_dim: 32; summed rows at site 'value' need 16"):
        engram.attach(model, CFG.replace(site="value", combine="sum", head_dim=32, gate="none"))
    handle = engram.attach(model, CFG.replace(site="value"))
    assert handle.memory.layer(0).width == 16
    optimizer = engram.optim.build(model.train(), lr=1e-2)
    losses = [_step(model, optimizer, _ids()) for _ in range(6)]
    assert losses[-1] < losses[0] and handle.memory.layer(0).table.store.rows.any()


def test_a_family_without_an_entry_is_found_by_its_structure(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import BertConfig, BertForMaskedLM, StableLmConfig, StableLmForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = StableLmForCausalLM(StableLmConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes)).eval()
    ids = _ids()
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        with caplog.at_level(logging.WARNING, logger="engram"):
            handle = engram.attach(model, CFG)
        assert "not a listed host; blocks found by structure in model.layers" in caplog.text
        assert torch.equal(model(ids, use_cache=False).logits, base)
        _filled(handle)
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :5], use_cache=True).cache
        torch.testing.assert_close(model(ids[:, 5:], cache=cache).logits, whole[:, 5:], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(whole, base)
    bert = BertForMaskedLM(BertConfig(vocab_size=VOCAB, **sizes))
    with pytest.raises(ConfigError, match=r"both the input embedding \(Embedding\) and one list of 2 blocks, found 0"):
        engram.attach(bert, CFG)
    assert not hasattr(bert, "engram")


@pytest.mark.parametrize("what", ["memory", "memory+norms", "all"])
def test_what_learns(what: Any, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama").train()
    handle = engram.attach(model, CFG, trainable=what)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("engram.")}
    optimizer = engram.optim.build(model, lr=1e-2)
    for _ in range(3):
        _step(model, optimizer, _ids())
    changed = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
    norms = {name for name in before if "norm" in name}
    assert changed == {"memory": set(), "memory+norms": norms, "all": set(before)}[what]
    assert handle.memory.layer(0).table.store.rows.any()
    handle.print_trainable()
    counts = handle.trainable_parameters()
    host = sum(before[name].numel() for name in changed)
    rows = sum(m.table.store.rows.numel() for m in handle.memory.modules_by_layer())
    assert counts["host"] == host and counts["rows"] == rows and f"{rows:,} in rows" in capsys.readouterr().out
    assert counts["all"] == rows + counts["dense"] + sum(p.numel() for p in before.values())
    for call in (handle.set_trainable, lambda what: engram.attach(tiny_model(), CFG, trainable=what)):
        with pytest.raises(ConfigError, match=r"trainable: 'rows'.*memory\+norms"):
            call("rows")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("kind", "site"), RECOMPUTED)
def test_recomputed_activations_give_the_same_gradients(
    kind: str, site: Any, reentrant: bool, tiny_model: TinyModel
) -> None:
    """A host recomputes its blocks without the hooks before them, but with those inside: the value site's."""
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = tiny_model(kind).train()
        handle = _filled(engram.attach(model, _cfg(kind).replace(site=site)))
        calls = [0]
        handle.memory.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(1)  # dropout
        model(_ids(), labels=_ids()).loss.backward()  # the cache is left to the host
        step = handle.memory._step
        assert step is not None and (step.state is None) == recomputed, "a host that recomputes makes no cache"
        assert calls[0] == (4 if recomputed and site == "value" else 2)
        rows = [m.table.proxy.grad for m in handle.memory.modules_by_layer()]
        found.append([p.grad for p in model.parameters() if p.grad is not None and p.numel()] + rows)
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "deepseek_v4"])
def test_sixteen_bits(kind: str, tiny_model: TinyModel) -> None:
    model, ids = tiny_model(kind).to(torch.bfloat16), _ids()
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        handle = engram.attach(model, _cfg(kind))
        assert torch.equal(model(ids, use_cache=False).logits, base) and base.dtype == torch.bfloat16
        assert handle.memory.layer(0).table.store.rows.dtype == torch.float32
        _filled(handle)
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :5], use_cache=True).cache
        assert not torch.equal(whole, base)
        torch.testing.assert_close(model(ids[:, 5:], cache=cache).logits, whole[:, 5:], rtol=0.05, atol=0.05)


def test_blocks_that_lie_elsewhere_until_they_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """`device_map` with a block on disk: its weights are on the meta device when the memory is attached."""
    from accelerate import dispatch_model

    ids, judge = _ids(), tiny_model("llama")
    torch.manual_seed(0)
    _filled(engram.attach(judge, CFG))
    model = tiny_model("llama")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert next(model.model.layers[1].parameters()).is_meta
    torch.manual_seed(0)
    handle = _filled(engram.attach(model, CFG))
    assert all(not p.is_meta for p in handle.memory.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, judge(ids, use_cache=False).logits)


@pytest.mark.parametrize("below", [False, True])
def test_low_rank_adapters_above_and_below(below: bool, tiny_model: TinyModel) -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny_model("llama").train(), _ids()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if below:
        wrapped = peft.get_peft_model(model, lora)
        handle = engram.attach(wrapped, CFG)
    else:
        handle = engram.attach(model, CFG)
        wrapped = peft.get_peft_model(model, lora)
        assert not handle.memory.layer(0).table.trainable  # adapters freeze what they do not know
    for layer in handle.memory.modules_by_layer():
        layer.table.trainable = True
        for parameter in layer.parameters():
            if not isinstance(parameter, RowProxy):
                parameter.requires_grad_(True)
    frozen = {n: p.detach().clone() for n, p in wrapped.named_parameters() if not p.requires_grad and p.numel()}
    learning = {n: p.detach().clone() for n, p in wrapped.named_parameters() if "lora_B" in n}
    optimizer = engram.optim.build(wrapped, lr=1e-2)
    losses = [_step(wrapped, optimizer, ids) for _ in range(6)]
    assert losses[-1] < losses[0] and handle.stats()[1]["updates"] == 6
    assert handle.memory.layer(0).table.store.rows.any()
    now = dict(wrapped.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    assert all(not torch.equal(now[name], value) for name, value in learning.items())
    wrapped.eval()
    with torch.no_grad():
        whole = wrapped(ids, use_cache=False).logits
        cache = wrapped(ids[:, :5], use_cache=True).cache
        torch.testing.assert_close(wrapped(ids[:, 5:], cache=cache).logits, whole[:, 5:], rtol=1e-5, atol=1e-5)
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(ids, use_cache=False).logits, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bits", ["bitsandbytes 4", "bitsandbytes 8", "quanto 8"])
def test_quantised_backbones(bits: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Through the ecosystem's loaders, where they are installed; the memory beside the weights is fp32 and learns."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

    pytest.importorskip("optimum.quanto" if "quanto" in bits else "bitsandbytes")
    how: Any = {
        "bitsandbytes 4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        "bitsandbytes 8": lambda: BitsAndBytesConfig(load_in_8bit=True),
        "quanto 8": lambda: QuantoConfig(weights="int8"),
    }
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)  # blocks of 64 weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how[bits](), dtype=torch.float32)
    ids = _ids()
    assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        handle = engram.attach(model, CFG.replace(hidden_size=64), trainable="memory")
        assert torch.equal(model(ids, use_cache=False).logits, base)
    optimizer = engram.optim.build(model.train(), lr=1e-2)
    losses = [_step(model, optimizer, ids) for _ in range(6)]
    assert losses[-1] < losses[0] and handle.memory.layer(0).table.store.rows.any()
    assert all(p.dtype == torch.float32 for p in _dense(handle)) and handle.trainable_parameters()["host"] == 0
    with torch.no_grad():
        whole = model.eval()(ids, use_cache=False).logits
        cache = model(ids[:, :5], use_cache=True).cache
        torch.testing.assert_close(model(ids[:, 5:], cache=cache).logits, whole[:, 5:], rtol=1e-4, atol=1e-4)


def test_memory_sits_on_the_first_float_type_of_quantised_weights(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.model.embed_tokens = nn.Embedding(VOCAB, 32).requires_grad_(False)
    model.model.embed_tokens.weight = nn.Parameter(torch.zeros(VOCAB, 32, dtype=torch.uint8), requires_grad=False)
    handle = engram.attach(model, CFG)
    assert all(p.dtype == torch.float32 for p in _dense(handle))


def test_the_page_lists_every_host_and_what_fails_in_it(repo_root: Path) -> None:
    page = (repo_root / "docs" / "hosts.md").read_text(encoding="utf-8")
    table = page.split("<!-- hosts -->")[1].split("<!-- /hosts -->")[0].strip().splitlines()[2:]
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    expected = [
        [entry.name, f"`{kind}`", "yes" if entry.values else "no", ", ".join(entry.fails)]
        for kind, entry in ENTRIES.items()
    ]
    assert listed == expected
