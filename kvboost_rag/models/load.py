"""From a name, a folder, a GGUF file, a bundled model or the caller's own objects to a model ready to serve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from kvboost_rag.models.adapter_files import AdapterPaths, activate, base_of, load_adapters, with_adapter_files
from kvboost_rag.models.answer_end import complete_generation_config, eos_token_ids
from kvboost_rag.models.bundled import LoadProgress, Progress, bundled_folder
from kvboost_rag.models.digest import WeightDigests
from kvboost_rag.models.digest_file import digests_of_files, files_identity
from kvboost_rag.models.errors import ModelLoadError, reason
from kvboost_rag.models.gguf import load_gguf_model, load_gguf_tokenizer
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.tensors import UnreadableWeights, named_tensors
from kvboost_rag.models.unwrap import input_device, unwrap

__all__ = [
    "LoadProgress",
    "LoadedModel",
    "ModelLoadError",
    "load_model",
    "load_tokenizer",
    "with_digests",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its tokenizer, and the name it was asked for by.

    `eos_token_ids`: every id that ends an answer: those of the generation config, the model config and the
    tokenizer, and the token with which the chat template closes an assistant's turn. Ascending.
    `identity`: of the files that the weights were read from, None for others.
    `digests`: of the weights, where nobody could change them since (`with_digests`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_token_ids: tuple[int, ...] = ()
    identity: str | None = field(default=None, repr=False, compare=False)
    digests: WeightDigests | None = field(default=None, repr=False, compare=False)


def load_model(
    spec: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    attn_implementation: str | None = None,
    tp_plan: Any = None,
    hub: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    adapters: AdapterPaths | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a decoder-only language model.

    Args:
        spec: hub id, local folder (of a model, or of a peft adapter that names its base model, which is then active),
            path of a `.gguf` file, `bundled:smollm2`, `bundled:gemma3`, or a model object (then `tokenizer` is required
            and the loading options must be unset; it is taken out of what it is wrapped in, see `models.unwrap`, and
            put into eval mode).
        tokenizer: tokenizer object, or where to load it from; default: where the model comes from.
        tokenizer_kwargs: handed to `from_pretrained` of the tokenizer, where it is loaded here.
        dtype: a torch dtype or its name; default: the checkpoint's own.
        device_map, quantization_config, attn_implementation, tp_plan: handed to `from_pretrained` as they are.
        hub: what is handed to `from_pretrained` of model and tokenizer alike: `revision`, `trust_remote_code`, `token`,
            `cache_dir`, … GGUF files and model objects have no use for it.
        weights: further keywords of the model's `from_pretrained` (`max_memory`, `config`, …).
        adapters: folders (or hub ids) of peft adapters by name; requests ask for them (`ReuseConfig.adapter`), and
            without that the base model answers.
        progress: called when a step begins.

    Raises:
        ModelLoadError: nothing to load there; the message says where it looked, or what to install.
    """
    options = {
        "dtype": _dtype(dtype),
        "device_map": device_map,
        "quantization_config": quantization_config,
        "attn_implementation": attn_implementation,
        "tp_plan": tp_plan,
        **(weights or {}),
    }
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(spec, (str, os.PathLike)):
        if adapters:
            raise ModelLoadError("adapters= is for models that are loaded here: load them into the model with peft")
        return _held_by_caller(spec, tokenizer, options, tokenizer_kwargs or {})
    origin = _Origin(os.fspath(spec), options, hub or {}, adapters or {})
    return _loaded(origin.of_adapter(), tokenizer, tokenizer_kwargs or {}, progress or (lambda _: None))


@dataclass(frozen=True)
class _Origin:
    """Where weights come from.

    Attributes:
        options: for the model's `from_pretrained` alone; `hub`: for the tokenizer's too.
        active: the adapter that is active at rest.
        tokenizer: where the tokenizer comes from, if not from the model.
    """

    name: str
    options: dict[str, Any]
    hub: Mapping[str, Any]
    adapters: AdapterPaths
    active: str | None = None
    tokenizer: str | None = None

    def of_adapter(self) -> _Origin:
        """That of the base model, where this is an adapter's folder."""
        folder = Path(self.name).expanduser()
        base = base_of(folder)
        if base is None:
            return self
        tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else None
        return replace(
            self, name=base, adapters={"default": folder, **self.adapters}, active="default", tokenizer=tokenizer
        )


def _loaded(origin: _Origin, tokenizer: Any, tokenizer_kwargs: Mapping[str, Any], report: Progress) -> LoadedModel:
    name = origin.name
    source = _resolve(name, report)
    report(LoadProgress(f"loading {name}", 1, 1))
    identity = _identity(source, origin)
    model = _load_weights(source, origin)
    loaded_tokenizer = _load_tokenizer(name, source, tokenizer or origin.tokenizer, {**origin.hub, **tokenizer_kwargs})
    ends = eos_token_ids(model, loaded_tokenizer)
    complete_generation_config(model, loaded_tokenizer, ends)
    if origin.adapters:
        load_adapters(model, origin.adapters)
    if origin.active:
        activate(model, origin.active)
    model.requires_grad_(False)
    report(LoadProgress(f"loaded {name}", 2, 1))
    if identity != _identity(source, origin):  # the files were changed meanwhile
        identity = None
    return LoadedModel(_settled(model.eval()), loaded_tokenizer, name, ends, identity)


