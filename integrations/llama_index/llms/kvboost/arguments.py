"""Arguments of KVBoostLLM, and how objects that hold a model are copied, pickled and written to dictionaries."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer, field_validator
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.llms.kvboost.calls import REUSE_SETTINGS, ChatTemplate
from llama_index.llms.kvboost.loading import engine_spec
from llama_index.llms.kvboost.tools import ToolCalling

from kvboost_rag.adapters.generation_kwargs import check_params
from kvboost_rag.adapters.registry import EngineSpec
from kvboost_rag.adapters.reuse_settings import check_reuse

logger = logging.getLogger(__name__)

_POSITIONS = (
    "context_window",
    "max_new_tokens",
    "query_wrapper_prompt",
    "tokenizer_name",
    "model_name",
    "model",
    "tokenizer",
    "device_map",
    "stopping_ids",
    "tokenizer_kwargs",
    "tokenizer_outputs_to_remove",
    "model_kwargs",
    "generate_kwargs",
    "is_chat_model",
    "callback_manager",
    "system_prompt",
    "messages_to_prompt",
    "completion_to_prompt",
    "pydantic_program_mode",
    "output_parser",
)
"""The order of `HuggingFaceLLM`'s arguments."""


class KVBoostArguments(ToolCalling, CustomLLM):
    """Fields of `KVBoostLLM`. Copies and pickles share the engine; what cannot be pickled is left out of the state."""

    model_name: str = Field(default="", description="Hub id, folder, .gguf file or `bundled:…`; else give `model`.")
    tokenizer_name: str = Field(default="", description="Where the tokenizer comes from, if not from the model.")
    context_window: int | None = Field(default=None, gt=0, description="At most this many tokens; default the model's.")
    max_new_tokens: int = Field(default=DEFAULT_NUM_OUTPUTS, gt=0, description="Most tokens of an answer.")
    device_map: Any = Field(default="auto", description="As `from_pretrained` takes it.")
    stopping_ids: list[int] = Field(default_factory=list, description="Tokens that end an answer, beside the model's.")
    tokenizer_outputs_to_remove: list[str] = Field(
        default_factory=list, description="Accepted and not needed: the model gets token ids and a mask only."
    )
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, description="For loading the tokenizer.")
    model_kwargs: dict[str, Any] = Field(default_factory=dict, description="For loading the model.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="Generation parameters of every call.")
    is_chat_model: bool | None = Field(default=None, description="Default: whether there is a chat template.")
    is_function_calling_model: bool | None = Field(
        default=None, description="Default: whether the chat template writes tools; else they are written as text."
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables of the chat template.")
    store: Any = Field(default=None, description="Folder for the KV of documents, or a `Store`; default: memory only.")
    dtype: Any = Field(default=None, description="Of the weights; default the checkpoint's own.")
    reuse: str | None = Field(default=None, description="`blend` (default), `exact` (prefix cache only) or `off`.")
    repair: str | None = Field(default=None, description="Strategy that chooses the rows to recompute.")
    recompute_ratio: float | None = Field(default=None, description="Share of document tokens to recompute, 0…1.")
    settle: bool | None = Field(
        default=None, description="Recompute served turns while nobody waits; default: on in chats."
    )
    adapter: str | list[str] | None = Field(
        default=None,
        description="Adapter that answers; `[]`: the base model; default: as the model stands.",
    )
    namespace: str | None = Field(default=None, description="Whose documents; those of one are never used for another.")
    strict: bool | None = Field(default=None, description="Raise on a fault in reuse instead of plain prefill.")
    neighbours: int | None = Field(
        default=None, ge=0, description="Similar chunks that `KVWarm` encodes a chunk after; default the engine's (4)."
    )
    system_prompt: str = Field(default="", description="Stands before every prompt that is not formatted yet.")
    query_wrapper_prompt: BasePromptTemplate = Field(
        default=PromptTemplate("{query_str}"), description="Put around prompts that are not formatted yet."
    )

    _spec: EngineSpec = PrivateAttr()

    def __init__(self, *args: Any, model: Any = None, tokenizer: Any = None, engine: Any = None, **fields: Any) -> None:
        placed = _by_position(args, fields.keys() | {k for k, v in (("model", model), ("tokenizer", tokenizer)) if v})
        model, tokenizer = placed.pop("model", model), placed.pop("tokenizer", tokenizer)
        fields |= placed
        if unknown := sorted(fields.keys() - type(self).model_fields.keys()):
            raise TypeError(f"KVBoostLLM has no argument {', '.join(unknown)}")
        super().__init__(**{name: value for name, value in fields.items() if value is not None})
        check_reuse(self._reuse_settings())
        check_params(self.generate_kwargs)
        self._spec = engine_spec(dict(self), model, tokenizer, engine)
        self.model_name = self.model_name or getattr(engine, "name", None) or self._spec.name
        if fields.get("messages_to_prompt") is None:
            self.messages_to_prompt = ChatTemplate(self._spec)

    @field_validator("query_wrapper_prompt", mode="before")
    @classmethod
    def _as_template(cls, value: Any) -> Any:
        return PromptTemplate(value) if isinstance(value, str) else value

    @field_serializer("query_wrapper_prompt")
    def _template_text(self, value: BasePromptTemplate) -> str:
        return value.get_template()

    @field_serializer("store")
    def _store_path(self, value: Any) -> str | None:
        return value if isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()

    def _reuse_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in REUSE_SETTINGS}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVBoostArguments:
        """A copy that shares the engine, the callbacks and the rate limiter."""
        memo = {} if memo is None else memo
        for shared in (self.callback_manager, self.rate_limiter, self.store):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Arguments and spec. What cannot be pickled is left out of the state, and stays where it is."""
        fields = {}
        for name, value in self.__dict__.items():
            if isinstance(value, ChatTemplate):
                continue
            try:
                pickle.dumps(value)
            except Exception:  # objects raise what they like
                logger.warning("%s of %s cannot be pickled; the copy has the default", name, self.class_name())
            else:
                fields[name] = value
        return {"fields": fields, "spec": self._spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["fields"], engine=state["spec"])  # type: ignore[misc]


def _by_position(args: Sequence[Any], named: Collection[str]) -> dict[str, Any]:
    """Arguments given without names, under the names that `HuggingFaceLLM` gives their places.

    Raises:
        TypeError: too many, or one that was given by name too.
    """
    if len(args) > len(_POSITIONS):
        raise TypeError(f"KVBoostLLM takes at most {len(_POSITIONS)} positional arguments, got {len(args)}")
    placed = dict(zip(_POSITIONS, args, strict=False))
    if twice := [name for name in placed if name in named]:
        raise TypeError(f"KVBoostLLM got {', '.join(twice)} twice, by position and by name")
    return placed
