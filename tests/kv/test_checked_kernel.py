"""A kernel is used after it agreed with plain torch, and never again once it did not."""

from __future__ import annotations

import logging

import pytest
import torch

from kvboost_rag.kv.checked_kernel import CheckedKernel

EXPECTED = torch.tensor([1.0, float("nan"), float("inf"), -2.0])


def run(kernel: CheckedKernel, output: torch.Tensor, kind: object = "kind") -> torch.Tensor | None:
    return kernel.run(kind, lambda: output, lambda found: [(found, EXPECTED)])


def test_each_kind_is_compared_once() -> None:
    kernel, compared = CheckedKernel("test", "cpu"), []

    def twin(found: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        compared.append(found)
        return [(found, EXPECTED)]

    for kind in ("a", "b", "a", "b", "a"):
        assert kernel.run(kind, lambda: EXPECTED, twin) is EXPECTED
    assert len(compared) == 2


@pytest.mark.parametrize(
    "wrong",
    [EXPECTED + 0.1, EXPECTED.nan_to_num(), torch.zeros(4), EXPECTED[:3]],
    ids=["differs", "finite elsewhere", "zeros", "shape"],
)
@pytest.mark.parametrize("exact", [False, True])
def test_one_that_differs_is_refused_for_every_kind_and_said_once(
    wrong: torch.Tensor, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = CheckedKernel("test", "cpu", exact=exact)
    with caplog.at_level(logging.WARNING):
        assert run(kernel, wrong) is None
        assert run(kernel, EXPECTED, "another") is None
    assert kernel.refused
    assert not kernel.wanted(torch.device("cpu"))
    assert len(caplog.records) == 1


def test_rounding_is_no_difference_unless_bits_are_promised() -> None:
    rounded = EXPECTED * (1 + 1e-5)
    assert run(CheckedKernel("test", "cpu"), rounded) is rounded
    assert run(CheckedKernel("test", "cpu", exact=True), rounded) is None
    assert run(CheckedKernel("test", "cpu", exact=True), EXPECTED) is EXPECTED


@pytest.mark.parametrize(
    ("setting", "wanted"), [("auto", (True, False, True)), ("on", (True, True, True)), ("off", (False, False, False))]
)
def test_where_it_is_tried(monkeypatch: pytest.MonkeyPatch, setting: str, wanted: tuple[bool, ...]) -> None:
    monkeypatch.setenv("KVBOOST_KERNELS", setting)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ours, gpus = CheckedKernel("test", "cpu"), CheckedKernel("test", "gpu")
    assert (ours.wanted(cpu), gpus.wanted(cpu), gpus.wanted(cuda)) == wanted
    assert not ours.wanted(cuda)
