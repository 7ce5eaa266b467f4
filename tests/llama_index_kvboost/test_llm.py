"""KVBoostLLM's eight methods, its parameters and what it says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms import kvboost
from llama_index.llms.kvboost import KVBoostLLM
from llama_index_kvboost.helpers import TEXTS, USER, MakeLLM

from kvboost_rag import GenerationParams
from kvboost_rag.serving.limits import ContextOverflowError

PROMPT = "The store holds keys"


async def all_answers(llm: KVBoostLLM, **kwargs: Any) -> tuple[set[str], list[Any]]:
    """The texts that the eight methods give for one prompt, in completion and chat, and their last responses."""
    chat_prompt = llm.messages_to_prompt(USER)
    streamed = list(llm.stream_complete(chat_prompt, formatted=True, **kwargs))
    streamed_chat = list(llm.stream_chat(USER, **kwargs))
    astreamed = [r async for r in await llm.astream_complete(chat_prompt, formatted=True, **kwargs)]
    astreamed_chat = [r async for r in await llm.astream_chat(USER, **kwargs)]
    whole = [
        llm.complete(chat_prompt, formatted=True, **kwargs),
        await llm.acomplete(chat_prompt, formatted=True, **kwargs),
    ]
    whole += [llm.chat(USER, **kwargs), await llm.achat(USER, **kwargs)]
    streams = [streamed, streamed_chat, astreamed, astreamed_chat]
    texts = {"".join(r.delta for r in stream) for stream in streams}
    texts |= {_text(r) for r in whole} | {_text(stream[-1]) for stream in streams}
    return texts, whole + [stream[-1] for stream in streams]


def _text(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


async def test_eight_methods_give_one_answer(make_llm: MakeLLM) -> None:
    texts, responses = await all_answers(make_llm())
    assert len(texts) == 1
    assert texts.pop()
    assert len({json.dumps(r.raw["usage"]) for r in responses}) == 1


async def test_stop_strings_end_all_of_them_and_are_not_shown(make_llm: MakeLLM) -> None:
    llm = make_llm(max_new_tokens=16)
    (full,), _ = await all_answers(llm)
    stop = full[5:8]
    assert len(stop) == 3
    texts, responses = await all_answers(llm, stop=[stop])
    assert texts == {full[: full.index(stop)]}
    assert {r.raw["finish_reason"] for r in responses} == {"stop"}


async def test_call_parameters_beat_those_of_the_model(make_llm: MakeLLM) -> None:
    llm = make_llm(max_new_tokens=4, generate_kwargs={"max_new_tokens": 5})
    _, responses = await all_answers(llm, max_new_tokens=3)
    assert {r.raw["usage"]["completion_tokens"] for r in responses} == {3}
    assert llm.complete(PROMPT).raw["usage"]["completion_tokens"] == 5
    assert llm.complete(PROMPT, max_tokens=2).raw["usage"]["completion_tokens"] == 2


def test_streams_carry_the_text_so_far_and_the_new_piece(make_llm: MakeLLM) -> None:
    text = ""
    for response in make_llm().stream_chat(USER):
        text += response.delta
        assert response.message.content == text
        assert response.message.role == "assistant"


def test_unknown_call_parameters_are_warned_about(make_llm: MakeLLM) -> None:
    with pytest.warns(UserWarning, match="bogus"):
        make_llm().complete(PROMPT, bogus=1)


def test_unknown_arguments_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(TypeError, match="max_new_token"):
        make_llm(max_new_token=3)
    with pytest.raises(ValueError, match="recompute_ratio"):
        make_llm(recompute_ratio=2.0)
    with pytest.raises(ValueError, match="temperature=-1"):
        make_llm(generate_kwargs={"temperature": -1})
    with pytest.raises(TypeError, match="expected a Store, a folder"):
        KVBoostLLM(model_name="/nowhere", store=3)
    with pytest.raises(ValueError, match="model_name="):
        KVBoostLLM()


def test_metadata_comes_from_the_model(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    metadata = make_llm().metadata
    assert (metadata.num_output, metadata.is_chat_model) == (8, True)
    assert 1024 < metadata.context_window < 2048, "room for an answer and the template around messages"
    text = make_llm(is_chat_model=False).metadata
    assert (text.context_window, text.is_chat_model) == (2048, False)
    assert make_llm(context_window=512).metadata.context_window == 512
    assert make_llm(context_window=4096).metadata.context_window == 2048
    assert "4096" in caplog.text


def test_a_model_without_chat_template_is_no_chat_model(tiny_model: Any, make_llm: MakeLLM) -> None:
    import copy

    from kvboost_rag import KVBoost
    from kvboost_rag.models.load import load_model

    loaded = tiny_model("llama")
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = None
    with KVBoost(load_model(loaded.model, tokenizer=tokenizer)) as engine:
        llm = make_llm(engine=engine)
        assert llm.metadata.is_chat_model is False
        assert llm.metadata.is_function_calling_model is False
        assert llm.messages_to_prompt(USER) == "user: Which store is full?\nassistant: "
        assert llm.chat(USER).message.content == llm.complete(llm.messages_to_prompt(USER), formatted=True).text


def test_a_prompt_that_does_not_fit_is_refused_with_numbers(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(ContextOverflowError, match="2048") as caught:
        llm.complete(" ".join(TEXTS) * 40)
    assert caught.value.prompt_tokens > 2048
    with pytest.raises(ContextOverflowError):
        list(llm.stream_chat([ChatMessage(content=" ".join(TEXTS) * 40)]))


def test_raw_is_plain_and_tells_what_reuse_did(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = "\n\n".join(["Answer from this:", TEXTS[0], "Question: which?"])
    cold = llm.complete(prompt, documents=TEXTS[:1]).raw
    warm = llm.complete(prompt, documents=TEXTS[:1]).raw
    assert json.loads(json.dumps(warm)) == warm
    assert cold["kvboost"]["hits"] == {"encoded": 1}
    assert warm["kvboost"]["hits"] == {"approximate": 1}
    assert warm["kvboost"]["cached_tokens"] > 0
    usage = warm["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_one_document_need_not_be_in_a_list(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = "\n\n".join(["Answer from this:", TEXTS[0], TEXTS[1], "Question: which?"])
    for one in (TEXTS[0], NodeWithScore(node=TextNode(text=TEXTS[1]))):
        assert llm.complete(prompt, documents=one).raw["kvboost"]["hits"] == {"encoded": 1}
    assert llm.complete(prompt, documents=TEXTS[:2]).raw["kvboost"]["hits"] == {"approximate": 2}
    assert llm.complete(prompt).raw["kvboost"]["hits"] == {}, "not known from then on"


def test_reuse_can_be_chosen_by_model_and_by_call(make_llm: MakeLLM) -> None:
    llm = make_llm(repair="none", recompute_ratio=0.5)
    prompt = "\n\n".join(["Answer from this:", TEXTS[0], "Question: which?"])
    llm.engine.warm(TEXTS[:1])
    assert llm.complete(prompt).raw["kvboost"]["repair"] == "none"
    full = llm.complete(prompt, repair="full").raw["kvboost"]
    assert full["recomputed_tokens"] == full["document_tokens"]
    off = llm.complete(prompt, reuse="off").raw["kvboost"]
    assert (off["reuse"], off["cached_tokens"]) == ("off", 0)


def test_namespaces_do_not_see_each_other(make_llm: MakeLLM) -> None:
    llm = make_llm(namespace="a")
    llm.engine.warm(TEXTS[:1], namespace="a")
    prompt = "\n\n".join(["Answer from this:", TEXTS[0], "Question: which?"])
    assert llm.complete(prompt).raw["kvboost"]["num_documents"] == 1
    assert llm.complete(prompt, namespace="b").raw["kvboost"]["num_documents"] == 0


def test_wrapper_and_system_prompt_stand_around_bare_prompts_only(make_llm: MakeLLM) -> None:
    llm = make_llm(system_prompt="Be brief.", query_wrapper_prompt="<{query_str}>")
    plain = make_llm(engine=llm.engine)
    assert llm.complete("Hi").text == plain.complete("Be brief. <Hi>").text
    assert llm.complete("Hi", formatted=True).text == plain.complete("Hi").text


def test_messages_to_prompt_of_the_caller_is_used(make_llm: MakeLLM) -> None:
    llm = make_llm(messages_to_prompt=lambda messages: "|".join(m.content for m in messages))
    assert llm.chat(USER).message.content == llm.complete("Which store is full?").text


def test_stopping_ids_end_the_answer(make_llm: MakeLLM) -> None:
    llm = make_llm()
    token_ids = llm.engine.generate(PROMPT, params=GenerationParams(max_new_tokens=8)).token_ids
    stop = next(token for token in token_ids if token != token_ids[0])
    response = make_llm(engine=llm.engine, stopping_ids=[stop]).complete(PROMPT)
    assert response.raw["usage"]["completion_tokens"] == token_ids.index(stop) + 1
    assert response.raw["finish_reason"] == "stop"


def test_temperature_samples_by_seed(make_llm: MakeLLM) -> None:
    llm = make_llm(generate_kwargs={"temperature": 1.5, "do_sample": True})
    answers = [llm.complete(PROMPT, seed=seed).text for seed in (1, 2, 3, 1)]
    assert answers[0] == answers[3]
    assert len(set(answers)) > 1


def test_token_counts_are_the_models_own(make_llm: MakeLLM) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [])
    llm = make_llm(callback_manager=CallbackManager([counter]))
    usage = llm.chat(USER).raw["usage"]
    list(llm.stream_chat(USER))
    assert len(counter.llm_token_counts) == 2
    for event in counter.llm_token_counts:
        assert event.prompt_token_count == usage["prompt_tokens"] == len(llm.tokenize(llm.messages_to_prompt(USER)))
        assert event.completion_token_count == usage["completion_tokens"] == 8


class Seen(BaseEventHandler):
    """Collects events."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)


