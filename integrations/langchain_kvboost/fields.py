"""Fields that ChatKVBoost and KVBoostLLM have in common, and the peers' arguments that are taken in their place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from kvboost_rag.adapters.generation_kwargs import CLIENT_OPTIONS
from kvboost_rag.adapters.registry import EngineSpec
from kvboost_rag.config import EncodingConfig
from langchain_kvboost.identity import is_held

_SHARED = ("tokenizer", "store", "assistant_model")
"""Fields that may hold objects which copies share."""


class KVBoostFields(BaseModel):
    """What a local model with document reuse is told; each reuse and decoding setting may also be given to one call.

    Keywords that are no field go to `generate` (`no_repeat_ngram_size`, …); unknown ones are warned about.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=())

    model: Any
    """Hub id, folder, `.gguf` file, `bundled:smollm2`, a loaded transformers model (with `tokenizer`) or an engine."""
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """Tokenizer object, or where to load it from; default: where the model comes from."""
    store: Any = Field(default=None, exclude=True, repr=False)
    """Where documents' KV is kept: a folder (memory over disk), a `Store`, or None for memory only."""
    device: Any = None
    device_map: Any = None
    dtype: Any = None
    model_kwargs: dict[str, Any] | None = Field(default=None, repr=False)
    """Further options of `from_pretrained` (`revision`, `quantization_config`, …), and `adapters`: folders of
    LoRA adapters, by name."""
    pipeline_kwargs: dict[str, Any] | None = None
    """Further generation keywords, under the names of transformers."""

    reuse: str | None = None
    """`blend` (default): document KV wherever it stands in the prompt; `exact`: prefix cache only; `off`."""
    repair: str | None = None
    """Strategy that chooses the rows to recompute; default `query`."""
    recompute_ratio: float | None = None
    """Share of document tokens to recompute, 0…1; default 0.05."""
    neighbours: int | None = Field(default=None, ge=0)
    """Similar chunks that warmer and vector store encode a chunk after; default: `EncodingConfig.neighbours` (4)."""
    settle: bool | None = None
    """Recompute served turns while nobody waits, so that the next turn starts from exact KV; default: on in chats."""
    adapter: str | list[str] | None = None
    """The model's adapter (or several) that answers; `[]`: none, the base model; None: as the model stands."""
    namespace: str | None = None
    """Whose documents: those of one are never used for another; default: the engine's."""
    strict: bool = False
    """Raise on a fault in reuse instead of answering by plain prefill."""
    encoding: EncodingConfig | None = Field(default=None, repr=False)
    """How chunks are encoded and kept (anchor, quantisation, …); see `EncodingConfig`."""

    max_new_tokens: int | None = Field(
        default=None, validation_alias=AliasChoices("max_new_tokens", "max_tokens", "max_completion_tokens")
    )
    """Default 256."""
    do_sample: bool | None = None
    temperature: float | None = None
    """Above 0 means sampling (unless `do_sample` says otherwise); unset or 0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    """Strings at whose first occurrence an answer ends; they are not part of it."""
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=0)
    """So many tokens that followed the same words in the prompt are guessed and checked in one forward."""
    assistant_model: Any = Field(default=None, exclude=True, repr=False)
    """A smaller model that guesses tokens ahead: loaded, or a name as for `model`. Answers stay the same."""

    _spec: EngineSpec = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Goes on to LangChain's own; a class with private attributes would otherwise cut it off."""
        super().model_post_init(context)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares tokenizer, store and assistant."""
        memo = {} if memo is None else memo
        memo |= {id(shared): shared for shared in (getattr(self, name) for name in _SHARED)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Objects (locks cannot be pickled, weights should not) are left out; the spec finds tokenizer and store again,
        without its assistant a model gives the same answers."""
        state = super().__getstate__()
        objects = [name for name in _SHARED if getattr(self, name) is not None and is_held(getattr(self, name))]
        fields = {name: value for name, value in state["__dict__"].items() if name not in objects}
        return state | {"__dict__": fields}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """The inverse; in another process a store is not found again."""
        super().__setstate__(state)
        found = {"tokenizer": self._spec.load.get("tokenizer"), "store": self._spec.store, "assistant_model": None}
        for name in _SHARED:
            self.__dict__.setdefault(name, found[name])

    @model_validator(mode="before")
    @classmethod
    def _take_peers_arguments(cls, values: Any) -> Any:
        """Constructor arguments of HuggingFacePipeline and keywords that are no field."""
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        for source in ("pipeline", "llm"):
            if given.get(source) is not None:
                taken = pipeline_arguments(given.pop(source))
                settings = {**(taken.get("pipeline_kwargs") or {}), **(given.get("pipeline_kwargs") or {})}
                given = taken | given | {"pipeline_kwargs": settings or None}
        for alias in ("model_id", "model_name"):
            if alias in given:
                given.setdefault("model", given.pop(alias))
        for name in [name for name in CLIENT_OPTIONS if name in given]:
            del given[name]
            warnings.warn(f"{name} is ignored: the model runs in this process", UserWarning, stacklevel=4)
        unknown = {name: given.pop(name) for name in set(given) - _field_names(cls)}
        unknown.pop("batch_size", None)
        if unknown:
            given["pipeline_kwargs"] = {**(given.get("pipeline_kwargs") or {}), **unknown}
        return given


def pipeline_arguments(source: Any) -> dict[str, Any]:
    """Fields that stand for a pipeline, for whatever of LangChain's classes wraps one, or for another of ours.

    Raises:
        TypeError: no model and tokenizer in it.
    """
    if isinstance(source, KVBoostFields):
        fields = set(KVBoostFields.model_fields) & source.model_fields_set
        return {name: getattr(source, name) for name in fields}
    inner = getattr(source, "llm", None) or getattr(source, "pipeline", None)
    if inner is not None:
        given = pipeline_arguments(inner)
        given["pipeline_kwargs"] = {
            **(given["pipeline_kwargs"] or {}),
            **(getattr(source, "pipeline_kwargs", {}) or {}),
        }
        tokenizer = getattr(source, "tokenizer", None)  # ChatHuggingFace carries one of its own
        return given if tokenizer is None else given | {"tokenizer": tokenizer}
    if not hasattr(source, "model") or not hasattr(source, "tokenizer"):
        raise TypeError(f"expected a transformers text-generation pipeline, got {type(source).__name__}")
    # Where transformers keeps them differs from version to version.
    settings = {**(getattr(source, "_forward_params", None) or {}), **(getattr(source, "_generate_kwargs", None) or {})}
    if (assistant := getattr(source, "assistant_model", None)) is not None:
        settings["assistant_model"] = assistant
        settings.pop("assistant_tokenizer", None)  # an assistant of other words is refused anyway
    return {"model": source.model, "tokenizer": source.tokenizer, "pipeline_kwargs": settings or None}


def _field_names(cls: type[BaseModel]) -> set[str]:
    names = set(cls.model_fields)
    for field in cls.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(choice) for choice in field.validation_alias.choices}
        elif field.alias:
            names.add(field.alias)
    return names
