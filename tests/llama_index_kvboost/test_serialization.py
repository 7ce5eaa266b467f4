"""Dictionaries, pickles and copies: weights are shared, and the live object keeps what it has."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.kvboost import KVBoostLLM, KVWarm
from llama_index_kvboost.helpers import USER, MakeLLM

from kvboost_rag import KVBoost

FIELDS: dict[str, Any] = {
    "max_new_tokens": 5,
    "context_window": 1000,
    "generate_kwargs": {"repetition_penalty": 1.1},
    "query_wrapper_prompt": PromptTemplate("<{query_str}>"),
    "system_prompt": "Be brief.",
    "stopping_ids": [7],
    "recompute_ratio": 0.2,
    "namespace": "namespace",
}


def test_from_dict_of_to_dict(make_llm: MakeLLM) -> None:
    llm = make_llm(**FIELDS)
    data = llm.to_dict()
    again = KVBoostLLM.from_dict(data, engine=llm.engine)
    assert again.to_dict() == data
    assert again.query_wrapper_prompt.get_template() == "<{query_str}>"
    assert again.complete("Hi").text == llm.complete("Hi").text


def test_describing_a_model_makes_no_engine(tiny_loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda *a, **k: pytest.fail("an engine was made"))
    llm = KVBoostLLM(model=tiny_loaded.model, tokenizer=tiny_loaded.tokenizer)
    for use in (repr, str, pickle.dumps, copy.deepcopy, lambda m: m.to_dict(), lambda m: m.to_json()):
        use(llm)
    assert llm.model_dump()
    assert llm.to_payload()
    assert llm._spec.peek() is None


def test_equal_arguments_share_one_model(tiny_loaded: Any) -> None:
    model, tokenizer = tiny_loaded.model, tiny_loaded.tokenizer
    first = KVBoostLLM(model=model, tokenizer=tokenizer, max_new_tokens=3)
    second = KVBoostLLM(model=model, tokenizer=tokenizer, max_new_tokens=4)
    try:
        assert first.engine is second.engine
        assert first.engine.model is model
    finally:
        from kvboost_rag.adapters.registry import close_all

        close_all()


def test_pickle_in_one_process_shares_the_engine_and_leaves_the_llm_alone(make_llm: MakeLLM) -> None:
    lock = threading.Lock()

    def to_prompt(messages: Any) -> str:
        with lock:
            return "|".join(m.content for m in messages)

    llm = make_llm(messages_to_prompt=to_prompt, **FIELDS)
    before = llm.chat(USER).message.content
    again = pickle.loads(pickle.dumps(llm))
    assert again.engine is llm.engine
    assert again.to_dict() == llm.to_dict()
    assert llm.messages_to_prompt is to_prompt
    assert llm.chat(USER).message.content == before
    assert again.complete("Hi").text == llm.complete("Hi").text


def test_deep_copies_share_weights_and_callbacks_but_no_settings(make_llm: MakeLLM) -> None:
    counter = TokenCountingHandler()
    llm = make_llm(callback_manager=CallbackManager([counter]), **FIELDS)
    again = copy.deepcopy(llm)
    assert again.engine is llm.engine
    again.generate_kwargs["repetition_penalty"] = 9.0
    again.chat(USER)
    assert llm.generate_kwargs == {"repetition_penalty": 1.1}
    assert len(counter.llm_token_counts) == 1
    assert copy.copy(llm).engine is llm.engine


OTHER_PROCESS = """
import pickle, sys
llm = pickle.loads(bytes.fromhex(sys.stdin.read()))
assert "torch" not in sys.modules
print(llm.complete("The store holds").text.encode().hex())
llm.engine.close()
"""


def test_pickle_in_another_process_loads_by_name(tiny_loaded: Any, tmp_path: Any) -> None:
    tiny_loaded.model.save_pretrained(tmp_path)
    tiny_loaded.tokenizer.save_pretrained(tmp_path)
    llm = KVBoostLLM(model_name=str(tmp_path), dtype="float32", device_map=None, max_new_tokens=8)
    answer = llm.complete("The store holds").text
    llm.engine.close()
    script = f"import sys; sys.path[:0] = {sys.path!r}\n{OTHER_PROCESS}"
    found = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(llm).hex(), capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert bytes.fromhex(found.stdout.strip()).decode() == answer


def test_warmers_go_through_dictionaries_and_pickles(make_llm: MakeLLM) -> None:
    warm = KVWarm(llm=make_llm(), collection="c")
    again = pickle.loads(pickle.dumps(warm))
    assert again.llm.engine is warm.llm.engine
    assert again.to_dict() == warm.to_dict()
    assert copy.deepcopy(warm).llm is warm.llm
    parsed = KVWarm.from_dict(warm.to_dict())
    assert (parsed.collection, parsed.llm.max_new_tokens) == ("c", 8)
