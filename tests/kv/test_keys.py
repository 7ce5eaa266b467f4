"""The dual hash and the fingerprint: different things never share a key."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from architectures import YARN

from kvboost_rag.kv.keys import ROOT_HASH, content_hash, context_hash, hash_fields, model_fingerprint, prefix_hash


def test_fields_cannot_run_into_each_other() -> None:
    assert hash_fields("d", b"ab", b"c") != hash_fields("d", b"a", b"bc")
    assert hash_fields("d", b"a") != hash_fields("d", b"a", b"")
    assert hash_fields("da", b"") != hash_fields("d", b"a")
    # A namespace that spells part of a fingerprint, and the other way round.
    assert content_hash("model", "x", [1]) != content_hash("modelx", "", [1])


def test_domains_are_apart() -> None:
    ids = [1, 2, 3]
    assert len({content_hash("m", "", ids), prefix_hash("m", "", ROOT_HASH, ids), context_hash(ids)}) == 3


def test_the_prefix_hash_chains() -> None:
    one, other = (prefix_hash("m", "", ROOT_HASH, ids) for ids in ([1], [2]))
    assert prefix_hash("m", "", one, [5]) != prefix_hash("m", "", other, [5])
    assert content_hash("m", "", [5]) == content_hash("m", "", (5,))


def test_hashes_are_the_same_in_another_process() -> None:
    code = "from kvboost_rag.kv.keys import content_hash; print(content_hash('m', 'n', [1, 2 ** 40]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == content_hash("m", "n", [1, 2**40])


@pytest.fixture
def base(tiny_model: Any) -> Any:
    return tiny_model("llama")


def test_the_same_model_has_the_same_fingerprint(tiny_model: Any, base: Any) -> None:
    again = tiny_model("llama")
    assert model_fingerprint(base.model, base.tokenizer) == model_fingerprint(again.model, again.tokenizer)


@pytest.mark.parametrize(
    "fields",
    [{"rope_parameters": YARN}, {"dtype": torch.bfloat16}, {"num_hidden_layers": 4}, {"rms_norm_eps": 1e-5}],
)
def test_another_config_has_another_fingerprint(tiny_model: Any, base: Any, fields: dict[str, Any]) -> None:
    other = tiny_model("llama", **fields)
    assert model_fingerprint(base.model, base.tokenizer) != model_fingerprint(other.model, other.tokenizer)


def test_swapped_weights_have_another_fingerprint(tiny_model: Any, base: Any) -> None:
    other = tiny_model("llama")
    other.model.model.layers[3].self_attn.k_proj.weight[7, 5] += 0.01
    assert model_fingerprint(base.model, base.tokenizer) != model_fingerprint(other.model, other.tokenizer)


def test_a_kernel_choice_is_not_another_model(tiny_model: Any, base: Any) -> None:
    other = tiny_model("llama", attn_implementation="eager")
    assert model_fingerprint(base.model, base.tokenizer) == model_fingerprint(other.model, other.tokenizer)


def test_another_template_has_another_fingerprint(tiny_model: Any, base: Any) -> None:
    before = model_fingerprint(base.model, base.tokenizer)
    template = base.tokenizer.chat_template
    try:
        base.tokenizer.chat_template = template + "x"
        assert model_fingerprint(base.model, base.tokenizer) != before
    finally:
        base.tokenizer.chat_template = template
