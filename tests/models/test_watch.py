"""Weights that change under a live engine: noticed before the next request, and never served with the old KV."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvboost_rag import KVBoost
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.models.digest import WeightDigests, hash_tensor
from kvboost_rag.models.fingerprint import model_fingerprint
from kvboost_rag.models.watch import ModelWatch
from kvboost_rag.serving.variants import ModelChanged

DOCUMENTS = [f"Room {i} of the archive holds letters of the year {1850 + i} and nothing else at all." for i in range(4)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which room holds the oldest?"])


@pytest.fixture
def loaded(tiny_model: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=3)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)


def state_dict(model: Any) -> None:
    changed = {k: v * 1.2 if "v_proj" in k else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(changed)


def assigned_state_dict(model: Any) -> None:
    changed = {k: v * 1.2 if "v_proj" in k else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(changed, assign=True)


def optimizer_step(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.requires_grad_(True)
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    torch.optim.SGD([weight], lr=10.0).step()
    weight.requires_grad_(False)


def new_parameter(model: Any) -> None:
    attention = model.model.layers[2].self_attn
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.detach().flip(0), requires_grad=False)


def through_data(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data += 0.05


def replaced_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data.flip(1)


def one_row(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[200] += 0.5


def replaced_module(model: Any) -> None:
    old = model.model.layers[1].self_attn.k_proj
    new = nn.Linear(old.in_features, old.out_features, bias=False)
    new.weight.requires_grad_(False)
    model.model.layers[1].self_attn.k_proj = new


def buffer(model: Any) -> None:
    """One that no counter of a parameter shows: the angles that keys are rotated by."""
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.9)


def replaced_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.1


def tied(model: Any) -> None:
    """Through the name under which nobody looks."""
    model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.9, requires_grad=False)


def whole_data(model: Any) -> None:
    """No version counter moves, the address does."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 1.01


CHANGES = [
    buffer,
    replaced_buffer,
    tied,
    untied,
    whole_data,
    in_place,
    state_dict,
    assigned_state_dict,
    optimizer_step,
    new_parameter,
    through_data,
    replaced_data,
    one_row,
    replaced_module,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_noticed_before_the_next_request(loaded: Any, change: Callable[[Any], None]) -> None:
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        old = engine.registry.fingerprint
        change(loaded.model)
        result = engine.generate(PROMPT, strict=True)
        assert engine.registry.fingerprint == model_fingerprint(loaded.model, loaded.tokenizer) != old
        # Still known as documents, encoded anew.
        assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}
        reference = engine.logits(PROMPT, reuse="off")
        for options in ({"reuse": "exact"}, {"repair": "full"}):
            assert torch.allclose(engine.logits(PROMPT, strict=True, **options), reference, atol=1e-4)
        warm = engine.logits(PROMPT, repair="none", strict=True)
    with KVBoost(loaded) as fresh:
        assert torch.equal(fresh.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True), warm)


def test_weights_put_back_find_their_kv_again(loaded: Any) -> None:
    with KVBoost(loaded) as engine:
        engine.warm(DOCUMENTS)
        weight = loaded.model.model.layers[1].self_attn.k_proj.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(2)
            engine.generate(PROMPT, strict=True)
            weight.copy_(before)
        result = engine.generate(PROMPT, strict=True)
        assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.APPROXIMATE}


def test_refresh_sees_what_no_glance_does(loaded: Any) -> None:
    weight = loaded.model.model.layers[1].self_attn.v_proj.weight
    with KVBoost(loaded) as engine:
        assert not engine.refresh()
        weight.data[1, 1] += 0.5
        assert engine.refresh()
        assert engine.registry.fingerprint == model_fingerprint(loaded.model, loaded.tokenizer)
        loaded.model.config.rms_norm_eps = 1e-3
        assert engine.refresh()


def test_an_unchanged_model_is_read_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        "kvboost_rag.models.digest.hash_tensor", lambda tensor: read.append(tensor.numel()) or hash_tensor(tensor)
    )
    watch = ModelWatch(loaded.model, loaded.tokenizer)
    first = watch.state()
    everything = len(read)
    assert watch.state() is first
    assert len(read) == everything
    in_place(loaded.model)
    assert watch.state().fingerprint != first.fingerprint
    assert len(read) == everything + 1  # the one tensor that was changed


def test_what_a_model_writes_itself_is_no_change(tiny_model: Any) -> None:
    """Frequencies that follow the prompt's length, in place (longrope) or as a new buffer (dynamic)."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **factors}):
        fields = {"max_position_embeddings": 64} if rope["rope_type"] == "dynamic" else {}
        loaded = tiny_model("llama", rope_parameters=rope | {"rope_theta": 10_000.0}, **fields)
        watch = ModelWatch(loaded.model, loaded.tokenizer)
        before = watch.state()
        for length in (80, 10, 90):
            loaded.model(torch.zeros(1, length, dtype=torch.long))
            assert watch.state() is before


def test_every_byte_counts(loaded: Any) -> None:
    before = model_fingerprint(loaded.model, loaded.tokenizer)
    weight = loaded.model.get_input_embeddings().weight
    for place in (0, weight.numel() // 2 + 3, weight.numel() - 1):
        flat = weight.data.view(-1)
        kept = flat[place].clone()
        flat[place] = torch.nextafter(kept, torch.tensor(10.0))
        assert model_fingerprint(loaded.model, loaded.tokenizer) != before
        flat[place] = kept
    assert model_fingerprint(loaded.model, loaded.tokenizer) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_the_hash_is_of_values_not_of_layout(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (7, 13)).to(dtype)
    assert hash_tensor(values) == hash_tensor(values.t().contiguous().t())
    assert hash_tensor(values) != hash_tensor(values.t())
    assert hash_tensor(torch.zeros((), dtype=dtype)) != hash_tensor(torch.zeros(1, dtype=dtype))
    assert hash_tensor(torch.zeros(0, dtype=dtype))


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = hash_tensor(values)
    monkeypatch.setattr("kvboost_rag.models.digest.PIECE_BYTES", 7)
    assert hash_tensor(values) == whole


def test_digests_are_forgotten_with_the_tensor() -> None:
    digests = WeightDigests()
    for seed in range(5):  # a new tensor may lie where the last one did
        torch.manual_seed(seed)
        tensor = torch.randn(100)
        assert digests.of([("x", tensor)]) == [hash_tensor(tensor)]


def test_work_that_a_change_overtook_is_not_stored(loaded: Any) -> None:
    with KVBoost(loaded) as engine:
        changed = threading.Event()

        def change(_: Any) -> None:
            if not changed.is_set():
                changed.set()
                in_place(loaded.model)

        with pytest.raises(ModelChanged, match="call again"):
            engine.warm(DOCUMENTS, progress=change)
        new = model_fingerprint(loaded.model, loaded.tokenizer)
        assert engine.warm(DOCUMENTS).num_encoded == len(DOCUMENTS)
        stale = {info.key: info.fingerprint for info in engine.store.entries() if info.fingerprint != new}
        assert len(stale) == 1  # what was encoded before the change, under what the model was then
