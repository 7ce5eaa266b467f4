"""The table of models: built from what is installed, a sample that is the same everywhere, faults that fail it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from kvbench.tiny import tiny_tokenizer
from kvbench.tiny_models import NotBuilt, architectures, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[2]


def test_every_causal_architecture_is_tried() -> None:
    assert set(architectures()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_sample_is_fixed_by_hash() -> None:
    names = [f"model{i}" for i in range(50)]
    sample = models.chosen(names, 5)
    assert sample == models.chosen(list(reversed(names)), 5) == sorted(sample)
    assert set(sample) <= set(models.chosen([*names, "another"], 6))
    assert models.chosen(names, None) == names


def test_a_sample_runs_without_a_crash_or_a_wrong_answer() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "models.py"), "--sample", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout
    rows = [row for row in done.stdout.splitlines() if row.startswith("| ")]
    assert len(rows) >= 16
    assert any(row.endswith("| reused |") for row in rows)


def test_wrong_logits_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert models.asked(models.Row("llama"), model).outcome == "reused"
    original = models.KVBoost.logits

    def other(self: object, prompt: str, **options: object) -> torch.Tensor:
        found = original(self, prompt, **options)  # type: ignore[arg-type]
        return found if options.get("reuse") == "off" else found.flip(-1)

    monkeypatch.setattr(models.KVBoost, "logits", other)
    row = models.asked(models.Row("llama"), model)
    assert row.wrong
    assert row.outcome.startswith("WRONG")


def test_a_page_holds_the_rows(tmp_path: Path) -> None:
    rows = [models.Row("llama", outcome="reused"), models.Row("x|y", outcome="no reuse: a\nb")]
    text = models.page(rows)
    assert text.startswith(models.START)
    assert text.endswith(models.END)
    assert "| llama | float32 |  |  | reused |" in text
    assert "| x/y | float32 |  |  | no reuse: a b |" in text
    assert "1 rows reused, 1 served without reuse" in text


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuilt, match=r"\w+: "):
        tiny_model("reformer")
    assert len(tiny_tokenizer()) == 258
