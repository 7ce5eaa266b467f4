"""SHA-256 of all of a model's weights: every byte of every tensor, each read once for as long as it does not change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

PIECE_BYTES = 64 << 20
"""What is copied from a device at a time."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorMark:
    """What changes with a tensor, as far as that can be told without reading it: version counter, place in memory."""

    version: int
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMark:
        version = -1 if tensor.is_inference() else tensor._version
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return cls(version, local.data_ptr())


class WeightDigests:
    """Digests of tensors, remembered with the tensor objects while their marks stay. Not thread-safe."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensors: NamedTensors) -> list[bytes]:
        """SHA-256 of each tensor's shape, dtype and bytes. Those whose mark did not change are not read again."""
        marks = [TensorMark.of(tensor) for _, tensor in tensors]
        # What is spread over ranks is put together by all of them, in one order.
        spread = any(hasattr(tensor, "full_tensor") for _, tensor in tensors)
        with ThreadPoolExecutor(1 if spread else max(1, min(4, os.cpu_count() or 1))) as pool:
            pairs = [(tensor, mark) for (_, tensor), mark in zip(tensors, marks, strict=True)]
            found = list(pool.map(lambda pair: self._remembered(*pair) or hash_tensor(pair[0]), pairs))
        self.remember(tensors, found)
        return found

    def remember(self, tensors: NamedTensors, digests: Sequence[bytes]) -> None:
        """Take digests over that are known from elsewhere."""
        for (_, tensor), digest in zip(tensors, digests, strict=True):
            self._known[tensor] = (TensorMark.of(tensor), digest)

    def forget(self) -> None:
        """Read everything again when it is next asked for."""
        self._known.clear()

    def _remembered(self, tensor: torch.Tensor, mark: TensorMark) -> bytes | None:
        known = self._known.get(tensor)
        return known[1] if known is not None and known[0] == mark else None


def hash_tensor(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's shape, dtype and all its bytes, in logical order; of the whole, if ranks hold parts."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, raw.numel(), PIECE_BYTES):
        piece: Any = raw[start : start + PIECE_BYTES].cpu().numpy()
        digest.update(piece)
    return digest.digest()
