"""Generate from a model with memory: greedy, with beams, with drafts; and look at what the memory read and let in.

    .venv/bin/python docs/examples/generate.py

Decoding with a cache is the same function as the forward of the whole text: the last lines check it. A few seconds.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import engram


def build(seed: int) -> tuple[GPT2LMHeadModel, engram.Handle]:
    """A small GPT-2 with random weights and a memory whose rows are random, too, so that it has something to say."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, pad_token_id=0)).eval()
    model.generation_config.eos_token_id = None
    memory = engram.EngramConfig(hidden_size=64, layers=(1,), orders=(2, 3), heads=4, head_dim=16, rows=5_000)
    handle = engram.attach(model, memory)
    for layer in handle.memory.modules_by_layer():
        layer.table.write(torch.arange(1000), torch.randn(1000, 16))
    return model, handle


def main() -> None:
    model, handle = build(seed=0)
    draft, _ = build(seed=1)
    prompts_BT = torch.randint(1, 300, (2, 12))
    prompts_BT[1, :5] = 0  # a shorter prompt, padded on the left
    mask_BT = (torch.arange(12) >= torch.tensor([[0], [5]])).long()

    greedy = model.generate(prompts_BT, attention_mask=mask_BT, max_new_tokens=20, do_sample=False)
    beams = model.generate(prompts_BT, attention_mask=mask_BT, max_new_tokens=20, num_beams=4, do_sample=False)
    print("greedy:", greedy[0, 12:].tolist())
    print("beams: ", beams[0, 12:].tolist())
    one = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask_BT[:1]}
    drafted = model.generate(prompts_BT[:1], assistant_model=draft, **one)
    print("drafts of another model give the greedy text:", torch.equal(drafted, greedy[:1]))

    whole_BT = greedy[:1]
    with torch.no_grad(), handle.taps() as taps:
        judge = model(whole_BT, use_cache=False).logits
        rows_BTC, gate_BTS = taps[1]["rows"], taps[1]["gate"]
        print(f"rows of the last token: {rows_BTC[0, -1].tolist()}, gate {gate_BTS[0, -1, 0].item():.2f}")
        cache, pieces = None, []
        for token_B1 in whole_BT.split(1, dim=1):
            out = model(token_B1, cache=cache, use_cache=True)
            cache = out.cache
            pieces.append(out.logits)
    difference = float((torch.cat(pieces, dim=1) - judge).abs().max())
    print(f"token by token against the whole text: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
