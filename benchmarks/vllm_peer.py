"""vLLM with prefix caching, on the prompts of the other benchmarks. Runs in a venv of its own: `make bench-vllm`.

usage: python benchmarks/vllm_peer.py prompts FILE.json [--documents 16] [--rounds 5]     (our venv: writes the prompts)
       python benchmarks/vllm_peer.py run FILE.json --out ttft_vllm.jsonl                 (vLLM's venv: times them)

A time runs from the call with the prompt's text to one generated token, as in ttft.py, in bfloat16. vLLM compiles and
allocates when it starts; that is not counted. Rows: `cold` sees a prompt for the first time, `same prompt again` has
all of it in its prefix cache, `reordered` has the same documents in another order, which a prefix cache cannot use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "bundled:smollm2"
KV_CACHE_BYTES = 2 << 30


def write_prompts(path: Path, documents: int, rounds: int, chunk_tokens: int) -> None:
    """Prompts, the model's folder and what the machine is, for the other venv."""
    from kvbench.machine import this_machine
    from kvbench.texts import pydoc_documents
    from kvbench.workloads import reordered

    from kvboost_rag.models.bundled import bundled_folder
    from kvboost_rag.models.load import load_model
    from kvboost_rag.prompt.tokens import PromptTokens

    tokens = PromptTokens(load_model(MODEL).tokenizer)
    texts = pydoc_documents(tokens, documents, chunk_tokens)
    made = {
        "folder": str(bundled_folder("smollm2", lambda step: None)),
        "machine": this_machine().as_dict(),
        "documents": documents,
        "prompts": [p.text(tokens) for p in reordered(texts, documents, rounds)],
    }
    path.write_text(json.dumps(made))


def run(path: Path, out: Path) -> None:
    """Time the prompts and append rows that report.py understands."""
    import os

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_BYTES >> 30))
    # Python puts this folder first, and vLLM would take its kernels.py for the package of that name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import vllm

    given = json.loads(path.read_text())
    llm = vllm.LLM(given["folder"], dtype="bfloat16", enable_prefix_caching=True, max_model_len=8192)
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate(["Hello"], params, use_tqdm=False)
    times: dict[str, list[tuple[float, int]]] = {"cold": [], "reordered": [], "same prompt again": []}
    for number, prompt in enumerate(given["prompts"]):
        times["reordered" if number else "cold"].append(timed(llm, prompt, params))
        times["same prompt again"].append(timed(llm, prompt, params))
    with out.open("a") as file:
        for name, samples in times.items():
            row = summary(f"vllm {vllm.__version__}, {name}", samples)
            head = {"suite": "vllm", "machine": given["machine"], "model": MODEL, "dtype": "bfloat16"}
            print(json.dumps({**head, "documents": given["documents"], **row}), file=file)
            print(f"{row['name']:40s} {row['ttft_p50_ms']:8.0f} ms  ({len(samples)} prompts)")


def timed(llm: Any, prompt: str, params: Any) -> tuple[float, int]:
    """(milliseconds, prompt tokens) of one call."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return (time.perf_counter() - start) * 1e3, len(output.prompt_token_ids)


def summary(name: str, samples: list[tuple[float, int]]) -> dict[str, Any]:
    """A row as ttft.py writes them; which tokens were reused is not told, so it stays 0."""
    if not samples:
        return {"name": name, "failure": "no prompt of this kind: more rounds"}
    times = sorted(ms for ms, _ in samples)
    return {
        "name": name,
        "samples": len(samples),
        "ttft_p50_ms": statistics.median(times),
        "ttft_p95_ms": times[min(len(times) - 1, round(0.95 * (len(times) - 1)))],
        "ttft_min_ms": times[0],
        "prompt_tokens": statistics.fmean(tokens for _, tokens in samples),
        "reused_tokens": 0.0,
        "recomputed_tokens": 0.0,
        "peak_bytes": None,
        "stages_ms": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prompts", "run"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("ttft_vllm.jsonl"))
    args = parser.parse_args()
    if args.what == "prompts":
        write_prompts(args.file, args.documents, args.rounds, args.chunk_tokens)
    else:
        run(args.file, args.out)


if __name__ == "__main__":
    main()
