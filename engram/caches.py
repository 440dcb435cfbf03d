"""A host's key-value cache carries the memory's state: one more layer of it, the last.

transformers reorders, repeats, selects, crops, resets and copies caches layer by layer, in beam search, in assisted
decoding, when a prompt's cache is used again. A layer of ours among them gets every such call, so that rows and
convolution follow the text that the host itself sees. It must be the last one, because a host asks for its layers by
number, and it must not be put into a cache that fills itself while blocks run: it would be taken for block 0. So it is
put there when the first forward is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer

from engram.decoding import DecodeState

CACHE_NAMES = ("cache", "past_key_values")
"""transformers renamed the argument during 5.x."""


class StateLayer(DummyLayer):  # type: ignore[misc]
    """The last layer of a cache: a state of one memory, under the calls that a cache gives to its layers."""

    def __init__(self, state: DecodeState) -> None:
        super().__init__()
        self.state = state

    @property
    def record_past(self) -> bool:
        """Whether everything is kept because somebody is going to crop; transformers sets and clears it."""
        return self.state.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.recording = value

    def reset(self) -> None:
        """The cache begins anew."""
        self.state.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take positions back: a negative count, as the other layers take it."""
        self.state.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Somebody is going to crop: keep everything from now on."""
        self.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Texts in another order (beam search)."""
        self.state.change(lambda held: held.index_select(0, beam_idx.to(held.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every text several times."""
        self.state.change(lambda held: held.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the texts."""
        self.state.change(lambda held: held[indices.to(held.device)])


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments. Raises ValueError for one without layers (paged, or tuples)."""
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if cache is not None and not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(
            f"cache: {type(cache).__name__} has no list of layers that could carry the memory's state; paged caches "
            f"and tuples are not available, use a transformers Cache such as DynamicCache"
        )
    return cache


def cache_in(output: Any) -> Any:
    """The cache that a forward returns, in an output object or a tuple; None without one."""
    if isinstance(output, Mapping):
        return next((output[name] for name in CACHE_NAMES if output.get(name) is not None), None)
    if isinstance(output, tuple):
        return next((part for part in output if isinstance(getattr(part, "layers", None), list)), None)
    return None


def state_in(cache: Any, number: int) -> DecodeState | None:
    """The state of memory `number` in a cache, told whether the cache can be rolled back by any number of tokens.

    None where the cache is empty. Raises RuntimeError when it holds tokens that this memory has not seen, or more or
    fewer than those.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    mine = next((layer.state for layer in layers if layer.state.owner == number), None)
    seen = cache.get_seq_length() if len(cache.layers) > len(layers) else 0
    if mine is None:
        if int(seen) > 0:
            raise RuntimeError(
                f"memory: this forward continues a cache of {int(seen)} tokens that this memory did not see (another "
                f"model's, or from before it was attached); rows of the next tokens depend on them. Begin with an "
                f"empty cache"
            )
        return None
    mine.settle()
    on_the_device = isinstance(seen, Tensor) and seen.is_cuda  # asking would wait for the GPU, at every token
    if not on_the_device and int(seen) != mine.length:
        raise RuntimeError(
            f"memory: the cache holds {int(seen)} tokens, its memory has seen {mine.length}; change a cache by its own "
            f"methods (crop, reorder_cache, batch_select_indices, reset), which reach every layer"
        )
    mine.free = _rolls_back(cache)
    return mine


def _rolls_back(cache: Any) -> bool:
    """Whether every layer of the host can take back any number of tokens, recorded or not."""
    others = [layer for layer in cache.layers if not isinstance(layer, StateLayer)]
    return all(layer.is_croppable and not _slides(layer) for layer in others)


def _slides(layer: Any) -> bool:
    """A growing window that has forgotten its first tokens; unlike a static one it calls itself croppable still."""
    length = layer.get_seq_length() if getattr(layer, "is_sliding", False) else 0
    return isinstance(length, int) and length > 0 and length >= layer.get_max_length()


def put_state(cache: Any, state: DecodeState) -> None:
    """Append the state to a cache that has been filled for the first time."""
    state.free = _rolls_back(cache)
    state.recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
    cache.layers.append(StateLayer(state))


def new_tokens_kept(mask: Any, ids_BT: Tensor, past: int) -> Tensor | None:
    """Which of the new positions are no padding [B, T], from a host's attention mask; None where all are.

    Masks are those of past and new tokens [B, past + T], of attention [B, 1, T, keys] (boolean, or added to scores; a
    static cache has keys to come), or a dictionary of such by kind of attention. Raises ValueError for other shapes.
    """
    if isinstance(mask, Mapping):
        whole = mask.get("full_attention")
        mask = whole if whole is not None else next((one for one in mask.values() if one is not None), None)
    if mask is None:
        return None
    length = ids_BT.shape[1]
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask: a {type(mask).__name__} does not tell which tokens are padding; pass the mask [B, T]"
        )
    if mask.ndim == 2 and mask.shape == (len(ids_BT), past + length):
        return mask[:, past:]
    if mask.ndim == 4 and mask.shape[2] == length and mask.shape[3] >= length:
        return _kept_by_attention(mask, length, past).expand(len(ids_BT), -1)
    raise ValueError(
        f"attention_mask: shape {list(mask.shape)}; the memory needs the mask of the {past} tokens so far and the ids "
        f"{list(ids_BT.shape)}: [{len(ids_BT)}, {past + length}]"
    )


def _kept_by_attention(mask_BHTK: Tensor, length: int, past: int) -> Tensor:
    """Keys that their own query sees. Sliding windows put the first key of a mask past the first token."""
    seen_BTK = mask_BHTK[:, 0] if mask_BHTK.dtype == torch.bool else mask_BHTK[:, 0] == 0
    first = min(past, seen_BTK.shape[2] - length)
    return seen_BTK[:, :, first : first + length].diagonal(dim1=1, dim2=2)
