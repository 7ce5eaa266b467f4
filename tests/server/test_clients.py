"""The clients that people have, over a real socket: chat, streams, tools, structured output, errors, leaving, many."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from corpus_texts import document
from node_modules import node_folder
from serving_helpers import LiveServer, wait_until

DOCUMENTS = [document(n, 2) for n in range(3)]
RAG = "Read this.\n\n" + "\n\n".join(DOCUMENTS) + "\n\nWhat is on line 2?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds a city.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
HELLO: Any = [{"role": "user", "content": "Hello there."}]


@pytest.fixture
def client(server: LiveServer) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_chat_stream_and_usage(server: LiveServer, client: Any):
    server.engine.warm(DOCUMENTS)
    messages = [{"role": "user", "content": RAG}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens_details.cached_tokens
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_openai_completions_of_several_prompts(server: LiveServer, client: Any):
    made = client.completions.create(model="tiny", prompt=["One", "Two"], n=2, max_tokens=3, logprobs=1)
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    assert made.choices[0].text == made.choices[1].text
    assert made.choices[0].logprobs.top_logprobs[0]
    single = [client.completions.create(model="tiny", prompt=p, max_tokens=3).usage for p in ("One", "Two")]
    assert made.usage.prompt_tokens == sum(u.prompt_tokens for u in single)


def test_openai_tools_and_structured_output(server: LiveServer, client: Any):
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=80
    )
    call = made.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    follow_up = [*HELLO, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model="tiny", messages=follow_up, tools=[TOOL], max_tokens=4).choices

    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=City, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_openai_json_object(server: LiveServer, client: Any):
    """A random model, pushed towards an early end, gives an object; streamed it is the same."""
    (end,) = server.engine.tokenizer.encode("}", add_special_tokens=False)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "An object, please."}], "max_tokens": 60}
    form = {"response_format": {"type": "json_object"}, "logit_bias": {str(end): 100}}
    free = client.chat.completions.create(**asked)
    answer = client.chat.completions.create(**asked, **form)
    assert not (free.choices[0].message.content or "").strip().startswith("{")
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, **form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content


def test_openai_errors_are_its_own_classes(client: Any):
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, presence_penalty=9)
    assert bad.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"made_up": 1})
    assert bad.value.code == "unsupported_parameter"


def test_openai_leaving_a_stream_frees_it(server: LiveServer, client: Any):
    bias = {str(server.engine.tokenizer.encode("Z", add_special_tokens=False)[0]): 100}
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1500, stream=True, logit_bias=bias)
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.app.state.kvboost.gate.inside == 0)


async def test_openai_many_at_once_get_their_own_answers(server: LiveServer):
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"Number {number}."}]
        made = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
        return str(made.choices[0].message.content)

    alone = [await ask(n) for n in range(6)]
    assert await asyncio.gather(*(ask(n) for n in range(6))) == alone
    await client.close()


def test_langchain_openai(server: LiveServer):
    langchain_openai = pytest.importorskip("langchain_openai")
    server.engine.warm(DOCUMENTS)
    model = langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=80, stream_usage=True, max_retries=0
    )
    whole = model.invoke(RAG)
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 0
    parts = list(model.stream(RAG))
    assert "".join(p.text for p in parts) == whole.text
    assert (
        sum(p.usage_metadata["output_tokens"] for p in parts if p.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )
    bound = model.bind_tools([TOOL], tool_choice="find")
    assert bound.invoke("Where?").tool_calls[0]["name"] == "find"
    found = model.with_structured_output({"title": "city", **SCHEMA}, method="json_schema").invoke("Where?")
    assert found["city"] in ("Rome", "Oslo")
    assert [m.text for m in model.batch([RAG, RAG])] == [whole.text] * 2


@pytest.mark.parametrize("chat", [False, True])
def test_llama_index_openai_like(server: LiveServer, chat: bool):
    module = pytest.importorskip("llama_index.llms.openai_like")
    server.engine.warm(DOCUMENTS)
    hits = server.engine.stats().store_hits
    llm = module.OpenAILike(
        model="tiny",
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=chat,
        temperature=0,
        max_tokens=4,
        max_retries=0,
    )
    whole = llm.complete(RAG).text
    assert list(llm.stream_complete(RAG))[-1].text == whole
    assert server.engine.stats().store_hits >= hits + 6  # in both routes


def test_litellm(server: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks another host for prices
    litellm = pytest.importorskip("litellm")
    server.engine.warm(DOCUMENTS)
    call: dict[str, Any] = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 4}
    messages = [{"role": "user", "content": RAG}]
    whole = litellm.completion(messages=messages, num_retries=0, **call)
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **call))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=messages, presence_penalty=9, num_retries=0, **call)


NODE_SCRIPT = Path(__file__).with_name("openai_client.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_npm_openai(server: LiveServer, tmp_path: Path):
    folder = node_folder("openai")
    if folder is None:
        pytest.skip("no node_modules with openai (scripts/fetch_tools.sh)")
    (tmp_path / "node_modules").symlink_to(folder)
    script = tmp_path / "client.mjs"
    script.write_text(NODE_SCRIPT.read_text())
    run = subprocess.run(
        ["node", str(script), f"{server.url}/v1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["streamed"] == seen["whole"]
    assert seen["usage"]["completion_tokens"] == seen["whole_usage"]["completion_tokens"]
    assert seen["tool"] == "find"
    assert seen["city"] in ("Rome", "Oslo")
    assert seen["error"] == [400, "presence_penalty"]
    wait_until(lambda: server.app.state.kvboost.gate.inside == 0)
