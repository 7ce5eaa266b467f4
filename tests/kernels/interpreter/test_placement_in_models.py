"""The placement kernel under an engine's assembly of a prompt: the same buffer as plain torch's, or not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import REUSABLE

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.encode.encoder import Encoder, EncodingJob
from kvboost_rag.forward.probe import probe
from kvboost_rag.kv import quantization, triton_placement
from kvboost_rag.kv.assemble import PlacedEntry, assemble
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.kv.realign import PositionTables
from kvboost_rag.stores import MemoryStore

CAPACITY, STARTS = 90, (31, 3)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CheckedKernel:
    fresh = replace(triton_placement.KERNEL, checked=set(), refused=False)
    monkeypatch.setattr(triton_placement, "KERNEL", fresh)
    monkeypatch.setattr(quantization, "MIN_PSNR_DB", 0.0)  # random weights may give values that are hard to quantise
    return fresh


def _entry(loaded: Any, layout: Any, codec: str, num_tokens: int) -> StoreEntry:
    ids = tuple(range(3, 3 + num_tokens))
    tensors, meta = quantization.encode(Encoder(loaded.model, layout).encode(EncodingJob(ids, (1, 2))), codec)
    assert meta["codec"] == codec
    return StoreEntry("ab" * 32, "", "", ids, "", tensors, meta)


def _assembled(layout: Any, entries: list[StoreEntry]) -> KVBuffer:
    buffer, tables = KVBuffer(layout, CAPACITY), PositionTables.of(layout, CAPACITY)
    for tensor in (*buffer.keys, *buffer.values):
        tensor.fill_(float("nan"))
    assemble(buffer, [PlacedEntry(e, start) for e, start in zip(entries, STARTS, strict=True)], tables)
    return buffer


@pytest.mark.parametrize("codec", list(quantization.SETTINGS))
@pytest.mark.parametrize("family", ["llama", "smollm3-nope", "gemma3", "glm4-interleaved", "phi-partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fills_the_buffer_as_torch_does(
    tiny_model: Any, kernel: CheckedKernel, monkeypatch: pytest.MonkeyPatch, codec: str, family: str, dtype: Any
) -> None:
    model_type, fields = REUSABLE[family]
    loaded = tiny_model(model_type, dtype=dtype, **fields)
    layout = probe(loaded.model).require_layout
    entries = [_entry(loaded, layout, codec, 45), _entry(loaded, layout, codec, 17)]
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    expected = _assembled(layout, entries)
    monkeypatch.setenv("KVBOOST_KERNELS", "on")
    ours = _assembled(layout, entries)
    assert kernel.checked
    assert not kernel.refused
    # A step of the dtype: quantised keys are rounded once instead of twice, and the interpreter cuts bfloat16 off.
    step = 1e-5 if dtype is torch.float32 else 2**-7
    for mine, twin in zip((*ours.keys, *ours.values), (*expected.keys, *expected.values), strict=True):
        assert torch.equal(mine.isnan(), twin.isnan())
        largest = float(twin.nan_to_num().abs().amax())
        torch.testing.assert_close(mine, twin, atol=step * largest, rtol=step, equal_nan=True)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_is_wrong_is_not_used(
    tiny_model: Any, kernel: CheckedKernel, monkeypatch: pytest.MonkeyPatch, caplog: Any, fault: str
) -> None:
    def place(buffer: KVBuffer, index: int, *_: Any) -> None:
        if fault == "raises":
            raise RuntimeError("no binary for this device")
        buffer.keys[index].fill_(0.5)

    monkeypatch.setattr(triton_placement, "_place_group", place)
    loaded = tiny_model("llama")
    layout = probe(loaded.model).require_layout
    entries = [_entry(loaded, layout, "none", 45), _entry(loaded, layout, "none", 17)]
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    expected = _assembled(layout, entries)
    monkeypatch.setenv("KVBOOST_KERNELS", "on")
    ours = _assembled(layout, entries)
    assert kernel.refused
    assert len([r for r in caplog.records if "placement kernel is not used" in r.message]) == 1
    for start, entry in zip(STARTS, entries, strict=True):
        span = slice(start, start + len(entry.token_ids))
        assert torch.equal(ours.keys[0][:, :, span], expected.keys[0][:, :, span])


def test_odd_heads_are_left_to_torch(tiny_model: Any, kernel: CheckedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_KERNELS", "on")
    layout = probe(tiny_model("llama").model).require_layout
    odd = replace(layout, groups=tuple(replace(group, value_head_dim=15) for group in layout.groups))
    entry = StoreEntry("ab" * 32, "", "", (3, 4), "", {}, {})
    assert not triton_placement.place(KVBuffer(odd, CAPACITY), [(entry, 0)], PositionTables.of(odd, CAPACITY))
    assert not kernel.refused


def test_a_whole_request_runs_through_it(
    tiny_model: Any, kernel: CheckedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = ["The store holds keys and values. " * 3, "A question is answered from the documents. " * 2]
    prompt = [{"role": "user", "content": "\n\n".join(documents) + "\n\nWhat is kept?"}]
    answers = {}
    for setting in ("off", "on"):
        monkeypatch.setenv("KVBOOST_KERNELS", setting)
        encoding = EncodingConfig(neighbours=0, quantization="k8v4")
        with KVBoost(tiny_model("llama"), store=MemoryStore(1 << 28), encoding=encoding) as engine:
            engine.warm(documents)
            for _ in range(2):  # the second from a buffer that has been used
                result = engine.generate(prompt, documents=documents, params=GenerationParams(max_new_tokens=4))
                assert result.fallback_reason is None
                answers.setdefault(setting, []).append(result.token_ids)
    assert len(kernel.checked) == 1
    assert answers["on"] == answers["off"]
