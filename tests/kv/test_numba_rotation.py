"""Compiled rotation under an engine: the bits of plain torch before and after it takes over, or not used."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import REUSABLE

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.forward.probe import probe
from kvboost_rag.kv import numba_rotation
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.kv.realign import PositionTables, realign_into
from kvboost_rag.stores import MemoryStore

pytest.importorskip("numba")

STARTS, TOKENS, CAPACITY = (3, 60), 45, 120


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> CheckedKernel:
    fresh = replace(numba_rotation.KERNEL, checked=set(), refused=False)
    monkeypatch.setattr(numba_rotation, "KERNEL", fresh)
    monkeypatch.setattr(numba_rotation, "COMPILED", {})
    return fresh


def _chunk(layout: Any) -> ChunkKV:
    draw = torch.Generator().manual_seed(3)

    def tensors(size: str) -> tuple[torch.Tensor, ...]:
        shapes = [(len(g.layers), g.num_kv_heads, TOKENS, getattr(g, size)) for g in layout.groups]
        return tuple(torch.randn(shape, generator=draw).to(layout.dtype) for shape in shapes)

    return ChunkKV(tensors("key_head_dim"), tensors("value_head_dim"))


def _assembled(layout: Any, chunk: ChunkKV) -> KVBuffer:
    buffer, tables = KVBuffer(layout, CAPACITY), PositionTables.of(layout, CAPACITY)
    for tensor in (*buffer.keys, *buffer.values):
        tensor.fill_(0)
    for start in STARTS:
        realign_into(buffer, chunk, start, tables)
    return buffer


def _by_torch(layout: Any, chunk: ChunkKV, monkeypatch: pytest.MonkeyPatch) -> KVBuffer:
    with monkeypatch.context() as patched:
        patched.setenv("KVBOOST_KERNELS", "off")
        return _assembled(layout, chunk)


def _same(one: KVBuffer, other: KVBuffer) -> bool:
    return all(torch.equal(a, b) for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True))


@pytest.mark.parametrize("family", ["llama", "smollm3-nope", "gemma3", "glm4-interleaved", "phi-partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fills_the_buffer_as_torch_does(
    tiny_model: Any, compiled: CheckedKernel, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    model_type, fields = REUSABLE[family]
    layout = probe(tiny_model(model_type, dtype=dtype, **fields).model).require_layout
    chunk = _chunk(layout)
    expected = _by_torch(layout, chunk, monkeypatch)
    assert not numba_rotation.COMPILED
    assert _same(_assembled(layout, chunk), expected)  # by torch, while it is being compiled
    numba_rotation.wait_until_compiled()
    assert _same(_assembled(layout, chunk), expected)
    assert compiled.checked
    assert not compiled.refused


def test_an_answer_does_not_depend_on_when_it_takes_over(tiny_model: Any, compiled: CheckedKernel) -> None:
    loaded = tiny_model("llama", **REUSABLE["llama"][1])
    prompt = "one two three four five six seven eight " * 12
    with KVBoost(loaded, store=MemoryStore(1 << 28), profile=None) as engine:
        engine.warm([prompt], neighbours=None)
        answers, logits = [], []
        for _ in range(3):
            answers.append(engine.generate(prompt + "what?", params=GenerationParams(max_new_tokens=6), strict=True))
            logits.append(engine.logits(prompt + "what?", repair="none", strict=True))
            numba_rotation.wait_until_compiled()
    assert compiled.checked
    assert answers[0].usage.cached_tokens > 0
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def _llama(tiny_model: Any, dtype: torch.dtype = torch.float32) -> Any:
    return probe(tiny_model("llama", dtype=dtype, **REUSABLE["llama"][1]).model).require_layout


@pytest.mark.parametrize("fault", ["raises", "differs", "does not compile"])
def test_a_fault_leaves_it_to_torch_and_is_said_once(
    tiny_model: Any,
    compiled: CheckedKernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    layout = _llama(tiny_model)
    chunk = _chunk(layout)
    expected = _by_torch(layout, chunk, monkeypatch)

    def faulty(out: torch.Tensor, *_: Any) -> None:
        if fault == "raises":
            raise RuntimeError("broken")
        out.fill_(1)

    def compile_kind(*_: Any) -> Any:
        if fault == "does not compile":
            raise ImportError("numba needs another numpy")
        return faulty

    monkeypatch.setattr("kvboost_rag.kv.numba_rotation._compile", compile_kind)
    _assembled(layout, chunk)
    numba_rotation.wait_until_compiled()
    with caplog.at_level(logging.WARNING):
        assert _same(_assembled(layout, chunk), expected)
        assert _same(_assembled(layout, chunk), expected)
    assert compiled.refused
    assert len([r for r in caplog.records if "rotation (numba)" in r.message]) == 1


def test_leaves_other_dtypes_and_machines_without_numba_alone(
    tiny_model: Any, compiled: CheckedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = _llama(tiny_model, torch.float16)
    _assembled(half, _chunk(half))
    monkeypatch.setattr("kvboost_rag.kv.numba_rotation.numba_is_installed", lambda: False)
    single = _llama(tiny_model)
    _assembled(single, _chunk(single))
    assert not numba_rotation.COMPILED


def test_keys_that_do_not_lie_together_go_to_torch(
    tiny_model: Any, compiled: CheckedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _llama(tiny_model)
    chunk = _chunk(layout)
    expected = _by_torch(layout, chunk, monkeypatch)
    spread = ChunkKV(tuple(torch.cat([k, k], -1)[..., : k.shape[-1]] for k in chunk.keys), chunk.values)
    for _ in range(2):
        assert _same(_assembled(layout, spread), expected)
        numba_rotation.wait_until_compiled()
    assert not numba_rotation.COMPILED
    assert not compiled.refused
