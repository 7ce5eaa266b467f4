"""Checkpoints in the format of compressed-tensors (what llm-compressor writes for vLLM), made on the spot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCHEMES = ("W8A16", "W4A16", "W8A8", "FP8_DYNAMIC")


def compress(model: Any, scheme: str, folder: Path) -> Path:
    """Save a model with its linear layers quantised by rounding to the nearest; returns the folder.

    Args:
        scheme: one of `SCHEMES`.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    linear = preset_name_to_scheme(scheme, ["Linear"])
    if linear.weights.strategy == "group":  # groups are wider than tiny layers
        per_channel = linear.weights.model_dump() | {"strategy": "channel", "group_size": None}
        linear = linear.model_copy(update={"weights": type(linear.weights)(**per_channel)})
    groups = {"linear": linear}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in model.modules():
        quantised = getattr(module, "quantization_scheme", None)
        if quantised is not None and hasattr(module, "weight_scale"):
            scale, weight = module.weight_scale.data, module.weight.data
            largest = weight.view(weight.shape[0], scale.shape[-1], -1).abs().amax(-1)
            top = 448.0 if scheme.startswith("FP8") else 2 ** (quantised.weights.num_bits - 1) - 1
            scale.copy_((largest / top).view_as(scale))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def installed() -> bool:
    return find_spec("compressed_tensors") is not None
