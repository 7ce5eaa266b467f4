"""Tokens guessed ahead: the answer is that of plain decoding, whatever was guessed, accepted or rejected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import REFUSED, REUSABLE
from corpus_texts import document, prompt
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import ConfigError
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.models.load import load_model

DOCUMENTS = [document(n) for n in range(3)]
TEXT = prompt(DOCUMENTS)
REAL_DOCUMENTS = [document(n, 4) for n in range(3)]
COUNT = 30
PLAIN = GenerationParams(max_new_tokens=COUNT)
MODES: list[dict[str, Any]] = [
    {"reuse": "off"},
    {"reuse": "exact"},
    {"repair": "full"},
    {"repair": "none"},
    {"repair": "query", "recompute_ratio": 0.2},
    {"repair": "cacheblend", "recompute_ratio": 0.2},
]


def perturbed(loaded: Any, scale: float) -> PreTrainedModel:
    """A model that agrees with another one now and then."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in loaded.model.parameters():
            weight += scale * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0.0
    return loaded.model


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama")) as engine:
        engine.warm(DOCUMENTS)
        yield engine


@pytest.fixture(scope="module")
def assistant(tiny_model: Any) -> PreTrainedModel:
    return perturbed(tiny_model("llama"), 0.05)


def drafted(assistant: Any) -> list[GenerationParams]:
    lookups = [replace(PLAIN, prompt_lookup_num_tokens=n) for n in (1, 3, 10)]
    return [*lookups, replace(PLAIN, assistant_model=assistant)]


class Forwards:
    """Counts the forwards that give logits."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._handle = model.lm_head.register_forward_pre_hook(lambda *_: self._add())

    def _add(self) -> None:
        self.count += 1

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_answer_is_that_of_plain_decoding(engine: KVBoost, assistant: Any, options: dict[str, Any]) -> None:
    engine.generate(TEXT, params=PLAIN, **options)  # whatever the next ones will reuse is there
    expected = engine.generate(TEXT, params=PLAIN, strict=True, **options)
    assert expected.usage.accepted_tokens == 0
    for params in drafted(assistant):
        with Forwards(engine.model) as forwards:
            result = engine.generate(TEXT, params=params, strict=True, **options)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.finish_reason == expected.finish_reason
        usage = result.usage
        assert 0 < usage.accepted_tokens < usage.output_tokens
        saved = COUNT - forwards.count
        # A draft for the first token is checked in a forward of its own, behind the one over the prompt's rows.
        assert usage.accepted_tokens - (result.repair.rows_per_layer != ()) <= saved <= usage.accepted_tokens
        assert replace(usage, accepted_tokens=0) == expected.usage, "what was reused is the same"


@pytest.mark.parametrize("family", sorted(REUSABLE))
def test_every_kind_of_cache_goes_back_exactly(make_engine: Callable[..., KVBoost], family: str) -> None:
    """Rejected tokens leave nothing behind: windows, latent attention, interleaved, partial and no rotation."""
    engine = make_engine(family)
    engine.warm(DOCUMENTS)
    params = replace(PLAIN, max_new_tokens=16)
    expected = engine.generate(TEXT, params=params, strict=True, repair="none").token_ids
    ahead = replace(params, prompt_lookup_num_tokens=7)
    assert engine.generate(TEXT, params=ahead, strict=True, repair="none").token_ids == expected


def test_a_cache_is_cropped_by_what_is_removed_or_to_what_is_left(engine: KVBoost) -> None:
    cache = BufferCache(KVBuffer(engine.probe.require_layout, 16))
    for start, given, left in ((10, 0, 10), (10, -3, 7), (10, 4, 4), (10, 12, 10)):
        cache.buffer.length = start
        cache.crop(given)
        assert cache.get_seq_length() == left


def test_a_stop_string_inside_an_accepted_draft_ends_the_answer(engine: KVBoost) -> None:
    whole = engine.generate(TEXT, params=PLAIN, repair="full")
    for at in range(2, 20):
        stop = whole.text[at : at + 3]
        params = replace(PLAIN, stop=(stop,))
        expected = engine.generate(TEXT, params=params, repair="full")
        ahead = replace(params, prompt_lookup_num_tokens=10)
        events = list(engine.stream(TEXT, params=ahead, repair="full", strict=True))
        result = events[-1].result
        assert result is not None
        assert (result.text, result.token_ids, result.finish_reason) == (expected.text, expected.token_ids, "stop")
        assert "".join(event.delta for event in events) == expected.text


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17])
def test_the_answer_is_as_long_as_asked(engine: KVBoost, assistant: Any, count: int) -> None:
    for params in drafted(assistant):
        result = engine.generate(TEXT, params=replace(params, max_new_tokens=count), strict=True)
        assert (result.usage.output_tokens, result.finish_reason) == (count, "length")


class Lengths(StoppingCriteria):
    """Notes what it is shown, and ends at some length."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.tensor([len(self.seen) == self.at])


