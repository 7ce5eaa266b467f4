"""Full prefill in a shorter dtype beside float32: lines as the quality suite's, and figures of the models they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_report import quality_row


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "hotpotqa_60.json"
    documents = [f"Title {i}\nThe keeper of lighthouse {i} is called Number{i}." for i in range(3)]
    records = [{"question": f"Who keeps {i}?", "answers": [f"Number{i}"], "docs": documents} for i in range(3)]
    path.write_text(json.dumps([record | {"support": [0]} for record in records]))
    return path


def test_lines_are_the_suites_and_only_missing_ones_are_measured(
    tiny_model: Any,
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import rounding

    made: list[str] = []

    def load(name: str, dtype: str) -> Any:
        made.append(dtype)
        return tiny_model("llama", dtype=getattr(torch, dtype), max_position_embeddings=4096)

    monkeypatch.setattr(rounding, "load_model", load)
    out = tmp_path / "quality_rounding.jsonl"
    command = ["rounding.py", str(questions), "--out", str(out), "--answer-tokens", "4"]
    monkeypatch.setattr(sys, "argv", [*command, "--cases", "2"])
    rounding.main()
    monkeypatch.setattr(sys, "argv", command)
    rounding.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["hotpotqa-0", "hotpotqa-1", "hotpotqa-2"]
    assert made == ["float32", "bfloat16"] * 2
    assert {line["arm"] for line in lines} == {"full prefill in bfloat16"}
    assert set(lines[0]) - {"machine"} == set(quality_row(0, "", 0.0)) - {"source"}
    assert all(0 < line["kl_first"] < 0.5 for line in lines)


def test_the_same_model_twice_does_not_differ(tiny_model: Any, questions: Path) -> None:
    from kvbench.cases import from_file
    from kvbench.rounded import rounded_row

    from kvboost_rag import KVBoost
    from kvboost_rag.measure.calibrate import reference_answer
    from kvboost_rag.stores import MemoryStore

    engines = [
        KVBoost(tiny_model("llama", max_position_embeddings=4096), store=MemoryStore(1 << 20), profile=None)
        for _ in range(2)
    ]
    case = from_file(questions, 1)[0]
    line = rounded_row(engines[1], case, reference_answer(engines[0], case, 4), 4)
    assert line["identical"]
    assert line["agreement"] == 1
    assert line["kl_first"] == line["kl_mean"] == 0
    for engine in engines:
        engine.close()
