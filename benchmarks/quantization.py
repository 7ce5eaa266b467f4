"""What each codec of stored KV costs in quality and saves in bytes, on a real model.

    python benchmarks/quantization.py DATA.json [--questions 12] [--model bundled:smollm2] [--dtype bfloat16]

DATA.json: records with `question` and `docs`, as for `evidence.py`. Printed for each codec: bytes of KV per token (of
the entry, edges in the model's dtype included), PSNR over all chunks, chunks refused, and KL(full prefill ‖ ours) in
nats at the first answer token and over the reference's greedy answer, with repair `none` and `query` 5 %. Chunks are
encoded alone (no neighbours), so that the rows differ by the codec only. `--dtype` is that of model and stored KV.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence import divergence, messages
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.kv.quantization import SETTINGS
from kvboost_rag.measure.calibrate import prompt_of
from kvboost_rag.stores import MemoryStore

REPAIRS = (("none", 0.0), ("query", 0.05))


def measure(engine: KVBoost, records: Sequence[dict[str, Any]], answer_tokens: int, label: str) -> list[np.ndarray]:
    """For each repair the mean (KL first, KL mean, agreement) over the questions."""
    rows: list[list[tuple[float, float, float]]] = [[] for _ in REPAIRS]
    for record in track(records, label):
        engine.warm(record["docs"], neighbours=None)
        prompt = prompt_of(engine.tokenizer, messages(record["question"], record["docs"]))
        params = GenerationParams(max_new_tokens=answer_tokens)
        answer = engine.generate(prompt, reuse="off", params=params).token_ids
        reference = engine.logits(prompt, answer[:-1], reuse="off")
        for found, (repair, ratio) in zip(rows, REPAIRS, strict=True):
            ours = engine.logits(prompt, answer[:-1], repair=repair, recompute_ratio=ratio, strict=True)
            found.append(divergence(reference, ours))
    return [np.mean(found, axis=0) for found in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    records = json.loads(args.data.read_text())[: args.questions]
    table = Table(
        title=f"{args.model}, {args.dtype}, {len(records)} questions of {args.data.name}", title_justify="left"
    )
    for column in ("codec", "bytes/token", "PSNR mean", "PSNR min", "refused"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for repair, ratio in REPAIRS:
        table.add_column(f"{repair} {ratio:.0%}: KL first", justify="right")
        table.add_column("KL mean", justify="right")
        table.add_column("agree", justify="right")
    for setting in SETTINGS:
        store = MemoryStore(8 << 30)
        encoding = EncodingConfig(quantization=setting)
        with KVBoost.from_pretrained(args.model, dtype=args.dtype, store=store, encoding=encoding) as engine:
            found = measure(engine, records, args.answer_tokens, setting)
            chunks = [info for info in store.entries() if info.key in set(store.catalog.hashes())]
        psnr = [float(info.meta["psnr_db"]) for info in chunks if "psnr_db" in info.meta]
        table.add_row(
            setting,
            f"{sum(c.num_bytes for c in chunks) / sum(c.num_tokens for c in chunks):,.0f}",
            f"{np.mean(psnr):.1f} dB" if psnr else "",
            f"{min(psnr):.1f} dB" if psnr else "",
            f"{sum('refused' in c.meta for c in chunks)} of {len(chunks)}",
            *(f"{value:.4f}" if i < 2 else f"{value:.3f}" for row in found for i, value in enumerate(row)),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
