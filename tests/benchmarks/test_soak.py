"""A short run of the soak, and proof that it notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak

from kvboost_rag.stores import MemoryStore


def test_every_operation_leaves_the_store_as_predicted(tmp_path: Path) -> None:
    run = soak.Soak(soak.tiny_model(), tmp_path / "kv", seed=7)
    run.steps(250)
    run.close()
    assert set(run.counts) == {"ask", "warm", "evict", "delete namespace", "restart"}
    assert run.expected.hits > 20
    assert run.expected.misses > 20


@pytest.mark.parametrize("fault", ["forgets a hit", "keeps what was deleted"])
def test_the_soak_notices_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "forgets a hit":
        monkeypatch.setattr(MemoryStore, "_on_hit", lambda self, entry: None)
    else:
        monkeypatch.setattr(MemoryStore, "delete", lambda self, key, reason="deleted": False)
    run = soak.Soak(soak.tiny_model(), tmp_path / "kv", seed=7)
    with pytest.raises(soak.SoakError):
        run.steps(250)
    run.close()
