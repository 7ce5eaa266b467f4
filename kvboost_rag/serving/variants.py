"""The parts of an engine for each state of its model: weights and active adapters. No state sees another's KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.forward.probe import ProbeReport
from kvboost_rag.indexing.index import DocumentIndex
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.indexing.warmer import Warmer
from kvboost_rag.models.adapters import AdapterNames, available_adapters, resting_adapters, with_adapters
from kvboost_rag.models.watch import ModelState, ModelWatch
from kvboost_rag.serving.server import Server

T = TypeVar("T")

MAX_VARIANTS = 16
"""States whose parts are kept; those of others are made again, which costs no forward."""


@dataclass(frozen=True)
class Variant:
    """The parts that hold for one state of the model.

    Attributes:
        adapters: that were active when it was made.
    """

    state: ModelState
    adapters: AdapterNames
    probe: ProbeReport
    registry: ChunkRegistry
    fetcher: ChunkFetcher
    similar: SimilarChunks
    donors: Donors
    warmer: Warmer
    index: DocumentIndex
    server: Server


class ModelChanged(RuntimeError):
    """The model is not what it was when a piece of work began: what was computed since is not stored."""


class Variants:
    """Picks the parts that belong to the model as it is now, and makes them when a state is met first.

    Contract: `run`, `run_as` and `refresh` are called in the engine's worker, one at a time: nobody else switches
    adapters then. `resting` and `fingerprints` may be read from any thread.

    Args:
        make: the parts for a state of these variants.

    Attributes:
        resting: for the model as it was last seen between requests.
    """

    def __init__(self, watch: ModelWatch, make: Callable[[Variants, ModelState, AdapterNames], Variant]) -> None:
        self._watch = watch
        self._make = make
        self._made: dict[str, Variant] = {}
        self._fingerprints: tuple[str, ...] = ()
        if available_adapters(watch.model):  # documents indexed without an adapter are known with one
            with with_adapters(watch.model, ()):
                self._fingerprints = (watch.state().fingerprint,)
        self.resting = self._current()

    def fingerprints(self) -> tuple[str, ...]:
        """Of the states met so far."""
        return self._fingerprints

    def run(self, adapters: AdapterNames | None, job: Callable[[Variant], T]) -> T:
        """Run a job with exactly these adapters active; None: with the model as it stands.

        Raises:
            AdapterError: the model does not have one of them.
        """
        if adapters is None:
            self.resting = self._current()
            return job(self.resting)
        with with_adapters(self._watch.model, adapters):
            return job(self._current())

    def run_as(self, fingerprint: str, adapters: AdapterNames, job: Callable[[], T]) -> T:
        """Run a job that belongs to a state, if the model can be brought to it.

        Raises:
            ModelChanged: it cannot: the weights are others by now.
        """
        self.resting = self._current()
        if self.resting.state.fingerprint == fingerprint:
            return job()
        if set(adapters) <= set(available_adapters(self._watch.model)):
            with with_adapters(self._watch.model, adapters):
                if self._watch.state().fingerprint == fingerprint:
                    return job()
        raise ModelChanged("the model's weights or adapters were changed since this began: call again")

    def refresh(self) -> bool:
        """Read the whole model again; True if it is in another state than was thought."""
        before = self.resting.state.fingerprint
        self._watch.refresh()
        self._made.clear()
        self.resting = self._current()
        return self.resting.state.fingerprint != before

    def _current(self) -> Variant:
        state = self._watch.state()
        variant = self._made.pop(state.fingerprint, None)
        if variant is None:
            if state.fingerprint not in self._fingerprints:
                self._fingerprints = (*self._fingerprints, state.fingerprint)
            variant = self._make(self, state, resting_adapters(self._watch.model))
        while len(self._made) >= MAX_VARIANTS:
            del self._made[next(iter(self._made))]
        self._made[state.fingerprint] = variant
        return variant
