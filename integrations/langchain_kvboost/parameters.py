"""What ChatKVBoost and KVBoostLLM have in common: their parameters, the engine behind them, and one request path."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LangSmithParams
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from kvboost_rag import __version__
from kvboost_rag.config import EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.generation_kwargs import CLIENT_OPTIONS, merge_params
from kvboost_rag.loading_kwargs import loading_options
from kvboost_rag.registry import EngineSpec, adopt

if TYPE_CHECKING:
    from kvboost_rag.datamodels import StreamEvent
    from kvboost_rag.engine import KVBoost

_REUSE = ("reuse", "repair", "recompute_ratio", "namespace", "strict")
_DECODING = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
_NOT_FOR_DECODING = ("tool_choice", "parallel_tool_calls", "stream", "structured_output_format")


class KVBoostParameters(BaseModel):
    """Parameters of a local model with document reuse; each may also be given to a single call.

    Weights are loaded at first use, once per process for equal `model`, `store` and loading options.
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
    """Further options of `from_pretrained` (`revision`, `quantization_config`, `attn_implementation`, …)."""
    pipeline_kwargs: dict[str, Any] | None = None
    """Further generation keywords, under the names of transformers."""

    reuse: str | None = None
    """`blend` (default): document KV wherever it stands in the prompt; `exact`: prefix cache only; `off`."""
    repair: str | None = None
    """Strategy that chooses the rows to recompute; default `query`."""
    recompute_ratio: float | None = None
    """Share of document tokens to recompute, 0…1; default 0.05."""
    neighbours: int | None = Field(default=None, ge=0)
    """Similar chunks that warmer and vector store encode a chunk behind; default: `EncodingConfig.neighbours` (4)."""
    namespace: str = ""
    """Tenant: documents of one are never used for another."""
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

    _spec: EngineSpec = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Goes on to LangChain's own; a class with private attributes would otherwise cut it off."""
        super().model_post_init(context)

    @model_validator(mode="before")
    @classmethod
    def _take_peers_arguments(cls, values: Any) -> Any:
        """Constructor arguments of HuggingFacePipeline and keywords that are no field."""
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        for source in ("pipeline", "llm"):
            if given.get(source) is not None:
                given = pipeline_arguments(given.pop(source)) | given
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

    @model_validator(mode="after")
    def _set_kvboost(self) -> Self:
        """Check the settings, note what to load, and say in traces which version ran."""
        self._reuse_config()
        self._spec = self._make_spec()
        if not isinstance(self.model, str):
            self.model = _name_of(self.model)
        add_version: Callable[[str, str], None] = getattr(self, "_add_version")  # noqa: B009 - of LangChain's base
        add_version("kvboost-rag", __version__)
        return self

    def _make_spec(self) -> EngineSpec:
        engine_module = sys.modules.get("kvboost_rag.engine")  # an engine that exists has been imported
        if engine_module is not None and isinstance(self.model, engine_module.KVBoost):
            return adopt(self.model)
        options = {"dtype": self.dtype, "tokenizer": self.tokenizer} | (self.model_kwargs or {})
        load = loading_options(self.device, self.device_map or options.pop("device_map", None), **options)
        engine = {} if self.encoding is None else {"encoding": self.encoding}
        return EngineSpec(self.model, self.store, load, engine)

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str = "text-generation",
        backend: str = "default",
        device: int | str | None = None,
        device_map: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        pipeline_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """What `HuggingFacePipeline.from_model_id` takes, plus the fields of this class. Nothing is loaded yet.

        Raises:
            ValueError: another task than text generation, or another backend than transformers.
        """
        if task != "text-generation":
            raise ValueError(f"task={task!r}: only text-generation models have a KV cache to reuse")
        if backend != "default":
            raise ValueError(f"backend={backend!r}: only the transformers backend ('default') is supported")
        return cls(
            model=model_id,
            device=device,
            device_map=device_map,
            model_kwargs=model_kwargs,
            pipeline_kwargs=pipeline_kwargs,
            **kwargs,
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any, **kwargs: Any) -> Self:
        """From a transformers text-generation pipeline, a HuggingFacePipeline or a ChatHuggingFace.

        Its model and tokenizer are used as they are, not copied.
        """
        return cls(**(pipeline_arguments(pipeline) | kwargs))

    @property
    def engine(self) -> KVBoost:
        """The engine behind this model; the first use in a process loads the weights."""
        return self._spec.get()

    @property
    def model_name(self) -> str:
        """What the model was asked for by."""
        return str(self.model)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that an answer depends on: also the key of LangChain's LLM cache."""
        held = not isinstance(self._spec.model, str) and not hasattr(self._spec.model, "__fspath__")
        return {
            "model": self.model_name,
            # Two model objects may have one name.
            **({"fingerprint": self.engine.library.fingerprint} if held else {}),
            "device_map": self.device_map,
            "dtype": _plain(self.dtype),
            "encoding": _plain(self.encoding),
            "model_kwargs": _plain(self.model_kwargs),
            "pipeline_kwargs": _plain(self.pipeline_kwargs),
            "neighbours": self.neighbours,
            **{name: getattr(self, name) for name in (*_REUSE, *_DECODING)},
        }

    def _ls_params(self, kind: str, stop: list[str] | None, kwargs: Mapping[str, Any]) -> LangSmithParams:
        """What LangSmith shows of a call."""
        params = LangSmithParams(ls_provider="kvboost", ls_model_type=kind)  # type: ignore[typeddict-item]
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        temperature = kwargs.get("temperature", self.temperature)
        if temperature is not None:
            params["ls_temperature"] = temperature
        for tokens in (kwargs.get("max_new_tokens"), kwargs.get("max_tokens"), self.max_new_tokens):
            if tokens is not None:
                params.setdefault("ls_max_tokens", tokens)
        if stop or self.stop:
            params["ls_stop"] = stop or _as_list(self.stop)
        return params

    def _reuse_config(self, **call: Any) -> dict[str, Any]:
        """Reuse settings of one call, checked."""
        own = {name: getattr(self, name) for name in _REUSE}
        settings = own | {name: value for name, value in call.items() if value is not None}
        ReuseConfig().override(**settings)
        # An empty namespace and strict=False leave the engine's own settings as they are.
        return {
            name: value for name, value in settings.items() if value is not None and value is not False and value != ""
        }

    def _generation_params(self, stop: Sequence[str] | None, call: Mapping[str, Any]) -> GenerationParams:
        """Decoding parameters of one call: those of the call beat those of the object."""
        own = {name: getattr(self, name) for name in _DECODING}
        base = merge_params(GenerationParams(), {**(self.pipeline_kwargs or {}), **_set(own)})
        given = {**(call.get("pipeline_kwargs") or {}), **call}
        given.pop("pipeline_kwargs", None)
        return merge_params(base, given | ({"stop": list(stop)} if stop else {}))

    def _events(
        self,
        prompt: Any,
        stop: Sequence[str] | None,
        documents: Sequence[Any],
        kwargs: Mapping[str, Any],
        cancelled: threading.Event | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """The one way a request takes, for invoke, stream, batch and their async forms.

        Raises:
            ContextOverflowError: of LangChain, whose middleware understands it.
        """
        from kvboost_rag.decode import ContextOverflowError as Overflow

        call = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DECODING}
        if (wanted := call.pop("model", None)) not in (None, self.model_name):
            raise ValueError(f"model={wanted!r} in a call of {self.model_name!r}: make another object for it")
        tools = call.pop("tools", None)
        settings = self._reuse_config(**{name: call.pop(name) for name in _REUSE if name in call})
        params = self._generation_params(stop, call)
        template = {"tools": tools} if tools else None
        events = self.engine.stream(
            prompt, documents=list(documents), params=params, template=template, cancelled=cancelled, **settings
        )
        try:
            with closing(events):
                yield from events
        except Overflow as error:
            raise ContextOverflowError(str(error)) from error

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` under the model's own tokenizer, special tokens not added."""
        return list(self.engine.tokens.ids(text))


def pipeline_arguments(source: Any) -> dict[str, Any]:
    """Fields that stand for a pipeline, for whatever of LangChain's classes wraps one, or for another of ours.

    Raises:
        TypeError: no model and tokenizer in it.
    """
    if isinstance(source, KVBoostParameters):
        fields = set(KVBoostParameters.model_fields) & source.model_fields_set
        return {name: getattr(source, name) for name in fields} | {"model": source._spec.model}
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
    return {"model": source.model, "tokenizer": source.tokenizer, "pipeline_kwargs": settings or None}


def _field_names(cls: type[BaseModel]) -> set[str]:
    names = set(cls.model_fields)
    for field in cls.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(choice) for choice in field.validation_alias.choices}
        elif field.alias:
            names.add(field.alias)
    return names


def _name_of(model: Any) -> str:
    if hasattr(model, "__fspath__"):
        return str(model.__fspath__())
    if hasattr(model, "config") and not hasattr(model, "name"):
        return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return str(getattr(model, "name", None) or type(model).__name__)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _as_list(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop)


def _plain(value: Any) -> Any:
    """Settings as text and numbers; objects by what they say of themselves."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
