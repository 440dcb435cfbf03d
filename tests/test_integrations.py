"""Rows and their optimizer inside other people's training code: accelerate, transformers' Trainer, DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import engram
import engram.optim
from engram.config import EngramConfig

VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(1,), heads=2, head_dim=8, rows=211)
TinyModel = Callable[..., Any]


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random texts with their labels, as Trainer wants them."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, VOCAB, (count, 10), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def _attached(tiny_model: TinyModel) -> tuple[Any, engram.Handle]:
    model = tiny_model("llama").train()
    model.config.use_cache = False
    torch.manual_seed(1)  # the memory's projections
    return model, engram.attach(model, CFG)


def test_transformers_trainer_trains_the_rows(tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, handle = _attached(tiny_model)
    optimizer = engram.optim.build(model, lr=1e-2)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_grad_norm=1.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Texts(48), optimizers=(optimizer, None)).train()
    assert handle.stats()[1]["updates"] == 6
    assert handle.memory.layer(1).table.store.rows.any()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_supervised_fine_tuning_trains_the_memory_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    """TRL's trainer with nothing but the model and our optimizer."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n + 2 for n in range(VOCAB - 2)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(n * k) % 50}" for k in range(9)) for n in range(16)]
    model = tiny_model("llama").train()
    handle = engram.attach(model, CFG, trainable="memory")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("engram.")}
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, max_length=16, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer,
        optimizers=(engram.optim.build(model, lr=1e-2), None),
    )  # fmt: skip
    trainer.train()
    assert handle.stats()[1]["updates"] == 4 and handle.memory.layer(1).table.store.rows.any()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def test_accelerate_accumulates_clips_and_steps(tiny_model: TinyModel) -> None:
    from accelerate import Accelerator

    model, handle = _attached(tiny_model)
    reference, reference_handle = _attached(tiny_model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, engram.optim.build(model, lr=1e-2))
    plain = engram.optim.build(reference, lr=1e-2)
    ids = Texts(8).ids
    for half in ids.chunk(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(half, labels=half).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        (reference(half, labels=half).loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    plain.step()
    rows, expected = (h.memory.layer(1).table.store.rows for h in (handle, reference_handle))
    assert rows.any()
    torch.testing.assert_close(rows, expected)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel_leaves_the_rows_alone(tiny_model: TinyModel, process_group: None) -> None:
    model, handle = _attached(tiny_model)
    optimizer = engram.optim.build(model, lr=1e-2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ids = Texts(4).ids
    for _ in range(3):
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.stats()[1]["updates"] == 3


def test_rows_in_several_processes_are_refused(
    tiny_model: TinyModel, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = _attached(tiny_model)
    optimizer = engram.optim.build(model, lr=1e-2)
    ids = Texts(4).ids
    model(ids, labels=ids).loss.backward()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="not exchanged between 2 processes"):
        optimizer.step()
