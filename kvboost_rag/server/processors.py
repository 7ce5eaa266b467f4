"""What decoding does to logits for OpenAI's parameters, as transformers' own processors and criteria."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor, StoppingCriteria


class OpenAIPenalties(LogitsProcessor):  # type: ignore[misc]
    """`logit -= frequency · count + presence · (count > 0)`, counted over the answer; the prompt does not count."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._prompt_len: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._prompt_len is None:
            self._prompt_len = input_ids.shape[1]
        counts = torch.bincount(input_ids[0, self._prompt_len :], minlength=scores.shape[-1]).to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0)  # type: ignore[return-value]


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """Adds to the logits of single tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        added = self._values.to(scores)[None]
        return scores.index_add(1, self._ids.to(scores.device), added)  # type: ignore[return-value]


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer under the model's own distribution (before penalties, bias, temperature), in nats."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class LogprobRecord:
    """Log probabilities of an answer's tokens, as they are chosen. Make one an answer."""

    num_top: int
    tokens: list[TokenLogprob] = field(default_factory=list)
    _row: torch.Tensor | None = None

    def processor(self) -> LogitsProcessor:
        """Must be the first one."""
        return _Seen(self)

    def criterion(self) -> StoppingCriteria:
        """Sees which token was chosen; never stops."""
        return _Chosen(self)

    def see(self, row: torch.Tensor) -> None:
        """Logits `[vocab_size]` of the token to come."""
        self._row = row

    def choose(self, token_id: int) -> None:
        """The token that came."""
        assert self._row is not None
        logprobs = self._row.float().log_softmax(-1)
        top = logprobs.topk(self.num_top)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        self.tokens.append(TokenLogprob(token_id, float(logprobs[token_id]), pairs))


class _Seen(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, record: LogprobRecord) -> None:
        self._record = record

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._record.see(scores[0])
        return scores


class _Chosen(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, record: LogprobRecord) -> None:
        self._record = record

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.Tensor:
        self._record.choose(int(input_ids[0, -1]))
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)
