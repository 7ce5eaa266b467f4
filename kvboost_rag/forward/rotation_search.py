"""How a model rotates its keys, found by trying: modules, pairings, ends of a head, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvboost_rag.forward.probe_runs import Runs, TooFar, difference
from kvboost_rag.forward.row_check import relative_l2
from kvboost_rag.forward.tolerance import Tolerance
from kvboost_rag.kv.rope import Pairing, RotarySource, Rotation
from kvboost_rag.models import hf_cache


def find_rotations(
    runs: Runs, base: Sequence[hf_cache.LayerKV], shifted: Sequence[hf_cache.LayerKV], tolerance: Tolerance
) -> tuple[list[Rotation | None], float]:
    rotations: list[Rotation | None] = []
    worst = 0.0
    for index, ((keys, _), (moved, _)) in enumerate(zip(base, shifted, strict=True)):
        candidates: list[Rotation | None] = [None, *_candidates(runs.sources, keys)]
        errors = [_rotation_error(c, keys, moved, runs.shift) for c in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= tolerance.for_keys(index):
            noise = tolerance.keys[index] if tolerance.keys else 0.0
            raise TooFar(
                f"keys of layer {index} are not a known rotation of each other at other positions "
                f"(best {difference(errors[best], noise)})"
            )
        worst = max(worst, errors[best])
        rotations.append(candidates[best])
    return rotations, worst


def _candidates(sources: Sequence[RotarySource], keys: torch.Tensor) -> Iterator[Rotation]:
    head_dim = keys.shape[-1]
    for source in sources:
        try:
            width = source.tables(torch.arange(2, device=keys.device))[0].shape[-1] * 2
        except (TypeError, ValueError):
            continue  # a vision or audio module that the text path does not use
        if width > head_dim:
            continue
        pairings: tuple[Pairing, ...] = ("half", "interleaved")
        for offset in sorted({0, head_dim - width}):
            for pairing in pairings:
                yield Rotation(source, pairing, offset, width)


def _rotation_error(rotation: Rotation | None, keys: torch.Tensor, moved: torch.Tensor, shift: int) -> float:
    if rotation is None:
        return relative_l2(moved, keys)
    positions = torch.arange(keys.shape[2], device=keys.device)
    free = rotation.undo(keys.float(), rotation.source.tables(positions))
    expected = torch.empty_like(free)
    rotation.rotate_into(expected, free, rotation.source.tables(positions + shift))
    return relative_l2(moved, expected)
