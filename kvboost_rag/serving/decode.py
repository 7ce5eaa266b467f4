"""Tokens out: transformers' own `generate` goes on from the repaired cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from kvboost_rag.chunks.served import ServedPrompt
from kvboost_rag.config import GenerationParams
from kvboost_rag.forward.row_forward import RowPass, RowPlan, observe_rows, row_forward, row_pass
from kvboost_rag.models.hf_cache import BufferCache, cache_argument
from kvboost_rag.models.unwrap import input_device
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.serving.callers import blaming_callers, callables
from kvboost_rag.serving.drafted_forward import continuing
from kvboost_rag.serving.generation_settings import CallSettings, call_settings, only_these, replaced_settings
from kvboost_rag.serving.lanes import PREFILL_CHUNK, breathe, is_crowded, stepping
from kvboost_rag.serving.watch import Decoded, Endings, Watch

logger = logging.getLogger(__name__)


def prompt_tensor(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """Token ids `[prompt_len]` where the model expects them."""
    return torch.tensor(ids, device=input_device(model))


class Decoder:
    """Runs `generate` for one model. Not thread-safe; the engine calls it from its worker."""

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens, eos_token_ids: Sequence[int]) -> None:
        self.model = model
        self.tokens = tokens
        self.eos_token_ids = tuple(eos_token_ids)
        if replaced := replaced_settings(model.generation_config):
            logger.warning("not taken over from the model's generation config: %s", "; ".join(replaced))

    def run(
        self,
        prompt: ServedPrompt,
        params: GenerationParams,
        on_text: Callable[[str], None],
        on_token: Callable[[], None],
        cancelled: threading.Event,
    ) -> tuple[Decoded, torch.Tensor | None]:
        """Generate the answer to a prompt that is prepared.

        Args:
            on_text: gets each piece of text as soon as no stop string can begin in it.
            on_token: called after each token.
            cancelled: checked after each token.

        Returns:
            The answer, and the positions that were computed to the end, `[num_rows]`; None without a repair plan.
        """
        settings = self._settings(prompt, params)
        ids = prompt_tensor(self.model, prompt.token_ids)
        endings = Endings(settings.stop, frozenset(self._end_ids(params)), settings.criteria, cancelled)
        watch = Watch(self.tokens, endings, len(ids), on_text, on_token)
        kwargs = settings.objects | {
            "generation_config": settings.config,
            "stopping_criteria": StoppingCriteriaList([watch]),
        }
        if prompt.cache is not None:
            kwargs[cache_argument(self.model)] = prompt.cache
        own = (*settings.criteria, *callables(settings.objects))
        earlier, last = self._begin_rows(prompt, ids)
        with (
            self._started(prompt, ids, last, settings.drafts) as (model, final),
            _seeded(params.seed, input_device(self.model)),
            only_these(model, settings.config),
            blaming_callers(self.model, own),
        ):
            model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], **kwargs)
        if prompt.cache is None or not final:
            return watch.finish(params.max_new_tokens), None
        prompt.cache.count_rows(sum(map(len, earlier)))
        return watch.finish(params.max_new_tokens), torch.cat([*earlier, final[0].rows])

    def _settings(self, prompt: ServedPrompt, params: GenerationParams) -> CallSettings:
        """Of one call; a plain prefill goes in pieces where others wait for it."""
        length = len(prompt.token_ids) + params.max_new_tokens
        settings = call_settings(self.model, params, self._end_ids(params), length)
        if prompt.plan is None and not prompt.exact_tokens and is_crowded() and not settings.drafts:
            settings.config.prefill_chunk_size = PREFILL_CHUNK
        return settings

    @torch.no_grad()
    def score(self, prompt: ServedPrompt, continuation: Sequence[int]) -> torch.Tensor:
        """Logits after the prompt and after each token of a given continuation, float32 `[len + 1, vocab_size]`."""
        start = prompt_tensor(self.model, prompt.token_ids)
        ids = torch.tensor(list(continuation), dtype=torch.long, device=start.device)
        if prompt.cache is None or prompt.plan is None:
            done = prompt.cache.buffer.length if prompt.cache is not None else 0
            return self._append(torch.cat([start[done:], ids]), prompt.cache, done)[-(len(ids) + 1) :]
        first = row_forward(self.model, prompt.cache.buffer, start, prompt.plan.row_plan).logits[None].float()
        if not len(ids):
            return first
        return torch.cat([first, self._append(ids, prompt.cache, len(start))])

    def _append(self, ids: torch.Tensor, cache: BufferCache | None, position: int) -> torch.Tensor:
        kwargs: dict[str, Any] = {} if cache is None else {cache_argument(self.model): cache}
        positions = torch.arange(position, position + len(ids), device=ids.device)[None]
        output = self.model(input_ids=ids[None], position_ids=positions, use_cache=cache is not None, **kwargs)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _begin_rows(self, prompt: ServedPrompt, ids: torch.Tensor) -> tuple[list[torch.Tensor], RowPlan | None]:
        """While others wait, compute a long plan's rows piece by piece, all but the last piece.

        A piece sees fresh KV in front of it, as it would in one forward. Rows that are dropped on the way are chosen
        among all of them, so such a plan stays whole.

        Returns:
            The rows that were computed, and what is left to do.
        """
        if prompt.cache is None or prompt.plan is None:
            return [], None
        plan = prompt.plan.row_plan
        if plan.watcher is not None or not is_crowded():
            return [], plan
        *earlier, last = plan.rows.split(PREFILL_CHUNK)
        for rows in earlier:
            observe_rows(self.model, prompt.cache.buffer, ids, RowPlan(rows))
            breathe(len(rows))
        return earlier, RowPlan(last)

    @contextmanager
    def _started(
        self, prompt: ServedPrompt, ids: torch.Tensor, plan: RowPlan | None, drafts: bool
    ) -> Iterator[tuple[PreTrainedModel, list[RowPass]]]:
        """The model for `generate`, whose first forward is the partial one, so that no forward is spent on getting
        started; and that pass, if there is one, once it began.
        """
        model = stepping(self.model)
        passes: list[RowPass] = []
        if prompt.cache is None or plan is None:
            yield continuing(model) if drafts and prompt.cache is not None else model, passes
            return
        prompt.cache.buffer.length = len(ids) - 1
        final_pass = row_pass(self.model, prompt.cache, ids, plan)

        def prompt_logits() -> torch.Tensor:
            with final_pass as state:
                passes.append(state)
                logits: torch.Tensor = model(input_ids=ids[-1:][None], use_cache=True).logits[:, -1:]
                return logits

        if drafts:
            yield continuing(model, prompt_logits), passes
        else:
            with final_pass as state:
                yield model, [state]

    def _end_ids(self, params: GenerationParams) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.eos_token_ids, *params.stop_token_ids)))


class _seeded:  # noqa: N801 - reads as a context manager function
    """Sampling from a seed of its own, without disturbing the caller's random state."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed = seed
        self._gpus = [device] if device.type == "cuda" else []
        self._fork: Any = None

    def __enter__(self) -> None:
        if self._seed is None:
            return
        # Only the model's device: torch's defaults initialise and seed every GPU of the machine.
        self._fork = torch.random.fork_rng(devices=self._gpus)
        self._fork.__enter__()
        torch.default_generator.manual_seed(self._seed)
        for gpu in self._gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(self._seed)

    def __exit__(self, *exc: Any) -> None:
        if self._fork is not None:
            self._fork.__exit__(*exc)
