"""Read a released layout: look into the files, read some rows in place, fill a memory, write it back.

    python docs/examples/read_released.py

A small file in the layout of Qwen3.8-Flash-Next is written first (random numbers, the names and shapes of the release);
with the real files only the path changes. Nothing here needs a GPU or a download.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import engram
from engram.inspecting import inspect_files

HIDDEN, STREAMS, HEADS, WIDTH, VOCAB, EOS = 32, 4, 4, 8, 1000, 7
COLUMNS = 2 * HEADS  # bigrams and trigrams


def write_small_release(folder: Path) -> None:
    """Random weights of one memory layer, as the release names them: block 1, its rows in four shards."""
    about = {
        "hidden_size": HIDDEN,
        "hc_count": STREAMS,
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "ple_layer_ids": [2],  # counted from 1
        "ple_embed_dim": COLUMNS * WIDTH,
        "heads_per_ngram": HEADS,
        "ngram_vocab_size_base": 5000,
        "seed": 1234,
    }
    (folder / "config.json").write_text(json.dumps(about))
    cfg = engram.families.get("qwen3.8-flash-next").replace(
        hidden_size=HIDDEN, heads=HEADS, head_dim=WIDTH, rows=5000, filler=EOS, eos=(EOS,), vocab_size=VOCAB
    )
    hasher = engram.NgramHash(cfg, layer=1)
    width, streams = COLUMNS * WIDTH, STREAMS * HIDDEN
    tensors = {
        "key_proj.weight": torch.randn(streams, width) * width**-0.5,
        "value_proj.weight": torch.randn(HIDDEN, width) * width**-0.5,
        "norm_key.weight": torch.randn(streams) * 0.1,  # the norms multiply by 1 + w
        "norm_query.weight": torch.randn(streams) * 0.1,
        "norm_conv.weight": torch.randn(streams) * 0.1,
        "conv1d.weight": torch.randn(streams, 1, 4) * 0.1,
        "ple_embedding.layer_multipliers": hasher.multipliers,
        "ple_embedding.ngram_heads_vocab_sizes": hasher.sizes,
        "ple_embedding.ngram_heads_offsets": hasher.offsets,
    }
    for i, shard in enumerate(torch.randn(hasher.total_rows, WIDTH).bfloat16().chunk(4)):
        tensors[f"ple_embedding.ngram_embedding.shard_{i}.weight"] = shard.contiguous()
    prefix = "model.language_model.layers.1.ple."
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def main() -> None:
    """Everything that can be done with a release, once."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "release"
        folder.mkdir()
        write_small_release(folder)

        # `engram inspect FOLDER` in a shell
        found = inspect_files(str(folder))
        layer = found["layers"][0]
        table = f"{layer['rows']:,} rows of {layer['width']} values, {layer['row_format']}"
        print(f"{found['family']}: block {layer['layer']}, {table}")
        assert layer["agrees"] and not found["unplaced"], "the saved constants are those of our hash"

        # Some rows, by positioned reads: the table may have 100 GB.
        cfg = engram.released_config(folder)
        ids = torch.randint(0, VOCAB, (1, 12))
        rows = engram.NgramHash(cfg, layer=1).rows(ids)
        values = engram.released_rows(folder, 1, rows.flatten())
        print(f"{rows.numel()} rows of {ids.numel()} tokens, mean square {values.square().mean():.3f}")

        # A memory with these weights; its rows copied into a store, or left in the files.
        memory, in_place = engram.Memory(cfg.replace(placement="host")), engram.Memory(cfg)
        engram.load_released(memory, folder)
        engram.load_released(in_place, folder, rows="in place")
        x = torch.randn(1, 12, STREAMS, HIDDEN)
        memory.start(ids)
        in_place.start(ids)
        update = memory(1, x)
        assert torch.equal(update, in_place(1, x))
        print(f"update of the streams: {list(update.shape)}, norm {update.norm():.3f}")

        # The way back: what another program of the family reads.
        engram.export_released(memory, "qwen3.8-flash-next", Path(made) / "again", shards=4)
        assert torch.equal(engram.released_rows(Path(made) / "again", 1, rows.flatten()), values)
        print("exported, and read back bit for bit")
        memory.close()
        in_place.close()


if __name__ == "__main__":
    main()
