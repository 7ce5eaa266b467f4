"""Every field of transformers' `GenerationConfig`: honoured as stock, decided here, or refused with one clear line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from corpus_texts import document, prompt
from engine_helpers import located
from transformers import GenerationConfig, LogitsProcessor, MaxTimeCriteria, StoppingCriteria

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import ConfigError
from kvboost_rag.serving.drafting import OF_ASSISTANT
from kvboost_rag.serving.generation_settings import DECIDED, HONOURED, UNAVAILABLE, replaced_settings

DOCUMENTS = [document(n) for n in range(3)]
TEXT = prompt(DOCUMENTS)
MODES: list[dict[str, Any]] = [{"reuse": "off"}, {"repair": "full"}, {"reuse": "exact"}]


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama")) as engine:
        engine.warm(DOCUMENTS)
        yield engine


@pytest.fixture
def own(engine: KVBoost) -> Iterator[GenerationConfig]:
    """The model's generation config, put back afterwards."""
    before = engine.model.generation_config
    engine.model.generation_config = GenerationConfig(**before.to_diff_dict())
    yield engine.model.generation_config
    engine.model.generation_config = before


def stock(engine: KVBoost, **settings: Any) -> list[int]:
    ids = torch.tensor([located(engine, TEXT, reuse="off").token_ids])
    out = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_length=None, **settings)
    return out[0, ids.shape[1] :].tolist()


def test_every_field_has_exactly_one_place() -> None:
    fields = {name for name in vars(GenerationConfig()) if name not in ("_original_object_hash", "generation_kwargs")}
    tables = (HONOURED, DECIDED, frozenset(UNAVAILABLE))
    placed = [name for table in tables for name in table]
    assert len(placed) == len(set(placed))
    assert fields - set(placed) == set(), "new in transformers: honour, decide or refuse it"


VALUES: dict[str, Any] = {
    "min_length": 400,
    "min_new_tokens": 20,
    "max_time": 100.0,
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[65], [111, 102]],
    "renormalize_logits": True,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 8,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.5),
    "suppress_tokens": list(range(100, 250)),
    "begin_suppress_tokens": list(range(3, 380)),
    "sequence_bias": [[[17], 10.0]],
    "guidance_scale": 1.8,
    "watermarking_config": {"greenlist_ratio": 0.4, "bias": 4.0},
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 4,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.5,
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.6,
    "min_p": 0.9,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.5,
}
WITHOUT_EFFECT = ("max_time", "renormalize_logits", "remove_invalid_values", "forced_bos_token_id")
"""Here: nothing is late, invalid or out of order, and the prompt has more than one token."""
DRAFTING = ("prompt_lookup_num_tokens", "max_matching_ngram_size", *OF_ASSISTANT)
"""Change how soon an answer comes and nothing in it (`test_drafting.py`)."""


def test_every_honoured_field_is_tried() -> None:
    assert set(VALUES) | set(SAMPLING) == HONOURED


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_honoured_as_stock_does_from_a_call_and_from_the_model(engine: KVBoost, own: Any, name: str) -> None:
    value, sampled = (SAMPLING[name], True) if name in SAMPLING else (VALUES[name], False)
    # The tiny model repeats itself, which most settings would not show in; some need it, or the prompt's tokens.
    penalties = {"repetition_penalty": None, "no_repeat_ngram_size": None, "encoder_no_repeat_ngram_size": 0.5}
    penalty = penalties.get(name, 1.3)
    beside = {} if penalty is None else {"repetition_penalty": penalty}

    count = 5 if name == "forced_eos_token_id" else 20  # before the answer ends by itself

    def seeded(**settings: Any) -> list[int]:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return stock(engine, max_new_tokens=count, do_sample=sampled, **beside, **settings)

    expected = seeded(**{name: value})
    assert expected != seeded() or name in (*WITHOUT_EFFECT, *DRAFTING)
    in_call = GenerationParams(max_new_tokens=count, do_sample=sampled, seed=5, extra={name: value}, **beside)
    for options in MODES:
        assert list(engine.generate(TEXT, params=in_call, strict=True, **options).token_ids) == expected, options
    own.update(**{name: value})
    of_model = GenerationParams(max_new_tokens=count, do_sample=sampled, seed=5, **beside)
    for options in MODES:
        assert list(engine.generate(TEXT, params=of_model, strict=True, **options).token_ids) == expected, options


