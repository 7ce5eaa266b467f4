"""A model on two ranks (tensor parallel by transformers, gloo): what one process answers, whatever befalls one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("rank_worker.py")
MODELS = {"llama-2-heads": ("llama", 2), "qwen3-4-heads": ("qwen3", 4)}


Save = Callable[..., Path]


@pytest.fixture
def save(tiny_model: Any, tmp_path: Path) -> Save:
    """A tiny model's folder."""

    def saved(kind: str, heads: int, **fields: Any) -> Path:
        loaded = tiny_model(kind, num_key_value_heads=heads, num_hidden_layers=3, **fields)
        loaded.model.save_pretrained(tmp_path / "model")
        loaded.tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return saved


def launch(ranks: int, model: Path, store: Path, results: Path, *scenarios: str, **environment: str) -> list[Any]:
    """What each rank found, by scenario."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *many, str(WORKER), str(model), str(store), str(results), *scenarios]
    path = os.pathsep.join(str(ROOT / shelf) for shelf in ("", "kernels", "integrations", "tests"))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]


def close(a: Any, b: Any) -> bool:
    ways = ("none", "query", "full", "off")
    return all(torch.allclose(torch.tensor(a[way]), torch.tensor(b[way]), atol=1e-4) for way in ways)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one_process_whatever_befalls_a_file(save: Save, name: str, tmp_path: Path) -> None:
    folder = save(*MODELS[name])
    (alone,) = launch(1, folder, tmp_path / "one", tmp_path / "a", "cold", "warm")
    names = ("cold", "warm", "deleted", "corrupt", "slow", "fails")
    ranks = launch(2, folder, tmp_path / "two", tmp_path / "b", *names)
    for scenario in names[:-1]:
        first, second = ({k: v for k, v in rank[scenario].items() if k != "entries"} for rank in ranks)
        assert first == second, scenario  # to the bit: rows, hits and answers are decided once
        assert close(first, alone["warm"]), scenario
        assert (first["tokens"], first["reuse"]) == (alone["warm"]["tokens"], "blend"), scenario
        assert first["fingerprint"] == alone["warm"]["fingerprint"]
        assert first["heads"] * 2 == alone["warm"]["heads"]
    assert set(ranks[0]["cold"]["hits"]) == {"encoded"}
    assert set(ranks[0]["warm"]["hits"]) == set(ranks[0]["slow"]["hits"]) == {"approximate"}
    for scenario in ("deleted", "corrupt"):  # one rank's file: both ranks encode that chunk
        assert sorted(ranks[0][scenario]["hits"]) == ["approximate", "approximate", "encoded"], scenario
    for rank in ranks:
        assert (rank["fails"]["reuse"], rank["fails"]["tokens"]) == ("off", alone["warm"]["plain tokens"])
        assert rank["fails"]["reason"]


@pytest.mark.parametrize("name", MODELS)
def test_stores_are_read_by_another_number_of_ranks(save: Save, name: str, tmp_path: Path) -> None:
    folder = save(*MODELS[name])
    (one,) = launch(1, folder, tmp_path / "one", tmp_path / "a", "cold")
    two = launch(2, folder, tmp_path / "two", tmp_path / "b", "cold")
    from_one = launch(2, folder, tmp_path / "one", tmp_path / "c", "warm")
    (from_two,) = launch(1, folder, tmp_path / "two", tmp_path / "d", "warm")
    for found in (*from_one, from_two):
        assert set(found["warm"]["hits"]) == {"approximate"}
        assert close(found["warm"], one["cold"])
    assert two[0]["cold"]["entries"] == two[0]["cold"]["heads"] * 2 * 3  # an entry a head


def test_a_rank_that_never_comes_is_an_error_in_bounded_time(save: Save, tmp_path: Path) -> None:
    folder = save("llama", 2)
    found = launch(2, folder, tmp_path / "two", tmp_path / "a", "gone", KVBOOST_RANKS_WAIT="4")
    assert "KVBOOST_RANKS_WAIT" in found[0]["gone"]["error"]
    assert found[0]["gone"]["seconds"] < 10


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_that_ranks_cannot_share_are_refused_and_nobody_waits(save: Save, heads: int, tmp_path: Path) -> None:
    """Transformers itself cannot run such a model: each rank says so, at once."""
    folder = save("llama", heads, num_attention_heads=6, hidden_size=96)
    found = launch(2, folder, tmp_path / "store", tmp_path / "a", "cold")
    says = f"its {heads} key-value heads cannot be split over 2 ranks"
    assert all(rank["cold"]["reason"].startswith(says) for rank in found)
    (alone,) = launch(1, folder, tmp_path / "store", tmp_path / "b", "cold")
    assert alone["cold"]["reuse"] == "blend"
