"""LoRA adapters through the server: each is a model of its own, and none is served another's KV."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import typer
from adapter_helpers import with_two_adapters
from serving_helpers import LiveServer

from kvboost_rag import KVBoost
from kvboost_rag.cli.serve import parse_adapters
from kvboost_rag.models.adapters import with_adapters

DOCUMENTS = [f"Kiln {i} fired {i + 12} pots a day until the clay of the valley was used up." for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which kiln fired most?"])
MODELS = ("tiny", "red", "blue")


@pytest.fixture
def loaded(tiny_model: Any) -> Any:
    """At rest no adapter is active."""
    made = tiny_model("llama", num_hidden_layers=3)
    with_two_adapters(made).base_model.disable_adapter_layers()
    return made


@pytest.fixture
def server(start_server: Any, loaded: Any) -> Iterator[LiveServer]:
    with KVBoost(loaded) as engine:
        yield start_server(engine)


def ask(server: LiveServer, model: str, reuse: str = "true") -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "documents": DOCUMENTS}
    return server.post("/v1/completions", body, x_kvboost_report="true", x_kvboost_enabled=reuse).json()


def text(answer: Any) -> str:
    return answer["choices"][0]["text"]


def test_adapters_are_models(server: LiveServer) -> None:
    listed = server.get("/v1/models").json()["data"]
    assert [(m["id"], m.get("parent")) for m in listed] == [("tiny", None), ("blue", "tiny"), ("red", "tiny")]
    assert server.get("/v1/models/red").json()["parent"] == "tiny"
    refused = server.post("/v1/completions", {"model": "green", "prompt": "x"})
    assert refused.status_code == 404
    assert "'tiny', 'blue', 'red'" in refused.json()["error"]["message"]


def test_no_adapter_is_served_another_ones_kv(server: LiveServer, loaded: Any) -> None:
    plain = {model: text(ask(server, model, "false")) for model in MODELS}
    assert len(set(plain.values())) == 3
    for model in MODELS:
        answer = ask(server, model)
        assert answer["model"] == model
        assert answer["kvboost"]["hits"] == {"encoded": 3}
    for model in MODELS:
        assert ask(server, model)["kvboost"]["hits"] == {"approximate": 3}
    for model, names in (("tiny", ()), ("red", ("red",)), ("blue", ("blue",))):
        with with_adapters(server.engine.model, names), KVBoost(loaded) as alone:
            expected = alone.generate(PROMPT, documents=DOCUMENTS, strict=True, max_new_tokens=8).text
        assert text(ask(server, model)) == expected


def test_requests_at_once_each_get_their_own(server: LiveServer) -> None:
    one_by_one = {model: text(ask(server, model)) for model in MODELS}
    wanted = [*MODELS, *reversed(MODELS)] * 2
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda model: text(ask(server, model)), wanted))
    assert answers == [one_by_one[model] for model in wanted]


def test_the_option_names_each_adapter_once() -> None:
    assert parse_adapters(["a=./x", "b=./y=z"]) == (("a", "./x"), ("b", "./y=z"))
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(typer.BadParameter, match="NAME=FOLDER"):
            parse_adapters(wrong)
