"""Products and attention by oneDNN against torch's own, on any processor whose torch has oneDNN."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.forward import onednn
from kvboost_rag.forward.attention_blocks import attend_blocks
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.attention_mass import attention_mass, mass_by_weights
from kvboost_rag.forward.attention_plan import TWO_PRODUCTS, plan_blocks
from kvboost_rag.forward.row_forward import RowPlan, row_forward
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.checked_kernel import CheckedKernel

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CheckedKernel:
    """As on a processor where it is faster, with one thread, and nothing checked yet."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(onednn, "KERNEL", CheckedKernel("oneDNN product", "cpu"))
    return onednn.KERNEL


@pytest.fixture
def taken(kernel: CheckedKernel, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the weights that oneDNN multiplied by."""
    seen: list[torch.Size] = []
    plain = onednn.product

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(weight.shape)
        return plain(rows, weight, bias)

    monkeypatch.setattr(onednn, "product", product)
    return seen


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (1, 7), (2, 3), (1, 63), (100,)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (24, 96), (63, 1000), (100, 3)])
def test_products_are_those_of_linear(taken, shape, inputs: int, outputs: int, with_bias: bool) -> None:
    rows, weight = draw(*shape, inputs), draw(outputs, inputs, seed=4)
    bias = draw(outputs, seed=5) if with_bias else None
    with onednn.Products():
        found = linear(rows, weight, bias)
        named = linear(rows, weight, bias=bias)
    assert taken == [weight.shape] * 2
    torch.testing.assert_close(found, linear(rows, weight, bias), **CLOSE)
    assert torch.equal(named, found)


@torch.no_grad()
def test_operands_that_do_not_lie_together(taken) -> None:
    rows, weight = draw(63, 1, 24).transpose(0, 1)[:, ::2], draw(24, 96, seed=4).T
    with onednn.Products():
        found = linear(rows, weight.contiguous())
        turned = linear(rows, weight)
    assert len(taken) == 1, "a weight that lies otherwise is torch's"
    torch.testing.assert_close(found, turned, **CLOSE)


class Packed(torch.Tensor):
    """A tensor with an implementation of its own, as quantised weights have."""


@pytest.mark.parametrize(
    "operands",
    [
        (draw(3, 8).bfloat16(), draw(5, 8).bfloat16()),
        (draw(3, 8).double(), draw(5, 8).double()),
        (draw(3, 8), draw(5, 8).as_subclass(Packed)),
        (draw(3, 8).as_subclass(Packed), draw(5, 8)),
        (draw(3, 8), draw(5, 8), draw(5).as_subclass(Packed)),
        (draw(3, 8).to("meta"), draw(5, 8).to("meta")),
        (draw(1, 1, 8), draw(5, 8)),
        (draw(0, 8), draw(5, 8)),
        (draw(8), draw(5, 8)),
    ],
    ids=["bfloat16", "float64", "packed weight", "rows", "bias", "no data", "one row", "none", "vector"],
)
def test_what_is_left_to_torch(taken, operands) -> None:
    with torch.no_grad(), onednn.Products():
        output = linear(*operands)
    assert output.shape == (*operands[0].shape[:-1], 5)
    assert not taken


def test_training_autocast_and_wrong_shapes_are_left_to_torch(taken) -> None:
    rows, weight = draw(3, 8), torch.nn.Parameter(draw(5, 8))
    with onednn.Products():
        linear(rows, weight).sum().backward()
        assert weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert linear(rows, weight).dtype == torch.bfloat16
        with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
            linear(rows, weight.T)
    assert not taken


@torch.no_grad()
def test_compiled_code_gives_the_same_inside(kernel: CheckedKernel) -> None:
    compiled = torch.compile(lambda rows, weight: linear(rows, weight) + 1, backend="eager")
    rows, weight = draw(3, 8), draw(5, 8)
    with onednn.Products():
        found = compiled(rows, weight)
    torch.testing.assert_close(found, linear(rows, weight) + 1, **CLOSE)
    assert not kernel.refused


@torch.no_grad()
@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_faulty_product_is_not_used_again(kernel: CheckedKernel, fault: str, monkeypatch) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no such operation")
        return 2 * linear(rows, weight, bias)

    monkeypatch.setattr(onednn, "product", product)
    rows, weight = draw(3, 8), draw(5, 8)
    with onednn.Products():
        assert torch.equal(linear(rows, weight), linear(rows, weight))
    assert kernel.refused
    assert not onednn.wanted(rows.device)


def case(rows: torch.Tensor, length: int, window: int | None, heads: int, kv_heads: int) -> AttentionCall:
    columns = torch.arange(length)
    mask = columns <= rows[:, None]
    if window is not None:
        mask &= columns > rows[:, None] - window
    room = draw(2, 1, kv_heads, length + 9, 24)  # views of a longer buffer
    key, value = room[0][:, :, :length], room[1][:, :, :length]
    return AttentionCall(draw(1, heads, len(rows), 24, seed=6), key, value, mask[None, None], scaling=0.31)


@pytest.mark.parametrize("cached", [1, 5000, onednn.CACHED_LOGITS])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("length", [63, 701])
def test_attention_is_a_plain_softmax(
    taken, length: int, window: int | None, heads: int, kv_heads: int, cached: int, monkeypatch
) -> None:
    monkeypatch.setattr(onednn, "CACHED_LOGITS", cached)
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(5))[:37].sort().values
    call = case(chosen, length, window, heads, kv_heads)
    output, log_sum_exp = attend_blocks(call, plan_blocks(call.mask[0, 0], call.group, TWO_PRODUCTS))
    assert taken
    assert not onednn.KERNEL.refused
    torch.testing.assert_close(output, call.mixed().transpose(1, 2), **CLOSE)
    assert log_sum_exp is not None
    torch.testing.assert_close(log_sum_exp, call.logits().logsumexp(-1), **CLOSE)
    torch.testing.assert_close(attention_mass(call, log_sum_exp, 5), mass_by_weights(call, 5), **CLOSE)


def test_large_logits_keep_their_log_sum_exp(taken) -> None:
    call = case(torch.arange(20, 63), 63, None, 4, 2)
    large = AttentionCall(call.query * 100, call.key, call.value, call.mask, call.scaling)
    output, log_sum_exp = attend_blocks(large, plan_blocks(large.mask[0, 0], large.group, TWO_PRODUCTS))
    assert taken
    torch.testing.assert_close(output, large.mixed().transpose(1, 2), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(log_sum_exp, large.logits().logsumexp(-1), atol=1e-3, rtol=1e-5)


def test_partial_forward_of_a_model_with_biases(taken, tiny_model, monkeypatch) -> None:
    loaded = tiny_model("qwen2")
    found = every_row_then_every_other(loaded.model)
    assert len(set(taken)) > 3
    assert not onednn.KERNEL.refused
    taken.clear()
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    for mine, theirs in zip(every_row_then_every_other(loaded.model), found, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert not taken


def test_rows_that_follow_one_another_keep_torchs_products(taken, tiny_model, monkeypatch) -> None:
    """They may be of the exact path, which is to agree with full prefill."""
    monkeypatch.setattr(onednn, "attends", lambda query: False)
    model = tiny_model("llama").model
    whole, _ = every_row_then_every_other(model)
    assert taken, "of the other half"
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    assert torch.equal(every_row_then_every_other(model)[0], whole)


def test_several_threads_share_the_heads_in_torchs_own_attention(taken, monkeypatch) -> None:
    query = draw(1, 2, 5, 8)
    assert onednn.attends(query)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not onednn.attends(query)
    assert onednn.wanted(query.device), "for `linear`"


def every_row_then_every_other(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the last row, of a pass over all rows and of one over half of them."""
    from kvboost_rag.forward.probe import probe

    ids = torch.arange(3, 66) % model.config.vocab_size
    buffer = KVBuffer(probe(model).require_layout, len(ids))
    rows = torch.arange(len(ids))
    whole, half = (row_forward(model, buffer, ids, RowPlan(chosen)).logits for chosen in (rows, rows[::2]))
    return whole, half


@pytest.mark.parametrize(
    ("processor", "expected"), [("vendor_id : AuthenticAMD", True), ("vendor_id : GenuineIntel", False)]
)
def test_decided_by_the_processors_name(processor: str, expected: bool, monkeypatch) -> None:
    monkeypatch.setattr(onednn.Path, "read_text", lambda *_: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert onednn.is_faster.__wrapped__() is expected
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not onednn.is_faster.__wrapped__()


def test_not_on_a_gpu(kernel: CheckedKernel) -> None:
    assert onednn.wanted(torch.device("cpu"))
    assert not onednn.wanted(torch.device("cuda"))


def test_encoding_is_said_to_be_by_it(taken, tiny_model, monkeypatch) -> None:
    from kvboost_rag.encode.encoder import Encoder, EncodingJob
    from kvboost_rag.forward.probe import probe

    loaded = tiny_model("llama")
    encoder = Encoder(loaded.model, probe(loaded.model).require_layout)
    job = EncodingJob(tuple(range(5, 68)), (1, 2, 3))
    taken.clear()
    found, name = encoder.encode(job), encoder.signature
    assert taken
    assert all(map(torch.equal, tensors(found), tensors(encoder.encode(job))))
    taken.clear()
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    plain = encoder.encode(job)
    assert not taken
    assert encoder.signature != name
    for ours, expected in zip(tensors(found), tensors(plain), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


def tensors(chunk: ChunkKV) -> list[torch.Tensor]:
    return [*chunk.keys, *chunk.values]