@pytest.mark.parametrize("count", [0, 10])
def test_a_callers_criterion_sees_every_token(engine: KVBoost, count: int) -> None:
    criterion = Lengths(11)
    params = replace(PLAIN, prompt_lookup_num_tokens=count, extra={"stopping_criteria": [criterion]})
    result = engine.generate(TEXT, params=params, repair="full", strict=True)
    first = result.usage.input_tokens + 1
    assert criterion.seen == list(range(first, first + 11))
    assert (len(result.token_ids), result.finish_reason) == (11, "stop")


def test_an_answer_is_cancelled_between_drafts(engine: KVBoost) -> None:
    cancelled = threading.Event()
    params = replace(PLAIN, max_new_tokens=200, prompt_lookup_num_tokens=4)
    result = None
    for event in engine.stream(TEXT, params=params, cancelled=cancelled):
        cancelled.set()
        result = event.result
    assert result is not None
    assert result.finish_reason == "cancelled"
    assert result.usage.output_tokens < 200


def test_requests_decoded_together_do_not_mix(engine: KVBoost, assistant: Any) -> None:
    asked = [*drafted(assistant), PLAIN, PLAIN]
    prompts = [f"{TEXT} Number {n}?" for n in range(len(asked))]
    alone = [engine.generate(text, params=params).token_ids for text, params in zip(prompts, asked, strict=True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: engine.generate(one[0], params=one[1]), zip(prompts, asked, strict=True)))
    assert [result.token_ids for result in together] == alone
    assert [result.usage.accepted_tokens > 0 for result in together] == [True] * 4 + [False] * 2


def test_sampling_is_seeded(engine: KVBoost, assistant: Any) -> None:
    for params in drafted(assistant):
        sampled = replace(params, do_sample=True, temperature=1.5, seed=3)
        first, second = (engine.generate(TEXT, params=sampled, strict=True).token_ids for _ in range(2))
        assert first == second != engine.generate(TEXT, params=replace(sampled, seed=4)).token_ids


def test_a_call_an_engine_and_a_model_say_what_guesses(tiny_model: Any, assistant: Any) -> None:
    loaded = tiny_model("llama")
    with KVBoost(loaded, params=GenerationParams(max_new_tokens=COUNT, prompt_lookup_num_tokens=5)) as engine:

        def accepted(**options: Any) -> int:
            return engine.generate(TEXT, strict=True, **options).usage.accepted_tokens

        assert accepted() > 0
        assert engine.generate(TEXT).usage.output_tokens == COUNT
        assert accepted(params=PLAIN) > 0, "a call that names nothing has the engine's"
        assert accepted(params=replace(PLAIN, prompt_lookup_num_tokens=0)) == 0
        assert accepted(prompt_lookup_num_tokens=0) == 0
        assert accepted(assistant_model=assistant) > 0, "instead of the engine's lookup"
    with KVBoost(loaded, params=GenerationParams(assistant_model=assistant)) as engine:
        assert accepted(params=PLAIN) > 0
        assert accepted(params=PLAIN, prompt_lookup_num_tokens=0) == 0
    loaded.model.generation_config.prompt_lookup_num_tokens = 5
    with KVBoost(loaded) as engine:
        assert accepted(params=PLAIN) > 0
        assert accepted(params=replace(PLAIN, extra={"prompt_lookup_num_tokens": 0})) == 0


