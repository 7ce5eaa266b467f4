"""The row attention kernel inside a model's partial forward, reached through transformers' attention interface."""

from __future__ import annotations

from dataclasses import replace

import architectures
import pytest
import torch
from kv_helpers import kv_at, plain_forward

from kvboost_rag.forward import triton_attention
from kvboost_rag.forward.causal_rows import causal_rows
from kvboost_rag.forward.probe import probe
from kvboost_rag.forward.row_forward import RowPlan, row_forward
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.checked_kernel import CheckedKernel

LENGTH = 61


@pytest.fixture
def kernel(monkeypatch) -> CheckedKernel:
    monkeypatch.setenv("KVBOOST_KERNELS", "on")
    fresh = replace(triton_attention.KERNEL, checked=set(), refused=False)
    monkeypatch.setattr(triton_attention, "KERNEL", fresh)
    return fresh


def _partial_logits(model, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    layout = probe(model).require_layout
    buffer = KVBuffer(layout, LENGTH + 7)
    buffer.place(kv_at(model, layout, ids, 0), 0)
    return row_forward(model, buffer, ids, RowPlan(rows)).logits


@pytest.mark.parametrize("name", ["llama", "gemma2-eager", "gemma3", "gpt_oss-sinks"])
def test_gives_full_prefill(tiny_model, kernel: CheckedKernel, name: str) -> None:
    model_type, fields = architectures.REUSABLE[name]
    model = tiny_model(model_type, **fields).model
    ids = torch.randint(3, 380, (LENGTH,), generator=torch.Generator().manual_seed(11))
    rows = torch.tensor([3, 4, 17, 33, 34, 52, 59, 60])
    logits = _partial_logits(model, ids, rows)
    assert kernel.checked
    assert not kernel.refused
    torch.testing.assert_close(logits, plain_forward(model, ids)[0][-1], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_is_wrong_is_not_used(tiny_model, kernel: CheckedKernel, monkeypatch, caplog, fault) -> None:
    def output(call, causal):
        if fault == "raises":
            raise RuntimeError("no binary for this device")
        return call.mixed().transpose(1, 2) * 1.5

    monkeypatch.setattr(triton_attention, "_output", output)
    model_type, fields = architectures.REUSABLE["llama"]
    model = tiny_model(model_type, **fields).model
    ids = torch.randint(3, 380, (LENGTH,), generator=torch.Generator().manual_seed(11))
    logits = _partial_logits(model, ids, torch.arange(40, LENGTH))
    assert kernel.refused
    assert len([r for r in caplog.records if "kernel is not used" in r.message]) == 1
    torch.testing.assert_close(logits, plain_forward(model, ids)[0][-1], atol=2e-5, rtol=1e-4)


def test_masks_in_the_kernels_terms() -> None:
    rows = torch.tensor([2, 9, 30])
    columns = torch.arange(40)[None]
    causal = columns <= rows[:, None]
    plain = causal_rows(causal, rows)
    assert plain is not None
    assert plain.window is None
    sliding = causal_rows(causal & (columns > rows[:, None] - 7), rows)
    assert sliding is not None
    assert sliding.window == 7
    chunked = causal & (columns // 8 == rows[:, None] // 8)
    assert causal_rows(chunked, rows) is None
