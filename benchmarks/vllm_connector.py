"""vLLM with the connector: time to first token, throughput, and how far its answers are from vLLM's full prefill.

usage: python benchmarks/vllm_connector.py prepare FOLDER [--questions hotpotqa_60.json] [--count 12]   (our venv)
       python benchmarks/vllm_connector.py run FOLDER [--out FILE.jsonl] [--compute-last 0] [--clients 8] (vLLM's venv)

`prepare` warms the documents into FOLDER/kv and writes the prompts as token ids. `run` times one call from token ids to
one token, in one engine, in turn: full prefill, the same prompt again (vLLM's own prefix hit), the documents in another
order without the connector, and with it; its prefix cache is emptied before each but the second. Then `--clients`
requests on overlapping documents at once, with and without; and the KL of the first token's distribution to full
prefill's, in nats over the whole vocabulary, beside that of the engine's `none` on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

MODEL, DTYPE = "bundled:smollm2", "float32"


def prepare(folder: Path, questions: Path | None, count: int) -> None:
    from kvbench.cases import from_file
    from kvbench.machine import this_machine
    from kvbench.texts import pydoc_documents
    from kvbench.workloads import reordered

    from kvboost_rag import KVBoost
    from kvboost_rag.models.bundled import bundled_folder
    from kvboost_rag.observe.divergence import kl_per_token
    from kvboost_rag.prompt.tokens import PromptTokens

    model = str(bundled_folder("smollm2", lambda step: None))
    folder.mkdir(parents=True, exist_ok=True)
    with KVBoost.from_pretrained(model, dtype=DTYPE, store=folder / "kv", profile=None) as engine:
        tokens = PromptTokens(engine.tokenizer)
        texts = pydoc_documents(tokens, 16, 256)
        cases = from_file(questions, count) if questions else []
        speed = [tokens.render(p.messages()) for p in reordered(texts, 16, 4)]
        asked = [tokens.render(case.messages()) for case in cases]
        for documents in (texts, *(case.documents for case in cases)):
            print(engine.warm(list(documents)).num_encoded, "chunks encoded", flush=True)
        kl = []
        for case in cases:
            ours, full = (engine.logits(case.messages(), **o) for o in ({"repair": "none"}, {"reuse": "off"}))
            kl.append(float(kl_per_token(full, ours)[0]))
        ids = [engine.tokenizer(text, add_special_tokens=False).input_ids for text in (*speed, *asked)]
    made = {"model": model, "machine": this_machine().as_dict(), "speed": ids[:4], "asked": ids[4:], "core_kl": kl}
    (folder / "prompts.json").write_text(json.dumps(made))


class Vllm:
    """One vLLM engine with the connector, which a request asks for by its salt."""

    def __init__(self, model: str, store: Path, compute_last: int) -> None:
        # Python puts this folder first, and vLLM would take its kernels.py for the package of that name.
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_connector_module_path="vllm_kvboost",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": str(store), "compute_last": compute_last},
        )
        options = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "enforce_eager": True, "max_logprobs": -1}
        self.llm = LLM(model, dtype=DTYPE, enable_prefix_caching=True, kv_transfer_config=connector, **options)

    def ask(self, prompts: list[list[int]], ours: bool, logprobs: int | None = None) -> tuple[float, list[Any]]:
        """(milliseconds, outputs) of prompts served together, one token each."""
        from vllm import SamplingParams

        from vllm_kvboost import cache_salt

        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=logprobs, detokenize=False)
        asked = [{"prompt_token_ids": ids} | ({"cache_salt": cache_salt()} if ours else {}) for ids in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3, outputs

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()


def time_orders(vllm: Vllm, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Milliseconds of every kind of request, in turn over the prompts, the first round left out."""
    times: dict[str, list[float]] = {"full prefill": [], "same prompt again": [], "reordered, connector": []}
    cached = dict.fromkeys(times, 0)
    times["reordered, vLLM alone"], cached["reordered, vLLM alone"] = [], 0
    for number, prompt in enumerate((prompts[0], *prompts)):
        for name, ours, keep in (
            ("full prefill", False, False),
            ("same prompt again", False, True),
            ("reordered, connector", True, False),
        ):
            if not keep:
                vllm.forget()
            ms, (output,) = vllm.ask([prompt], ours)
            cached[name] = output.num_cached_tokens
            if number:
                times[name].append(ms)
        if number > 1:  # the last order's blocks are in the cache
            vllm.forget()
            vllm.ask([prompts[number - 2]], False)
            ms, (output,) = vllm.ask([prompt], False)
            times["reordered, vLLM alone"].append(ms)
            cached["reordered, vLLM alone"] = output.num_cached_tokens
    full = statistics.median(times["full prefill"])
    rows = []
    for name, samples in times.items():
        median = statistics.median(samples)
        rows.append({"row": name, "p50_ms": median, "full_over": full / median, "cached_tokens": cached[name]})
    return rows


def time_clients(vllm: Vllm, prompts: list[list[int]], clients: int) -> list[dict[str, Any]]:
    """Requests per second of `clients` at once."""
    batch = [prompts[i % len(prompts)] for i in range(clients)]
    rows = []
    for ours in (False, True):
        vllm.forget()
        ms, _ = vllm.ask([[*prompt, 200 + i] for i, prompt in enumerate(batch)], ours)
        rows.append(
            {"row": f"{clients} at once, connector {'on' if ours else 'off'}", "per_second": 1e3 * clients / ms}
        )
    return rows


def kl_to_full(vllm: Vllm, prompts: list[list[int]]) -> list[float]:
    """KL of the first token of each prompt, full prefill ‖ ours, nats."""
    found = []
    for prompt in prompts:
        rows = []
        for ours in (False, True):
            vllm.forget()
            (output,) = vllm.ask([prompt], ours, logprobs=-1)[1]
            rows.append({token: p.logprob for token, p in output.outputs[0].logprobs[0].items()})
        full, blend = rows
        found.append(sum(math.exp(p) * (p - blend[token]) for token, p in full.items()))
    return found


def run(folder: Path, out: Path | None, compute_last: int, clients: int) -> None:
    given = json.loads((folder / "prompts.json").read_text())
    vllm = Vllm(given["model"], folder / "kv", compute_last)
    rows = time_orders(vllm, given["speed"]) + time_clients(vllm, given["speed"], clients)
    if given["asked"]:
        kl = kl_to_full(vllm, given["asked"])
        half = 1.96 * statistics.stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else math.inf
        core = statistics.fmean(given["core_kl"])
        rows.append({"row": "KL first", "questions": len(kl), "kl": statistics.fmean(kl), "half": half, "core": core})
    head = {"suite": "vllm_connector", "machine": given["machine"], "model": MODEL, "dtype": DTYPE}
    for row in rows:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if out is not None:
            with out.open("a") as file:
                print(json.dumps({**head, "compute_last": compute_last, **row}), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--compute-last", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "prepare":
        prepare(args.folder, args.questions, args.count)
    else:
        run(args.folder, args.out, args.compute_last, args.clients)


if __name__ == "__main__":
    main()
