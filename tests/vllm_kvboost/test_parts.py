"""The connector's parts on their own: settings, salts, heads of a rank, what is refused at start, the middleware."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost_rag.chunks.token_search import TokenRun
from vllm_kvboost import BlendByDefault, cache_salt
from vllm_kvboost.checks import refuse_what_cannot_be_served
from vllm_kvboost.metadata import Failures, Load
from vllm_kvboost.middleware import with_salt
from vllm_kvboost.policy import Access
from vllm_kvboost.reference import NotServable, open_reference
from vllm_kvboost.settings import Settings
from vllm_kvboost.writer import Heads, Writer


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, '"store" must name'),
        ({"store": ""}, '"store" must name'),
        ({"store": "kv", "namespase": "a"}, "unknown namespase; known: store, namespace"),
        ({"store": "kv", "min_tokens": 3}, "min_tokens=3: expected a number, 8 or more"),
        ({"store": "kv", "deadline_ms": "soon"}, "deadline_ms='soon'"),
        ({"store": "kv", "memory_bytes": True}, "memory_bytes=True"),
        ({"store": "kv", "namespace": 5}, "namespace"),
    ],
)
def test_settings_that_cannot_be_used_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Settings.of(extra)


def test_settings_as_they_come_from_the_command_line() -> None:
    settings = Settings.of(json.loads('{"store": "/kv", "namespaces": ["a", "b"]}'))
    assert (settings.store, settings.namespaces, settings.namespace) == ("/kv", ("a", "b"), "")
    assert Settings.of({"store": "/kv", "namespace": "a"}).namespaces == ("a",)


def test_salts() -> None:
    access = Access(("", "a:b"), None)
    assert access.namespace_of(cache_salt()) == ("", "")
    assert access.namespace_of(cache_salt("a:b")) == ("a:b", "")
    assert access.namespace_of(cache_salt("c")) == (None, "namespace")
    assert access.namespace_of("kvboost") == access.namespace_of(None) == (None, "no_salt")
    assert Access(("",), "").namespace_of(None) == ("", "")
    with pytest.raises(ValueError, match="policy='exact'"):
        cache_salt(policy="exact")


@pytest.mark.parametrize(("heads", "world"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 2), (6, 3)])
def test_the_ranks_share_the_heads_as_vllm_does(heads: int, world: int) -> None:
    shares = [Heads.of(heads, rank, world) for rank in range(world)]
    assert {s.count for s in shares} == {max(1, heads // world)}
    assert {h for s in shares for h in range(s.first, s.first + s.count)} == set(range(heads))
    if world > heads:  # vLLM: rank r holds head r // (world // heads)
        assert [s.first for s in shares] == [r // (world // heads) for r in range(world)]


class _Layer:
    """An attention layer that keeps what is written to it, slot by slot."""

    def __init__(self, heads: int, dim: int) -> None:
        self.kv_cache = torch.full((2, 40, heads, dim), float("nan"))
        self.impl = self

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        assert keys.is_contiguous()
        assert values.is_contiguous()
        cache[0, slots], cache[1, slots] = keys, values


def test_two_ranks_write_the_halves_of_what_one_writes(tiny_model: Any, tmp_path: Any) -> None:
    loaded = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=4)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    reference = open_reference(str(tmp_path), str(tmp_path), None, torch.float32, "cpu")
    source = SimpleNamespace(entries=lambda keys: {})
    load = Load("r", "", tuple(range(30, 55)), (), 3, 25, (1, 3, 2))

    def written(rank: int, world: int, heads: int) -> torch.Tensor:
        layers = {i: _Layer(heads, 16) for i in range(3)}
        Writer(source, reference, 10, (rank, world)).load(load, layers)  # type: ignore[arg-type]
        return torch.stack([layer.kv_cache for layer in layers.values()])

    whole = written(0, 1, 4)
    halves = torch.cat([written(0, 2, 2), written(1, 2, 2)], dim=3)
    assert torch.equal(whole.nan_to_num(9), halves.nan_to_num(9))
    used = ~whole[0, 0, :, 0, 0].isnan()
    # Positions 3…9 lie in block 1, 10…19 in block 3, 20…24 in block 2.
    assert used.nonzero().flatten().tolist() == [*range(13, 20), *range(20, 25), *range(30, 40)]


def test_what_failed_is_said_for_every_rank() -> None:
    both = Failures({"a"}).aggregate(Failures({"b"}))
    assert isinstance(both, Failures)
    assert both.request_ids == {"a", "b"}
    load = Load("r", "", tuple(range(100)), (TokenRun("k", 0, 5, 60),), 20, 65, tuple(range(40, 50)))
    assert load.blocks(10) == {42, 43, 44, 45, 46}


def config(**changes: Any) -> Any:
    parts = {
        "kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute"),
        "model_config": SimpleNamespace(use_mla=False),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "lora_config": None,
    }
    return SimpleNamespace(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "groups", "message"),
    [
        ({"kv_transfer_config": SimpleNamespace(kv_load_failure_policy="fail")}, 1, "kv_load_failure_policy"),
        ({"model_config": SimpleNamespace(use_mla=True)}, 1, "MLA"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, 1, "pipeline"),
        ({"lora_config": object()}, 1, "LoRA"),
        ({}, 2, "more than one group"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: Any, groups: int, message: str) -> None:
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=object())] * groups)
    with pytest.raises(NotServable, match=message):
        refuse_what_cannot_be_served(config(**changes), caches)
    refuse_what_cannot_be_served(config(), SimpleNamespace(kv_cache_groups=caches.kv_cache_groups[:1]))


def test_the_middleware_sets_a_salt_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_NAMESPACE", "docs")
    assert json.loads(with_salt(b'{"prompt": "x"}')) == {"prompt": "x", "cache_salt": "kvboost:blend:docs"}
    for body in (b'{"cache_salt": "mine"}', b"[1]", b"not json", b""):
        assert with_salt(body) == body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
def test_the_middleware_hands_on_the_whole_body_and_its_length(path: str) -> None:
    pieces = [b'{"prompt":', b' "hello"}']
    seen: dict[str, Any] = {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        seen.update(body=body, headers=dict(scope["headers"]))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"19"), (b"x-a", b"1")]}
    asyncio.run(BlendByDefault(app)(scope, receive, lambda message: None))  # type: ignore[arg-type]
    changed = path.endswith("completions")
    assert ("cache_salt" in json.loads(seen["body"])) is changed
    assert int(seen["headers"][b"content-length"]) == (len(seen["body"]) if changed else 19)
    assert seen["headers"][b"x-a"] == b"1"
