"""The speed suite on a tiny model: every suite runs and says what was reused. No times are asserted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch


@pytest.fixture
def bench(tiny_model, tmp_path: Path):
    import ttft

    args = argparse.Namespace(
        model="tiny", dtype="float32", documents=3, chunk_tokens=64, rounds=2, only=[], quick=True, out=tmp_path / "out"
    )
    return ttft.Bench(tiny_model("llama", num_hidden_layers=3), args)


def rows_of(bench) -> dict[str, dict]:
    return {row["name"]: row for row in map(json.loads, bench.args.out.read_text().splitlines())}


def test_peers_are_timed_for_one_token(bench, tiny_model):
    from kvbench.peers import LangChainPipeline, LlamaIndexLLM, one_token
    from kvbench.workloads import reordered

    pytest.importorskip("langchain_huggingface")
    pytest.importorskip("llama_index.llms.huggingface")
    prompt = reordered(bench.documents(2), 2, 1)[0]
    with bench.engine() as engine:
        for peer in (LangChainPipeline, LlamaIndexLLM):
            answer = peer(engine.model, engine.tokens).first_token(prompt)
            assert engine.tokens.count(answer.token) <= 4, peer.name
        with pytest.raises(ValueError, match="answered with 9 tokens"):
            one_token(engine.tokens.decode(engine.tokens.ids("one two three four")[:9]), engine.tokens)


def test_core(bench, capsys):
    import ttft

    ttft.core(bench)
    rows = rows_of(bench)
    assert not [row for row in rows.values() if "failure" in row]
    prompt = rows["none"]["prompt_tokens"]
    assert rows[ttft.FULL]["reused_tokens"] == rows["transformers generate"]["reused_tokens"] == 0
    assert rows["none"]["recomputed_tokens"] == 0
    assert rows["none"]["reused_tokens"] > 3 * 48
    recomputed = rows["query 5 %"]["recomputed_tokens"]
    assert 0 < recomputed < rows["cacheblend 15 %"]["recomputed_tokens"]
    assert rows["query 5 %"]["reused_tokens"] == pytest.approx(rows["none"]["reused_tokens"] - recomputed)
    assert rows[ttft.Oracle.name]["reused_tokens"] < prompt
    stages = rows["query 5 %"]["stages_ms"]
    assert {"realign_ms", "repair_ms", "suffix_ms", "ttft_ms"} <= set(stages)
    assert "÷ oracle" in capsys.readouterr().out


def test_oracle_and_prefix_by_hand_give_the_plain_token(bench):
    from kvbench.contenders import Oracle, Plain, PrefixByHand
    from kvbench.workloads import WORKLOADS

    documents = bench.documents(6)
    with bench.engine() as engine:
        plain = Plain(engine.model, engine.tokens)
        others = [Oracle(engine.model, engine.tokens), PrefixByHand(engine.model, engine.tokens)]
        reused = []
        for workload in ("timestamp", "reordered", "turns"):
            for prompt in WORKLOADS[workload].make(documents, 3, 3, 0):
                expected = plain.first_token(prompt).token
                for contender in others:
                    contender.prepare(prompt)
                    found = contender.first_token(prompt)
                    assert found.token == expected
                    reused.append(found.reused_tokens)
        assert min(reused[::2]) > 100  # the oracle has everything but the question
        assert 0 in reused[1::2]
        assert max(reused[1::2]) > 50


def test_a_contender_that_fails_says_so_and_the_others_go_on(bench):
    from kvbench.clock import measure
    from kvbench.contenders import Contender, Plain
    from kvbench.tables import ttft_table
    from kvbench.workloads import reordered

    class Broken(Contender):
        name = "broken"

        def first_token(self, prompt):
            raise RuntimeError("needs another version")

    with bench.engine() as engine:
        series = measure([Broken(), Plain(engine.model, engine.tokens)], reordered(bench.documents(2), 2, 2))
        table = ttft_table(series, 1)
    assert series["broken"].failure == "RuntimeError: needs another version"
    assert len(series["transformers generate"].samples) == 2
    assert "needs another version" in table


def test_states(bench):
    import ttft

    ttft.states(bench)
    rows = rows_of(bench)
    assert not [row for row in rows.values() if "failure" in row]
    for name, row in rows.items():
        assert (row["reused_tokens"] > 100) == (name != ttft.FULL), name
    assert rows["query 5 %, cold: documents encoded in the call"]["stages_ms"]["encode_ms"] > 0
    assert rows["query 5 %, from memory"]["stages_ms"]["encode_ms"] < 0.5


@pytest.mark.parametrize("suite", ["lengths", "decode", "workloads"])
def test_other_suites_run(bench, suite: str, capsys):
    import ttft

    bench.args.chunk_tokens = 64
    ttft.SUITES[suite](bench)
    out = capsys.readouterr().out
    assert "Error" not in out
    assert "query 5 %" in out


def test_percentiles():
    from kvbench.clock import Sample, Series
    from kvbench.contenders import FirstToken

    series = Series("x", [Sample(float(ms), None, FirstToken(0)) for ms in (30, 10, 20, 50, 40)])
    assert (series.p50_ms, series.fastest_ms) == (30, 10)
    assert series.p95_ms == pytest.approx(48)


def test_peak_memory_sees_an_allocation():
    from kvbench.clock import PeakMemory

    with PeakMemory() as memory:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        del block
    if memory.peak_bytes is None:
        pytest.skip("this system does not reset a process' high-water mark")
    assert memory.peak_bytes > 48 << 20


def test_workloads_are_what_they_say(bench):
    from kvbench.workloads import WORKLOADS

    documents = bench.documents(8)
    made = {name: w.make(documents, 4, 5, 0) for name, w in WORKLOADS.items()}
    assert all(len(prompts) == 5 for prompts in made.values())
    assert {frozenset(p.documents) for p in made["reordered"]} == {frozenset(documents[:4])}
    assert len({p.documents for p in made["reordered"]}) > 2
    assert len({p.system for p in made["timestamp"]}) == 5
    for prompt in made["edited"]:
        assert sum(d not in documents for d in prompt.documents) == 1
    for before, after in zip(made["turns"], made["turns"][1:], strict=False):
        assert after.history[: len(before.history)] == before.history
        assert set(before.documents) < set(after.documents)
        for document in after.documents:
            assert "\n".join(m["content"] for m in after.messages()).count(document) == 1
    counts = [sum(d in p.documents for p in WORKLOADS["popular"].make(documents, 4, 200, 0)) for d in documents]
    assert counts[0] > 1.5 * counts[-1]
