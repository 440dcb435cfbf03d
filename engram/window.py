"""Which earlier ids a position may see: the rule, and packed documents from position ids.

Slot s of a window is the id s places back, slot 0 the current one. Walking back from the current token, a slot is
blocked when it lies before the text, on a barrier (padding, end of text, image span), or in another packed document.
Once one slot is blocked all older slots are blocked too, and blocked slots hold the filler class: the rule of
DeepSeek-V4.1 (start, image spans), Qwen3.8 and LongCat (end of text), stated once. In plain torch it is
`look_back` of kernels/reference_rows.py.

Shapes: B batch, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_numbers(segment_BT: Tensor) -> Tensor:
    """Segment ids [B, T] -> numbers that differ between any two documents of a sequence, also where ids are reused."""
    changed_BT = torch.zeros_like(segment_BT)
    changed_BT[:, 1:] = segment_BT[:, 1:] != segment_BT[:, :-1]
    return changed_BT.cumsum(dim=1)


def segments_from_positions(position_ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor | None:
    """Packed documents from position ids [B, T] that restart; None when no sequence holds more than one document.

    mask_BT  0 at padding, whose positions mean nothing: restarts there do not count.

    A document starts wherever a position is not its predecessor plus one: the rule by which transformers isolates
    packed documents in its attention masks, so that memory and attention agree.
    """
    if position_ids_BT.shape[-1] < 2:
        return None
    restart_BT = position_ids_BT.diff(dim=-1, prepend=position_ids_BT[:, :1] - 1) != 1
    if mask_BT is not None:
        live_BT = mask_BT.bool()
        restart_BT = restart_BT & live_BT & torch.cat([live_BT[:, :1] & False, live_BT[:, :-1]], dim=1)
    segment_BT = restart_BT.cumsum(dim=-1)
    return segment_BT if bool((segment_BT[:, -1] != 0).any()) else None


def positions_from_segments(segment_BT: Tensor) -> Tensor:
    """Position ids [B, T] that restart at 0 in every packed document of `segment_BT`."""
    index_T = torch.arange(segment_BT.shape[1], device=segment_BT.device).expand_as(segment_BT)
    starts_BT = torch.ones_like(segment_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segment_BT[:, 1:] != segment_BT[:, :-1]
    return index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
