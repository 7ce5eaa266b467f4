"""The pretended GPU itself: what a real one refuses, it refuses; what it computes is what the host computes."""

from __future__ import annotations

import pytest
import torch

from tests.pretend_cuda import DeviceTensor, pretend_cuda


@pytest.fixture(autouse=True)
def two_devices():
    with pretend_cuda(2):
        yield


def test_values_and_places():
    a, b = torch.arange(6, device="cuda").reshape(2, 3), torch.ones(2, 3).to("cuda:0")
    assert isinstance(a + b, DeviceTensor)
    assert str((a @ b.long().T).device) == "cuda:0"
    assert torch.equal((a + b).cpu(), torch.arange(6).reshape(2, 3) + torch.ones(2, 3))
    assert torch.tensor([1, 2], device="cuda:1").tolist() == [1, 2]
    a[0].add_(1)
    a[:, 1] = 7
    assert a.tolist() == [[1, 7, 3], [3, 7, 5]]
    assert a[a > 4].tolist() == [7, 7, 5]
    assert a[torch.tensor([1])].tolist() == [[3, 7, 5]], "indices may come from the host"
    out = torch.empty(3, device="cuda")
    torch.add(b[0], 1, out=out)
    assert out.tolist() == [2, 2, 2]
    assert b[0].untyped_storage().nbytes() == 24


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_operands_on_two_devices(other):
    a = torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(3, device=other)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([a, torch.ones(3, device=other)])
    a.copy_(torch.zeros(3, device=other))
    assert a.tolist() == [0, 0, 0]


def test_what_only_the_host_can():
    a = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="numpy"):
        a.numpy()
    with pytest.raises(RuntimeError, match="page-locked"):
        a.pin_memory()
    assert torch.ones(2).pin_memory().is_pinned()
    assert not torch.ones(2).is_pinned()


def test_streams_have_to_be_waited_for():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        a = torch.ones(3).to("cuda", non_blocking=True)
        arrived = side.record_event()
        later = a * 2
    with pytest.raises(RuntimeError, match="waited for"):
        a + 1
    torch.cuda.current_stream().wait_event(arrived)
    assert (a + 1).sum().item() == 6
    with pytest.raises(RuntimeError, match="waited for"):
        later.sum()
    torch.cuda.synchronize("cuda:1")
    with pytest.raises(RuntimeError, match="waited for"):
        later.sum()
    torch.cuda.synchronize()
    assert later.sum().item() == 6
