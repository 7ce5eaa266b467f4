"""`benchmarks/scale.py`: its arithmetic against what is known otherwise, and the simulation at its limits."""

from __future__ import annotations

import numpy as np
import pytest
import scale


def test_bytes_are_those_of_the_models() -> None:
    plain = [model.chunk_bytes("none") for model in scale.MODELS]
    assert plain == [256 * 23_040, 256 * 131_072, 256 * 327_680]
    for model, size in zip(scale.MODELS, plain, strict=True):
        assert size / 4 < model.chunk_bytes("k8v4") < model.chunk_bytes("k8v8") < 0.6 * size


def test_everything_is_found_where_there_is_room_for_everything() -> None:
    requests = scale.trace(500, 400, 4, 0.9, 0.1, 0)
    assert requests.shape == (400, 4)
    assert 0 <= requests.min() <= requests.max() < 500
    distinct = len(np.unique(requests))
    alone = scale.simulate(requests, scale.Fleet(500, 1, memory=1, disk=1, remote=0))
    assert alone == {"memory": requests.size - distinct, "encoded": distinct}
    apart = scale.simulate(requests, scale.Fleet(500, 4, memory=1, disk=1, remote=0))
    shared = scale.simulate(requests, scale.Fleet(500, 4, memory=1, disk=1, remote=1))
    assert shared["encoded"] == 0
    assert shared["remote"] == apart["encoded"] > distinct
    half = scale.simulate(requests, scale.Fleet(500, 4, memory=0, disk=0, remote=0.5))
    assert half["remote"] + half["encoded"] == requests.size
    assert half["remote"] > requests.size / 2, "what is asked for most stays"
    nothing = scale.simulate(requests, scale.Fleet(500, 4, memory=0, disk=0, remote=0))
    assert nothing == {"encoded": requests.size}


def test_popular_chunks_are_asked_for_more_often() -> None:
    requests = scale.trace(1000, 5000, 4, 1.1, 0.0, 1)
    counts = np.sort(np.bincount(requests.ravel(), minlength=1000))[::-1]
    assert counts[:10].sum() > 20 * counts[500:510].sum()


def test_the_command_prints_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--simulated", "300", "--requests", "100", "--chunks", "1e6"])
    out = capsys.readouterr().out
    assert out.count("\n|---|") == 3
    assert "assumed: 989 TFLOPS at 40%" in out
    assert "| 8B (Llama 3.1) | 1e+06 | 33.6 TB |" in out
    shares = [line.split("|")[2:6] for line in out.splitlines() if line.startswith("| 1%, ")]
    assert len(shares) == 5
    assert all(sum(float(cell.strip(" %")) for cell in row) == pytest.approx(100, abs=0.3) for row in shares)
