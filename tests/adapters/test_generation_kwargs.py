"""Other classes' generation and loading keywords."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import GenerationConfig

from kvboost_rag.adapters.generation_kwargs import merge_params
from kvboost_rag.adapters.loading_kwargs import loading_options
from kvboost_rag.config import ConfigError, GenerationParams

BASE = GenerationParams(max_new_tokens=5, stop=("x",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_completion_tokens": 7, "temperature": None}, {"max_new_tokens": 7}),
        ({"temperature": 0.7}, {"temperature": 0.7, "do_sample": True}),
        ({"temperature": 0.7, "do_sample": False}, {"temperature": 0.7, "do_sample": False}),
        ({"temperature": 0}, {"temperature": 0, "do_sample": False}),
        ({"top_p": 0.5}, {"top_p": 0.5, "do_sample": False}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"eos_token_id": [3, 4]}, {"stop_token_ids": (3, 4)}),
        ({"stopping_ids": 3}, {"stop_token_ids": (3,)}),
        ({"n": 2}, {"extra": {"num_return_sequences": 2}}),  # which the decoder refuses
        ({"no_repeat_ngram_size": 3}, {"extra": {"no_repeat_ngram_size": 3}}),
        (
            {"num_beams": 1, "return_full_text": False, "pad_token_id": 0, "use_cache": True},
            {"extra": {"num_beams": 1}},
        ),
        ({"generation_config": GenerationConfig(max_new_tokens=9, top_k=3)}, {"max_new_tokens": 9, "top_k": 3}),
        ({"generation_config": {"max_new_tokens": 9}, "max_new_tokens": 2}, {"max_new_tokens": 2}),
    ],
)
def test_known_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merge_params(BASE, given)
    assert {name: getattr(merged, name) for name in expected} == expected


def test_a_sampling_default_is_switched_off_by_temperature_zero() -> None:
    sampling = merge_params(BASE, {"temperature": 0.7})
    assert not merge_params(sampling, {"temperature": 0}).do_sample
    assert merge_params(sampling, {"max_tokens": 3}).do_sample


@pytest.mark.parametrize("name", ["max_lenght", "return_full_text", "max_length", "streamer", "timeout"])
def test_names_without_effect_are_warned_about(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} is ignored"):
        assert merge_params(BASE, {name: 3}) == BASE


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        merge_params(BASE, {"max_tokens": 0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"device": -1}, {"device_map": {"": "cpu"}}),
        ({"device": 1}, {"device_map": {"": 1}}),
        ({"device_map": "auto"}, {"device_map": "auto"}),
        ({"torch_dtype": "bfloat16", "low_cpu_mem_usage": True}, {"dtype": "bfloat16"}),
        ({"revision": "main", "trust_remote_code": True}, {"hub": {"revision": "main", "trust_remote_code": True}}),
        ({"attn_implementation": "eager", "dtype": None}, {"attn_implementation": "eager"}),
    ],
)
def test_loading_options(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loading_options(**given) == expected


def test_loading_options_that_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="contradict"):
        loading_options(device=0, device_map="auto")
    with pytest.raises(TypeError, match="BitsAndBytesConfig"):
        loading_options(load_in_4bit=True)
    for slip, meant in (("torch_dtpe", "torch_dtype"), ("devicemap", "device_map"), ("atn_implementation", "attn_imp")):
        with pytest.raises(TypeError, match=f"unknown loading option {slip}; is {meant}"):
            loading_options(**{slip: True})
    with pytest.raises(TypeError, match="set here"):
        loading_options(output_loading_info=True)
