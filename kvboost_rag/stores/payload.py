"""Tensors that a store may keep: contiguous, not part of anything larger, on one device."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvboost_rag.datamodels import StoreEntry


def own(
    entry: StoreEntry, device: torch.device | str = "cpu", pin_memory: bool = False, non_blocking: bool = False
) -> StoreEntry:
    """`entry` with tensors that hold exactly their own bytes on `device`.

    A view keeps the whole of what it was cut from alive (a chunk cut from a prompt's KV would hold the prompt), which
    no byte budget would see; such tensors are copied. Others are taken as they are.

    Args:
        pin_memory: use page-locked host memory, from which copies to an accelerator can run asynchronously.
        non_blocking: do not wait for such copies.
    """
    tensors = {n: _own(t.detach().to(device, non_blocking=non_blocking)) for n, t in entry.tensors.items()}
    if pin_memory:
        tensors = {n: t if t.is_pinned() else t.pin_memory() for n, t in tensors.items()}
    return replace(entry, tensors=tensors)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.contiguous().clone() if tensor.is_contiguous() else tensor.contiguous()
