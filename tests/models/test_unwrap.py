"""Models in what people wrap them in: unwrapped, or served through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.models.unwrap import input_device, unwrap

DOCUMENTS = [f"Mill {i} ground {i + 30} sacks of rye a week until the river was led away from it." for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which mill ground most?"])
EIGHT = GenerationParams(max_new_tokens=8)

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_taken_off(tiny_model: Any, name: str) -> None:
    loaded = tiny_model("llama", num_hidden_layers=3)
    with KVBoost(loaded) as engine:
        expected = engine.generate(PROMPT, documents=DOCUMENTS, params=EIGHT, strict=True)
        fingerprint = engine.registry.fingerprint
    wrapped = WRAPPERS[name](loaded.model)
    assert unwrap(wrapped) is loaded.model
    with KVBoost.from_pretrained(wrapped, tokenizer=loaded.tokenizer) as engine:
        assert engine.registry.fingerprint == fingerprint
        result = engine.generate(PROMPT, documents=DOCUMENTS, params=EIGHT, strict=True)
        assert (result.reuse, result.token_ids) == ("blend", expected.token_ids)


def test_a_model_compiled_in_place_is_served_through(tiny_model: Any) -> None:
    loaded = tiny_model("llama", num_hidden_layers=3)
    with KVBoost(loaded) as engine:
        expected = engine.logits(PROMPT, reuse="off")
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    loaded.model.compile(backend=backend)
    with KVBoost(loaded) as engine:
        assert engine.probe.reusable, engine.probe.reason
        for options in ({"repair": "full"}, {"reuse": "exact"}, {"reuse": "off"}):
            ours = engine.logits(PROMPT, documents=DOCUMENTS, strict=True, **options)
            assert torch.allclose(ours, expected, atol=1e-4), options
        assert engine.generate(PROMPT, documents=DOCUMENTS, params=EIGHT, strict=True).reuse == "blend"
    assert calls


def test_hooks_of_accelerate_stay(tiny_model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    loaded = tiny_model("llama", num_hidden_layers=3)
    with KVBoost(loaded) as engine:
        expected, fingerprint = engine.logits(PROMPT, reuse="off"), engine.registry.fingerprint
    for module in [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]:
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))
    assert loaded.model.model.layers[0].self_attn.k_proj.weight.device.type == "meta"
    with KVBoost(loaded) as engine:
        assert engine.registry.fingerprint == fingerprint
        assert torch.allclose(
            engine.logits(PROMPT, documents=DOCUMENTS, repair="full", strict=True), expected, atol=1e-4
        )


def test_a_model_is_no_wrapper(tiny_model: Any) -> None:
    model = tiny_model("llama", num_hidden_layers=1).model
    assert unwrap(model) is model
    assert input_device(model) == torch.device("cpu")
