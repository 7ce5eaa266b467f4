"""A short round of what `benchmarks/torture.py` does for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torture

from kvboost_rag.kv.keys import content_hash
from kvboost_rag.stores import DiskStore


def test_a_short_torture(tmp_path: Path) -> None:
    torture.run(kills=6, mutations=25, full_disks=1, seed=7, folder=tmp_path)


def test_it_finds_what_it_looks_for(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, torture.BUDGET)
    for number in range(3):
        store.put(torture.entry_of(store, store.catalog.add(torture.record_of(number))))
    store.close()
    torture.check(tmp_path, "nothing happened")
    (tmp_path / "notes").write_text(torture.record_of(5).text)
    with pytest.raises(torture.TortureError, match="text of 0005"):
        torture.check(tmp_path, "a text was left behind")
    (tmp_path / "notes").unlink()
    key = content_hash("model", "", torture.record_ids(2))
    store = DiskStore(tmp_path, torture.BUDGET)
    wrong = torture.entry_of(store, torture.record_of(2))
    wrong.tensors["keys"].add_(1)
    store.put(wrong)
    store.close()
    with pytest.raises(torture.TortureError, match=f"{key[:16]} has another chunk's tensors"):
        torture.check(tmp_path, "wrong tensors")
