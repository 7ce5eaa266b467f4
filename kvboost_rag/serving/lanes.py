"""A lane: one request's way through all stages, which can rest between two tokens while others have their turn.

Everything of one request (transformers' `generate` with its processors, criteria and random numbers included) runs in
a greenlet of the worker's thread. Where `generate` asks the model for the next token's logits, the lane hands the
question to whoever drives it (`batch`), which answers those of all lanes with one forward. Nothing of it runs at the
same time as anything else, so no stage has to know about it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvboost_rag.models.hf_cache import BufferCache, cache_argument, causal_output

PREFILL_CHUNK = 512
"""Rows (tokens of a prefill, of a repair) that one forward computes at most while others wait."""

_PLAIN = frozenset({"input_ids", "position_ids", "attention_mask", "use_cache", "return_dict", "logits_to_keep"})


@dataclass(frozen=True)
class Step:
    """A forward that a lane waits for.

    Attributes:
        kwargs: of the model's forward.
        cache: the request's buffer, if the forward is one more token after it and nothing else.
        run: the forward by itself.
    """

    kwargs: Mapping[str, Any]
    cache: BufferCache | None
    run: Callable[[], Any]

    @property
    def token(self) -> torch.Tensor:
        """The token to be appended, `[1]`."""
        ids: torch.Tensor = self.kwargs["input_ids"]
        return ids[0]

    def output(self, logits: torch.Tensor) -> CausalLMOutputWithPast:
        """What the forward would have returned, for logits `[vocab_size]`."""
        return causal_output(logits[None, None], self.cache)


class Lane:
    """One job that can rest. Driven from one thread.

    Args:
        job: what to run.
        seeded: whether it draws random numbers from a seed of its own: its generator's state is then kept apart.

    Attributes:
        step: the token that it waits for, None where it waits for memory or for its turn to go on preparing.
        prompt_tokens: length of its prompt; 0 before that is known.
        tokens: positions that it holds memory for.
        wanted: positions that it waits for memory for.
        rows: that it computed on its way to the first token; whoever drives it takes them off.
        crowded: whether there were others when it went on last.
    """

    def __init__(self, job: Callable[[], None], seeded: bool = False) -> None:
        self._greenlet = greenlet(job)
        self._greenlet.lane = self
        self._seeded = seeded
        self._outside: torch.Tensor | None = None
        self.step: Step | None = None
        self.prompt_tokens = 0
        self.tokens = 0
        self.wanted = 0
        self.rows = 0
        self.crowded = False

    @property
    def is_over(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def is_preparing(self) -> bool:
        """Has begun, and could go on towards its first token at once."""
        return self.step is None and not self.wanted and not self.is_over

    def resume(self, answer: Any = None) -> None:
        """Run until it rests or is over. An exception as the answer is raised where it waits.

        Raises:
            Exception: what the job raised.
        """
        self.step = None
        if self._is_new:
            self._outside = torch.get_rng_state() if self._seeded else None
            self._greenlet.switch()
        elif isinstance(answer, BaseException):
            self._greenlet.throw(answer)
        else:
            self._greenlet.switch(answer)

    @property
    def _is_new(self) -> bool:
        return not self._greenlet and not self._greenlet.dead

    def rest(self, step: Step | None = None) -> Any:
        """Called in the lane: let others go on, and come back with what the step gave."""
        self.step = step
        if self._outside is None:
            return self._greenlet.parent.switch()
        # Nobody else draws from this lane's seed, nor does this lane from theirs.
        own = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        try:
            return self._greenlet.parent.switch()
        finally:
            self._outside = torch.get_rng_state()
            torch.set_rng_state(own)


def current_lane() -> Lane | None:
    """The lane that this code runs in."""
    return getattr(getcurrent(), "lane", None)


def is_crowded() -> bool:
    """Whether others wait while this code runs."""
    lane = current_lane()
    return lane is not None and lane.crowded


def reserve(prompt_tokens: int, answer_tokens: int) -> None:
    """In a lane, rest until there is memory for a request of so many positions; elsewhere nothing."""
    lane = current_lane()
    if lane is None:
        return
    lane.prompt_tokens, lane.wanted = prompt_tokens, prompt_tokens + answer_tokens
    while lane.wanted:  # granted by whoever drives the lane
        lane.rest()


def breathe(num_rows: int) -> None:
    """In a lane, after a forward over so many rows: let others go on if it is their turn; elsewhere nothing.

    Called where nothing is half done: no lock is held and the model has no hooks of a forward that is still to come.
    """
    lane = current_lane()
    if lane is not None:
        lane.rows += num_rows
        lane.rest()


def stepping(model: PreTrainedModel) -> PreTrainedModel:
    """The model for `generate`: in a lane one whose forwards after the prompt are steps, and which lets others go on
    after those over the prompt; else the model itself.

    It shares weights, modules and hooks with the model; nothing in the model is changed.
    """
    lane = current_lane()
    if lane is None:
        return model
    try:
        name = cache_argument(model)
    except ValueError:  # recurrent models and wrappers: nobody can tell their steps apart
        return model
    shared = copy.copy(model)
    forward = model.forward
    begun = False

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        is_first, begun = not begun, True
        cache = kwargs.get(name)
        ids = kwargs.get("input_ids")
        if isinstance(cache, BufferCache) and cache.in_row_pass:
            lane.rows += cache.num_rows
            return forward(*args, **kwargs)
        if args or cache is None or ids is None:
            return forward(*args, **kwargs)
        if is_first or 0 < _length(cache) < lane.prompt_tokens:
            output = forward(**kwargs)
            breathe(ids.shape[-1])
            return output
        packable = isinstance(cache, BufferCache) and ids.shape == (1, 1) and _is_plain(kwargs, name)
        return lane.rest(Step(kwargs, cache if packable else None, lambda: forward(**kwargs)))

    step.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    shared.forward = step
    return shared


def _length(cache: Any) -> int:
    """Tokens that a cache holds; 0 for one of recurrent layers, which does not count them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return 0


def _is_plain(kwargs: Mapping[str, Any], cache_name: str) -> bool:
    """Whether nothing is said that a packed forward does not say."""
    return all(value is None or name in _PLAIN or name == cache_name for name, value in kwargs.items())
