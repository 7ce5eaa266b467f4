"""Loading keywords as people write them for other model classes -> keywords of `models.load.load_model`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_HUB = (
    "revision",
    "code_revision",
    "trust_remote_code",
    "token",
    "cache_dir",
    "local_files_only",
    "subfolder",
    "proxies",
    "force_download",
    "gguf_file",
)
"""What model and tokenizer are both told."""
_SAME = (
    "dtype",
    "device_map",
    "quantization_config",
    "attn_implementation",
    "tp_plan",
    "tokenizer",
    "tokenizer_kwargs",
    "adapters",
)
_TOKENIZER = ("use_fast",)
_PASSED = ("low_cpu_mem_usage", "offload_state_dict")
"""What transformers has no use for any more, and people still write."""
_OURS = ("output_loading_info", "_from_auto", "_from_pipeline", "_commit_hash")
"""What `from_pretrained` is told here and by nobody else."""
_QUANTIZED = {"load_in_8bit": "load_in_8bit=True", "load_in_4bit": "load_in_4bit=True"}


def loading_options(device: Any = None, device_map: Any = None, **model_kwargs: Any) -> dict[str, Any]:
    """Keywords for `load_model` (as `EngineSpec.load` takes them); unset ones are left out.

    Args:
        device: as pipelines take it: an index, -1 for the CPU, or a name such as `cuda:0`.
        device_map: as `from_pretrained` takes it; instead of `device`.
        model_kwargs: what people hand to `from_pretrained` (`torch_dtype`, `revision`, `quantization_config`, …).

    Raises:
        TypeError: a keyword that can be no one's.
        ValueError: `device` and `device_map` at once.
    """
    given = {name: value for name, value in model_kwargs.items() if value is not None}
    if "torch_dtype" in given:
        given.setdefault("dtype", given.pop("torch_dtype"))
    if device is not None and device_map is not None:
        raise ValueError(f"device={device!r} and device_map={device_map!r} contradict each other; give one of them")
    if device is not None:
        device_map = device_map_of(device)
    options = {name: given.pop(name) for name in _SAME if name in given}
    hub = {name: given.pop(name) for name in _HUB if name in given}
    for name in _PASSED:
        given.pop(name, None)
    told = {name: given.pop(name) for name in _TOKENIZER if name in given}
    if told:
        options["tokenizer_kwargs"] = told | dict(options.get("tokenizer_kwargs") or {})
    if device_map is not None:
        options["device_map"] = device_map
    if hub:
        options["hub"] = hub
    for name, argument in _QUANTIZED.items():
        if given.pop(name, False):
            raise TypeError(
                f"{name} is gone from transformers: pass quantization_config=BitsAndBytesConfig({argument})"
            )
    _check(given)
    if given:
        options["weights"] = given
    return options


def _check(given: Mapping[str, Any]) -> None:
    """Refuse what is plainly a slip; whether a model's class knows the rest shows when it is loaded."""
    for name in given:
        if name in _OURS:
            raise TypeError(f"{name} cannot be given: it is set here")
        near = difflib.get_close_matches(name, (*_SAME, *_HUB, "device", "torch_dtype"), 1, 0.8)
        if near:
            raise TypeError(f"unknown loading option {name}; is {near[0]} meant?")


def device_map_of(device: Any) -> Mapping[str, Any]:
    """The `device_map` that puts a whole model onto one device."""
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        device = str(device)  # a torch.device
    return {"": "cpu" if isinstance(device, int) and device < 0 else device}
