"""The references against twins that compute one element at a time, and what the ops refuse."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvboost_kernels
from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation, dequantise, place_chunk
from kvboost_kernels.row_attention import row_attention
from kvboost_kernels.row_attention.reference import row_attention_reference


def element(source: torch.Tensor | Quantised, at: tuple[int, int, int, int]) -> float:
    """One number of a stored tensor, in double precision."""
    if isinstance(source, torch.Tensor):
        return float(source[at])
    layer, head, token, channel = at
    half = source.shape[3] // 2
    if source.bits == 8:
        code = int(source.codes[at])
    elif channel < half:
        code = int(source.codes[layer, head, token, channel]) % 16
    else:
        code = int(source.codes[layer, head, token, channel - half]) // 16
    group = (layer, head, token // source.token_group, channel // source.channel_group)
    return code * float(source.scale[group]) + float(source.offset[group])


@pytest.mark.parametrize("kind", ["plain", "int8", "int4", "int8 rows", "int4 rows", "int4 blocks"])
@pytest.mark.parametrize(("pairing", "rotary", "offset"), [("half", 12, 0), ("interleaved", 8, 3), ("half", 6, 6)])
def test_place_chunk_one_element_at_a_time(stored, rotation, kind, pairing, rotary, offset) -> None:
    chunk = Chunk(stored((1, 2, 9, 12), torch.float32, kind), stored((1, 2, 9, 6), torch.float32, kind), 4)
    turn = rotation(20, rotary, pairing, offset)
    keys, values = torch.full((1, 2, 20, 12), 7.0), torch.full((1, 2, 20, 6), 7.0)
    place_chunk([chunk], keys, values, rotation=turn)
    pairs = {}
    for i in range(rotary // 2):
        first, second = (i, i + rotary // 2) if pairing == "half" else (2 * i, 2 * i + 1)
        pairs[offset + first] = (i, offset + first, offset + second)
        pairs[offset + second] = (i, offset + first, offset + second)
    for head in range(2):
        for token in range(9):
            for channel in range(12):
                expected = element(chunk.keys, (0, head, token, channel))
                if channel in pairs:
                    i, first, second = pairs[channel]
                    x1, x2 = (element(chunk.keys, (0, head, token, c)) for c in (first, second))
                    cos, sin = float(turn.cos[4 + token, i]), float(turn.sin[4 + token, i])
                    expected = x1 * cos - x2 * sin if channel == first else x2 * cos + x1 * sin
                assert float(keys[0, head, 4 + token, channel]) == pytest.approx(expected, abs=1e-5)
            for channel in range(6):
                expected = element(chunk.values, (0, head, token, channel))
                assert float(values[0, head, 4 + token, channel]) == pytest.approx(expected, abs=1e-6)
    assert (keys[:, :, :4] == 7).all()
    assert (values[:, :, 13:] == 7).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_row_attention_one_weight_at_a_time(request_of, window, softcap, with_sinks) -> None:
    rows, heads, group, kv_len = [10, 0, 6], 6, 3, 11
    sinks = torch.randn(heads) if with_sinks else None
    request = request_of(
        2, group, (8, 5), kv_len, rows, torch.float32, sliding_window=window, softcap=softcap, sinks=sinks
    )
    output, mass, entropy = row_attention_reference(replace(request, mass_rows=torch.tensor([0, 2]), entropy=True))
    expected_mass = torch.zeros(kv_len)
    for head in range(heads):
        for row, position in enumerate(rows):
            seen = [j for j in range(position + 1) if window is None or j > position - window]
            logits = {}
            for j in seen:
                logit = (
                    float(request.query[0, head, row].double() @ request.key[0, head // group, j].double()) * 8**-0.5
                )
                logits[j] = logit if softcap is None else softcap * math.tanh(logit / softcap)
            total = sum(math.exp(x) for x in logits.values())
            denominator = total + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            weights = {j: math.exp(x) / denominator for j, x in logits.items()}
            wanted = sum(w * request.value[0, head // group, j] for j, w in weights.items())
            torch.testing.assert_close(output[0, head, row], wanted, rtol=1e-5, atol=1e-6)
            shares = [math.exp(x) / total for x in logits.values()]
            assert float(entropy[head, row]) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-5)
            if row in (0, 2):
                for j, w in weights.items():
                    expected_mass[j] += w / (2 * heads)
    torch.testing.assert_close(mass, expected_mass, rtol=1e-5, atol=1e-6)


def test_row_attention_equals_transformers_eager(request_of) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    request = request_of(2, 2, (16, 16), 30, [29, 4, 17], torch.float32, softcap=20.0)
    visible = torch.arange(30)[None] <= request.rows[:, None]
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    expected, _ = eager_attention_forward(
        module, request.query, request.key, request.value, mask, scaling=request.scaling, softcap=20.0
    )
    found = row_attention(
        request.query, request.key, request.value, request.rows, scaling=request.scaling, softcap=20.0
    )
    torch.testing.assert_close(found.output.transpose(1, 2), expected, rtol=1e-5, atol=1e-6)


def test_dequantise_leaves_plain_tensors_alone() -> None:
    tensor = torch.randn(1, 1, 3, 4)
    assert dequantise(tensor) is tensor


def misfits() -> dict[str, tuple[str, object]]:
    """Calls that must be refused, by name: (part of the message, call)."""
    keys, values = torch.zeros(2, 1, 10, 8), torch.zeros(2, 1, 10, 4)
    part = lambda n, start, dim=8: Chunk(torch.ones(2, 1, n, dim), torch.ones(2, 1, n, 4), start)  # noqa: E731
    table = torch.zeros(5, 4)
    place = lambda *chunks, **kw: place_chunk(chunks, keys, values, **kw)  # noqa: E731
    q, k, rows = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 6, 8), torch.arange(3)
    attend = lambda query=q, key=k, value=k, at=rows, **kw: row_attention(query, key, value, at, scaling=1.0, **kw)  # noqa: E731
    codes, scale = torch.zeros(1, 1, 4, 8, dtype=torch.uint8), torch.zeros(1, 1, 1, 8)
    return {
        "behind the end": ("does not fit 10 columns", lambda: place(part(3, 8))),
        "before the start": ("does not fit", lambda: place(part(3, -1))),
        "overlap": ("overlap", lambda: place(part(3, 2), part(3, 0), part(2, 4))),
        "head dimension": ("the buffers ask for", lambda: place(part(3, 0, dim=6))),
        "few positions": ("tables for 5 positions", lambda: place(part(3, 3), rotation=Rotation(table, table))),
        "wide rotation": ("rotate channels", lambda: place(rotation=Rotation(table, table, offset=1))),
        "tables": ("sin: expected float32", lambda: Rotation(table, table.half())),
        "pairing": ("expected half or interleaved", lambda: Rotation(table, table, "other")),
        "bits": ("4 or 8 bit", lambda: Quantised(codes, scale, scale, 3, 4, 1)),
        "scales": ("expected shape", lambda: Quantised(codes, scale, scale, 8, 2, 1)),
        "integers": ("expected a float dtype", lambda: place(Chunk(keys.int(), values, 0))),
        "heads": ("not a multiple", lambda: attend(query=torch.zeros(1, 3, 3, 8))),
        "rows dtype": ("rows: expected int64", lambda: attend(at=rows.int())),
        "rows length": ("rows: expected int64 [3]", lambda: attend(at=torch.arange(4))),
        "dtypes": ("attention needs one dtype", lambda: attend(value=k.half())),
        "lengths": ("must agree", lambda: attend(value=k[:, :, 1:])),
        "wide head": ("expected 1 to 256", lambda: attend(q.repeat(1, 1, 1, 40), k.repeat(1, 1, 1, 40))),
        "window": ("sliding_window=0", lambda: attend(sliding_window=0)),
        "softcap": ("softcap=0", lambda: attend(softcap=0.0)),
        "sinks": ("each of 4 heads", lambda: attend(sinks=torch.zeros(2))),
        "mass rows": ("indices into rows", lambda: attend(mass_rows=torch.ones(3, dtype=torch.bool))),
        "backend": ("expected auto, triton or reference", lambda: attend(backend="cuda")),
        "no interpreter": ("TRITON_INTERPRET=1", lambda: attend(backend="triton")),
        "devices": ("must be on one device", lambda: attend(sinks=torch.zeros(4, device="meta"))),
        "gradients": ("no backward pass", lambda: attend(query=q.clone().requires_grad_(), backend="triton")),
    }


@pytest.mark.parametrize("name", misfits())
def test_refused_with_the_reason(name, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message, call = misfits()[name]
    with pytest.raises(ValueError, match=r".*".join(map(__import__("re").escape, message.split("*")))):
        call()


def test_a_refused_call_writes_nothing() -> None:
    keys, values = torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 10, 4)
    good = Chunk(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 4), 0)
    with pytest.raises(ValueError, match="does not fit"):
        place_chunk([good, replace(good, start=9)], keys, values)
    assert (keys == 0).all()


def test_gradients_flow_through_the_reference(request_of) -> None:
    request = request_of(1, 2, (8, 8), 6, [5], torch.float32)
    query = request.query.clone().requires_grad_()
    row_attention(query, request.key, request.value, request.rows, scaling=1.0).output.sum().backward()
    assert query.grad is not None
    assert query.grad.abs().sum() > 0


def test_triton_is_imported_by_no_module_of_the_interface() -> None:
    code = (
        "import sys, torch\n"
        "from kvboost_kernels.place_chunk import place_chunk\n"
        "from kvboost_kernels.row_attention import row_attention\n"
        "row_attention(*(torch.zeros(1, 1, 2, 4),) * 3, torch.arange(2), scaling=1.0)\n"
        "sys.exit('triton' in sys.modules)"
    )
    shelf = str(Path(kvboost_kernels.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": shelf}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