def with_digests(loaded: LoadedModel) -> LoadedModel:
    """A model just loaded, with the digests of its weights: read from the cache if the same files were loaded before.

    To be called before anybody can change the weights.
    """
    if loaded.identity is None or Ranks.many(loaded.model):  # ranks need not find the same files
        return loaded
    digests = WeightDigests()
    try:
        digests_of_files(loaded.identity, list(named_tensors(loaded.model)), digests)
    except UnreadableWeights:
        return loaded
    return replace(loaded, digests=digests)


def load_tokenizer(spec: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer that `load_model` would load, without the weights.

    Raises:
        ModelLoadError: as `load_model`.
    """
    name = os.fspath(spec)
    return _load_tokenizer(name, _resolve(name, lambda _: None), None, {})


def _resolve(name: str, report: Progress) -> Path | None:
    """The local folder or GGUF file that `name` means, or None for a hub id."""
    if name.startswith("bundled:"):
        return bundled_folder(name.removeprefix("bundled:"), report)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no such GGUF file: {path.absolute()}")
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(files)}: name the file" if files else ""
        raise ModelLoadError(f"no config.json in {path.absolute()}{hint}")
    if path.exists():
        raise ModelLoadError(f"{path.absolute()} is a file; expected a folder with config.json or a .gguf file")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or (os.sep == "\\" and os.sep in name):
        raise ModelLoadError(f"no such folder: {path.absolute()}")
    return None


def _load_weights(source: Path | None, origin: _Origin) -> PreTrainedModel:
    name, options = origin.name, origin.options
    if source is not None and source.suffix == ".gguf":
        return load_gguf_model(source, **options)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source or name, output_loading_info=True, **options, **origin.hub
        )
    except Exception as error:  # damaged files, unknown architectures and missing back ends raise what they like
        raise _load_error(name, source, error) from error
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys") or ()]
    if missing := sorted({*info["missing_keys"], *mismatched}):  # they would be random
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelLoadError(f"{name} lacks {len(missing)} of the model's weights ({shown}): not a whole checkpoint")
    return model


def _identity(source: Path | None, origin: _Origin) -> str | None:
    """What the weights are a function of, or None where the files are not to be found."""
    if source is None:
        where = {k: v for k, v in origin.hub.items() if k in ("revision", "cache_dir", "subfolder")}
        try:
            found = cached_file(origin.name, "config.json", local_files_only=True, **where)
        except (OSError, ValueError):
            found = None
        if found is None:
            return None
        source = Path(found).parent
    identity = files_identity(source, origin.options | dict(origin.hub))
    return with_adapter_files(identity, origin.adapters) if origin.adapters else identity


def _load_tokenizer(
    name: str, source: Path | None, tokenizer: str | PreTrainedTokenizerBase | None, kwargs: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer is None and source is not None and source.suffix == ".gguf":
        return load_gguf_tokenizer(source)
    try:
        return AutoTokenizer.from_pretrained(tokenizer or source or name, **kwargs)
    except Exception as error:
        raise _load_error(tokenizer or name, source, error) from error


def _load_error(name: str, source: Path | None, error: Exception) -> ModelLoadError:
    if source is not None:
        return ModelLoadError(f"cannot load {source}: {reason(error)}")
    offline = " (HF_HUB_OFFLINE is set, so only the local Hugging Face cache was searched)"
    where = offline if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") else ""
    return ModelLoadError(
        f"cannot load {name!r}: no folder of that name in {Path.cwd()}, "
        f"and from the Hugging Face hub{where}: {reason(error)}"
    )


def _held_by_caller(
    model: Any, tokenizer: Any, options: dict[str, Any], tokenizer_kwargs: Mapping[str, Any]
) -> LoadedModel:
    model = unwrap(model)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ModelLoadError(f"expected a model name, path or transformers model, got {type(model).__name__}")
    if tokenizer is None:
        raise ModelLoadError("a model object comes without its tokenizer: pass tokenizer=")
    if options:
        raise ModelLoadError(f"{', '.join(options)}: options of loading, but the model is loaded already")
    if isinstance(tokenizer, str):
        tokenizer = _load_tokenizer(tokenizer, None, tokenizer, tokenizer_kwargs)
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return LoadedModel(_settled(model.eval()), tokenizer, name, eos_token_ids(model, tokenizer))  # type: ignore[arg-type]


def _settled(model: Any) -> Any:
    """The model after a forward, if it is quantised: some libraries pack weights for the processor at the first one,
    which would look like other weights later. One that cannot run says so when it is probed.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        with suppress(Exception), torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=input_device(model)))
    return model


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | str | None:
    if dtype is None or isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelLoadError(f"dtype={dtype!r}: expected float32, bfloat16, float16 or auto")
    return found
