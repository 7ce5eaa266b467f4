"""vLLM on this CPU, in this process, on a tiny model whose documents were warmed by the engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in vLLM's own environment: make test-vllm")

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

NUM_DOCUMENTS = 8
NUM_LOGPROBS = 20


def document(number: int, words: int = 60) -> str:
    """A text of its own: no two share a sentence."""
    draw = random.Random(number)
    nouns = ("keeper", "lamp", "harbour", "index", "chunk", "token", "answer", "store", "question", "engine")
    return f"Document {number}. " + " ".join(f"{draw.choice(nouns)}-{draw.randrange(1000)}" for _ in range(words)) + "."


@dataclass
class Answer:
    """What vLLM gave: tokens, their logprobs by token id, how many prompt tokens it says were cached, what we told."""

    token_ids: tuple[int, ...]
    logprobs: list[dict[int, float]]
    cached: int
    told: dict[str, Any]

    def is_close_to(self, other: Answer, tolerance: float = 2e-3) -> bool:
        """Same tokens, and the same likelihoods of all tokens that both list."""
        return self.token_ids == other.token_ids and all(
            abs(mine[token] - theirs[token]) < tolerance
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
            for token in mine.keys() & theirs.keys()
        )


@dataclass
class Server:
    """One vLLM engine with the connector."""

    llm: Any
    folder: str
    documents: list[list[int]]
    _number: int = field(default=0)

    def prompt(self, *numbers: int, question: int = 7) -> list[int]:
        """Ids of a prompt: a head, documents behind each other with a separator, a question."""
        ids = [3, 4, 5, 6, 7, 8, 9]
        for number in numbers:
            ids += [*self.documents[number], 11, 11]
        return [*ids, *random.Random(question).choices(range(20, 200), k=13)]

    def ask(
        self, *prompts: list[int], salt: str | None = "kvboost:blend:", tokens: int = 4, **params: Any
    ) -> list[Answer]:
        """Greedy answers to prompts that are served together."""
        from vllm import SamplingParams

        transfer = params.pop("transfer", None)
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            logprobs=NUM_LOGPROBS,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
            **params,
        )
        asked = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        return [self.answer(output) for output in self.llm.generate(asked, sampling, use_tqdm=False)]

    @staticmethod
    def answer(output: Any) -> Answer:
        (completion, *_) = output.outputs
        logprobs = [{token: p.logprob for token, p in row.items()} for row in completion.logprobs]
        told = (output.kv_transfer_params or {}).get("kvboost", {})
        return Answer(tuple(completion.token_ids), logprobs, output.num_cached_tokens, told)

    def reset(self) -> None:
        """Forget vLLM's prefix cache."""
        assert self.llm.reset_prefix_cache()

    @property
    def planner(self) -> Any:
        """The scheduler's side of the connector."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector._planner


@pytest.fixture(scope="session")
def vllm_model(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model as files, of shapes that vLLM's attention takes."""
    folder = tmp_path_factory.mktemp("vllm-model")
    loaded = tiny_model("llama", num_hidden_layers=3, head_dim=32, max_position_embeddings=4096)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """The documents that `warmed` holds."""
    return [document(n) for n in range(NUM_DOCUMENTS)]


@pytest.fixture(scope="session")
def warmed(vllm_model: str, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A store with documents under the empty namespace, and other documents under `other`; ids of the former."""
    from kvboost_rag import KVBoost

    folder = tmp_path_factory.mktemp("kv")
    with KVBoost.from_pretrained(vllm_model, dtype="float32", store=folder, profile=None) as engine:
        engine.warm(texts, neighbours=2)
        engine.warm([document(n) for n in range(100, 102)], namespace="other")
        return folder, [engine.tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def serve(vllm_model: str, warmed: tuple[Path, list[list[int]]]) -> Iterator[Callable[..., Server]]:
    """`serve(store=…, enable_prefix_caching=False, …)`: a vLLM engine; at most one at a time."""
    import gc

    import torch
    from vllm import LLM
    from vllm.config import KVTransferConfig

    made: list[LLM] = []

    def make(extra: dict[str, Any] | None = None, model: str = vllm_model, **options: Any) -> Server:
        store, documents = warmed
        transfer = KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_connector_module_path="vllm_kvboost",
            kv_role="kv_both",
            kv_load_failure_policy=options.pop("policy", "recompute"),
            kv_connector_extra_config={"store": str(store), **(extra or {})},
        )
        defaults = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "max_num_batched_tokens": 4096}
        made.append(LLM(model, kv_transfer_config=transfer, max_logprobs=50, **(defaults | options)))
        return Server(made[-1], model, documents)

    threads = torch.get_num_threads()
    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()
    made.clear()
    gc.collect()
    torch.set_num_threads(threads)
