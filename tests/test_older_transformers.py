"""Both names of the argument that takes a cache: `cache` since transformers 5.24, `past_key_values` before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from kv_helpers import plain_forward
from packaging.version import Version
from torch import nn

from kvboost_rag.models.hf_cache import cache_argument

OLDER = Version(transformers.__version__) < Version("5.24")


def test_the_name_follows_the_older_and_newer_transformers(tiny_model: Any) -> None:
    name = cache_argument(tiny_model("llama").model)
    assert name == ("past_key_values" if OLDER else "cache")


def test_older_names_are_found_in_the_signature() -> None:
    class Older(nn.Module):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> None: ...

    class Neither(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None: ...

    assert cache_argument(Older()) == "past_key_values"
    with pytest.raises(ValueError, match=r"Neither\.forward takes no KV cache"):
        cache_argument(Neither())


def test_older_and_newer_forwards_fill_our_cache(tiny_model: Any) -> None:
    logits, layers = plain_forward(tiny_model("llama").model, torch.tensor([5, 9, 33]))
    assert logits.shape == (3, 384)
    assert [keys.shape for keys, _ in layers] == [(1, 2, 3, 16)] * 5
