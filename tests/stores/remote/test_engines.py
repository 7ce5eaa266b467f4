"""Two machines, each an engine with a folder of its own, over one shared store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost_rag.config import EncodingConfig, ReuseConfig
from kvboost_rag.engine import KVBoost
from kvboost_rag.stores import Tiers
from tests.stores.remote import servers
from tests.stores.test_engine import DOCUMENTS, PROMPT


@pytest.mark.parametrize("setting", ["none", "k8v4"])
def test_cold_on_one_machine_is_warm_on_another_to_the_bit(tiny_model, tmp_path: Path, setting: str) -> None:
    encoding = EncodingConfig(quantization=setting)
    with servers.valkey_cluster(tmp_path / "nodes") as nodes:
        shared = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        first = KVBoost(tiny_model("llama"), store=Tiers(tmp_path / "1", shared=shared), encoding=encoding)
        first.register(DOCUMENTS)
        cold = first.logits(PROMPT, repair="none", strict=True)
        first.close()
        config = ReuseConfig(disk_load="always")
        second = KVBoost(
            tiny_model("llama"), store=Tiers(tmp_path / "2", shared=shared), encoding=encoding, config=config
        )
        second.register(DOCUMENTS)
        assert torch.equal(second.logits(PROMPT, repair="none", strict=True), cold)
        assert second.store.tier_stats["remote"].hits == 3
        assert second.store.stats.hits == 3
        second.evict(DOCUMENTS[:1])
        assert second.store.tier_of(second.store.catalog.hashes()[0]) == "memory"
        second.close()
        third = KVBoost(tiny_model("llama"), store=Tiers(tmp_path / "3", shared=shared), encoding=encoding)
        third.register(DOCUMENTS)
        assert torch.equal(third.logits(PROMPT, repair="none", strict=True), cold)
        assert third.store.tier_stats["remote"].hits == 2
        third.close()
        offline = KVBoost(tiny_model("llama"), store=tmp_path / "3", encoding=encoding)
        assert torch.equal(offline.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), cold)
        assert offline.store.stats.hits == 3, "what was shared lies on this machine's disk, too"
        offline.close()


def test_a_shared_store_that_is_gone_costs_the_time_to_compute(tiny_model, tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "server") as server:
        url = server.url
    engine = KVBoost(tiny_model("llama"), store=Tiers(tmp_path / "kv", shared=url))
    alone = KVBoost(tiny_model("llama"))
    expected = alone.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True)
    assert torch.equal(engine.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), expected)
    assert engine.stats().fallbacks == {}
    engine.close()
    alone.close()
