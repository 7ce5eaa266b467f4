"""Adapters on a live model: each has its own fingerprint and its own KV, whoever switches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_helpers import fill, lora, with_two_adapters

from kvboost_rag import KVBoost
from kvboost_rag.config import ConfigError
from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind
from kvboost_rag.models.adapters import AdapterError, available_adapters, resting_adapters, with_adapters
from kvboost_rag.models.fingerprint import model_fingerprint

peft = pytest.importorskip("peft")

DOCUMENTS = [
    f"Document {i} says that the lamp of tower {i} burned oil for {i + 7} years, day and night." for i in range(4)
]
PROMPT = "\n\n".join([*DOCUMENTS, "Which lamp burned longest?"])


@pytest.fixture
def loaded(tiny_model: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture
def adapted(loaded: Any) -> Any:
    """The model with adapters `red` and `blue`, as a `PeftModel`."""
    return with_two_adapters(loaded)


def fingerprint(loaded: Any) -> str:
    return model_fingerprint(loaded.model, loaded.tokenizer)


def off(engine: KVBoost, **options: Any) -> torch.Tensor:
    return engine.logits(PROMPT, reuse="off", **options)


def reused(result: GenerationResult) -> set[HitKind]:
    return {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT}


def test_each_set_of_active_adapters_has_its_own_fingerprint(loaded: Any, adapted: Any) -> None:
    prints = {}
    for names in ((), ("red",), ("blue",), ("red", "blue")):
        with with_adapters(loaded.model, names):
            assert resting_adapters(loaded.model) == names
            prints[names] = fingerprint(loaded)
    assert len(set(prints.values())) == 4
    adapted.set_adapter("blue")
    assert fingerprint(loaded) == prints["blue",]
    with adapted.disable_adapter():
        assert fingerprint(loaded) == prints[()]


def test_the_base_is_the_same_with_and_without_adapters_beside_it(tiny_model: Any, loaded: Any, adapted: Any) -> None:
    plain = tiny_model("llama", num_hidden_layers=3)
    with with_adapters(loaded.model, ()):
        assert fingerprint(loaded) == fingerprint(plain)


def test_scaling_and_weights_of_active_adapters_count_and_others_do_not(loaded: Any, adapted: Any) -> None:
    adapted.set_adapter("red")
    before = fingerprint(loaded)
    fill(adapted, "blue", 9)
    assert fingerprint(loaded) == before
    layer = loaded.model.model.layers[1].self_attn.q_proj
    layer.scaling["red"] *= 2
    scaled = fingerprint(loaded)
    assert scaled != before
    layer.scaling["red"] /= 2
    assert fingerprint(loaded) == before
    layer.lora_B["red"].weight.data[3, 1] += 1e-3
    assert fingerprint(loaded) != before


def test_an_adapter_is_known_by_its_weights_not_its_name(tiny_model: Any) -> None:
    prints = []
    for name in ("first", "second"):
        one = tiny_model("llama", num_hidden_layers=3)
        model = peft.get_peft_model(one.model, lora(), adapter_name=name)
        fill(model, name, 5)
        prints.append(fingerprint(one))
    assert prints[0] == prints[1]


def test_merged_weights_are_another_model(loaded: Any, adapted: Any) -> None:
    adapted.set_adapter("red")
    before = fingerprint(loaded)
    adapted.merge_adapter()
    assert fingerprint(loaded) != before


def test_switching_leaves_everything_as_it_was(loaded: Any, adapted: Any) -> None:
    def state() -> Any:
        gradients = {name: p.requires_grad for name, p in loaded.model.named_parameters()}
        layers = [m for m in loaded.model.modules() if hasattr(m, "lora_A")]
        return gradients, [(list(m.active_adapters), m.disable_adapters) for m in layers]

    adapted.set_adapter("red")
    before = state()
    for names in (("blue",), (), ("red", "blue")):
        with pytest.raises(KeyError), with_adapters(loaded.model, names):
            raise KeyError("whatever")
        assert state() == before


def test_an_unknown_adapter_is_refused_with_those_there_are(tiny_model: Any, loaded: Any, adapted: Any) -> None:
    assert available_adapters(loaded.model) == ("blue", "red")
    with KVBoost(loaded) as engine:
        with pytest.raises(AdapterError, match="no adapter c: it has blue, red"):
            engine.generate(PROMPT, adapter="c")
        with pytest.raises(ConfigError, match="a list of names"):
            engine.generate(PROMPT, adapter=3)
        assert engine.stats().fallbacks == {}
    with KVBoost(tiny_model("llama")) as engine, pytest.raises(AdapterError, match="it has none"):
        engine.generate(PROMPT, adapter="red")


def full(engine: KVBoost, **options: Any) -> torch.Tensor:
    """Everything reused that can be, nothing repaired."""
    return engine.logits(PROMPT, repair="none", strict=True, **options)


def test_no_adapter_is_served_another_ones_kv(loaded: Any, adapted: Any) -> None:
    """Exact reuse gives the plain model's logits only if every key and value came from the adapter that is asked."""
    adapted.set_adapter("red")
    with KVBoost(loaded) as engine:
        reference = {name: off(engine, adapter=name) for name in ("red", "blue", ())}
        assert (reference["red"] - reference["blue"]).abs().max() > 0.1
        for name in ("red", "blue", (), "blue", "red", ()):
            ours = engine.logits(PROMPT, reuse="exact", strict=True, adapter=name)
            assert torch.allclose(ours, reference[name], atol=1e-4), name
        assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True), reference["red"], atol=1e-4)