async def test_events_are_emitted(make_llm: MakeLLM) -> None:
    seen = Seen()
    get_dispatcher().add_event_handler(seen)
    try:
        await all_answers(make_llm())
    finally:
        get_dispatcher().event_handlers.remove(seen)
    ends = [event for event in seen.events if isinstance(event, (LLMChatEndEvent, LLMCompletionEndEvent))]
    assert sum(isinstance(event, LLMChatEndEvent) for event in ends) == 4
    assert len(ends) == 8
    assert all(event.response.raw["usage"]["completion_tokens"] == 8 for event in ends)


def test_nothing_is_loaded_before_it_is_needed() -> None:
    llm = KVBoostLLM(model_name="/nowhere/at/all", max_new_tokens=7)
    assert llm.to_payload() == {"class_name": "KVBoost_LLM", "model_name": "/nowhere/at/all", "num_output": 7}
    with pytest.raises(ValueError, match="no such folder"):
        llm.complete("Hi")


def test_the_namespace_is_shared_with_its_owner() -> None:
    """A package file in `llama_index` or `llama_index.llms` would hide llama-index-core and its other integrations."""
    import llama_index.core

    folder = Path(kvboost.__file__).parent
    assert folder.parts[-3:] == ("llama_index", "llms", "kvboost")
    assert not [name for parent in folder.parents[:2] for name in parent.glob("__init__.py")]
    assert Path(llama_index.core.__file__).parents[1] != folder.parents[1]


def test_tokens_guessed_ahead_change_no_answer(make_llm: MakeLLM, tiny_model: Any) -> None:
    plain = make_llm(max_new_tokens=24)
    expected = plain.complete(PROMPT)
    assistant = tiny_model("llama", num_hidden_layers=4).model
    asked = [
        make_llm(max_new_tokens=24, generate_kwargs={"prompt_lookup_num_tokens": 5}).complete(PROMPT),
        plain.complete(PROMPT, prompt_lookup_num_tokens=5),
        plain.complete(PROMPT, assistant_model=assistant),
    ]
    assert [response.text for response in asked] == [expected.text] * 3
    counts = [response.raw["kvboost"]["accepted_tokens"] for response in (expected, *asked)]
    assert counts[0] == 0
    assert min(counts[1:3]) > 0
