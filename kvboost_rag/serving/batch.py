"""Several requests at once: the lanes that are under way, one step of all of them after the other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.packed_forward import packed_forward, same_as_alone
from kvboost_rag.serving.lanes import PREFILL_CHUNK, Lane, Step
from kvboost_rag.serving.worker import Worker

logger = logging.getLogger(__name__)

MAX_LANES = 16
"""Requests under way at once; more wait in the order in which they came."""
STEPS_A_TURN = 8
"""Steps after which the worker does what else is queued (documents, comparisons) before it goes on."""
ROWS_A_STEP = PREFILL_CHUNK
"""Rows that requests on their way to the first token may compute between two tokens of the others (one forward more,
if it is longer). They go one after the other: sharing would give each the time of the last."""


@dataclass(frozen=True)
class Ticket:
    """A request that waits for its lane.

    Attributes:
        alone: must run without others (it switches the model's adapters).
        seeded: as in `Lane`.
    """

    job: Callable[[], None]
    alone: bool
    seeded: bool
    future: Future[None] = field(default_factory=Future)


class Batch:
    """Takes requests as they come and drives them together, in the worker's thread.

    Contract: a request joins at the next step, whatever the others do, and leaves when it is over. One alone runs the
    model's own forward; two or more share one, if the model gave the same logits so when that was tried first.
    Those that have a token already get their next one after at most `ROWS_A_STEP` rows of those that have none.
    A fault of one request ends that request.

    Args:
        model: whose requests these are.
        worker: where everything runs.
        max_tokens: positions that all requests under way may have together; a longer one runs alone.
    """

    def __init__(self, model: PreTrainedModel, worker: Worker, max_tokens: int) -> None:
        self._model, self._worker, self._max_tokens = model, worker, max_tokens
        self._waiting: deque[Ticket] = deque()
        self._lanes: dict[Lane, Ticket] = {}
        self._packs: bool | None = None
        self.num_packed_steps = 0
        """Forwards that served two or more requests."""

    def submit(self, job: Callable[[], None], *, alone: bool = False, seeded: bool = False) -> Future[None]:
        """Queue a request.

        Raises:
            RuntimeError: as `Worker.submit`.
        """
        ticket = Ticket(job, alone, seeded)
        self._waiting.append(ticket)
        try:
            turn = self._worker.submit(self._turn)
        except RuntimeError:
            self._waiting.remove(ticket)
            raise
        turn.add_done_callback(lambda done: ticket.future.cancel() if done.cancelled() else None)
        return ticket.future

    def door(self, alone: bool, seeded: bool) -> Door:
        """Where a stream hands in a request of a kind."""
        return Door(self, alone, seeded)

    @torch.no_grad()
    def _turn(self) -> None:
        """A few steps of all lanes; goes on in another turn unless the worker was closed."""
        try:
            self._drive()
        except BaseException as error:  # a fault here must not leave anybody waiting
            while self._lanes:
                self._resume(next(iter(self._lanes)), error)
            raise

    def _drive(self) -> None:
        steps = 0
        while self._waiting or self._lanes:
            self._prepare(admits=steps < STEPS_A_TURN or not self._lanes)
            if not self._lanes:
                return
            self._step()
            steps += 1
            if self._lanes and steps >= STEPS_A_TURN and not any(lane.is_preparing for lane in self._lanes):
                # Nothing that other jobs may change is half looked up by now.
                if self._worker.again(self._turn):
                    return
                steps = 0

    def _prepare(self, admits: bool) -> None:
        """Bring requests towards their first token, in the order in which they came, until it is others' turn."""
        spent = 0
        for lane in list(self._lanes):
            spent = self._advance(lane, spent)
        while admits and self._waiting and len(self._lanes) < MAX_LANES and self._may_compute(spent):
            alone = self._waiting[0].alone or any(ticket.alone for ticket in self._lanes.values())
            if self._lanes and alone:
                return
            ticket = self._waiting.popleft()
            if ticket.future.set_running_or_notify_cancel():
                lane = Lane(ticket.job, ticket.seeded)
                self._lanes[lane] = ticket
                spent = self._advance(lane, spent)

    def _advance(self, lane: Lane, spent: int) -> int:
        """Let a lane go on until it waits for its first token; returns the rows that were `spent` since the last step.

        A lane that has just been made counts as preparing.
        """
        while lane in self._lanes and lane.is_preparing and self._may_compute(spent):
            self._resume(lane)
            spent, lane.rows = spent + lane.rows, 0
        return spent

    def _may_compute(self, spent: int) -> bool:
        return spent < ROWS_A_STEP or not any(lane.step for lane in self._lanes)

    def _step(self) -> None:
        """One token of each lane that waits for one; memory for those that wait for it."""
        for lane in [lane for lane in self._lanes if lane.wanted]:
            held = sum(other.tokens for other in self._lanes)
            if not held or held + lane.wanted <= self._max_tokens:
                lane.tokens, lane.wanted = lane.wanted, 0
                self._resume(lane)
        asked = {lane: lane.step for lane in self._lanes if lane.step is not None}
        packable = {lane: step for lane, step in asked.items() if step.cache is not None}
        if len(packable) > 1 and self._packs is not False:
            answers = self._packed(packable)
            for lane, answer in answers.items():
                self._resume(lane, answer)
            asked = {lane: step for lane, step in asked.items() if lane not in answers}
        for lane, step in asked.items():
            try:
                answer = step.run()
            except Exception as error:
                answer = error
            self._resume(lane, answer)

    def _packed(self, steps: dict[Lane, Step]) -> dict[Lane, Any]:
        """One forward for all; nothing where it fails, so that each runs its own."""
        caches = [step.cache for step in steps.values() if step.cache is not None]
        lengths = [cache.buffer.length for cache in caches]
        try:
            logits = packed_forward(self._model, torch.cat([step.token for step in steps.values()]), caches)
            if self._packs is None:
                runs = [lambda step=step: step.run().logits[0, -1] for step in steps.values()]
                alone = same_as_alone(runs, caches, logits)
                self._packs = alone is None
                if alone is not None:
                    logger.warning("this model's requests are decoded one by one: together they give other logits")
                    logits = alone.to(logits.dtype)
        except Exception as error:
            if self._packs is None or not isinstance(error, torch.OutOfMemoryError):
                logger.warning("requests are decoded one by one from now on: %s", error, exc_info=error)
                self._packs = False
            for cache, length in zip(caches, lengths, strict=True):
                cache.buffer.length = length
            return {}
        self.num_packed_steps += 1
        return {lane: step.output(row) for (lane, step), row in zip(steps.items(), logits, strict=True)}

    def _resume(self, lane: Lane, answer: Any = None) -> None:
        """Let a lane go on; an end, good or bad, is its request's alone."""
        lane.crowded = len(self._lanes) > 1 or bool(self._waiting)
        try:
            lane.resume(answer)
        except BaseException as error:
            self._lanes.pop(lane).future.set_exception(error)
        else:
            if lane.is_over:
                self._lanes.pop(lane).future.set_result(None)


@dataclass(frozen=True)
class Door:
    """The batch for requests of one kind; see `Ticket`."""

    batch: Batch
    alone: bool
    seeded: bool

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """As `Batch.submit`."""
        return self.batch.submit(job, alone=self.alone, seeded=self.seeded)
