"""Fingerprints: models that compute different things never share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import YARN

from kvboost_rag.models.fingerprint import model_fingerprint


@pytest.fixture
def base(tiny_model: Any) -> Any:
    return tiny_model("llama")


def test_the_same_model_has_the_same_fingerprint(tiny_model: Any, base: Any) -> None:
    again = tiny_model("llama")
    assert model_fingerprint(base.model, base.tokenizer) == model_fingerprint(again.model, again.tokenizer)


@pytest.mark.parametrize(
    "fields",
    [{"rope_parameters": YARN}, {"dtype": torch.bfloat16}, {"num_hidden_layers": 4}, {"rms_norm_eps": 1e-5}],
)
def test_another_config_has_another_fingerprint(tiny_model: Any, base: Any, fields: dict[str, Any]) -> None:
    other = tiny_model("llama", **fields)
    assert model_fingerprint(base.model, base.tokenizer) != model_fingerprint(other.model, other.tokenizer)


def test_swapped_weights_have_another_fingerprint(tiny_model: Any, base: Any) -> None:
    other = tiny_model("llama")
    other.model.model.layers[3].self_attn.k_proj.weight[7, 5] += 0.01
    assert model_fingerprint(base.model, base.tokenizer) != model_fingerprint(other.model, other.tokenizer)


def test_a_kernel_choice_is_not_another_model(tiny_model: Any, base: Any) -> None:
    other = tiny_model("llama", attn_implementation="eager")
    assert model_fingerprint(base.model, base.tokenizer) == model_fingerprint(other.model, other.tokenizer)


def test_another_template_has_another_fingerprint(tiny_model: Any, base: Any) -> None:
    before = model_fingerprint(base.model, base.tokenizer)
    template = base.tokenizer.chat_template
    try:
        base.tokenizer.chat_template = template + "x"
        assert model_fingerprint(base.model, base.tokenizer) != before
    finally:
        base.tokenizer.chat_template = template
