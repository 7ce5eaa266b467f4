"""The kernels' benchmark: it measures equal things, refuses wrong results, and does nothing without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernels_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(bench: ModuleType):
    return bench.Shape(
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        chunks=3,
        chunk_tokens=64,
        rows=20,
        dtype=torch.float32,
        device="cpu",
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_cases_agree_with_their_baselines(bench, small) -> None:
    cases = bench.build_cases(small, compile_flex=False)
    assert len({case.name for case in cases}) == 4
    for case in cases:
        assert bench.check(case) <= 1e-4, case.name


def test_a_wrong_result_is_not_timed(bench, small) -> None:
    case = bench.build_cases(small, compile_flex=False)[-1]
    wrong = replace(case, ours=lambda: (case.ours()[0] + 1,))
    with pytest.raises(AssertionError, match="results differ by 1"):
        bench.check(wrong)
    with pytest.raises(AssertionError, match="nan"):
        bench.check(replace(case, ours=lambda: (case.ours()[0] * float("nan"),)))


def test_floor_counts_what_must_move(bench, small) -> None:
    place, _, scattered, question = bench.build_cases(small, compile_flex=False)
    tensor = 2 * 2 * 192 * 32 * 4
    assert place.bytes_moved == 4 * tensor + 2 * 192 * 16 * 4
    assert question.flops == 6 * 32 * 4 * sum(range(173, 193))
    assert 0 < scattered.flops < question.flops


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_says_that_there_is_no_gpu(bench, capsys) -> None:
    assert bench.main([]) == 0
    assert "No GPU here" in capsys.readouterr().out
