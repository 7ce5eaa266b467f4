"""Which arguments of a decoder layer hold the rows of a pass, and in which dimension.

The probe runs partial forwards with two numbers of rows: a dimension whose size went with them counts rows. Arguments
are narrowed by that and by nothing else, so that a model which passes something else than it did is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

Path = tuple[str | int, ...]
"""Where a tensor stands among the arguments: position or name, then keys within containers."""
Shapes = list[dict[Path, tuple[int, ...]]]
"""Of each layer's tensor arguments."""


def map_tensors(change: Callable[[Path, torch.Tensor], torch.Tensor], value: Any, path: Path = ()) -> Any:
    """`value` with every tensor in it, inside dicts, tuples and lists too, replaced by `change(path, tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(change, part, (*path, key)) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(change, part, (*path, index)) for index, part in enumerate(value))
    return value


@contextmanager
def seen_shapes(layers: nn.ModuleList) -> Iterator[Shapes]:
    """Collects the shapes of what the layers are given while the context is open."""
    shapes: Shapes = [{} for _ in layers]

    def hook(found: dict[Path, tuple[int, ...]]) -> Callable[..., None]:
        def see(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            found[path] = tuple(tensor.shape)
            return tensor

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            map_tensors(see, (args, kwargs))

        return look

    handles = [
        layer.register_forward_pre_hook(hook(found), with_kwargs=True)
        for layer, found in zip(layers, shapes, strict=True)
    ]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class RowArguments:
    """For each layer, by path: the dimensions that count rows (none for an argument that is the same for all rows)."""

    dims: tuple[dict[Path, tuple[int, ...]], ...]

    @classmethod
    def of(
        cls, many: Sequence[dict[Path, tuple[int, ...]]], few: Sequence[dict[Path, tuple[int, ...]]]
    ) -> RowArguments:
        """From the shapes of two passes with different numbers of rows."""
        return cls(
            tuple(
                {
                    path: tuple(dim for dim, size in enumerate(shape) if one.get(path, shape)[dim] != size)
                    for path, shape in other.items()
                }
                for other, one in zip(many, few, strict=True)
            )
        )

    def row_dim(self, layer: int, path: Path, tensor: torch.Tensor) -> int | None:
        """The dimension of a layer's argument that counts rows, or None.

        Raises:
            RuntimeError: the probe has not seen such an argument, or could not tell.
        """
        dims = self.dims[layer].get(path)
        if dims is None or len(dims) > 1 or any(dim >= tensor.dim() for dim in dims):
            raise RuntimeError(
                f"decoder layer {layer} was given {describe(path, tensor)}, of which the probe did not learn which "
                "dimension counts rows; repair that drops rows on the way cannot run on this model"
            )
        return dims[0] if dims else None


_KNOWN: WeakKeyDictionary[nn.ModuleList, RowArguments] = WeakKeyDictionary()


def remember(layers: nn.ModuleList, arguments: RowArguments) -> None:
    """Kept for `recall`, as long as the layers exist."""
    _KNOWN[layers] = arguments


def recall(layers: nn.ModuleList) -> RowArguments:
    """What the probe found.

    Raises:
        RuntimeError: the model has not been probed.
    """
    if layers not in _KNOWN:
        raise RuntimeError("rows can only be dropped on the way in a model that has been probed: call probe(model)")
    return _KNOWN[layers]


def describe(path: Path, tensor: torch.Tensor) -> str:
    """An argument, for messages."""
    where, first, *inner = path
    name = f"argument {first}" if where == 0 else f"argument {first!r}"
    return name + "".join(f"[{key!r}]" for key in inner) + f" of shape {tuple(tensor.shape)}"
