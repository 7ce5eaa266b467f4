"""Partial forwards through a CPU's matrix tiles: what they give, when they are used, what happens if they are wrong."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_helpers import kv_at

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.forward import amx_attention
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.causal_rows import CausalRows
from kvboost_rag.forward.probe import probe
from kvboost_rag.forward.row_forward import RowPlan, observe_rows, row_forward
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.repair.query import AttentionMass
from kvboost_rag.stores import MemoryStore

pytest.importorskip("numba")

from emulated_tiles import tiles_or_emulation

LENGTH = 203
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("qwen2", {}),
    "windows, head sizes": ("gemma3_text", {"sliding_window": 40, "head_dim": 64, "num_hidden_layers": 7}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
ROWS = torch.tensor([3, 17, 18, 60, 99, 100, 101, 150, 170, *range(185, LENGTH)])


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> CheckedKernel:
    kernel = replace(amx_attention.KERNEL, checked=set(), refused=False)
    monkeypatch.setattr(amx_attention, "KERNEL", kernel)
    return kernel


@pytest.fixture
def tiles(unused: CheckedKernel) -> Iterator[CheckedKernel]:
    with tiles_or_emulation():
        yield unused


def _model(tiny_model: Any, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    model_type, fields = FAMILIES[family]
    return tiny_model(model_type, dtype=dtype, **{**SIZES, **fields})


def _pass(model: Any, observer: Any = None) -> torch.Tensor:
    """Logits of a partial forward over buffers whose other positions are another text's."""
    draw = torch.Generator().manual_seed(11)
    ids, other = (torch.randint(3, 380, (LENGTH,), generator=draw) for _ in range(2))
    layout = probe(model).require_layout
    buffer = KVBuffer(layout, LENGTH + 7)
    buffer.place(kv_at(model, layout, other, 0), 0)
    if observer is not None:
        observe_rows(model, buffer, ids, RowPlan(ROWS, observer=observer))
    return row_forward(model, buffer, ids, RowPlan(ROWS)).logits.float()


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_float32_as_nearly_as_torchs(
    tiny_model: Any, tiles: CheckedKernel, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = _model(tiny_model, family).model
    precise = copy.deepcopy(model).float()
    ours = _pass(model)
    assert tiles.checked
    assert not tiles.refused
    with monkeypatch.context() as patched:
        patched.setenv("KVBOOST_KERNELS", "off")
        torchs = _pass(model)
        exact = _pass(precise)
    assert not torch.equal(ours, torchs)
    assert _far(ours, exact) < 1.5 * _far(torchs, exact) + 0.005


def test_measured_attention_is_torchs(tiny_model: Any, tiles: CheckedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tiny_model).model
    ours, torchs = AttentionMass(1, 12, LENGTH), AttentionMass(1, 12, LENGTH)
    _pass(model, ours)
    assert {kind[0] for kind in tiles.checked} == {"attention", "mass"}
    with monkeypatch.context() as patched:
        patched.setenv("KVBOOST_KERNELS", "off")
        _pass(model, torchs)
    assert float(torchs.total.sum()) == pytest.approx(12 * 3, rel=1e-2)
    torch.testing.assert_close(ours.total, torchs.total, rtol=5e-2, atol=2e-3)


def test_a_soft_cap_is_left_to_torch(tiny_model: Any, tiles: CheckedKernel) -> None:
    fields = {**SIZES, "sliding_window": 40, "attn_implementation": "eager"}
    _pass(tiny_model("gemma2", dtype=torch.bfloat16, **fields).model)
    assert not tiles.checked
    assert not tiles.refused


def test_other_dtypes_and_plain_forwards_are_torchs(
    tiny_model: Any, tiles: CheckedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    with monkeypatch.context() as patched:  # nor is it found out what the mask amounts to
        patched.setattr("kvboost_rag.forward.row_attention.causal_rows", lambda mask, rows: asked.append(mask))
        _pass(_model(tiny_model, dtype=torch.float32).model)
        assert not asked
        _pass(_model(tiny_model).model)
        assert asked
    assert not tiles.checked


@pytest.mark.parametrize("fault", ["differs", "raises", "cannot be compiled"])
def test_what_is_wrong_is_not_used_and_said_once(
    tiny_model: Any,
    tiles: CheckedKernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    model = _model(tiny_model).model
    with monkeypatch.context() as patched:
        patched.setenv("KVBOOST_KERNELS", "off")
        torchs = _pass(model)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("broken")
        heads, rows = query.shape[1:3]
        output = torch.ones(1, rows, heads, value.shape[3], dtype=query.dtype)
        return output, torch.ones(key.shape[1], heads // key.shape[1], rows)

    def loops() -> Any:
        if fault == "cannot be compiled":
            raise ImportError("numba needs another numpy")
        return SimpleNamespace(attend_rows=attend)

    monkeypatch.setattr(amx_attention, "_loops", loops)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_pass(model), torchs)
        assert torch.equal(_pass(model), torchs)
    assert tiles.refused
    assert len([r for r in caplog.records if "row attention (numba)" in r.message]) == 1


def test_mass_that_is_wrong_is_measured_by_torch(
    tiny_model: Any, tiles: CheckedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost_kernels.row_attention import cpu

    model = _model(tiny_model).model
    torchs, ours = AttentionMass(1, 12, LENGTH), AttentionMass(1, 12, LENGTH)
    with monkeypatch.context() as patched:
        patched.setenv("KVBOOST_KERNELS", "off")
        _pass(model, torchs)
    monkeypatch.setattr(cpu, "attention_mass", lambda query, key, *_, **__: torch.ones(key.shape[2]))
    _pass(model, ours)
    assert tiles.refused
    torch.testing.assert_close(ours.total, torchs.total, rtol=5e-2, atol=2e-3)


@pytest.mark.parametrize("missing", ["numba", "tiles"])
def test_machines_without_are_left_alone(
    tiny_model: Any,
    unused: CheckedKernel,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:
    amx_attention.can_compile.cache_clear()
    if missing == "numba":
        monkeypatch.setattr(amx_attention, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(amx_attention.Path, "read_text", lambda path: "flags : fpu avx2")
    try:
        assert not amx_attention.can_compile()
        _pass(_model(tiny_model).model)
    finally:
        amx_attention.can_compile.cache_clear()
    assert not unused.checked


@pytest.mark.parametrize("how", ["layers", "model"])
def test_a_compiled_model_gives_the_same(tiny_model: Any, tiles: CheckedKernel, how: str) -> None:
    """A tracer must not follow the loops, which work on addresses."""
    model = _model(tiny_model).model
    plain = _pass(model)
    for module in model.model.layers if how == "layers" else [model]:
        module.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(_pass(model), plain, atol=5e-2, rtol=5e-2)
    assert tiles.checked
    assert not tiles.refused


def test_large_logits_with_a_common_offset_are_no_disagreement(
    tiles: CheckedKernel,
) -> None:
    """In bfloat16 plain torch rounds such logits beyond use; the comparison must not blame the tiles."""
    draw = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(1, 2, 50, 64, generator=draw).bfloat16() for _ in range(3))
    query[..., 0], key[..., 0] = 30, 30
    rows = torch.arange(50)
    call = AttentionCall(query, key, value, (rows <= rows[:, None])[None, None], 0.125)
    done = amx_attention.attend(call, CausalRows(rows, None))
    assert done is not None
    done.mass(20)
    assert not tiles.refused


def test_cold_answer_is_the_warm_one(tiny_model: Any, tiles: CheckedKernel) -> None:
    document = "one two three four five six seven eight " * 12
    options = {"documents": [document], "repair": "query", "recompute_ratio": 0.2, "strict": True}
    with KVBoost(_model(tiny_model), store=MemoryStore(1 << 28), profile=None) as engine:
        cold, warm = (engine.logits(document + "what?", (5, 6, 7), **options) for _ in range(2))
        answer = engine.generate(document + "what?", params=GenerationParams(max_new_tokens=4), **options)
    assert torch.equal(cold, warm)
    assert answer.usage.recomputed_tokens > 0
    assert tiles.checked
    assert not tiles.refused
