"""What lies before and between chunks: what it can see, and that keeping a prompt's head changes no bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost_rag.chunks.token_search import TokenRun
from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv import quantization
from vllm_kvboost.heads import PromptHeads
from vllm_kvboost.metadata import Load
from vllm_kvboost.reference import Reference, open_reference
from vllm_kvboost.writer import Writer

LENGTH = 21


@pytest.fixture(scope="module")
def reference(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("heads")
    loaded = tiny_model("llama", num_hidden_layers=3)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return open_reference(str(folder), str(folder), None, torch.float32, "cpu")


def encoded(reference: Reference, ids: list[int], start: int) -> ChunkKV:
    """KV of `ids[start:]` by the model's own forward, keys position-free."""
    buffer = reference.buffers.take(len(ids))
    reference.compute(buffer, tuple(ids), list(range(len(ids))))
    return reference.take(buffer, start, len(ids))


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(20, 200), k=count)


def same(a: ChunkKV, b: ChunkKV) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


@torch.inference_mode()
def test_a_head_is_full_prefills_and_computed_once(reference: Reference) -> None:
    heads = PromptHeads(reference, 1 << 20)
    first = heads.get(ids(1, 5))
    assert same(first, encoded(reference, ids(1, 5), 0))
    assert heads.get(ids(1, 5)) is first
    assert heads.num_computed == 5


@torch.inference_mode()
def test_what_was_dropped_comes_back_bit_for_bit(reference: Reference) -> None:
    roomy, tight = PromptHeads(reference, 1 << 30), PromptHeads(reference, 0)
    for seed in random.Random(0).choices(range(4), k=12):
        assert same(*(heads.get(ids(seed, 3 + seed)) for heads in (roomy, tight)))
    assert roomy.num_computed < tight.num_computed


@torch.inference_mode()
@pytest.mark.parametrize("start", [0, 2, 4 + LENGTH + 9])
def test_text_between_chunks_sees_the_whole_prompt_before_it(reference: Reference, start: int) -> None:
    """Chunks encoded where they stand make everything exact, so that what is computed must be full prefill's."""
    prompt = ids(5, 4 + LENGTH + 3 + LENGTH + 40 + LENGTH)
    starts = [4, 4 + LENGTH + 3, len(prompt) - LENGTH]
    runs = tuple(TokenRun(f"c{n}", 0, at, LENGTH) for n, at in enumerate(starts))
    entries = {run.key: entry(encoded(reference, prompt[: run.end], run.start)) for run in runs}
    writer = Writer(SimpleNamespace(), reference, 16, (0, 1))  # type: ignore[arg-type]
    buffer = reference.buffers.take(len(prompt))
    load = Load("r", "", tuple(prompt), runs, start, len(prompt), ())
    assert writer.assemble(load, entries, buffer) == 4 + 3 + 40
    assert writer.assemble(load, entries, buffer) == 3 + 40
    wanted = encoded(reference, prompt, 0)
    found = reference.take(buffer, 0, len(prompt))
    for mine, theirs in zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def entry(kv: ChunkKV) -> Any:
    tensors, meta = quantization.encode(kv, "none")
    return SimpleNamespace(tensors=tensors, meta=meta)
