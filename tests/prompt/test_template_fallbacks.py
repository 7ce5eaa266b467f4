"""What chat templates drop or refuse reaches the prompt all the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvboost_rag.prompt.chat_template import render_messages, template_abilities

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {"type": "object"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c12345678", "type": "function", "function": {"name": "look_up", "arguments": {"q": "who"}}}
        ],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": "c12345678", "content": "Ada Korr."},
]
PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('user', 'assistant') or (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
)
FULL = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m['role'] }}]"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)


def _tokenizer(tiny_tokenizer: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [PLAIN, STRICT, FULL])
def test_everything_is_in_the_prompt(tiny_tokenizer: Any, template: str) -> None:
    prompt = render_messages(_tokenizer(tiny_tokenizer, template), CONVERSATION, tools=[TOOL])
    for text in ("Be brief.", "Who?", "look_up", '"q": "who"', "Ada Korr.", "Find."):
        assert text in prompt
    assert "None" not in prompt


def test_a_template_that_knows_it_all_is_left_alone(tiny_tokenizer: Any) -> None:
    tokenizer = _tokenizer(tiny_tokenizer, FULL)
    ours = render_messages(tokenizer, CONVERSATION, tools=[TOOL])
    assert ours == tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert "<tool_call>" not in ours


def test_abilities_follow_the_template(tiny_tokenizer: Any) -> None:
    tokenizer = _tokenizer(tiny_tokenizer, PLAIN)
    assert not template_abilities(tokenizer).tools
    tokenizer.chat_template = FULL
    assert template_abilities(tokenizer).tools


def test_plain_conversations_do_not_change(tiny_tokenizer: Any) -> None:
    tokenizer = _tokenizer(tiny_tokenizer, PLAIN)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert render_messages(tokenizer, messages) == "[system]S\n[user]U\n"
