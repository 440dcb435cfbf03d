"""Put memory into a model, train the memory alone, write it, and add it to a fresh copy of the model.

    .venv/bin/python docs/examples/attach_and_finetune.py

The model is a small Llama with random weights, so that nothing is downloaded; any decoder of transformers goes the same
way. Half a minute on one core.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import engram
import engram.optim

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")[:4096]


def model_without_memory() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def main() -> None:
    ids_BT = torch.tensor(list(TEXT.encode()[:4096])).view(16, 256)
    model = model_without_memory()
    memory = engram.EngramConfig(hidden_size=64, layers=(1, 2), orders=(2, 3), heads=4, head_dim=16, rows=5_000)
    handle = engram.attach(model, memory, trainable="memory")
    handle.print_trainable()

    optimizer = engram.optim.build(model, lr=1e-2, row_lr_multiplier=5.0)
    model.train()
    for step in range(60):
        loss = model(ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == 59:
            print(f"step {step:>3}  loss {loss.item():.3f}")
    handle.memory.check_learning()

    model.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        trained = model(ids_BT[:2]).logits
        handle.save_pretrained(folder)
        print("written:", ", ".join(sorted(path.name for path in Path(folder).iterdir())))
        fresh = model_without_memory().eval()
        engram.load(fresh, folder)
        print("the fresh copy computes the same:", torch.equal(fresh(ids_BT[:2]).logits, trained))
        with handle.disabled():
            print(f"loss of the model without memory: {model(ids_BT, labels=ids_BT).loss.item():.3f}")


if __name__ == "__main__":
    main()
