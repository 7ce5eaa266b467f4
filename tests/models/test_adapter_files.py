"""Adapters from files: beside a base model that answers without them, or a folder that is an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import fill, lora, peft, save_adapters, with_two_adapters

from kvboost_rag import KVBoost
from kvboost_rag.models.adapters import resting_adapters
from kvboost_rag.models.load import ModelLoadError, load_model

DOCUMENTS = [f"Boat {i} carried {i + 12} barrels of salt up the river before the ice came." for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which boat carried most?"])


@pytest.fixture
def folders(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    return save_adapters(tiny_model("llama", num_hidden_layers=3), tmp_path)


@pytest.fixture
def reference(tiny_model: Any) -> dict[str, torch.Tensor]:
    """Logits of the same model and adapters, made in memory."""
    loaded = tiny_model("llama", num_hidden_layers=3)
    with_two_adapters(loaded)
    with KVBoost(loaded) as engine:
        found = {name: engine.logits(PROMPT, reuse="off", adapter=name) for name in ("red", "blue")}
        return found | {"base": engine.logits(PROMPT, reuse="off", adapter=[])}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4)


def test_adapters_rest_until_they_are_asked_for(folders: dict[str, Path], reference: dict[str, torch.Tensor]) -> None:
    names = ("red", "blue")
    with KVBoost.from_pretrained(folders["base"], adapters={name: folders[name] for name in names}) as engine:
        assert same(engine.logits(PROMPT, reuse="exact", strict=True), reference["base"])
        for name in (*names, *names):
            assert same(engine.logits(PROMPT, reuse="exact", strict=True, adapter=name), reference[name]), name
        assert same(engine.logits(PROMPT, reuse="exact", strict=True), reference["base"])
        adapted = engine.registry.fingerprint
    with KVBoost.from_pretrained(folders["base"]) as engine:
        assert engine.registry.fingerprint == adapted  # one base, one store


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_folder_that_is_an_adapter_is_the_adapted_model(
    folders: dict[str, Path], reference: dict[str, torch.Tensor], with_tokenizer: bool
) -> None:
    if with_tokenizer:
        for path in folders["base"].glob("token*"):
            shutil.copy(path, folders["red"])
    with KVBoost.from_pretrained(folders["red"], adapters={"other": folders["blue"]}) as engine:
        assert resting_adapters(engine.model) == ("default",)
        assert same(engine.logits(PROMPT, reuse="exact", strict=True), reference["red"])
        assert same(engine.logits(PROMPT, reuse="exact", strict=True, adapter="other"), reference["blue"])
        assert same(engine.logits(PROMPT, reuse="exact", strict=True, adapter=[]), reference["base"])


def test_other_adapter_files_are_another_model_although_digests_are_kept(
    folders: dict[str, Path],
) -> None:
    prints = []
    for source in ("red", "blue"):
        weights = (folders[source] / "adapter_model.safetensors").read_bytes()
        (folders["red"] / "adapter_model.safetensors").write_bytes(weights)
        for _ in range(2):
            with KVBoost.from_pretrained(folders["red"]) as engine:
                prints.append(engine.registry.fingerprint)
                expected = engine.logits(PROMPT, reuse="off")
                assert same(engine.logits(PROMPT, reuse="exact", strict=True), expected)
    assert prints[0] == prints[1] != prints[2] == prints[3]


def test_adapters_that_cannot_be_had(tiny_model: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot load the adapter x from .*nowhere"):
        load_model(folders["base"], adapters={"x": tmp_path / "nowhere"})
    other = peft.get_peft_model(tiny_model("llama", num_hidden_layers=3, hidden_size=32, head_dim=8).model, lora())
    fill(other, "default", 3)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="cannot load the adapter x"):
        load_model(folders["base"], adapters={"x": tmp_path / "other"})
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    peft.get_peft_model(tiny_model("llama").model, config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ModelLoadError, match="learned tokens"):
        load_model(folders["base"], adapters={"x": tmp_path / "prompt"})
    config_file = folders["red"] / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ModelLoadError, match="names no base model"):
        load_model(folders["red"])
    loaded = tiny_model("llama")
    with pytest.raises(ModelLoadError, match="load them into the model with peft"):
        load_model(loaded.model, tokenizer=loaded.tokenizer, adapters={"x": folders["blue"]})