def test_an_assistant_is_loaded_by_name_once(tiny_model: Any, assistant: Any, tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    assistant.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    with KVBoost(loaded) as engine:
        expected = engine.generate(TEXT, params=PLAIN).token_ids
        params = replace(PLAIN, assistant_model=tmp_path)
        first = engine._parts.requests.make(TEXT, params=params).params.assistant_model
        assert engine._parts.requests.make(TEXT, params=replace(PLAIN, assistant_model=str(tmp_path))).params == (
            replace(PLAIN, assistant_model=first)
        )
        result = engine.generate(TEXT, params=params, strict=True)
        assert result.token_ids == expected
        assert result.usage.accepted_tokens > 0


def test_the_assistant_keeps_its_own_settings(engine: KVBoost, assistant: Any) -> None:
    before = assistant.generation_config
    told = before.to_dict()
    counts = []
    for number in (1, 12):
        extra = {"num_assistant_tokens": number, "num_assistant_tokens_schedule": "constant"}
        extra |= {"assistant_confidence_threshold": 0.0}
        params = replace(PLAIN, assistant_model=assistant, extra=extra)
        with Forwards(engine.model) as forwards:
            engine.generate(TEXT, params=params, repair="full", strict=True)
        counts.append(forwards.count)
    assert counts[0] > counts[1], "longer drafts, fewer forwards"
    assert assistant.generation_config is before
    assert before.to_dict() == told


class Processor(LogitsProcessor):
    """Would notice tokens that come and go."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


def test_what_keeps_state_between_tokens_is_decoded_plainly(engine: KVBoost, assistant: Any) -> None:
    for params in drafted(assistant):
        own = Processor()
        result = engine.generate(TEXT, params=replace(params, extra={"logits_processor": [own]}), strict=True)
        first = result.usage.input_tokens
        assert own.lengths == list(range(first, first + COUNT))
        for extra in ({"guidance_scale": 1.8}, {"watermarking_config": {"bias": 4.0}}):
            plain = engine.generate(TEXT, params=replace(PLAIN, extra=extra), strict=True)
            result = engine.generate(TEXT, params=replace(params, extra=extra), strict=True)
            assert (result.token_ids, result.usage.accepted_tokens) == (plain.token_ids, 0)


def test_a_prompt_beyond_the_assistants_context_goes_without(engine: KVBoost, tiny_model: Any) -> None:
    short = tiny_model("llama", max_position_embeddings=64).model
    result = engine.generate(TEXT, params=replace(PLAIN, assistant_model=short), strict=True)
    assert result.usage.accepted_tokens == 0
    assert result.token_ids == engine.generate(TEXT, params=PLAIN, strict=True).token_ids


def test_what_cannot_guess_or_check_is_refused_by_name(engine: KVBoost, tiny_model: Any, tmp_path: Path) -> None:
    other = tiny_model("llama", vocab_size=400).model
    mamba = REFUSED["mamba"]
    recurrent = tiny_model(mamba[0], **mamba[1])
    (tmp_path / "empty").mkdir()
    refused = {
        "the model itself": engine.model,
        "has 400 tokens, the model 384": other,
        "only a decoder": recurrent.model,
        "expected a causal language model": 7,
        "empty": str(tmp_path / "empty"),
    }
    for why, given in refused.items():
        with pytest.raises(ConfigError, match=why):
            engine.generate(TEXT, params=replace(PLAIN, assistant_model=given))
    with pytest.raises(ConfigError, match="alternatives"):
        replace(PLAIN, assistant_model=other, prompt_lookup_num_tokens=3)
    with pytest.raises(ConfigError, match="prompt_lookup_num_tokens=-1"):
        engine.generate(TEXT, prompt_lookup_num_tokens=-1)
    with KVBoost(recurrent) as slow:
        with pytest.raises(ConfigError, match="cannot go back behind a rejected token"):
            slow.generate("A lamp", prompt_lookup_num_tokens=3)
        recurrent.model.generation_config.prompt_lookup_num_tokens = 3
        assert slow.generate("A lamp", params=PLAIN).usage.accepted_tokens == 0, "a checkpoint's wish is passed over"
    with pytest.raises(ConfigError, match="has 400 tokens"):
        KVBoost(tiny_model("llama"), params=GenerationParams(assistant_model=other))


def test_another_tokenizer_of_the_same_size_is_refused(
    engine: KVBoost, assistant: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    assistant.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"#":', 1).replace('"#":', '"b":', 1).replace('"b":', '"a":', 1))
    swapped = file.read_text().replace('"x": ', '"tmp": ').replace('"y": ', '"x": ').replace('"tmp": ', '"y": ')
    file.write_text(swapped)
    with pytest.raises(ConfigError, match="another tokenizer"):
        engine.generate(TEXT, params=replace(PLAIN, assistant_model=str(tmp_path)))


def test_a_conversation_is_the_same_with_drafts(make_engine: Callable[..., KVBoost]) -> None:
    """Turns, what is settled of them and what they reuse."""
    seen = []
    for params in (PLAIN, replace(PLAIN, prompt_lookup_num_tokens=6)):
        engine = make_engine(params=params)
        engine.warm(DOCUMENTS)
        chat = engine.session()
        turns = []
        for text in ("\n\n".join([*DOCUMENTS, "Which store is full?"]), "Why?", "And then?"):
            result = chat.generate(text, strict=True)
            engine.finish_background()
            turns.append((result.token_ids, replace(result.usage, accepted_tokens=0)))
        seen.append((turns, engine.stats().settled_tokens))
    assert seen[0] == seen[1]


@pytest.mark.model
def test_on_the_real_model_answers_stay_and_drafts_are_accepted() -> None:
    """The assistant is the same model in bfloat16, which agrees with it nearly always."""
    with KVBoost.from_pretrained("bundled:smollm2", dtype=torch.float32) as engine:
        engine.warm(REAL_DOCUMENTS)
        text = "\n\n".join([*REAL_DOCUMENTS, "Repeat the first document word for word:\n"])
        params = GenerationParams(max_new_tokens=48)
        assistant = load_model("bundled:smollm2", dtype=torch.bfloat16).model
        for options in ({"reuse": "off"}, {"reuse": "exact"}, {"repair": "query"}, {"repair": "none"}):
            expected = engine.generate(text, params=params, strict=True, **options)
            for drafts in ({"prompt_lookup_num_tokens": 8}, {"assistant_model": assistant}):
                result = engine.generate(text, params=replace(params, **drafts), strict=True, **options)
                assert result.token_ids == expected.token_ids
                assert result.usage.accepted_tokens > result.usage.output_tokens // 3
