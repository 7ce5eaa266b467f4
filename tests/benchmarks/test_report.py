"""The report: figures counted by hand, the same lines give the same page, and README quotes what was generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"processor": "CPU", "threads": 2, "memory_gb": 24.0, "torch": "2", "transformers": "5", "commit": "abc"}


def quality_row(case: int, arm: str, kl: float, correct: bool = True, identical: bool = True, **more) -> dict:
    return {
        "source": "quality",
        "model": "m",
        "dtype": "float32",
        "dataset": "hotpotqa",
        "case": f"c{case}",
        "arm": arm,
        "kl_first": kl,
        "kl_mean": kl / 2,
        "agreement": 1.0,
        "identical": identical,
        "f1": 1.0,
        "full_f1": 1.0,
        "correct": correct,
        "full_correct": True,
        "ttft_ms": 100.0,
        "full_ttft_ms": 400.0,
        "input_tokens": 100,
        "cached_tokens": 75,
        "recomputed_tokens": 25,
    } | more


def speed_row(name: str, p50: float, reused: float = 90.0, suite: str = "core", **more) -> dict:
    return {
        "suite": suite,
        "machine": MACHINE,
        "model": "m",
        "dtype": "bfloat16",
        "documents": 4,
        "name": name,
        "samples": 3,
        "ttft_p50_ms": p50,
        "ttft_p95_ms": 2 * p50,
        "ttft_min_ms": p50,
        "prompt_tokens": 100.0,
        "reused_tokens": reused,
        "recomputed_tokens": 0.0,
        "peak_bytes": 1_000_000,
        "stages_ms": {},
    } | more


QUALITY = [
    *(quality_row(i, "query 5 %, 4 neighbours", 0.01 * i, identical=i < 3) for i in range(4)),
    *(quality_row(i, "cacheblend 15 %, 0 neighbours", 0.2, correct=False) for i in range(4)),
]
SPEED = [
    speed_row("full prefill (reuse off)", 1000.0, 0.0),
    speed_row("query 5 %", 200.0),
    speed_row("transformers, last prompt's cache kept by hand", 100.0, 50.0),
    {
        "suite": "core",
        "machine": MACHINE,
        "model": "m",
        "dtype": "bfloat16",
        "documents": 4,
        "name": "p",
        "failure": "E",
    },
]


def test_summaries():
    from kvbench.summary import summarise

    query, blend = summarise(QUALITY)
    assert (query.kl_first.mean, query.kl_mean.mean) == (pytest.approx(0.015), pytest.approx(0.0075))
    assert query.kl_first.low < 0.015 < query.kl_first.high
    assert (query.identical.mean, query.ttft_ratio, query.recomputed) == (0.75, 4.0, 0.25)
    assert (query.kept, query.shift.mean, blend.kept, blend.shift.mean) == (1.0, 0.0, 0.0, -1.0)


def test_arms_are_compared_on_the_prompts_that_all_of_them_have():
    from kvbench.summary import summarise

    more = [*QUALITY, quality_row(9, "query 5 %, 4 neighbours", 100.0)]
    query, blend = summarise(more)
    assert query.num_prompts == blend.num_prompts == 4
    assert query.kl_first.mean < 1


def test_ablations_do_not_narrow_the_main_table():
    from kvbench.markdown import headline, page
    from kvbench.summary import summarise

    ablation = quality_row(0, "query 5 %, 4 neighbours", 9.0, source="quality_ablations_m")
    assert [s.num_prompts for s in summarise([*QUALITY, ablation])] == [4, 4, 1]
    assert headline([*QUALITY, ablation], SPEED) == headline(QUALITY, SPEED)
    text = page([*QUALITY, ablation], SPEED)
    assert "Ablations on hotpotqa" in text
    assert "\nratio:\n\n| reuse |" in text
    assert "\nanchor:" not in text, "no such arm was measured"


def test_headline_is_of_the_largest_run():
    from kvbench.markdown import headline

    small = [row | {"source": "quality_a", "model": "a"} for row in QUALITY if row["case"] == "c0"]
    assert headline([*small, *QUALITY], SPEED) == headline(QUALITY, SPEED)


def test_page_says_what_quality_was_measured_on():
    from kvbench.markdown import page

    rows = [row | {"machine": MACHINE | {"commit": commit}} for row in QUALITY for commit in ("abc", "def")]
    text = page(rows, [])
    assert text.count("Measured on: CPU, 2 threads") == 2
    assert text.index("kvboost-rag abc") < text.index("kvboost-rag def")


def test_page_says_when_warming_has_paid_off():
    from kvbench.markdown import page

    rows = [("full prefill (reuse off)", 400.0), ("none", 100.0), ("query 5 %", 500.0)]
    text = page([], [speed_row(name, p50, suite="workload turns", warm_seconds=6.0) for name, p50 in rows])
    assert "Warming took 6.0 s; it has paid off: none after 20.0 questions, query 5 % never." in text


def test_page_says_where_it_loses_and_what_did_not_run():
    from kvbench.markdown import page

    text = page(QUALITY, SPEED)
    losses = text.partition("## Where it loses")[2].partition("## Quality")[0]
    assert "query 5 % takes 2.0 times as long as transformers, last prompt's cache kept by hand" in losses
    assert "cacheblend 15 %, 0 neighbours answers fewer questions than full prefill (-100 %" in losses
    assert "query 5 %, 4 neighbours gives the identical answer on 75 % (target 80 %)" in losses
    assert "did not run: E" in text
    assert "5.00 x" in text
    assert page(QUALITY, SPEED) == text


def test_readme_block_is_checked():
    import report
    from kvbench.markdown import page

    text = page(QUALITY, SPEED)
    block = report.quoted(text)
    assert block is not None
    assert report.faults(f"# Name\n\n{block}\n\nrest", text, text) == []
    assert "README.md quotes" in report.faults(block.replace("200", "150"), text, text)[0]
    assert "docs/benchmarks.md" in report.faults("no table", text + " ", text)[0]
    assert report.faults("no table", text, text) == []


def test_plots_and_html(tmp_path: Path):
    pytest.importorskip("matplotlib")
    import report
    from kvbench.html import to_html
    from kvbench.markdown import page

    lengths = [speed_row("none", 10.0 * n, suite="lengths", prompt_tokens=100.0 * n) for n in (1, 2)]
    report.draw(tmp_path, QUALITY, [*SPEED, *lengths])
    first = (tmp_path / "figures" / "trade_off.svg").read_bytes()
    report.draw(tmp_path, QUALITY, [*SPEED, *lengths])
    assert (tmp_path / "figures" / "trade_off.svg").read_bytes() == first
    html = to_html(page(QUALITY, [*SPEED, *lengths]), tmp_path)
    assert html.count("<svg") == 2
    assert "<table>" in html


def test_committed_pages_are_those_that_the_committed_results_give():
    """What continuous integration checks."""
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_whole_run_names_scripts_and_arguments_that_exist(tmp_path: Path, monkeypatch):
    import argparse

    import quality
    import run_all

    for quick in (True, False):
        args = argparse.Namespace(
            quick=quick, files=[tmp_path / "hotpotqa_60.json"], results=tmp_path, docs=tmp_path, readme=tmp_path / "r"
        )
        for script, *arguments in run_all.commands(args):
            assert (ROOT / "benchmarks" / script).is_file()
            if "--arms" in arguments:
                assert quality.arms_of(arguments[arguments.index("--arms") + 1 :])
