"""Answers of a given form: a JSON object, JSON of a schema, a text that a pattern matches, a call of one of some tools.

Tokens that cannot go on with the form are masked, by llguidance (extra `structured`), in a logits processor that
transformers' own `generate` runs; a model of any size obeys. What it cannot do is end in time: an answer that is cut
off by `max_new_tokens` is a beginning of that form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvboost_rag.config import ConfigError, GenerationParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

INSTALL = 'answers of a given form need llguidance: pip install "kvboost-rag[structured]"'

# Free white space is where a small model, once it has begun, never leaves off.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Form:
    """What an answer must look like: a grammar of llguidance. Make one with the functions below."""

    grammar: str


def is_available() -> bool:
    """Whether the library is installed."""
    return find_spec("llguidance") is not None


def json_object() -> Form:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Form:
    """JSON that a schema accepts.

    Raises:
        ConfigError: the schema says something that cannot be enforced (the message says what).
        ImportError: the library is not installed.
    """
    matcher = _library().LLMatcher
    try:
        grammar = matcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the JSON schema cannot be enforced: {error}") from None
    return _checked(grammar, "the JSON schema")


def regex(pattern: str) -> Form:
    """A text that a pattern matches as a whole (Rust's syntax: no look-around, no back references). Raises as above."""
    return _checked(_library().LLMatcher.grammar_from_regex(pattern), f"the pattern {pattern!r}")


def tool_call(tools: Sequence[Mapping[str, Any]]) -> Form:
    """One call of one of the tools, as bare JSON (`adapters.tool_calls` reads it).

    Args:
        tools: in OpenAI's form, as `tool_choice.chosen_tools` gives them.
    """
    calls = _calls(tools)
    return json_schema(calls[0] if len(calls) == 1 else {"anyOf": calls})


def _calls(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The schema of a call of each tool."""
    calls = []
    for tool in tools:
        function = tool["function"]
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    # Models fill in what a schema leaves open, and callers have no use for it.
                    "arguments": {"additionalProperties": False, **(function.get("parameters") or {"type": "object"})},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls


def of_response_format(wanted: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] = ()) -> Form | None:
    """The form that OpenAI's `response_format` asks for, or None where it asks for none.

    Args:
        tools: that may be called instead.

    Raises:
        ConfigError: not a response format, or a schema that cannot be enforced.
        ImportError: the library is not installed.
    """
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    if kind == "json_schema":
        schema = (wanted.get("json_schema") or {}).get("schema")
        if not isinstance(schema, Mapping):
            raise ConfigError('response_format: "json_schema" must hold {"name": …, "schema": {…}}')
        return json_schema(_or_call(schema, tools) if tools else schema)
    raise ConfigError(f"response_format={wanted!r}: expected type text, json_object or json_schema")


def _or_call(schema: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answer = dict(schema)
    named: dict[str, Any] = {
        key: answer.pop(key) for key in ("$defs", "definitions") if key in answer
    }  # references begin at the root
    return {"anyOf": [answer, *_calls(tools)], **named}


def processor(form: Form, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int] = ()) -> Any:
    """A transformers `LogitsProcessor` that holds one answer to a form. For one sequence of one request.

    Args:
        tokenizer: a fast one.
        eos_token_ids: what may end the answer; the tokenizer's own where empty.

    Raises:
        ConfigError: a slow tokenizer.
        ImportError: the library is not installed.
    """
    _library()
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{type(tokenizer).__name__} is no fast tokenizer: answers of a given form need one")
    from transformers import LogitsProcessor

    class Constrained(LogitsProcessor):  # type: ignore[misc]
        """Masks what cannot go on; what comes first is the prompt."""

        def __init__(self) -> None:
            self._matcher: Any = None
            self._seen = 0

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            import torch
            from llguidance.torch import allocate_token_bitmask, apply_token_bitmask_inplace, fill_next_token_bitmask

            if self._matcher is None:
                known = _llguidance_tokenizer(tokenizer, scores.shape[-1], tuple(eos_token_ids))
                self._matcher = _library().LLMatcher(known, form.grammar)
            else:
                self._matcher.consume_tokens(input_ids[0, self._seen :].tolist())
            self._seen = input_ids.shape[1]
            bitmask = allocate_token_bitmask(1, scores.shape[-1])
            fill_next_token_bitmask(self._matcher, bitmask)
            if self._matcher.is_error():
                raise ConfigError(f"the answer's form cannot be followed: {self._matcher.get_error()}")
            masked = scores.float().clone()
            apply_token_bitmask_inplace(masked, bitmask.to(masked.device))
            if masked.isneginf().all():  # what the form allows, another processor has ruled out: the form counts
                masked = torch.zeros_like(masked)
                apply_token_bitmask_inplace(masked, bitmask.to(masked.device))
            return masked  # type: ignore[return-value]

    return Constrained()


def held_to(params: GenerationParams, form: Form, tokenizer: PreTrainedTokenizerBase) -> GenerationParams:
    """`params` for one request whose answer must look like `form`; raises as `processor`."""
    extra = dict(params.extra or {})
    extra["logits_processor"] = [*extra.get("logits_processor", ()), processor(form, tokenizer)]
    return replace(params, extra=extra)


_TOKENIZERS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


def _llguidance_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    """Takes about a second to make, so it is kept with the tokenizer."""
    from llguidance.hf import from_tokenizer

    made = _TOKENIZERS.setdefault(tokenizer, {})
    key = (vocab_size, eos_token_ids)
    if key not in made:
        made[key] = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    return made[key]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(INSTALL) from error
    return llguidance


def _checked(grammar: str, what: str) -> Form:
    invalid, messages = _library().LLMatcher.validate_grammar_with_warnings(grammar)
    if invalid:
        raise ConfigError(f"{what} cannot be enforced: {'; '.join(messages)}")
    return Form(grammar)
