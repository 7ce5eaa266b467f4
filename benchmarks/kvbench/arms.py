"""The strategies and ablations that the quality suite compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.controls import OracleRepair, RandomRepair
from kvbench.summary import UNREUSED
from kvboost_rag.repair import (
    CacheBlendRepair,
    NoRepair,
    QueryRepair,
    RepairStrategy,
    SelectiveRepair,
    SensitivityRepair,
)


@dataclass(frozen=True)
class Arm:
    """One way to reuse.

    Attributes:
        anchor: `auto` (template head), the empty string (none), `bos`, or `head` (the prompt's own beginning).
        chunk_tokens: documents are reused in pieces of this size; None: whole.
        edited: documents were changed by a word after they had been warmed.
        contexts: encoding contexts of a chunk, as `EncodingConfig.contexts`.
        siblings: whether what stands before a chunk in its document belongs into its context.
        full_below: as `ReuseConfig.full_below`.
        leading: as `EncodingConfig.leading`.
        rounded: nothing is reused; full prefill in bfloat16, the scale for all others.
    """

    strategy: RepairStrategy
    ratio: float
    neighbours: int = 0
    quantization: str = "none"
    anchor: str = "auto"
    chunk_tokens: int | None = None
    edited: bool = False
    contexts: int = 1
    siblings: bool = True
    full_below: int = 0
    rounded: bool = False
    leading: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """What is stored of chunks besides their KV: fields of `EncodingConfig`."""
        sensitivity = "sensitivity" in (self.strategy.name, getattr(self.strategy, "weight", None))
        return ("sensitivity",) * sensitivity + ("leading",) * self.leading

    @property
    def name(self) -> str:
        if self.rounded:
            return UNREUSED
        weight = getattr(self.strategy, "weight", None)
        rows = self.strategy.name + (f"*{weight}" if weight else "")
        parts = [rows if self.strategy.name == "none" else f"{rows} {100 * self.ratio:g} %"]
        parts.append(f"{self.neighbours} neighbours")
        parts += [self.quantization] if self.quantization != "none" else []
        parts += [f"anchor {self.anchor or 'none'}"] if self.anchor != "auto" else []
        parts += [f"chunks of {self.chunk_tokens}"] if self.chunk_tokens is not None else []
        parts += ["edited"] if self.edited else []
        parts += [f"{self.contexts} contexts"] if self.contexts > 1 else []
        parts += ["leading"] if self.leading else []
        parts += [] if self.siblings else ["no siblings"]
        parts += [f"all below {self.full_below}"] if self.full_below else []
        return ", ".join(parts)


BASELINE = Arm(CacheBlendRepair(), 0.15)
"""What others do: chunks encoded alone, CacheBlend at 15 %."""
MAIN = (
    Arm(NoRepair(), 0.0),
    BASELINE,
    Arm(QueryRepair(), 0.15),
    Arm(NoRepair(), 0.0, 4),
    Arm(CacheBlendRepair(), 0.15, 4),
    Arm(QueryRepair(), 0.05, 4),
    Arm(QueryRepair(), 0.15, 4),
    Arm(QueryRepair(weight="deviation"), 0.05, 4),
    Arm(QueryRepair(weight="deviation"), 0.15, 4),
)
QUICK = (MAIN[0], BASELINE, MAIN[3], MAIN[5], MAIN[6], Arm(QueryRepair(), 0.30, 4))
HALF = (Arm(QueryRepair(), 0.50, 4),)
"""What it takes for the same answer on four questions of five."""
FIDELITY = (
    *(
        Arm(strategy, ratio, 4, contexts=contexts, leading=leading)
        for contexts in (1, 2)
        for leading in (False, True)
        for strategy, ratio in ((NoRepair(), 0.0), (QueryRepair(), 0.05))
    ),
    *(Arm(strategy, 0.05, 4, contexts=2) for strategy in (RandomRepair(), OracleRepair())),
    Arm(NoRepair(), 0.0, rounded=True),
)
"""What the default is decided by, and what it is held against."""
_BASE = Arm(QueryRepair(), 0.10, 4)
ABLATIONS: dict[str, tuple[Arm, ...]] = {
    "anchor": tuple(Arm(NoRepair(), 0.0, anchor=anchor) for anchor in ("", "bos", "auto", "head")),
    "rows": tuple(
        replace(_BASE, strategy=strategy)
        for strategy in (
            RandomRepair(),
            QueryRepair(),
            CacheBlendRepair(),
            QueryRepair(weight="deviation"),
            QueryRepair(weight="sensitivity"),
            SensitivityRepair(),
            SelectiveRepair(),
        )
    ),
    "neighbours": tuple(replace(_BASE, neighbours=count) for count in (0, 1, 2, 4, 8)),
    "ratio": tuple(replace(_BASE, ratio=ratio) for ratio in (0.0, 0.02, 0.05, 0.10, 0.15, 0.30)),
    "quantisation": tuple(replace(_BASE, quantization=codec) for codec in ("none", "k8v8", "k8v4")),
    "chunks": tuple(replace(_BASE, neighbours=0, chunk_tokens=size) for size in (64, 128, 256, 512)),
    "contexts": tuple(
        Arm(strategy, ratio, 4, contexts=contexts, siblings=siblings)
        for contexts in (1, 2)
        for siblings in (True, False)
        for strategy, ratio in ((NoRepair(), 0.0), (QueryRepair(), 0.05))
    ),
    "choice": tuple(
        Arm(strategy, 0.05, 4, contexts=2)
        for strategy in (RandomRepair(), QueryRepair(), CacheBlendRepair(), OracleRepair())
    ),
    "short": tuple(Arm(QueryRepair(), 0.05, 4, full_below=bound) for bound in (0, 128, 256)),
    "edited": (replace(_BASE, neighbours=0), replace(_BASE, neighbours=0, edited=True)),
}
