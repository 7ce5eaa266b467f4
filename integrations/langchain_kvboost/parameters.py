"""What ChatKVBoost and KVBoostLLM have in common: the engine behind them, and one request path."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LangSmithParams
from pydantic import model_validator
from typing_extensions import Self

from kvboost_rag import __version__
from kvboost_rag.adapters.constrained import held_to
from kvboost_rag.adapters.generation_kwargs import check_params, merge_params
from kvboost_rag.adapters.loading_kwargs import loading_options
from kvboost_rag.adapters.registry import EngineSpec, adopt
from kvboost_rag.adapters.reuse_settings import check_reuse
from kvboost_rag.config import GenerationParams
from langchain_kvboost.fields import KVBoostFields
from langchain_kvboost.identity import HeldName, fingerprint_of, is_held, name_of, plain

if TYPE_CHECKING:
    from kvboost_rag.datamodels import StreamEvent
    from kvboost_rag.engine import KVBoost

_REUSE = ("reuse", "repair", "recompute_ratio", "settle", "adapter", "namespace", "strict")
_DECODING = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
_DRAFTS = ("prompt_lookup_num_tokens", "assistant_model")
_NOT_FOR_DECODING = (
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "structured_output_format",
    "response_format",
    "ls_structured_output_format",
)


class KVBoostParameters(KVBoostFields):
    """A local model with document reuse; see `KVBoostFields` for what it can be told.

    Weights are loaded at first use, once per process for equal `model`, `store` and loading options.
    """

    @model_validator(mode="after")
    def _set_kvboost(self) -> Self:
        """Check the settings, note what to load, and say in traces which version ran."""
        self._reuse_config()
        check_params(self._own_decoding)
        self._spec, self.model = self._make_spec()
        add_version: Callable[[str, str], None] = getattr(self, "_add_version")  # noqa: B009 - of LangChain's base
        add_version("kvboost-rag", __version__)
        return self

    def _make_spec(self) -> tuple[EngineSpec, str]:
        """What to load, and its name for the field `model`."""
        given, name = self.model, name_of(self.model)
        if isinstance(given, HeldName):
            if given.is_engine:
                return given.spec, given
            given = given.spec.model
        engine_module = sys.modules.get("kvboost_rag.engine")  # an engine that exists has been imported
        if engine_module is not None and isinstance(given, engine_module.KVBoost):
            spec = adopt(given)
            return spec, HeldName(name, spec, is_engine=True)
        options = {"dtype": self.dtype, "tokenizer": self.tokenizer} | (self.model_kwargs or {})
        load = loading_options(self.device, self.device_map or options.pop("device_map", None), **options)
        engine = {} if self.encoding is None else {"encoding": self.encoding}
        spec = EngineSpec(given, self.store, load, engine)
        return spec, HeldName(name, spec, is_engine=False) if is_held(given) else name

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
        return cls(**(kwargs | {"pipeline": pipeline}))

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
        held = self._spec.model if is_held(self._spec.model) else None
        return {
            "model": self.model_name,
            # Two model objects may have one name.
            **({} if held is None else {"fingerprint": fingerprint_of(held)}),
            "tokenizer": None if self.tokenizer is None else name_of(self.tokenizer),
            "device_map": self.device_map,
            "dtype": plain(self.dtype),
            "encoding": plain(self.encoding),
            "model_kwargs": plain({k: v for k, v in (self.model_kwargs or {}).items() if k != "token"}),
            "pipeline_kwargs": plain({k: _named(v) for k, v in (self.pipeline_kwargs or {}).items()} or None),
            "neighbours": self.neighbours,
            **{name: getattr(self, name) for name in (*_REUSE, *_DECODING)},
            **{name: plain(_named(getattr(self, name))) for name in _DRAFTS},
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
            params["ls_stop"] = _as_list(stop or self.stop)
        return params

    def _reuse_config(self, **call: Any) -> dict[str, Any]:
        """Reuse settings of one call, checked."""
        own = {name: getattr(self, name) for name in _REUSE}
        settings = own | {name: value for name, value in call.items() if value is not None}
        check_reuse(settings)
        # An empty namespace and strict=False leave the engine's own settings as they are.
        unsaid = {"strict": False, "namespace": ""}
        return {name: value for name, value in settings.items() if value not in (None, unsaid.get(name))}

    @property
    def _own_decoding(self) -> dict[str, Any]:
        """Generation keywords of the object; fields beat `pipeline_kwargs`."""
        own = {name: getattr(self, name) for name in (*_DECODING, *_DRAFTS)}
        return {**(self.pipeline_kwargs or {}), **_set(own)}

    def _generation_params(self, stop: Sequence[str] | None, call: Mapping[str, Any]) -> GenerationParams:
        """Decoding parameters of one call: those of the call beat those of the object."""
        base = merge_params(GenerationParams(), self._own_decoding)
        given = {**(call.get("pipeline_kwargs") or {}), **call}
        given.pop("pipeline_kwargs", None)
        return merge_params(base, given | ({"stop": _as_list(stop)} if stop or isinstance(stop, str) else {}))

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
        from kvboost_rag.serving.limits import ContextOverflowError as Overflow

        call = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DECODING}
        if (wanted := call.pop("model", None)) not in (None, self.model_name):
            raise ValueError(f"model={wanted!r} in a call of {self.model_name!r}: make another object for it")
        tools, form = call.pop("tools", None), call.pop("form", None)
        settings = self._reuse_config(**{name: call.pop(name) for name in _REUSE if name in call})
        params = self._generation_params(stop, call)
        if form is not None:
            params = held_to(params, form, self.engine.tokenizer)
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
        engine, namespace = self.engine, self._reuse_config().get("namespace")
        return list(engine.registry.text_ids(text, engine.config.namespace_or_own(namespace)))


def _named(value: Any) -> Any:
    """A loaded model by its name: weights have no place in a cache key."""
    return name_of(value) if hasattr(value, "generate") else value


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _as_list(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop)
