"""A vLLM engine in a process of its own, its engine core and workers in others: `one_engine.py MODEL STORE RANKS IDS`.

Prints one JSON line for full prefill and one for what the connector loads.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from vllm_kvboost import cache_salt

    model, store, ranks, ids = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    transfer = KVTransferConfig(
        kv_connector="KVBoostConnector",
        kv_connector_module_path="vllm_kvboost",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": store},
    )
    options = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "enable_prefix_caching": True}
    llm = LLM(model, tensor_parallel_size=ranks, kv_transfer_config=transfer, **options)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5, detokenize=False, ignore_eos=True)
    for salt in (None, cache_salt()):
        (output,) = llm.generate(
            {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}), params, use_tqdm=False
        )
        (answer,) = output.outputs
        logprobs = {str(token): p.logprob for token, p in answer.logprobs[0].items()}
        told = {"cached": output.num_cached_tokens, "tokens": list(answer.token_ids), "logprobs": logprobs}
        print("ANSWER " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
