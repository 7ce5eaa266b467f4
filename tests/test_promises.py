"""The promises of the design, on tiny models of several architectures."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_texts import document, prompt

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.encode.encoder import Encoder
from kvboost_rag.forward.row_forward import row_pass
from kvboost_rag.repair import STRATEGIES
from kvboost_rag.stores import MemoryStore, open_store

FAMILIES = [
    "llama",
    "llama-yarn",
    "qwen3",
    "gemma3",
    "mistral-window",
    "glm4-interleaved",
    "smollm3-nope",
    "qwen3_moe",
    "deepseek_v3-latent",
]
DOCUMENTS = [document(n, 1 + n % 3) for n in range(5)]
EIGHT = GenerationParams(max_new_tokens=8)

MakeEngine = Callable[..., KVBoost]


# 1. repair="full" gives full prefill's logits; greedy tokens identical in float32.


@pytest.mark.parametrize("family", FAMILIES)
def test_full_repair_is_full_prefill(make_engine: MakeEngine, family: str) -> None:
    engine = make_engine(family)
    engine.warm(DOCUMENTS, neighbours=[[DOCUMENTS[i - 1]] for i in range(5)])
    text = prompt(DOCUMENTS[::-1])
    plain = engine.generate(text, reuse="off", params=EIGHT)
    full = engine.generate(text, repair="full", params=EIGHT, strict=True)
    assert full.token_ids == plain.token_ids
    assert full.usage.recomputed_tokens == sum(s.num_tokens for s in full.segments if s.kind is SegmentKind.DOCUMENT)
    continuation = plain.token_ids[:4]
    ours = engine.logits(text, continuation, repair="full", strict=True)
    torch.testing.assert_close(ours, engine.logits(text, continuation, reuse="off"), atol=5e-5, rtol=1e-4)


# 3. Cold == warm == after eviction == from disk == other process, bit for bit, and the second run hit.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cold_equals_warm_equals_evicted(make_engine: MakeEngine, family: str, strategy: str) -> None:
    engine = make_engine(family, encoding=EncodingConfig(sensitivity=True))
    text = prompt(DOCUMENTS)
    options: dict[str, Any] = {"documents": DOCUMENTS, "repair": strategy, "strict": True}
    cold = engine.generate(text, params=EIGHT, **options)
    cold_hits = engine.stats().store_hits
    warm = engine.generate(text, params=EIGHT, **options)
    assert {s.hit for s in cold.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}
    assert {s.hit for s in warm.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.APPROXIMATE}
    assert engine.stats().store_hits > cold_hits + len(DOCUMENTS)
    logits = engine.logits(text, cold.token_ids, **options)
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    evicted = engine.generate(text, params=EIGHT, **options)
    assert evicted.usage.created_tokens > 0
    assert cold.token_ids == warm.token_ids == evicted.token_ids
    assert torch.equal(logits, engine.logits(text, cold.token_ids, **options))


@pytest.mark.parametrize("reuse", ["blend", "exact"])
def test_from_disk_equals_memory(make_engine: MakeEngine, tmp_path: Path, reuse: str) -> None:
    text = prompt(DOCUMENTS)
    first = make_engine(store=tmp_path / "store")
    neighbours = [[DOCUMENTS[i - 1], DOCUMENTS[i - 2]] for i in range(5)]
    first.warm(DOCUMENTS, neighbours=neighbours)
    cold = first.logits(text, (5, 6, 7), reuse=reuse, strict=True)
    first.close()
    second = make_engine(store=tmp_path / "store")
    warm = second.logits(text, (5, 6, 7), reuse=reuse, strict=True)
    assert second.stats().store_hits >= (5 if reuse == "blend" else 1)
    assert second.stats().store_misses == 0
    assert torch.equal(cold, warm)


OTHER_PROCESS = """
import os, sys, torch
sys.path[:0] = {path!r}
from test_promises import prompt, DOCUMENTS
import conftest
os.environ["KVBOOST_FULL_BELOW"] = "0"
from kvboost_rag import KVBoost
from kvboost_rag.models.load import load_model
engine = KVBoost.from_pretrained({model!r}, dtype="float32", store={store!r})
logits = engine.logits(prompt(DOCUMENTS), (5, 6, 7), strict=True)
stats = engine.stats()
assert stats.store_hits >= 5 and stats.store_misses == 0, stats
torch.save(logits, {out!r})
engine.close()
"""


def test_another_process_gives_the_same_bits(tiny_model: Any, tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    folder, store, out = (str(tmp_path / name) for name in ("model", "store", "logits.pt"))
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    with KVBoost.from_pretrained(folder, dtype="float32", store=store) as engine:
        engine.warm(DOCUMENTS)
        ours = engine.logits(prompt(DOCUMENTS), (5, 6, 7), strict=True)
    path = [str(Path(__file__).parent), *sys.path]
    script = OTHER_PROCESS.format(path=path, model=folder, store=store, out=out)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert torch.equal(ours, torch.load(out))


def test_evicted_neighbours_do_not_change_a_chunk(make_engine: MakeEngine) -> None:
    """The catalog keeps the token ids of encoding contexts, so a chunk comes back whatever happened to them."""
    engine = make_engine()
    engine.warm(DOCUMENTS[:1], neighbours=[DOCUMENTS[1:3]])
    record = engine.registry.register(DOCUMENTS[0], "")
    before = engine.fetcher.fetch(record).kv
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    after = engine.fetcher.fetch(record)
    assert after.hit is HitKind.ENCODED
    assert after.encoded_tokens > 2 * len(record.token_ids)
    assert all(torch.equal(a, b) for a, b in zip(before.keys, after.kv.keys, strict=True))


@pytest.mark.parametrize("codec", ["k8v8", "k8v4"])
def test_cold_equals_warm_quantised(make_engine: MakeEngine, tmp_path: Path, codec: str) -> None:
    """The cold path uses the dequantised values too; KV of another codec counts as a miss."""
    text = prompt(DOCUMENTS)
    engine = make_engine("qwen3", store=tmp_path / "store", encoding=EncodingConfig(quantization=codec))
    engine.register(DOCUMENTS)
    cold = engine.logits(text, (5, 6), strict=True)
    misses = engine.stats().store_misses
    assert torch.equal(cold, engine.logits(text, (5, 6), strict=True))
    assert engine.stats().store_misses == misses
    engine.close()
    plain = make_engine("qwen3", store=tmp_path / "store")
    result = plain.generate(text, params=EIGHT, strict=True)
    assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}
    assert not torch.equal(cold, plain.logits(text, (5, 6), strict=True))


def test_neighbours_stand_apart_in_the_encoding_context(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS[:3], neighbours=[DOCUMENTS[1:3], [], []])
    record = engine.registry.register(DOCUMENTS[0], "")
    tokens = engine.tokens
    behind = [*tokens.document_ids(DOCUMENTS[1]), *tokens.document_ids("\n\n")]
    behind += [*tokens.document_ids(DOCUMENTS[2]), *tokens.document_ids("\n\n")]
    assert engine.store.catalog.contexts(record)[0] == (*tokens.default_anchor_ids(), *behind)


# 4. A strategy forwards what it says.


def test_none_forwards_only_text_and_suffix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    result = engine.generate(prompt(DOCUMENTS), repair="none", params=EIGHT, strict=True)
    fresh = sum(s.num_tokens for s in result.segments if s.kind in (SegmentKind.TEXT, SegmentKind.SUFFIX))
    assert result.repair.rows_per_layer == (fresh,) * 5
    assert result.repair.rows == ()


# 5. Quality does not get worse as the recompute ratio grows.


@pytest.mark.parametrize("strategy", ["cacheblend", "query"])
def test_more_recomputation_is_not_worse(make_engine: MakeEngine, strategy: str) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    text = prompt(DOCUMENTS)
    reference = engine.logits(text, reuse="off")[-1].log_softmax(-1)

    def error(ratio: float) -> float:
        options: dict[str, Any] = {"repair": strategy, "recompute_ratio": ratio, "strict": True, "tau_recompute": 9.0}
        ours = engine.logits(text, **options)[-1].log_softmax(-1)
        return float((reference.exp() * (reference - ours)).sum())

    errors = [error(ratio) for ratio in (0.0, 0.5, 1.0)]
    assert errors[0] > 10 * errors[2]
    assert errors[1] <= errors[0]
    assert errors[2] < 1e-6


# 6. All-hit, no-hit, duplicate, empty, one-token, reordered, interleaved with new text.


def test_new_text_between_documents(make_engine: MakeEngine) -> None:
    engine = make_engine()
    a, b = DOCUMENTS[:2]
    engine.warm([a, b])
    text = f"[something new]{a}[again something new]{b}\nQuestion: which?"
    result = engine.generate(text, params=EIGHT, repair="none", strict=True)
    assert [s.kind.value for s in result.segments] == ["prefix", "document", "text", "document", "suffix"]
    assert [s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT] == [HitKind.APPROXIMATE] * 2
    assert result.usage.cached_tokens == sum(s.num_tokens for s in result.segments if s.kind is SegmentKind.DOCUMENT)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("case", "documents", "text"),
    [
        ("all-hit", DOCUMENTS, prompt(DOCUMENTS)),
        ("no-hit", DOCUMENTS, "A prompt without any of them."),
        ("duplicate", DOCUMENTS[:1], prompt([DOCUMENTS[0], DOCUMENTS[0]])),
        ("reordered", DOCUMENTS, prompt([DOCUMENTS[3], DOCUMENTS[0], DOCUMENTS[4]])),
        ("one-token", ["Q"], prompt(["Q", "Q"])),
        ("only-a-document", DOCUMENTS[:1], DOCUMENTS[0]),
        ("adjacent", DOCUMENTS[:2], DOCUMENTS[0] + DOCUMENTS[1] + "?"),
        ("ends-with-a-document", DOCUMENTS[:1], "Repeat: " + DOCUMENTS[0]),
    ],
)
def test_every_arrangement_works(
    make_engine: MakeEngine, case: str, documents: list[str], text: str, strategy: str
) -> None:
    engine = make_engine(encoding=EncodingConfig(sensitivity=True, min_chunk_tokens=1))
    engine.warm(documents)
    result = engine.generate(text, params=EIGHT, repair=strategy, strict=True)
    assert result.usage.output_tokens >= 1
    usage = result.usage
    assert usage.input_tokens == usage.cached_tokens + usage.recomputed_tokens + usage.prefilled_tokens
    assert sum(s.num_tokens for s in result.segments) == usage.input_tokens
    if case != "no-hit":
        assert any(s.hit is HitKind.APPROXIMATE for s in result.segments)
    full = engine.logits(text, repair="full", strict=True)
    torch.testing.assert_close(full, engine.logits(text, reuse="off"), atol=5e-5, rtol=1e-4)


def test_prompts_longer_than_the_sliding_window(make_engine: MakeEngine) -> None:
    """Decoding goes on behind a buffer that is many windows long."""
    for family in ("gemma3", "mistral-window", "gemma2-eager", "gpt_oss-sinks"):
        engine = make_engine(family)
        engine.warm(DOCUMENTS)
        plain = engine.generate(prompt(DOCUMENTS), reuse="off", params=EIGHT)
        assert plain.usage.input_tokens > 5 * 16
        assert engine.generate(prompt(DOCUMENTS), repair="full", params=EIGHT, strict=True).token_ids == plain.token_ids
        exact = [engine.generate(prompt(DOCUMENTS), reuse="exact", params=EIGHT, strict=True) for _ in range(2)]
        assert [e.token_ids for e in exact] == [plain.token_ids] * 2
        assert exact[1].usage.cached_tokens >= 128


# 7. Stage times add up to TTFT.


@pytest.mark.parametrize("options", [{"reuse": "off"}, {"reuse": "exact"}, {"repair": "none"}, {"repair": "query"}])
def test_stage_times_add_up(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    result = engine.generate(prompt(DOCUMENTS), params=EIGHT, strict=True, **options)
    assert sum(result.timings_ms.values()) == pytest.approx(result.ttft_ms, rel=1e-6)
    assert 0 < result.ttft_ms <= result.total_ms
    assert all(value >= 0 for value in result.timings_ms.values())


# 10. Failure inside reuse falls back to plain prefill (once logged, counted), unless strict.


@pytest.mark.parametrize("broken", ["store.get", "catalog", "repair", "layer"])
def test_faults_fall_back_to_plain_prefill(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    text = prompt(DOCUMENTS)
    plain = engine.generate(text, reuse="off", params=EIGHT)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("broken on purpose")

    if broken == "store.get":
        monkeypatch.setattr(type(engine.store), "get", fail)
    elif broken == "catalog":
        monkeypatch.setattr(type(engine.store.catalog), "version", fail)
    elif broken == "repair":
        monkeypatch.setattr(STRATEGIES["query"], "plan", fail)
    else:  # fails in the middle of the final pass, inside `generate`
        monkeypatch.setattr("kvboost_rag.forward.row_attention.attend_blocks", fail)
    for _ in range(2):
        result = engine.generate(text, params=EIGHT)
        assert result.token_ids == plain.token_ids
        assert result.reuse == "off"
        assert "broken on purpose" in (result.fallback_reason or "")
    assert engine.stats().fallbacks == {"OSError": 2}
    assert sum("served by plain prefill" in r.message for r in caplog.records) == 1
    with pytest.raises(OSError, match="broken on purpose"):
        engine.generate(text, params=EIGHT, strict=True)


def test_a_catalog_that_another_program_holds_costs_a_request_little(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(store=tmp_path / "kv")
    engine.warm(DOCUMENTS[:2])
    other = sqlite3.connect(engine.store.catalog.database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("kvboost_rag.stores.catalog.database.BUSY_TIMEOUT_S", 1e6)  # what warming would wait
    known = engine.generate(prompt(DOCUMENTS[:2]), params=EIGHT, strict=True)
    assert known.reuse == "blend"
    given = engine.generate(prompt(DOCUMENTS), documents=DOCUMENTS, params=EIGHT, strict=True)
    assert given.reuse == "blend"
    other.execute("ROLLBACK")
    again = engine.generate(prompt(DOCUMENTS), documents=DOCUMENTS, params=EIGHT, strict=True)
    assert again.token_ids == given.token_ids


@pytest.mark.parametrize("broken", ["final pass", "placement", "encoding"])
def test_out_of_memory_in_reuse_leaves_nothing_behind(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """No hooks, no row attention, and during plain prefill nothing of what the failed forward had computed."""
    engine = make_engine()
    text = prompt(DOCUMENTS)
    plain = engine.generate(text, reuse="off", params=EIGHT)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        computed = torch.zeros(8)
        held.append(weakref.ref(computed))
        raise torch.OutOfMemoryError("pretended")

    def state() -> list[Any]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.model.modules()]
        return [*hooks, engine.model.config._attn_implementation]

    def failing_pass(*args: Any) -> Any:
        patch.setattr("kvboost_rag.forward.row_attention.attend_blocks", fail)
        return row_pass(*args)

    before = state()
    with monkeypatch.context() as patch:
        if broken == "final pass":  # inside `generate`
            patch.setattr("kvboost_rag.serving.decode.row_pass", failing_pass)
        elif broken == "placement":
            patch.setattr("kvboost_rag.serving.pipeline.assemble", fail)
        else:
            patch.setattr(Encoder, "encode", fail)
        patch.setattr(logging.getLogger("kvboost_rag.serving.faults"), "disabled", True)  # records keep tracebacks
        see = engine.model.lm_head.register_forward_pre_hook(lambda *_: alive.extend(ref() is not None for ref in held))
        result = engine.generate(text, documents=DOCUMENTS, repair="none", params=EIGHT)
        see.remove()
    assert (result.reuse, result.token_ids) == ("off", plain.token_ids)
    assert set(alive) == {False}
    assert state() == before
    assert engine.stats().fallbacks == {"OutOfMemoryError": 1}
    again = engine.generate(text, documents=DOCUMENTS, params=EIGHT, repair="full", strict=True)
    assert (again.reuse, again.token_ids) == ("blend", plain.token_ids)


def test_a_store_that_cannot_keep_anything_changes_nothing_but_speed(make_engine: MakeEngine) -> None:
    text = prompt(DOCUMENTS)
    roomy, tight = make_engine(), make_engine(store=MemoryStore(budget_bytes=10))
    a = roomy.logits(text, documents=DOCUMENTS, strict=True)
    b = tight.logits(text, documents=DOCUMENTS, strict=True)
    assert torch.equal(a, b)
    assert len(tight.store) == 0


def test_other_namespaces_are_never_hit(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(store=open_store(tmp_path / "store"))
    engine.warm(DOCUMENTS, namespace="a")
    own = engine.generate(prompt(DOCUMENTS), namespace="a", params=EIGHT, strict=True)
    other = engine.generate(prompt(DOCUMENTS), namespace="b", params=EIGHT, strict=True)
    assert sum(s.kind is SegmentKind.DOCUMENT for s in own.segments) == 5
    assert [s.kind for s in other.segments] == [SegmentKind.SUFFIX]
    hinted = engine.generate(prompt(DOCUMENTS), namespace="b", documents=DOCUMENTS, params=EIGHT, strict=True)
    assert {s.hit for s in hinted.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}


def test_headings_and_single_words_are_computed_wherever_they_stand(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = prompt(DOCUMENTS[:2])
    before = engine.logits(text, strict=True, documents=DOCUMENTS[:2])
    engine.warm(["The", "of", "Question", "Document", "store"])
    assert torch.equal(engine.logits(text, strict=True, documents=DOCUMENTS[:2]), before)
    result = engine.generate(text, documents=DOCUMENTS[:2], params=EIGHT)
    documents = [s for s in result.segments if s.kind is SegmentKind.DOCUMENT]
    assert min(s.num_tokens for s in documents) >= 16
