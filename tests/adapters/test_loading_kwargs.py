"""Every keyword that transformers' `from_pretrained` knows arrives there; none is dropped in silence."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvboost_rag.adapters.loading_kwargs import loading_options
from kvboost_rag.models.load import ModelLoadError, load_model

OURS = {"output_loading_info", "_from_auto", "_from_pipeline", "_commit_hash"}
"""Set here, or between transformers' own classes."""
UNUSED = {"low_cpu_mem_usage", "offload_state_dict"}
"""Transformers has no use for them any more, and neither have we."""


def known_to_transformers() -> set[str]:
    """By signature, and by what the bodies take out of `**kwargs`."""
    names: set[str] = set()
    for function in (PreTrainedModel.from_pretrained, AutoModelForCausalLM.from_pretrained):
        parameters = inspect.signature(function).parameters.values()
        names |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        names |= set(re.findall(r"kwargs\.(?:pop|get)\(\s*\"(\w+)\"", inspect.getsource(function)))
    return names - OURS


def arriving(options: dict[str, Any]) -> dict[str, Any]:
    """What `load_model` hands to `from_pretrained`, under which name."""
    plain = {k: v for k, v in options.items() if k not in ("hub", "weights", "tokenizer_kwargs")}
    return plain | options.get("hub", {}) | options.get("weights", {})


def test_every_keyword_of_from_pretrained_is_passed_on() -> None:
    names = known_to_transformers()
    assert {"max_memory", "config", "code_revision", "use_safetensors", "offload_folder", "variant"} <= names
    for name in sorted(names - UNUSED):
        value = object()
        expected = "dtype" if name == "torch_dtype" else name
        assert arriving(loading_options(**{name: value})).get(expected) is value, name
    accepted = set(inspect.signature(load_model).parameters)
    for options in (loading_options(**{name: "x"}) for name in names):
        assert set(options) <= accepted


@pytest.fixture
def folder(tiny_model: Any, tmp_path: Any) -> Any:
    loaded = tiny_model("llama", num_hidden_layers=2)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_they_take_effect(folder: Any, tmp_path: Any) -> None:
    def loaded(**given: Any) -> Any:
        return load_model(folder, **loading_options(**given)).model

    assert loaded(output_attentions=True, attn_implementation="eager").config.output_attentions is True
    config = LlamaConfig.from_pretrained(folder, rope_theta=777.0, num_hidden_layers=1)
    assert loaded(config=config).config.num_hidden_layers == 1
    limited = loaded(
        device_map="auto", max_memory={"cpu": 60_000}, offload_folder=str(tmp_path / "off"), use_safetensors=True
    )
    assert {"disk"} <= {str(place) for place in limited.hf_device_map.values()}
    assert (tmp_path / "off").is_dir()
    assert loaded(use_cache=False, use_fast=True, low_cpu_mem_usage=True).config.use_cache is False
    with pytest.raises(ModelLoadError, match="fp16"):
        loaded(variant="fp16")


def test_what_nobody_knows_is_refused_when_it_is_loaded(folder: Any) -> None:
    with pytest.raises(ModelLoadError, match="wombat"):
        load_model(folder, **loading_options(wombat=3))


def test_weights_that_do_not_fit_are_not_made_up(folder: Any) -> None:
    """Random ones would differ from load to load, under digests that are kept by the files' identity."""
    config = LlamaConfig.from_pretrained(folder, intermediate_size=96)
    with pytest.raises(ModelLoadError, match="lacks 6 of the model's weights"):
        load_model(folder, **loading_options(config=config, ignore_mismatched_sizes=True, torch_dtype=torch.float32))
