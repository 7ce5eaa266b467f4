"""Tiny models with LoRA adapters whose answers differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")


def lora(**options: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=0.1, **options
    )


def fill(model: torch.nn.Module, name: str, seed: int) -> None:
    """Give an adapter weights that matter: peft starts every one as the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{name}" in path and "lora_" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def with_two_adapters(loaded: Any) -> Any:
    """The model with adapters `red` and `blue`, as a `PeftModel`."""
    model = peft.get_peft_model(loaded.model, lora(), adapter_name="red")
    model.add_adapter("blue", lora())
    fill(model, "red", 1)
    fill(model, "blue", 2)
    return model.eval()


def save_adapters(loaded: Any, folder: Path) -> dict[str, Path]:
    """A base model's folder `base`, and one of each adapter."""
    loaded.model.save_pretrained(folder / "base")
    loaded.tokenizer.save_pretrained(folder / "base")
    model = with_two_adapters(loaded)
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder)
    return {name: folder / name for name in ("base", "red", "blue")}
