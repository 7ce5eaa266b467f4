"""Digests of weights from files: read once for the same files, never for others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvboost_rag import KVBoost
from kvboost_rag.models import digest
from kvboost_rag.models.fingerprint import model_fingerprint
from kvboost_rag.models.load import load_model


@pytest.fixture
def folder(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    loaded = tiny_model("llama", num_hidden_layers=2)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that were hashed."""
    seen: list[int] = []
    original = digest.hash_tensor
    monkeypatch.setattr(digest, "hash_tensor", lambda tensor: seen.append(tensor.numel()) or original(tensor))
    return seen


def opened(folder: Path, **options: Any) -> str:
    """The fingerprint that an engine over the folder has; checked against reading everything."""
    with KVBoost.from_pretrained(folder, **options) as engine:
        fingerprint = engine.registry.fingerprint
        assert fingerprint == model_fingerprint(engine.model, engine.tokenizer)
        return fingerprint


def test_the_second_load_reads_no_weights(folder: Path, read: list[int]) -> None:
    first = opened(folder)
    whole = len(read) // 2  # the check in `opened` reads everything once more
    read.clear()
    assert opened(folder) == first
    assert len(read) == whole


def test_other_files_are_read(folder: Path) -> None:
    first = opened(folder)
    path = folder / "model.safetensors"
    times = path.stat()
    weights = load_file(path)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][311, 5] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its old time does not make it the old file
    assert opened(folder) != first


def test_other_options_are_other_weights(folder: Path) -> None:
    assert len({opened(folder), opened(folder, dtype="bfloat16"), opened(folder, dtype="float16")}) == 3


@pytest.mark.parametrize("damage", ["", "{}", "[1, 2]", '["ab"]'])
def test_a_damaged_cache_is_computed_again(folder: Path, damage: str, tmp_path: Path) -> None:
    first = opened(folder)
    (file,) = (tmp_path / "cache" / "digests").iterdir()
    file.write_text(damage)
    assert opened(folder) == first
    assert len(file.read_text()) > 1000


def test_a_cache_that_cannot_be_written_costs_time_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(folder)
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(blocked))
    assert opened(folder, profile=None) == first


def test_weights_changed_between_loading_and_serving_are_read(folder: Path) -> None:
    first = opened(folder)
    loaded = load_model(folder)
    loaded.model.get_input_embeddings().weight.data[5, 7] += 1e-3
    with KVBoost(loaded) as engine:
        assert engine.registry.fingerprint == model_fingerprint(loaded.model, loaded.tokenizer) != first


def test_digests_are_the_same_in_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [(str(i), torch.randn(i + 1)) for i in range(40)]
    expected = [digest.hash_tensor(tensor) for _, tensor in tensors]
    for cores in (1, 7):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert digest.WeightDigests().of(tensors) == expected