def test_chunks_are_encoded_for_each_adapter_and_found_again(loaded: Any, adapted: Any) -> None:
    adapted.set_adapter("red")
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        assert reused(engine.generate(PROMPT, strict=True)) == {HitKind.APPROXIMATE}
        # Known because they were indexed, encoded because never with this adapter.
        first = engine.generate(PROMPT, adapter="blue", strict=True)
        assert reused(first) == {HitKind.ENCODED}
        assert reused(engine.generate(PROMPT, adapter="blue", strict=True)) == {HitKind.APPROXIMATE}
        engine.warm(DOCUMENTS, adapter=[])
        assert reused(engine.generate(PROMPT, adapter=[], strict=True)) == {HitKind.APPROXIMATE}
        assert resting_adapters(loaded.model) == ("red",)
    alone = KVBoost(loaded)
    adapted.set_adapter("blue")
    with alone:  # an engine that knows nothing but this adapter
        expected = alone.generate(PROMPT, documents=DOCUMENTS, strict=True)
        assert expected.token_ids == first.token_ids


@pytest.mark.parametrize("switch", ["set_adapter", "disable", "mixin"])
def test_a_switch_between_requests_is_noticed(loaded: Any, adapted: Any, switch: str) -> None:
    adapted.set_adapter("red")
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        before = full(engine)
        if switch == "set_adapter":
            adapted.set_adapter("blue")
        elif switch == "disable":
            adapted.base_model.disable_adapter_layers()
        else:
            for module in loaded.model.modules():
                if hasattr(module, "lora_A"):
                    module.set_adapter("blue")
        assert engine.registry.fingerprint == engine.fetcher.registry.fingerprint
        cold = full(engine)
        assert (cold - before).abs().max() > 0.05
        assert torch.equal(full(engine), cold)
        with KVBoost(loaded) as fresh:
            assert torch.equal(fresh.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), cold)
        assert torch.allclose(engine.logits(PROMPT, repair="full", strict=True), off(engine), atol=1e-4)


def test_merging_and_unmerging_under_a_live_engine(loaded: Any, adapted: Any) -> None:
    """Merged weights are others in their last bits; unmerged they are nearly, and may be exactly, the old ones."""
    adapted.set_adapter("red")
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        for change in (adapted.merge_adapter, adapted.unmerge_adapter):
            change()
            assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True), off(engine), atol=1e-4)
            assert engine.registry.fingerprint == fingerprint(loaded)
            ours = engine.logits(PROMPT, repair="none", strict=True)
            with KVBoost(loaded) as fresh:
                assert torch.equal(fresh.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), ours)


