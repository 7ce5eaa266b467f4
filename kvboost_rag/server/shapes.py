"""OpenAI's response objects: whole and in chunks, for chat and for text."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag import __version__
from kvboost_rag.adapters.result_summary import cache_read_tokens, summary
from kvboost_rag.adapters.tool_calls import ToolCall
from kvboost_rag.datamodels import GenerationResult
from kvboost_rag.server.choices import Piece, call_id
from kvboost_rag.server.processors import TokenLogprob

Decode = Callable[[int], tuple[str, bytes]]
"""Token id to text and bytes (`token_text`)."""
Spell = Callable[[Sequence[int]], str]
"""Token ids to the text that they are together."""


def usage(results: Sequence[GenerationResult], per_prompt: int = 1) -> dict[str, Any]:
    """Token counts of all answers to one request. Of `per_prompt` answers to one prompt the first one counts it, and
    the tokens whose KV was there before.
    """
    first = list({index // per_prompt: result for index, result in reversed(list(enumerate(results)))}.values())
    num_prompt = sum(r.usage.input_tokens for r in first)
    cached = sum(map(cache_read_tokens, first))
    num_answer = sum(r.usage.output_tokens for r in results)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def report(result: GenerationResult, spell: Spell | None = None) -> dict[str, Any]:
    """What `x-kvboost-report` asks for: how each segment was served (`text`: and what it says), repair, stage times."""
    segments = [
        {
            "kind": s.kind.value,
            "hit": s.hit.value,
            "start": s.start,
            "num_tokens": s.num_tokens,
            "num_recomputed_tokens": s.num_recomputed_tokens,
            **({"text": spell(s.token_ids)} if spell is not None else {}),
        }
        for s in result.segments
    ]
    return {**summary(result), "segments": segments}


@dataclass
class Shape(ABC):
    """The objects of one response.

    Attributes:
        model: name that the client asked for.
        wanted_report: header `x-kvboost-report`: our report goes with the end of each answer (`true`, `text`) or not.
        decode: token id to text and bytes, for log probabilities.
        spell: token ids to text, for reports.
    """

    model: str
    wanted_report: str
    decode: Decode
    spell: Spell
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def chunks(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        """The chunks of a stream that a piece becomes; `first` of its answer."""

    @abstractmethod
    def choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer."""

    def envelope(self, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": f"kvboost-{__version__}", "choices": choices}

    @abstractmethod
    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response that is not streamed."""

    @abstractmethod
    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""

    def reported(self, chunk: dict[str, Any], piece: Piece) -> dict[str, Any]:
        if piece.result is None or self.wanted_report not in ("1", "true", "text"):
            return chunk
        return chunk | {"kvboost": report(piece.result, self.spell if self.wanted_report == "text" else None)}


class ChatShape(Shape):
    """`chat.completion`."""

    def chunks(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        made = [self._chunk(piece.index, {"role": "assistant", "content": ""})] if first else []
        if piece.text or piece.logprobs:
            made.append(self._chunk(piece.index, {"content": piece.text}, self._logprobs(piece.logprobs)))
        for number, call in enumerate(piece.calls):
            made.append(self._chunk(piece.index, {"tool_calls": [{"index": number, **_tool_call(call)}]}))
        if piece.result is not None:
            made.append(self.reported(self._chunk(piece.index, {}, None, piece.finish_reason), piece))
        return made

    def choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        last = pieces[-1]
        text = "".join(p.text for p in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not last.calls else None}
        message["refusal"] = None
        if last.calls:
            message["tool_calls"] = [_tool_call(call) for call in last.calls]
        entries = tuple(e for p in pieces for e in p.logprobs)
        return {
            "index": last.index,
            "message": message,
            "logprobs": self._logprobs(entries),
            "finish_reason": last.finish_reason,
        }

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.envelope("chat.completion", "chatcmpl", choices)

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", "chatcmpl", []) | {"usage": counts}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, end: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}
        return self.envelope("chat.completion.chunk", "chatcmpl", [choice])

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = [
            self._token(e.token_id, e.logprob) | {"top_logprobs": [self._token(i, p) for i, p in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.decode(token_id)
        # JSON has no -inf, which a token has that the model rules out.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}


class TextShape(Shape):
    """`text_completion`."""

    def chunks(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        choice = self._choice(piece.index, piece.text, piece.logprobs, piece.finish_reason)
        return [self.reported(self.envelope("text_completion", "cmpl", [choice]), piece)]

    def choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        entries = tuple(e for p in pieces for e in p.logprobs)
        return self._choice(pieces[-1].index, "".join(p.text for p in pieces), entries, pieces[-1].finish_reason)

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.envelope("text_completion", "cmpl", choices)

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        return self.envelope("text_completion", "cmpl", []) | {"usage": counts}

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprob], end: str | None) -> dict[str, Any]:
        logprobs = None
        if entries:
            tokens = [self.decode(e.token_id)[0] for e in entries]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [max(e.logprob, -9999.0) for e in entries],
                "top_logprobs": [{self.decode(i)[0]: max(p, -9999.0) for i, p in e.top} for e in entries],
                "text_offset": [sum(map(len, tokens[:i])) for i in range(len(tokens))],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.call_id or call_id(), "type": "function", "function": function}
