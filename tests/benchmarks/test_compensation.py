"""Differences of contexts fitted on recomputed rows: the regression, and the script on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def test_the_fit_is_ridge_regression_a_head_at_a_time() -> None:
    from kvbench.compensated import RIDGE_TOKENS, fitted

    torch.manual_seed(0)
    directions, rows = torch.randn(2, 3, 11, 5), torch.tensor([0, 4, 7])
    missing = torch.randn(3, 3, 5)
    found = fitted(directions, rows, missing)
    for head in range(3):
        given = np.stack([directions[m, head, rows].flatten().numpy() for m in range(2)], 1)
        energy = float(directions[:, head].square().sum(-1).mean())
        left = given.T @ given + (RIDGE_TOKENS * energy + 1e-6) * np.eye(2)
        expected = np.linalg.solve(left, given.T @ missing[head].flatten().numpy())
        np.testing.assert_allclose(found[head].numpy(), expected, rtol=1e-4)
    assert float(fitted(directions, rows[:0], missing[:, :0]).abs().max()) == 0  # no rows: nothing is moved


def test_the_script_measures_every_way_once(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compensation

    path, out = tmp_path / "hotpotqa_60.json", tmp_path / "out.jsonl"
    documents = [
        f"Title {i}\nThe keeper of lighthouse {i} is called Number{i}. It stands on a cliff." for i in range(8)
    ]
    path.write_text(
        json.dumps([{"question": "Who keeps lighthouse 2?", "answers": ["Number2"], "docs": documents[:3]}])
    )
    loaded = tiny_model("llama")
    monkeypatch.setattr(compensation, "load_model", lambda name, dtype: loaded)
    monkeypatch.setattr(compensation, "load_embedder", lambda: lambda t: np.array([[len(x), 1.0] for x in t]))
    monkeypatch.setattr(sys, "argv", ["compensation.py", str(path), "--out", str(out)])
    compensation.main()
    compensation.main()
    rows = {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == list(compensation.WAYS) == [row["arm"] for row in map(json.loads, out.open())]
    moved, kept = rows["two contexts, 5 %, both differences fitted"], rows["two contexts, 5 %"]
    assert 0 < moved["kl_first"] != kept["kl_first"] > 0
    assert "one context, 5 % " in capsys.readouterr().out
