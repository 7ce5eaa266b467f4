"""Loading keywords as people write them for other model classes -> keywords of `models.load.load_model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HUB = (
    "revision",
    "trust_remote_code",
    "token",
    "cache_dir",
    "local_files_only",
    "subfolder",
    "proxies",
    "force_download",
)
_SAME = ("dtype", "device_map", "quantization_config", "attn_implementation", "tokenizer")
_WITHOUT_MEANING = ("low_cpu_mem_usage", "use_safetensors", "use_fast", "use_cache", "offload_folder")
_QUANTIZED = {"load_in_8bit": "load_in_8bit=True", "load_in_4bit": "load_in_4bit=True"}


def loading_options(device: Any = None, device_map: Any = None, **model_kwargs: Any) -> dict[str, Any]:
    """Keywords for `load_model` (as `EngineSpec.load` takes them); unset ones are left out.

    Args:
        device: as pipelines take it: an index, -1 for the CPU, or a name such as `cuda:0`.
        device_map: as `from_pretrained` takes it; instead of `device`.
        model_kwargs: what people hand to `from_pretrained` (`torch_dtype`, `revision`, `quantization_config`, …).

    Raises:
        TypeError: a keyword that has no meaning here; the message lists the known ones.
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
    for name in _WITHOUT_MEANING:
        given.pop(name, None)
    if device_map is not None:
        options["device_map"] = device_map
    if hub:
        options["hub"] = hub
    for name, argument in _QUANTIZED.items():
        if given.pop(name, False):
            raise TypeError(
                f"{name} is gone from transformers: pass quantization_config=BitsAndBytesConfig({argument})"
            )
    if given:
        raise TypeError(f"unknown loading options {', '.join(sorted(given))}; known: {', '.join((*_SAME, *_HUB))}")
    return options


def device_map_of(device: Any) -> Mapping[str, Any]:
    """The `device_map` that puts a whole model onto one device."""
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        device = str(device)  # a torch.device
    return {"": "cpu" if isinstance(device, int) and device < 0 else device}
