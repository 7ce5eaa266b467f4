"""The codecs: against a loop that says what they mean, at odd sizes, and where they must decline."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv import quantization

LENGTHS = [9, 10, 63, 100]
HEAD_DIMS = [1, 7, 32, 33, 64, 80]


def chunk(
    seq_len: int, head_dim: int = 64, dtype: torch.dtype = torch.float32, groups: int = 1, seed: int = 0
) -> ChunkKV:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(2 + g, 3, seq_len, head_dim) for g in range(groups)]
    offsets = [10 * torch.randn(s[0], s[1], 1, s[3], generator=rng) for s in shapes]
    keys = tuple((torch.randn(s, generator=rng) + o).to(dtype) for s, o in zip(shapes, offsets, strict=True))
    sizes = [6 * torch.rand(s[0], s[1], s[2], 1, generator=rng) ** 4 for s in shapes]  # few tokens are large
    values = tuple((n * (torch.rand(s, generator=rng) - 0.3)).to(dtype) for s, n in zip(shapes, sizes, strict=True))
    return ChunkKV(keys, values)


def same(a: ChunkKV, b: ChunkKV) -> bool:
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def quantised_row(row: torch.Tensor, bits: int, stored: torch.dtype) -> torch.Tensor:
    """What is left of numbers that share a scale: the definition, one number at a time."""
    zero = row.min().to(stored).float()
    scale = ((row.max() - zero) / (2**bits - 1)).to(stored).float()
    codes = [min(2**bits - 1, max(0, round(float((x - zero) / scale)))) if scale > 0 else 0 for x in row]
    return torch.stack([c * scale + zero for c in codes])


def by_loop(kv: ChunkKV, bits: quantization.Bits) -> ChunkKV:
    """The slow twin."""
    keys, values = (tuple(t.clone() for t in part) for part in (kv.keys, kv.values))
    last = kv.seq_len - quantization.EDGE_TOKENS
    for tensor in keys:
        for layer, head, channel in torch.cartesian_prod(*(torch.arange(tensor.shape[d]) for d in (0, 1, 3))).tolist():
            row = tensor[layer, head, quantization.EDGE_TOKENS : last, channel]
            row.copy_(quantised_row(row.float(), bits.keys, torch.float32))
    for tensor in values:
        for layer, head, token in torch.cartesian_prod(*(torch.arange(tensor.shape[d]) for d in (0, 1, 2))).tolist():
            if quantization.EDGE_TOKENS <= token < last:
                for part in tensor[layer, head, token].split(quantization.GROUP_CHANNELS):
                    part.copy_(quantised_row(part.float(), bits.values, torch.float16))
    return ChunkKV(keys, values)


@pytest.mark.parametrize("setting", ["k8v8", "k8v4"])
@pytest.mark.parametrize(("seq_len", "head_dim"), [(9, 1), (10, 7), (13, 33), (12, 64)])
def test_agrees_with_the_loop(setting: str, seq_len: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "MIN_PSNR_DB", 0.0)
    kv = chunk(seq_len, head_dim)
    tensors, meta = quantization.encode(kv, setting)
    assert meta["codec"] == setting
    expected = by_loop(kv, quantization.SETTINGS[setting])
    found = quantization.decode(tensors, meta)
    # Codes at the border between two levels may round either way.
    for got, want, step in ((found.keys, expected.keys, 6 / 255), (found.values, expected.values, 1.5)):
        for x, y in zip(got, want, strict=True):
            near = (x - y).abs() <= 1e-5
            assert near.float().mean() > 0.99
            assert (x - y).abs().max() <= step


@pytest.mark.parametrize("setting", quantization.SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq_len", [1, 8, *LENGTHS])
def test_dtype_shape_edges_and_error(setting: str, dtype: torch.dtype, seq_len: int) -> None:
    kv = chunk(seq_len, dtype=dtype, groups=2)
    found = quantization.decode(*quantization.encode(kv, setting))
    edge = quantization.EDGE_TOKENS
    for got, want in zip((*found.keys, *found.values), (*kv.keys, *kv.values), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(got[:, :, :edge], want[:, :, :edge])
        assert torch.equal(got[:, :, -edge:], want[:, :, -edge:])
        assert (got.float() - want.float()).abs().max() < 1.5
    if setting == "none" or seq_len <= 2 * edge:
        assert same(found, kv)


@pytest.mark.parametrize("setting", quantization.SETTINGS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_into_a_larger_buffer_writes_its_part_and_no_more(setting: str, head_dim: int) -> None:
    kv = chunk(21, head_dim, groups=2)
    tensors, meta = quantization.encode(kv, setting)
    buffers = [torch.full((*t.shape[:2], 40, t.shape[3]), torch.nan) for t in (*kv.keys, *kv.values)]
    views = [b[:, :, 5:26] for b in buffers]
    quantization.decode_into(tensors, meta, ChunkKV(tuple(views[:2]), tuple(views[2:])))
    assert same(ChunkKV(tuple(views[:2]), tuple(views[2:])), quantization.decode(tensors, meta))
    for buffer in buffers:
        assert buffer[:, :, :5].isnan().all()
        assert buffer[:, :, 26:].isnan().all()


def test_four_bits_are_packed_two_a_byte() -> None:
    kv = chunk(264, 64, torch.bfloat16)
    sizes = {
        s: sum(t.numel() * t.element_size() for t in quantization.encode(kv, s)[0].values()) for s in ("k8v8", "k8v4")
    }
    numbers = 2 * 3 * 256 * 64
    edges, scales = 2 * 2 * 3 * 8 * 64 * 2, 2 * 3 * 64 * 2 * 4 + numbers // 32 * 2 * 2
    assert sizes == {"k8v8": 2 * numbers + edges + scales, "k8v4": numbers + numbers // 2 + edges + scales}


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 81])
def test_pack_and_unpack(width: int) -> None:
    codes = torch.randint(0, 16, (3, 5, width), dtype=torch.uint8)
    packed = quantization._pack(codes)
    assert packed.shape[-1] == (width + 1) // 2
    assert torch.equal(quantization._unpack(packed, width), codes)


def test_psnr_is_what_its_definition_says_and_is_kept() -> None:
    kv = chunk(100, groups=2)
    tensors, meta = quantization.encode(kv, "k8v4")
    found = quantization.decode(tensors, meta)
    expected = []
    for part in ("keys", "values"):
        layers = []
        for a, b in zip(getattr(kv, part), getattr(found, part), strict=True):
            for x, y in zip(a, b, strict=True):
                layers.append(20 * torch.log10(x.abs().max() / ((x - y) ** 2).mean().sqrt()))
        expected.append(float(torch.stack(layers).mean()))
    assert float(meta["psnr_db"]) == pytest.approx(min(expected), abs=0.01)
    assert min(expected) > quantization.MIN_PSNR_DB


def outliers(kv: ChunkKV) -> ChunkKV:
    """In each group of a token's channels two far ends: whatever lies between them is lost in 4 bits."""
    values = [v * 0.01 for v in kv.values]
    for tensor in values:
        tensor[..., ::16] = 1.0
        tensor[..., 8::16] = -1.0
    return ChunkKV(kv.keys, tuple(values))


