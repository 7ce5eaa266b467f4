"""The processes that serve one model together (tensor parallel): what one decides, all do.

Every rank runs the same program: the same engine, the same calls in the same order. What they could see differently (a
file that only one of them misses, the rows that its heads would repair, a fault) is agreed on, with a bounded wait.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

DEFAULT_WAIT_S = 120.0


class RanksError(RuntimeError):
    """The ranks cannot go on together: one is gone, too slow, or does something else."""


class RanksDiverged(RanksError):
    """The ranks were asked, or met, different things; all of them are told at the same moment."""


@dataclass(frozen=True)
class Ranks:
    """Agreement between the ranks of one model. Each method is called by all of them, in the same order.

    Attributes:
        size, index: how many ranks there are, and which one this is.
        group: torch's process group for these messages.
        wait_s: how long a rank waits for the others.
    """

    size: int = 1
    index: int = 0
    group: Any = None
    wait_s: float = DEFAULT_WAIT_S

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """Those of a model that transformers spread by a tensor parallel plan; a single one for all others."""
        if not cls.many(model):
            return cls()
        size = dist.get_world_size()
        wait_s = float(os.environ.get("KVBOOST_RANKS_WAIT") or DEFAULT_WAIT_S)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        return cls(size, dist.get_rank(group), group, wait_s)

    @staticmethod
    def many(model: Any) -> bool:
        """Whether a model is spread over ranks."""
        return Ranks.count(model) > 1 and dist.is_available() and dist.is_initialized()

    @staticmethod
    def count(model: Any) -> int:
        """Over how many ranks a model is spread by its tensor parallel plan."""
        return getattr(model, "_tp_size", None) or 1

    def all(self, what: str, value: bool) -> bool:
        """Whether it holds on every rank."""
        return value if self.size == 1 else all(self._exchange(what, value))

    def smallest(self, what: str, value: int) -> int:
        """The smallest of all ranks' numbers."""
        return value if self.size == 1 else min(self._exchange(what, value))

    def mean(self, what: str, value: torch.Tensor) -> torch.Tensor:
        """The mean of all ranks' tensors, the same bits on all of them."""
        if self.size == 1:
            return value
        return torch.stack([other.cpu() for other in self._exchange(what, value.cpu())]).mean(0).to(value.device)

    def first(self, what: str, decide: Callable[[], T]) -> T:
        """What the first rank decides; where that raises, all raise it."""
        if self.size == 1:
            return decide()
        mine: Any = None
        if self.index == 0:
            try:
                mine = (True, decide())
            except Exception as error:
                mine = (False, _portable(error))
        fine, value = self._exchange(what, mine)[0]
        if not fine:
            raise value
        return value

    def _exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's value for the same question.

        Raises:
            RanksError: a rank did not answer in time.
            RanksDiverged: a rank answers another question.
        """
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, (what, value), group=self.group)
        except Exception as error:
            raise RanksError(
                f"rank {self.index} of {self.size} waited for the others ({what}) and one of them is gone or did not "
                f"come within {self.wait_s:g} s (KVBOOST_RANKS_WAIT): {error}"
            ) from error
        asked = [answer[0] for answer in answers]
        if len(set(asked)) > 1:
            raise RanksDiverged(
                f"the ranks do different things ({', '.join(asked)}): one of them failed, or was not "
                "given the same calls in the same order"
            )
        return [answer[1] for answer in answers]


def _portable(error: Exception) -> Exception:
    """The error, if it survives being sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
