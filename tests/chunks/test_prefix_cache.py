"""Blocks of the exact path: which there are, and that their bits do not depend on the prompt they were made for."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.forward.probe import probe
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.stores import MemoryStore
from tests.kv_helpers import plain_forward


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 100, 256])
def test_blocks_cover_the_prompt_and_depend_on_its_beginning_only(tiny_model, block_tokens: int):
    prefixes = PrefixCache(MemoryStore(1 << 20), tiny_model("llama").model, "f", block_tokens)
    ids = list(range(700))
    longest = prefixes.blocks(ids, "")
    for length in (0, 1, 63, 64, 65, 129, 255, 256, 600, 699):
        blocks = prefixes.blocks(ids[:length], "")
        assert list(itertools.chain.from_iterable(block for _, _, block in blocks)) == ids[:length]
        assert max((len(block) for _, _, block in blocks), default=0) <= block_tokens
        whole = prefixes.whole(length)
        assert 0 <= length - whole < block_tokens
        shared = [block for _, _, block in itertools.takewhile(lambda pair: pair in longest, blocks)]
        assert sum(map(len, shared)) == whole


def test_a_short_prompt_has_whole_blocks(tiny_model):
    prefixes = PrefixCache(MemoryStore(1 << 20), tiny_model("llama").model, "f")
    assert [prefixes.whole(n) for n in (63, 64, 127, 128, 255, 256, 511, 512, 1000)] == [
        0,
        64,
        64,
        128,
        128,
        256,
        256,
        512,
        768,
    ]


def test_what_a_short_prompt_stored_is_what_a_long_one_computes(tiny_model):
    model = tiny_model("llama").model
    layout = probe(model).require_layout
    ids = torch.randint(3, 380, (213,), generator=torch.Generator().manual_seed(3))

    def filled(*lengths: int) -> tuple[KVBuffer, int]:
        prefixes = PrefixCache(MemoryStore(1 << 24), model, "f", 64)
        loaded = 0
        for length in lengths:
            buffer = KVBuffer(layout, 256)
            prompt = ids[:length].tolist()
            loaded = prefixes.load(BufferCache(buffer), prompt, "")
            assert prefixes.fill(BufferCache(buffer), prompt, "") == length - loaded
            assert buffer.length == length
        return buffer, loaded

    cold, found = filled(213)
    warm, found_warm = filled(130, 213)
    assert (found, found_warm) == (0, 128)
    full = layout.stack(*zip(*[(k[0], v[0]) for k, v in plain_forward(model, ids)[1]], strict=True))
    for ours, other, plain in zip(
        (*cold.keys, *cold.values), (*warm.keys, *warm.values), (*full.keys, *full.values), strict=True
    ):
        assert torch.equal(ours[:, :, :213], other[:, :, :213])
        torch.testing.assert_close(ours[:, :, :213], plain, atol=2e-5, rtol=1e-4)
