"""Quantised, packed and offloaded models: reused where their weights can be read, else served with the reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.models.fingerprint import model_fingerprint
from kvboost_rag.models.load import LoadedModel, load_model
from kvboost_rag.stores import open_store

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

DOCUMENTS = [
    f"Ship {i} left the harbour with {i + 12} barrels of oil and came back empty in the year after." for i in range(4)
]
PROMPT = "\n\n".join([*DOCUMENTS, "Which ship carried most?"])


def torchao(name: str) -> Any:
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, name)())


QUANTISED: list[Any] = [
    pytest.param(lambda: torchao("Int8WeightOnlyConfig"), 1e-5, marks=needs_torchao, id="torchao-int8"),
    pytest.param(
        lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
        0.05,
        marks=needs_torchao,
        id="torchao-int8-activations",
    ),
    pytest.param(lambda: BitsAndBytesConfig(load_in_8bit=True), 0.05, marks=needs_bitsandbytes, id="bitsandbytes-8"),
    pytest.param(lambda: BitsAndBytesConfig(load_in_4bit=True), 1e-2, marks=needs_bitsandbytes, id="bitsandbytes-4"),
    pytest.param(
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        1e-2,
        marks=needs_bitsandbytes,
        id="bitsandbytes-nf4-double",
    ),
]


@pytest.fixture(scope="module")
def folder(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 64, deep enough for noise to add up."""
    path = tmp_path_factory.mktemp("model")
    loaded = tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=6)
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("config", "tolerance"), QUANTISED)
def test_quantised_models_are_reused(
    folder: Path, config: Callable[[], Any], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    prints = []
    for _ in range(2):  # the second time from disk, digests and KV alike
        store = open_store(tmp_path / "store")
        with KVBoost.from_pretrained(folder, store=store, quantization_config=config()) as engine:
            assert engine.probe.reusable, engine.probe.reason
            prints.append(engine.registry.fingerprint)
            reference = engine.logits(PROMPT, reuse="off")
            for options in ({"repair": "full"}, {"reuse": "exact"}):
                ours = engine.logits(PROMPT, documents=DOCUMENTS, strict=True, **options)
                assert distance(ours, reference) < tolerance, options
            cold = engine.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True)
            params = GenerationParams(max_new_tokens=4)
            result = engine.generate(PROMPT, documents=DOCUMENTS, params=params, strict=True)
            assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.APPROXIMATE}
            assert torch.equal(engine.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), cold)
            # Forwards change nothing that a fingerprint sees.
            prints.append(engine.registry.fingerprint)
            assert engine.stats().fallbacks == {}
    assert len(set(prints)) == 1


@needs_torchao
def test_a_model_quantised_in_place(tiny_model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    loaded = tiny_model("llama")
    plain = model_fingerprint(loaded.model, loaded.tokenizer)
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        quantize_(loaded.model, Int8WeightOnlyConfig())  # under a live engine
        reference = engine.logits(PROMPT, reuse="off")
        assert distance(engine.logits(PROMPT, repair="full", strict=True), reference) < 1e-5
        assert engine.registry.fingerprint != plain


@pytest.mark.parametrize(("config", "tolerance"), QUANTISED)
def test_packed_weights_count_to_the_last_byte(folder: Path, config: Callable[[], Any], tolerance: float) -> None:
    loaded = load_model(folder, quantization_config=config())
    before = model_fingerprint(loaded.model, loaded.tokenizer)
    weight = loaded.model.model.layers[3].self_attn.v_proj.weight
    packed = getattr(weight, "qdata", weight.data)
    packed.view(-1)[-1] ^= 1
    assert model_fingerprint(loaded.model, loaded.tokenizer) != before
    packed.view(-1)[-1] ^= 1
    assert model_fingerprint(loaded.model, loaded.tokenizer) == before
    scales = getattr(weight, "scale", None)
    if scales is None:
        state = getattr(weight, "quant_state", None)
        module = loaded.model.model.layers[3].self_attn.v_proj
        scales = state.absmax if state is not None else (module.state.SCB if weight.SCB is None else weight.SCB)
    scales.view(-1)[-1] += 1
    assert model_fingerprint(loaded.model, loaded.tokenizer) != before


def test_quantised_activations_do_not_hide_absolute_positions(tiny_model: Any, tmp_path: Path) -> None:
    """The tolerance grows with the model's own noise, not with what depends on the position."""
    pytest.importorskip("bitsandbytes")
    loaded = tiny_model("opt", word_embed_proj_dim=64, ffn_dim=64)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    with KVBoost.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True)) as engine:
        assert "layer 0 depend on the absolute position" in (engine.probe.reason or "")


DEVICES = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.layers.4": "cpu",
    "model.layers.5": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def test_weights_offloaded_to_disk_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    with KVBoost.from_pretrained(folder, store=tmp_path / "store") as engine:
        whole, reference = engine.registry.fingerprint, engine.logits(PROMPT, reuse="off")
        engine.warm(DOCUMENTS)
    hub = {"offload_folder": str(tmp_path / "offload")}
    with KVBoost.from_pretrained(folder, store=tmp_path / "store", device_map=DEVICES, hub=hub) as engine:
        assert engine.model.model.layers[1].self_attn.k_proj.weight.device.type == "meta"
        assert engine.registry.fingerprint == whole
        result = engine.generate(PROMPT, params=GenerationParams(max_new_tokens=4), strict=True)
        assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.APPROXIMATE}
        assert torch.allclose(engine.logits(PROMPT, repair="full", strict=True), reference, atol=1e-4)
        assert engine.registry.fingerprint == whole


def test_weights_that_cannot_be_read_are_served_without_reuse(tiny_model: Any, tmp_path: Path) -> None:
    loaded = tiny_model("llama", num_hidden_layers=2)
    projection = loaded.model.model.layers[0].self_attn.k_proj
    kept = projection.weight
    projection.weight = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
    with KVBoost(loaded, store=tmp_path / "store") as engine:
        assert "meta device, without values" in (engine.probe.reason or "")
        assert not engine.probe.reusable
        projection.weight = kept  # given back between two requests
        result = engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=4), strict=True)
        assert result.reuse == "blend"
    other = LoadedModel(tiny_model("llama", num_hidden_layers=2).model, loaded.tokenizer, "same")
    with KVBoost(other, store=tmp_path / "store") as engine:
        assert engine.registry.fingerprint == model_fingerprint(loaded.model, loaded.tokenizer)


def test_a_gguf_file_is_reused(tmp_path: Path) -> None:
    from gguf_file import write_gguf

    with KVBoost.from_pretrained(write_gguf(tmp_path / "tiny.gguf")) as engine:
        assert engine.probe.reusable, engine.probe.reason
        text = "ab a b ab c ab b a"
        reference = engine.logits(text, reuse="off")
        ours = engine.logits(text, documents=["a b ab c"], repair="full", strict=True)
        assert torch.allclose(ours, reference, atol=1e-4)
