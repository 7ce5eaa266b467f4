"""The probe accepts what can be reused, says how keys rotate, and refuses the rest with the reason."""

from __future__ import annotations

import architectures
import pytest
import torch
from transformers import AutoConfig

from kvboost_rag.forward.probe import probe
from kvboost_rag.kv.rope import Rotation


@pytest.mark.parametrize("name", architectures.REUSABLE)
def test_reusable_architectures_pass(tiny_model, name: str) -> None:
    model_type, fields = architectures.REUSABLE[name]
    report = probe(tiny_model(model_type, **fields).model)
    assert report.reusable, report.reason
    assert max(report.value_error, report.key_error, report.logit_error) < 1e-4
    assert report.require_layout.num_layers == fields.get("num_hidden_layers", 5)


@pytest.mark.parametrize("name", architectures.REFUSED)
def test_other_architectures_are_refused_with_the_reason(tiny_model, name: str) -> None:
    model_type, fields, reason = architectures.REFUSED[name]
    report = probe(tiny_model(model_type, **fields).model)
    assert not report.reusable
    assert report.layout is None
    assert reason in (report.reason or "")


@pytest.mark.parametrize(
    ("name", "pairing", "rotary_dim"),
    [
        ("llama", "half", 16),
        ("phi-partial", "half", 8),
        ("stablelm-partial", "half", 4),
        ("glm4-interleaved", "interleaved", 8),
        ("gptj-interleaved", "interleaved", 8),
        ("cohere2", "interleaved", 16),
    ],
)
def test_finds_pairing_and_rotary_dimension(tiny_model, name: str, pairing: str, rotary_dim: int) -> None:
    model_type, fields = architectures.REUSABLE[name]
    rotation = probe(tiny_model(model_type, **fields).model).require_layout.groups[0].rotation
    assert rotation is not None
    assert (rotation.pairing, rotation.offset, rotation.rotary_dim) == (pairing, 0, rotary_dim)


def test_layers_with_another_base_are_a_group_of_their_own(tiny_model) -> None:
    fields = {"sliding_window": 16, "num_hidden_layers": 7, "max_position_embeddings": 2048}
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    layout = probe(tiny_model("gemma3_text", rope_parameters=bases, **fields).model).require_layout
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3, 4, 6), (5,)]


def test_layers_without_rotation_are_a_group_of_their_own(tiny_model) -> None:
    layout = probe(tiny_model("smollm3").model).require_layout
    assert [(g.layers, g.rotation is None) for g in layout.groups] == [((0, 1, 2, 4), False), ((3,), True)]


def test_what_is_rotated_is_found_among_the_cached_values_too(tiny_model) -> None:
    layout = probe(tiny_model("deepseek_v3", **architectures.LATENT).model).require_layout
    (group,) = layout.groups
    assert group.exchanged
    assert (group.num_kv_heads, group.key_head_dim, group.value_head_dim) == (1, 8, 20)
    assert group.rotation is not None
    assert not any(g.exchanged for g in probe(tiny_model("llama").model).require_layout.groups)


def test_rope_that_changes_with_length_in_some_layers_only(tiny_model) -> None:
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": dict(architectures.LONGROPE),
    }
    fields = {"sliding_window": 16, "num_hidden_layers": 7, "max_position_embeddings": 2048}
    report = probe(tiny_model("gemma3_text", rope_parameters=bases, **fields).model)
    assert report.reusable, report.reason
    assert report.max_positions == 128


def test_length_dependent_rope_is_reused_up_to_the_proven_length(tiny_model) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert probe(tiny_model("llama", rope_parameters=dynamic).model).max_positions == 2048
    model = tiny_model("phi3", rope_parameters=dict(architectures.LONGROPE), original_max_position_embeddings=128).model
    assert probe(model).max_positions == 128


def test_a_rotation_by_other_angles_is_refused(tiny_model) -> None:
    """A rotary module that reports angles other than those the layers used must not pass."""
    model = tiny_model("llama").model
    rotary = model.model.rotary_emb
    original = rotary.forward
    calls = {"n": 0}

    def lies_outside_the_model(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls["n"] += 1
        # The model's own two forwards come first; whoever asks afterwards is told other angles.
        cos, sin = original(x, position_ids if calls["n"] <= 2 else position_ids * 2)
        return cos, sin

    rotary.forward = lies_outside_the_model
    report = probe(model)
    assert not report.reusable
    assert "rotation" in (report.reason or "")


def test_a_model_that_raises_is_refused_not_raised(tiny_model) -> None:
    model = tiny_model("llama").model
    model.model.layers[2].mlp.forward = lambda x: 1 / 0
    report = probe(model)
    assert not report.reusable
    assert "ZeroDivisionError" in (report.reason or "")


def test_the_result_is_remembered_per_model(tiny_model) -> None:
    model = tiny_model("llama").model
    assert probe(model) is probe(model)


def test_half_precision_models_pass(tiny_model) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        report = probe(tiny_model("llama", dtype=dtype).model)
        assert report.reusable, report.reason
        assert report.require_layout.dtype == dtype


def test_rotation_is_compared_by_what_it_does(tiny_model) -> None:
    rotation = probe(tiny_model("llama").model).require_layout.groups[0].rotation
    assert rotation is not None
    other = Rotation(rotation.source, "interleaved", rotation.offset, rotation.rotary_dim)
    assert rotation.same_as(rotation)
    assert not rotation.same_as(other)


def test_every_listed_architecture_is_known_to_transformers() -> None:
    for model_type, *_ in (*architectures.REUSABLE.values(), *architectures.REFUSED.values()):
        assert AutoConfig.for_model(model_type).model_type == model_type
