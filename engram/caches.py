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
    """The cache of the decoder's own tokens among a forward's arguments.

    Raises ValueError for one without layers (paged, or tuples).
    """
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    cache = getattr(cache, "self_attention_cache", cache)  # beside that of an encoder's tokens
    if cache is not None and not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(
            f"cache: {type(cache).__name__} has no list of layers that could carry the memory's state; paged caches "
            f"and tuples are not available, use a transformers Cache such as DynamicCache"
        )
    return cache


def cache_in(output: Any) -> Any:
    """The cache that a forward returns, in an output object or a tuple; None without one."""
    found = None
    if isinstance(output, Mapping):
        found = next((output[name] for name in CACHE_NAMES if output.get(name) is not None), None)
    elif isinstance(output, tuple):
        found = next((part for part in output if hasattr(part, "get_seq_length")), None)
    return getattr(found, "self_attention_cache", found)


def state_in(cache: Any, number: str) -> DecodeState | None:
    """The state of memory `number` in a cache, told whether the cache can be rolled back by any number of tokens.

    None where the cache is empty. Raises RuntimeError when it holds tokens that this memory has not seen, or more or
    fewer than those.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    mine = next((layer.state for layer in layers if layer.state.owner == number), None)
    seen = _tokens_in(cache) if len(cache.layers) > len(layers) else 0
    if mine is None:
        if seen is None or int(seen) > 0:
            raise RuntimeError(
                f"memory: this forward continues a cache of {'some' if seen is None else int(seen)} tokens that this "
                f"memory did not see (another model's, or from before it was attached); rows of the next tokens depend "
                f"on them. Begin with an empty cache"
            )
        return None
    mine.settle()
    on_the_device = isinstance(seen, Tensor) and seen.is_cuda  # asking would wait for the GPU, at every token
    if seen is not None and not on_the_device and int(seen) != mine.length:
        raise RuntimeError(
            f"memory: the cache holds {int(seen)} tokens, its memory has seen {mine.length}; change a cache by its own "
            f"methods (crop, reorder_cache, batch_select_indices, reset), which reach every layer"
        )
    mine.free = _rolls_back(cache)
    return mine


def _tokens_in(cache: Any) -> Any:
    """Tokens that a cache holds; None for some that it does not count (recurrent layers alone)."""
    if all(cache.is_linear[index] or cache.is_dummy[index] for index in range(len(cache.layers))):
        return None if cache.has_previous_state() else 0
    return cache.get_seq_length()


def _rolls_back(cache: Any) -> bool:
    """Whether every layer of the host can take back any number of tokens, recorded or not."""
    others = [layer for layer in cache.layers if not isinstance(layer, StateLayer)]
    return all(not _slides(layer) if getattr(layer, "is_sliding", False) else layer.is_croppable for layer in others)


def _slides(layer: Any) -> bool:
    """A window that has forgotten its first tokens. A growing one calls itself croppable still, a static one never."""
    if not getattr(layer, "is_sliding", False):
        return False
    length = getattr(layer, "cumulative_length_int", None)
    length = layer.get_seq_length() if length is None else length
    return not isinstance(length, int) or length >= layer.get_max_length()


def put_state(cache: Any, state: DecodeState) -> None:
    """Append the state to a cache that has been filled for the first time."""
    state.free = _rolls_back(cache)
    state.recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
    cache.layers.append(StateLayer(state))


def read_mask(mask: Any, ids_BT: Tensor, past: int) -> tuple[Tensor | None, Tensor | None]:
    """What a host's attention mask says about the new tokens -> (kept [B, T], documents [B, T]).

    None is "all are kept", and "one document". Masks are those of past and new tokens [B, past + T], of attention
    [B, heads, T, keys] (boolean, or added to scores; a static cache has keys to come), or a dictionary of such by kind
    of attention. In one of attention a document begins where a token does not see the one before it. Raises ValueError
    for other shapes, and for attention that skips tokens and sees others before them (trees of drafts).
    """
    if isinstance(mask, Mapping):
        whole = mask.get("full_attention")
        mask = whole if whole is not None else next((one for one in mask.values() if one is not None), None)
    if mask is None:
        return None, None
    batch, length = ids_BT.shape
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask: a {type(mask).__name__} does not tell which tokens are padding; pass the mask [B, T]"
        )
    if mask.ndim == 2 and mask.shape[0] in (1, batch) and mask.shape[1] >= past + length:
        return mask[:, past : past + length].expand(batch, -1), None
    if mask.ndim == 4 and mask.shape[2] == length and mask.shape[3] >= length:
        return _read_attention(mask, batch, past)
    raise ValueError(
        f"attention_mask: shape {list(mask.shape)}; the memory needs the mask of the {past} tokens so far and the ids "
        f"{list(ids_BT.shape)}: [{batch}, {past + length}]"
    )


def _read_attention(mask_BHTK: Tensor, batch: int, past: int) -> tuple[Tensor, Tensor | None]:
    """Kept tokens are those that see themselves. Sliding windows put the first key of a mask past the first token."""
    added = mask_BHTK.dtype.is_floating_point
    seen_BHTK = mask_BHTK > torch.finfo(mask_BHTK.dtype).min / 2 if added else mask_BHTK.bool()
    seen_BTK, length = seen_BHTK.any(dim=1).expand(batch, -1, -1), mask_BHTK.shape[2]
    first = min(past, seen_BTK.shape[2] - length)
    new_BTT = seen_BTK[:, :, first : first + length]
    keep_BT = new_BTT.diagonal(dim1=1, dim2=2)
    begins_BT = torch.zeros_like(keep_BT)
    begins_BT[:, 1:] = keep_BT[:, 1:] & keep_BT[:, :-1] & ~new_BTT.diagonal(offset=-1, dim1=1, dim2=2)
    if not bool(begins_BT.any()):
        return keep_BT, None
    document_BT = begins_BT.cumsum(dim=1)
    other_BTT = (document_BT[:, :, None] != document_BT[:, None, :]) & keep_BT[:, None, :] & keep_BT[:, :, None]
    if bool((new_BTT & other_BTT).any()):
        raise ValueError(
            "attention_mask: tokens skip the one before them and see earlier ones (a tree of drafts); the memory reads "
            "texts, so pass each branch as a text of its own"
        )
    return keep_BT, document_BT