ASKED: dict[str, Any] = {
    "use_cache": False,
    "cache_implementation": "static",
    "prefill_chunk_size": 16,
    "num_beams": 4,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "use_mtp": True,
    "is_assistant": True,
    "speculation_type": "dflash",
    "assistant_ensemble_weight": 0.5,
    "assistant_early_exit": 2,
    "token_healing": True,
}


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_what_is_not_to_be_had_is_replaced_in_a_model_and_refused_in_a_call(
    engine: KVBoost, own: Any, name: str, caplog: pytest.LogCaptureFixture, tiny_model: Any
) -> None:
    params = GenerationParams(max_new_tokens=20)
    expected = list(engine.generate(TEXT, params=params, reuse="off").token_ids)
    setattr(own, name, ASKED[name])  # a checkpoint's file is not checked by anybody
    (line,) = replaced_settings(own)
    assert line.startswith(f"{name}={ASKED[name]!r}: ")
    for options in MODES:
        result = engine.generate(TEXT, params=params, strict=True, **options)
        assert list(result.token_ids) == expected
        assert result.fallback_reason is None
    with pytest.raises(ConfigError, match=f"^{name}="):
        engine.generate(TEXT, params=GenerationParams(extra={name: ASKED[name]}))
    value, _ = UNAVAILABLE[name]
    same = GenerationParams(max_new_tokens=20, extra={name: value})
    assert list(engine.generate(TEXT, params=same, strict=True).token_ids)
    loaded = tiny_model("llama", num_hidden_layers=1)
    setattr(loaded.model.generation_config, name, ASKED[name])
    with caplog.at_level(logging.WARNING), KVBoost(loaded):
        assert sum(line in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", sorted(DECIDED - {"eos_token_id", "stop_strings"}))
def test_what_is_decided_here_changes_nothing(engine: KVBoost, own: Any, name: str) -> None:
    values = {"max_length": 3, "max_new_tokens": 2, "do_sample": True, "early_stopping": True, "cache_config": {"a": 1}}
    values |= {"transformers_version": "1"}
    values |= dict.fromkeys(("length_penalty", "diversity_penalty"), 0.5)
    value = values.get(name, 4 if name.endswith(("tokens", "_id", "size", "lookbehind", "len")) else True)
    if name in ("compile_config", "continuous_batching_config"):
        value = None
    params = GenerationParams(max_new_tokens=20)
    expected = list(engine.generate(TEXT, params=params, reuse="off").token_ids)
    setattr(own, name, value)
    for options in MODES:
        assert list(engine.generate(TEXT, params=params, strict=True, **options).token_ids) == expected


def test_stop_strings_of_a_model_end_the_answer(engine: KVBoost, own: Any) -> None:
    params = GenerationParams(max_new_tokens=40)
    whole = engine.generate(TEXT, params=params, reuse="off").text
    stop = whole[6:9]
    cut = whole[: whole.index(stop)]
    in_call = GenerationParams(max_new_tokens=40, extra={"stop_strings": [stop]})
    assert engine.generate(TEXT, params=in_call, strict=True, repair="full").text == cut
    own.stop_strings = stop
    for options in MODES:
        result = engine.generate(TEXT, params=params, strict=True, **options)
        assert (result.text, result.finish_reason) == (cut, "stop")


def test_a_model_without_a_generation_config(engine: KVBoost, own: Any) -> None:
    expected = engine.generate(TEXT, params=GenerationParams(max_new_tokens=9), strict=True, reuse="off").token_ids
    engine.model.generation_config = None
    assert replaced_settings(None) == []
    try:
        from kvboost_rag.serving.generation_settings import call_settings

        settings = call_settings(engine.model, GenerationParams(max_new_tokens=9), (2,))
    finally:
        engine.model.generation_config = own
    assert settings.config.eos_token_id == [2]
    assert expected


class Counting:
    """Raises at its n-th call."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("the caller's own fault")


class Processor(Counting, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count()
        return scores


class Criterion(Counting, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(1, dtype=torch.bool)


class Function(Counting):
    def __call__(self, batch: int, ids: torch.Tensor) -> list[int]:
        self.count()
        return list(range(384))


@pytest.mark.parametrize("options", [*MODES, {"repair": "none"}], ids=str)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("make", "extra"),
    [
        (Processor, lambda obj: {"logits_processor": [obj]}),
        (Criterion, lambda obj: {"stopping_criteria": [obj]}),
        (Function, lambda obj: {"prefix_allowed_tokens_fn": obj}),
        (Function, lambda obj: {"prefix_allowed_tokens_fn": lambda batch, ids: obj(batch, ids)}),
    ],
    ids=["processor", "criterion", "callable", "function"],
)
def test_a_callers_error_is_raised_once(
    engine: KVBoost, options: dict[str, Any], at: int, make: type[Counting], extra: Callable[[Any], dict[str, Any]]
) -> None:
    before = engine.stats().fallbacks
    obj = make(at)
    with pytest.raises(KeyError, match="the caller's own fault"):
        engine.generate(TEXT, params=GenerationParams(max_new_tokens=5, extra=extra(obj)), **options)
    assert obj.calls == at
    assert engine.stats().fallbacks == before


def test_settings_that_transformers_refuses_are_the_callers_error(engine: KVBoost) -> None:
    before = engine.stats().fallbacks
    for extra in ({"sequence_bias": "x"}, {"top_h": 7.0}, {"min_p": 7.0}):
        params = GenerationParams(max_new_tokens=5, do_sample=True, extra=extra)
        with pytest.raises((ValueError, TypeError)):
            engine.generate(TEXT, params=params)
    assert engine.stats().fallbacks == before


def test_a_fault_before_the_first_forward_that_plain_prefill_does_not_have(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a cache that `generate` does not take: counted, and answered all the same."""
    expected = engine.generate(TEXT, params=GenerationParams(max_new_tokens=5), reuse="off").token_ids
    original = engine.model.generate

    def refuses_caches(*args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs or "past_key_values" in kwargs:
            raise RuntimeError("no such cache")
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.model, "generate", refuses_caches)
    result = engine.generate(TEXT, params=GenerationParams(max_new_tokens=5))
    assert (result.reuse, result.token_ids) == ("off", expected)
    assert "no such cache" in (result.fallback_reason or "")
    assert engine.stats().fallbacks["RuntimeError"] >= 1


def test_a_criterion_of_transformers_is_taken_too(engine: KVBoost) -> None:
    params = GenerationParams(max_new_tokens=50, extra={"stopping_criteria": [MaxTimeCriteria(0.0)]})
    assert len(engine.generate(TEXT, params=params, strict=True).token_ids) == 1


def test_dynamic_ntk_answers_beyond_its_first_range(tiny_model: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    loaded = tiny_model("llama", rope_parameters=rope, max_position_embeddings=128)
    params = GenerationParams(max_new_tokens=6)
    with KVBoost(loaded) as engine:
        ids = torch.tensor([located(engine, TEXT, reuse="off").token_ids])
        assert ids.shape[1] > 128
        expected = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        answer = tuple(expected[0, ids.shape[1] :].tolist())
        short = engine.generate("One lamp", params=params, reuse="off").token_ids
        assert engine.generate(TEXT, params=params, reuse="off").token_ids == answer
        for options in ({}, {"reuse": "exact"}):
            result = engine.generate(TEXT, documents=[d[:60] for d in DOCUMENTS], params=params, **options)
            assert (result.reuse, result.token_ids) == ("off", answer)
            assert "constant up to 128 positions" in (result.fallback_reason or "")
        # Frequencies that a long prompt stretched do not stay for a short one.
        assert engine.generate("One lamp", params=params).token_ids == short
        assert engine.generate("One lamp", documents=["One"], params=params, repair="full").token_ids == short
