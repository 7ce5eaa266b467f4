"""vLLM in processes of its own: two ranks of tensor parallelism, and a server that clients talk to, twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_kvboost.server_process import START_S, environment, running_server

ENGINE = Path(__file__).with_name("one_engine.py")


def prompt_of(documents: list[list[int]]) -> list[int]:
    draw = random.Random(3)
    return [5, 6, 7, *documents[2], 11, *documents[0], 11, *documents[5], *(draw.randrange(20, 200) for _ in range(9))]


def test_two_ranks_answer_as_one(vllm_model: str, warmed: Any) -> None:
    store, documents = warmed
    ids = prompt_of(documents)
    answers = []
    for ranks in ("1", "2"):
        command = [sys.executable, str(ENGINE), vllm_model, str(store), ranks, json.dumps(ids)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=START_S, check=True)
        lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        answers.append([json.loads(line) for line in lines])
    for one, two in zip(*answers, strict=True):
        assert one["tokens"] == two["tokens"]
        assert one["cached"] == two["cached"]
        assert one["logprobs"] == pytest.approx(two["logprobs"], abs=1e-3)
    full, blend = answers[1]
    assert full["cached"] == 0
    assert blend["cached"] == len(ids) - 9


def test_a_server_its_clients_and_its_restart(vllm_model: str, warmed: Any, texts: list[str], tmp_path: Path) -> None:
    """Text as clients send it: the chat template's head, documents, a question; by default and by salt; metrics."""
    from openai import OpenAI

    store, documents = warmed
    content = "\n\n".join([texts[1], texts[4], "What does the keeper say?"])
    answers = []
    for start in range(2):
        with running_server(vllm_model, store, tmp_path / f"server-{start}.log") as address:
            client = OpenAI(base_url=f"{address}/v1", api_key="none")

            def ask(client: Any = client, **body: Any) -> Any:
                messages = [{"role": "user", "content": content}]
                return client.chat.completions.create(
                    model="m", messages=messages, max_tokens=6, temperature=0, extra_body=body
                )

            full, blend = ask(cache_salt="exact"), ask()
            assert full.usage.prompt_tokens_details.cached_tokens == 0
            reused = blend.usage.prompt_tokens_details.cached_tokens
            assert reused >= 0.9 * sum(len(documents[n]) for n in (1, 4))
            assert ask(kv_transfer_params={"kvboost": False}, cache_salt="third").usage.prompt_tokens == (
                blend.usage.prompt_tokens
            )
            answers.append(blend.choices[0].message.content)
            *_, last = client.completions.create(
                model="m", prompt=content, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            assert last.usage.prompt_tokens_details.cached_tokens > 0
            with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
                metrics = response.read().decode()
            assert "kvboost_claimed_tokens_total{" in metrics
            assert 'reason="no_salt"' in metrics
    assert answers[0] == answers[1], "after a restart the same answer"