def test_a_chunk_with_too_large_an_error_is_stored_as_it_is() -> None:
    kv = outliers(chunk(60))
    tensors, meta = quantization.encode(kv, "k8v4")
    assert meta["codec"] == "none"
    assert meta["refused"] == "k8v4"
    assert float(meta["psnr_db"]) < quantization.MIN_PSNR_DB
    assert same(quantization.decode(tensors, meta), kv)
    assert quantization.encode(kv, "k8v8")[1]["codec"] == "k8v8"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_numbers_that_cannot_be_quantised_are_stored_as_they_are(value: float) -> None:
    kv = chunk(60)
    kv.values[0][1, 2, 30, 5] = value
    tensors, meta = quantization.encode(kv, "k8v8")
    assert meta["codec"] == "none"
    assert tensors["values.0"] is kv.values[0]


def test_constant_and_zero_channels_come_back() -> None:
    kv = ChunkKV((torch.zeros(1, 1, 20, 8),), (torch.full((1, 1, 20, 8), 2.5),))
    tensors, meta = quantization.encode(kv, "k8v4")
    assert meta["codec"] == "k8v4"
    assert same(quantization.decode(tensors, meta), kv)


def test_encoding_again_gives_the_same_bits() -> None:
    kv = chunk(77, dtype=torch.bfloat16)
    first, again = quantization.encode(kv, "k8v4")[0], quantization.encode(kv, "k8v4")[0]
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_unknown_settings_codecs_and_missing_tensors_are_errors() -> None:
    kv = chunk(20)
    with pytest.raises(ValueError, match="expected one of none, k8v8, k8v4"):
        quantization.encode(kv, "int2")
    tensors, meta = quantization.encode(kv, "k8v8")
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        quantization.decode(tensors, {"codec": "zip"})
    del tensors["values.0.zero"]
    with pytest.raises(ValueError, match=r"values\.0\.zero"):
        quantization.decode(tensors, meta)
