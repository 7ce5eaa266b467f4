"""Every parameter that the installed openai client knows is honoured or refused by name; each has its check here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from corpus_texts import document
from serving_helpers import LiveServer

from kvboost_rag.server.bodies import ChatBody, CompletionBody, EmbeddingsBody

pytest.importorskip("openai")

from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

CHAT = get_type_hints(chat_create_params.CompletionCreateParamsStreaming)
TEXT = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
EMBEDDINGS = get_type_hints(embedding_create_params.EmbeddingCreateParams)
TOKENS = 16
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORM = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA | {"additionalProperties": False}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}
Check = Callable[[Callable[..., Any]], bool]
"""Given what asks (`ask(**parameters)` returns the response), says whether the parameter had its effect."""


def text(response: Any) -> str:
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def tokens(response: Any) -> int:
    return int(response.json()["usage"]["completion_tokens"])


def differs(**parameters: Any) -> Check:
    return lambda ask: text(ask(**parameters)) != text(ask())


def is_greedy(**parameters: Any) -> Check:
    """Sampling is on and comes out greedy, while without the parameter it does not."""
    wild = {"temperature": 2.0, "seed": 5}
    return lambda ask: text(ask(**wild, **parameters)) == text(ask()) != text(ask(**wild))


def is_repeatable(ask: Callable[..., Any]) -> bool:
    first, second, other = (text(ask(temperature=2.0, seed=seed)) for seed in (5, 5, 6))
    return first == second != other


def takes_only(name: str, taken: Any, refused: Any) -> Check:
    """The value that asks for nothing is taken and changes nothing, another is refused."""

    def check(ask: Callable[..., Any]) -> bool:
        answer = ask(**{name: refused})
        said = (answer.status_code, answer.json()["error"]["param"])
        return said == (400, name) and text(ask(**{name: taken})) == text(ask())

    return check


def calls_tool(ask: Callable[..., Any], **more: Any) -> bool:
    message = ask(tools=[TOOL], tool_choice="required", max_tokens=100, **more).json()["choices"][0]["message"]
    return [call["function"]["name"] for call in message["tool_calls"]] == ["find"]


def is_reused(ask: Callable[..., Any]) -> bool:
    given = {"documents": [document(1, 2)]}
    return [ask(**given).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for _ in range(2)] == [
        False,
        True,
    ]


def stops(ask: Callable[..., Any]) -> bool:
    whole = text(ask())
    return text(ask(stop=[whole[2:4]])) == whole[: whole.index(whole[2:4])]


def streams(ask: Callable[..., Any]) -> bool:
    return ask(stream=True).text.rstrip().endswith("data: [DONE]")


def streams_usage(ask: Callable[..., Any]) -> bool:
    lines = ask(stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
    return usage["completion_tokens"] == tokens(ask())


BOTH: dict[str, Check] = {
    "model": lambda ask: ask(model="gpt-9").status_code == 404,
    "temperature": differs(temperature=2.0, seed=5),
    "seed": is_repeatable,
    "top_p": is_greedy(top_p=1e-6),
    "top_k": is_greedy(top_k=1),
    "min_p": is_greedy(min_p=1.0),
    "repetition_penalty": differs(repetition_penalty=5.0),
    "presence_penalty": differs(presence_penalty=2.0),
    "frequency_penalty": differs(frequency_penalty=2.0),
    "logit_bias": differs(logit_bias={"60": 100}),
    "max_tokens": lambda ask: tokens(ask(max_tokens=3)) == 3,
    "n": lambda ask: len(ask(n=2).json()["choices"]) == 2,
    "stop": stops,
    "stream": streams,
    "stream_options": streams_usage,
    "documents": is_reused,
    "user": lambda ask: text(ask(user="somebody")) == text(ask()),  # a name for the client's own use
}
OF_CHAT: dict[str, Check] = {
    "messages": lambda ask: text(ask(messages=[{"role": "user", "content": "Other."}])) != text(ask()),
    "max_completion_tokens": lambda ask: tokens(ask(max_tokens=None, max_completion_tokens=3)) == 3,
    "logprobs": lambda ask: len(ask(logprobs=True).json()["choices"][0]["logprobs"]["content"]) == TOKENS,
    "top_logprobs": lambda ask: (
        len(ask(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 4
    ),
    "tools": calls_tool,
    "tool_choice": calls_tool,
    "parallel_tool_calls": lambda ask: calls_tool(ask, parallel_tool_calls=False),
    "response_format": lambda ask: (
        json.loads(text(ask(response_format=FORM, logit_bias=None, max_tokens=60)))["city"] in ("Rome", "Oslo")
    ),
    "store": takes_only("store", False, True),
    "service_tier": takes_only("service_tier", "auto", "priority"),
    "modalities": takes_only("modalities", ["text"], ["audio"]),
}
OF_TEXT: dict[str, Check] = {
    "prompt": lambda ask: len(ask(prompt=["a", "b"]).json()["choices"]) == 2,
    "logprobs": lambda ask: len(ask(logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"][0]) == 2,
    "echo": takes_only("echo", False, True),
    "suffix": takes_only("suffix", "", "and then"),
    "best_of": takes_only("best_of", 1, 2),
}
PROMPT = f"Read.\n\n{document(1, 2)}\n\nWhat?"


def asking(server: LiveServer, path: str, said: dict[str, Any]) -> Callable[..., Any]:
    """Of answers that do not end by themselves."""
    never = {str(token): -100 for token in server.engine.eos_token_ids}
    usual = {"model": "tiny", "max_tokens": TOKENS, "logit_bias": never, **said}
    return lambda **more: server.post(path, usual | more)


@pytest.fixture
def ask_chat(server: LiveServer) -> Callable[..., Any]:
    return asking(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})


@pytest.fixture
def ask_text(server: LiveServer) -> Callable[..., Any]:
    return asking(server, "/v1/completions", {"prompt": PROMPT})


def test_every_field_of_ours_has_a_check():
    assert set(ChatBody.model_fields) == {*BOTH, *OF_CHAT}
    assert set(CompletionBody.model_fields) == {*BOTH, *OF_TEXT}


@pytest.mark.parametrize("name", [*BOTH, *OF_CHAT])
def test_chat_honours(ask_chat: Callable[..., Any], name: str):
    assert (BOTH | OF_CHAT)[name](ask_chat)


@pytest.mark.parametrize("name", [*BOTH, *OF_TEXT])
def test_completions_honour(ask_text: Callable[..., Any], name: str):
    assert (BOTH | OF_TEXT)[name](ask_text)


def test_all_other_parameters_of_openai_are_refused_by_name(server: LiveServer, ask_chat: Any, ask_text: Any):
    """Those of later versions of the client included, whatever they are given."""
    routes = ((ask_chat, CHAT, ChatBody), (ask_text, TEXT, CompletionBody))
    for ask, known, ours in routes:
        assert len(known) > 15
        for name in sorted(set(known) - set(ours.model_fields)):
            for value in ("x", 1, {"a": "b"}, ["c"], True):
                answer = ask(**{name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    for name in sorted(set(EMBEDDINGS) - set(EmbeddingsBody.model_fields)):
        answer = server.post("/v1/embeddings", {"model": "tiny", "input": "x", name: 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert server.engine.stats().requests == 0