def test_wrapped_in_a_peft_model_the_model_is_the_same(loaded: Any, adapted: Any) -> None:
    engine = KVBoost.from_pretrained(adapted, tokenizer=loaded.tokenizer)
    with engine:
        assert engine.model is loaded.model
        assert engine.probe.reusable, engine.probe.reason
        assert torch.allclose(
            engine.logits(PROMPT, documents=DOCUMENTS, repair="full", strict=True), off(engine), atol=1e-4
        )


def test_learned_prompts_are_served_without_reuse(loaded: Any) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(loaded.model, config).eval()
    with KVBoost.from_pretrained(model, tokenizer=loaded.tokenizer) as engine:
        assert "learned tokens" in (engine.probe.reason or "")
        ids = loaded.tokenizer(PROMPT, return_tensors="pt")
        expected = model.generate(**ids, max_new_tokens=8, do_sample=False)
        from kvboost_rag.config import GenerationParams

        ours = engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=8))
        assert ours.reuse == "off"
        assert list(ours.token_ids) == expected[0, -len(ours.token_ids) :].tolist()


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
        lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
        lambda: lora(modules_to_save=["lm_head"]),
        lambda: lora(use_dora=True),
    ],
    ids=["ia3", "loha", "vera", "modules_to_save", "dora"],
)
def test_other_kinds_of_adapters(loaded: Any, config: Callable[[], Any]) -> None:
    base = fingerprint(loaded)
    model = peft.get_peft_model(loaded.model, config(), adapter_name="x").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    assert fingerprint(loaded) != base
    with KVBoost(loaded) as engine:
        reference = off(engine)
        assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True, adapter="x"), reference, atol=1e-4)
        with_base = engine.logits(PROMPT, reuse="exact", strict=True, adapter=[])
        assert engine.registry.fingerprint != base
        assert not torch.allclose(with_base, reference, atol=1e-3)
        with with_adapters(loaded.model, ()):
            assert fingerprint(loaded) == base


def test_transformers_own_adapters(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`add_adapter` and `set_adapter` of a transformers model, which asks for the newest peft by number alone."""
    from transformers.integrations import peft as mixin

    monkeypatch.setattr(mixin, "MIN_PEFT_VERSION", "0.0", raising=False)
    model = loaded.model
    for name in ("red", "blue"):
        model.add_adapter(lora(), adapter_name=name)
        fill(model, name, len(name))
    model.eval()
    with KVBoost(loaded) as engine:
        reference = {}
        for name in ("red", "blue"):
            model.set_adapter(name)
            reference[name] = off(engine)
        model.disable_adapters()
        reference["base"] = off(engine)
        model.enable_adapters()
        for name in ("red", "blue", "red"):
            model.set_adapter(name)
            assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True), reference[name], atol=1e-4)
        model.disable_adapters()
        assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True), reference["base"], atol=1e-4)
        assert torch.allclose(
            engine.logits(PROMPT, reuse="exact", strict=True, adapter="blue"), reference["blue"], atol=1e-4
        )
        assert torch.allclose(engine.logits(PROMPT, reuse="exact", strict=True), reference["base"], atol=1e-4)


def test_what_is_forgotten_is_forgotten_for_every_adapter(loaded: Any, adapted: Any) -> None:
    adapted.set_adapter("red")
    with KVBoost(loaded) as engine:
        engine.index.add("notes", DOCUMENTS)
        for name in ("blue", []):
            engine.generate(PROMPT, adapter=name, strict=True)
        assert len(engine.store.catalog) == 3 * len(DOCUMENTS)
        assert engine.index.delete("notes") == len(DOCUMENTS)
        assert len(engine.store.catalog) == 0
        assert list(engine.store.entries()) == []
        engine.warm(DOCUMENTS)
        engine.generate(PROMPT, adapter="blue", strict=True)
        assert engine.evict(DOCUMENTS[:1]) == 1
        assert len(engine.store.catalog) == 2 * (len(DOCUMENTS) - 1)
        adapted.set_adapter("blue")
        assert engine.generate("Which?", strict=True).reuse == "off"
        assert engine.evict(DOCUMENTS) == len(DOCUMENTS) - 1
        assert len(engine.store.catalog) == 0
