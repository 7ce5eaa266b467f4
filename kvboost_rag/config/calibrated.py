"""What calibration found for a model, as defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvboost_rag.config.checks import check_choice, check_count, check_range, check_strategy

ReuseMode = Literal["blend", "exact", "off"]


@dataclass(frozen=True)
class CalibratedDefaults:
    """What a model's profile puts in the place of the defaults below.

    Attributes:
        reuse: `blend`, or `exact` for a model that failed the accuracy gate.
        repair_options: parameters of the strategy (such as the weight of `query`); they go with `repair` only.
        neighbours, contexts, context_weights, quantization: how chunks are encoded and kept, see `EncodingConfig`.
    """

    reuse: ReuseMode = "blend"
    repair: str = "query"
    recompute_ratio: float = 0.05
    repair_options: Mapping[str, Any] = field(default_factory=dict)
    neighbours: int = 4
    contexts: int = 2
    context_weights: Any = None
    quantization: str = "none"

    def __post_init__(self) -> None:
        check_choice("reuse", self.reuse, get_args(ReuseMode))
        check_strategy("repair", self.repair)
        check_range("recompute_ratio", self.recompute_ratio, 0.0, 1.0)
        check_encoding(self.neighbours, self.quantization)


def check_encoding(neighbours: Any, quantization: Any) -> None:
    check_choice("quantization", quantization, ("none", "k8v8", "k8v4"))
    if neighbours is not None:
        check_count("neighbours", neighbours, 0, "chunks")
