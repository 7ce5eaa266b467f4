"""One rank of a tensor parallel model (or the only process); run by tests/test_tensor_parallel.py.

usage: python rank_worker.py MODEL_FOLDER STORE RESULTS SCENARIO …
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.models.load import load_model
from kvboost_rag.models.ranks import RanksError
from kvboost_rag.stores.heads import head_key

DOCUMENTS = [f"Mill {i} ground {i + 30} sacks of rye a week until the river was led away. " * 2 for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which mill ground most?"])
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def file_of(folder: Path, key: str) -> Path:
    """The file of an entry."""
    (path,) = folder.rglob(f"*{key}*")
    return path


def together() -> None:
    if RANKS > 1:
        dist.barrier()


def asked(engine: KVBoost, **options: Any) -> dict[str, Any]:
    """What the engine says, bit by bit."""
    found = {}
    ways = {"none": {"repair": "none"}, "query": {}, "full": {"repair": "full"}, "off": {"reuse": "off"}}
    for name, how in ways.items():
        logits = engine.logits(PROMPT, documents=DOCUMENTS, **{"strict": True, **how, **options})
        found[name] = logits.flatten().tolist()
    result = engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=6), **options)
    found["tokens"] = list(result.token_ids)
    plain = engine.generate(PROMPT, params=GenerationParams(max_new_tokens=6), reuse="off")
    found["plain tokens"] = list(plain.token_ids)
    found["reuse"] = result.reuse
    found["reason"] = result.fallback_reason
    return found


def encoded(engine: KVBoost) -> list[str]:
    """Where each document's KV comes from."""
    result = engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=1), strict=True)
    return [s.hit.value for s in result.segments if s.content_hash]


def keys(engine: KVBoost) -> list[str]:
    return [engine.registry.describe(text, "").content_hash for text in DOCUMENTS]


def run(loaded: Any, folder: Path, scenario: str) -> dict[str, Any]:
    """One scenario over a store, with an engine of its own."""
    with KVBoost(loaded, store=folder, profile=None) as engine:
        if not engine.probe.reusable:
            return {"reason": engine.probe.reason}
        chunk = keys(engine)[1]
        damaged = folder if scenario in ("deleted", "corrupt") else None
    together()
    if damaged is not None and RANK == 0:
        path = file_of(folder, head_key(chunk, 1))
        if scenario == "deleted":
            path.unlink()
        else:
            raw = bytearray(path.read_bytes())
            raw[-40] ^= 255
            path.write_bytes(raw)
    together()
    with KVBoost(loaded, store=folder, profile=None) as engine:
        if scenario == "slow" and RANK == 1:
            time.sleep(4)
        if scenario == "fails" and RANK == 1:
            engine.fetcher.heads = None  # type: ignore[assignment]
        if scenario == "fails":
            together()
            result = engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=6))
            return {"tokens": list(result.token_ids), "reuse": result.reuse, "reason": result.fallback_reason}
        if scenario == "gone":
            return gone(engine)
        hits = encoded(engine)
        return {"hits": hits, "entries": len(engine.store), "heads": engine.fetcher.heads.count, **asked(engine)} | {
            "fingerprint": engine.registry.fingerprint
        }


def gone(engine: KVBoost) -> dict[str, Any]:
    """The other rank never comes."""
    if RANK == 1:
        time.sleep(12)
        return {}
    start = time.monotonic()
    try:
        engine.generate(PROMPT, documents=DOCUMENTS)
    except RanksError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": None}


def main() -> None:
    model, folder, results, *scenarios = sys.argv[1:]
    options = {"tp_plan": "auto"} if RANKS > 1 else {}
    loaded = load_model(model, dtype=torch.float32, **options)
    found = {scenario: run(loaded, Path(folder), scenario) for scenario in scenarios}
    Path(results).mkdir(parents=True, exist_ok=True)
    (Path(results) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
