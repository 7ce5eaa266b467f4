"""Pages of 2 MB are asked for, and only inside the tensor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvboost_rag.kv import huge_pages
from kvboost_rag.kv.huge_pages import PAGE_BYTES, ask_for_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags(address: int) -> list[str]:
    """What the system knows of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="no huge pages on request")
def test_the_system_is_asked() -> None:
    tensor = torch.empty(5 * PAGE_BYTES, dtype=torch.uint8)
    ask_for_huge_pages(tensor)
    assert "hg" in _flags(tensor.data_ptr() + 2 * PAGE_BYTES)


def test_whole_pages_inside_the_tensor_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *given: asked.append(given))
    tensor = torch.empty(3 * PAGE_BYTES + 77, dtype=torch.uint8)
    ask_for_huge_pages(tensor)
    ask_for_huge_pages(tensor[: PAGE_BYTES - 1])
    ask_for_huge_pages(torch.empty(8, device="meta"))
    monkeypatch.setattr(sys, "platform", "darwin")
    ask_for_huge_pages(tensor)
    ((start, length, _),) = asked
    assert start % PAGE_BYTES == length % PAGE_BYTES == 0
    assert tensor.data_ptr() <= start
    assert start + length <= tensor.data_ptr() + tensor.numel()
    assert length >= 2 * PAGE_BYTES
