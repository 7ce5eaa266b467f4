"""Whose fault an error is: objects that a caller hands to `generate` raise the caller's errors, not ours."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


class CallersError(Exception):
    """Carries an error that a caller's logits processor, function or stopping criterion raised.

    Attributes:
        error: it, with its own traceback.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class NothingComputed(Exception):
    """Carries an error that came before the model ran: settings that transformers refuses, most likely."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def blaming_callers(model: nn.Module, own: Iterable[Any]) -> Iterator[None]:
    """Errors inside the context that `own` objects raised, or that came before the model ran, come out marked.

    Raises:
        CallersError, NothingComputed: instead of them.
    """
    started: list[bool] = []
    handle = model.register_forward_pre_hook(lambda *_: started.append(True))
    try:
        yield
    except Exception as error:
        if _raised_by(error, tuple(own)):
            raise CallersError(error) from error
        if not started:
            raise NothingComputed(error) from error
        raise
    finally:
        handle.remove()


@contextmanager
def as_they_were_raised() -> Iterator[None]:
    """Marked errors come out of the context without their marks."""
    try:
        yield
    except (CallersError, NothingComputed) as raised:
        raise raised.error from None


def callables(objects: Mapping[str, Any]) -> list[Any]:
    """The caller's own objects among arguments of `generate`."""
    found: list[Any] = []
    for value in objects.values():
        found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _raised_by(error: Exception, own: tuple[Any, ...]) -> bool:
    """Whether one of the objects was running when the error was raised."""
    codes = {code for code in map(_code, own) if code is not None}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        runs = frame.f_locals.get("self")
        if frame.f_code in codes or any(runs is obj for obj in own if runs is not None):
            return True
    return False


def _code(obj: Any) -> Any:
    """Of a function, or of what a partial calls; objects are known by themselves."""
    while isinstance(obj, partial):
        obj = obj.func
    return getattr(getattr(obj, "__func__", obj), "__code__", None)
