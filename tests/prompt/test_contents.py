"""Where templates put the contents of messages, and that no document is found in what they write around them."""

import datetime

import pytest
from tokenizer_kinds import CHATML

from kvboost_rag.datamodels import SegmentKind
from kvboost_rag.prompt.contents import locate_contents
from kvboost_rag.prompt.segments import KnownTexts, split_prompt
from kvboost_rag.prompt.template_text import TemplateText

PREAMBLE = "You are a helpful assistant named Lumen, trained by nobody."
DATE_LINE = "Cutting Knowledge Date: December 2023"
TODAY = f"Today Date: {datetime.date.today():%Y}"
TEMPLATES = {
    "chatml": CHATML,
    "preamble": "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + PREAMBLE + "<|im_end|>\n{% endif %}"
    + CHATML,
    "date": (
        "{% set today = strftime_now('Today Date: %Y') if strftime_now is defined else 'Today Date: 2024' %}"
        "<|im_start|>system\n" + DATE_LINE + "\n{{ today }}\n\n"
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
        "{% set messages = messages[1:] %}{% endif %}<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
    ),
    "system moved": (
        "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}[INST] "
        "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
        "{{ m['content'] }} [/INST]{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
    ),
    "json": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | tojson }}<|im_end|>\n{% endfor %}"
        "{% for d in documents or [] %}<doc>{{ d['text'] }}</doc>\n{% endfor %}"
    ),
}  # fmt: skip
CONTENTS = [
    "system",
    "user",
    "assistant\n",
    "  Who kept it?  ",
    f"{PREAMBLE} {DATE_LINE}",
    'a "quoted" line\nand another é',
]
TOKENIZERS = ["byte_bpe", "llama_bpe", "metaspace_unigram", "wordpiece", "slow"]


@pytest.fixture(params=sorted(TEMPLATES))
def tokens(request, tokens_of):
    found = [tokens_of(name) for name in TOKENIZERS]
    old = [each.tokenizer.chat_template for each in found]
    for each in found:
        each.tokenizer.chat_template = TEMPLATES[request.param]
    yield found
    for each, template in zip(found, old, strict=True):
        each.tokenizer.chat_template = template


def conversation(*contents):
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def matched(tokens, messages, texts, **options):
    """`(start, end)` of the documents in the rendered prompt, and it."""
    rendered = tokens.render(messages, **options)
    spans = split_prompt(rendered, KnownTexts(), texts, TemplateText(rendered, messages, options, tokens))
    assert "".join(span.text for span in spans) == rendered
    found, at = [], 0
    for span in spans:
        if span.kind is SegmentKind.DOCUMENT:
            found.append((at, at + len(span.text)))
        at += len(span.text)
    return found, rendered


def test_every_content_is_found_whatever_it_reads_like(tokens):
    messages = conversation(*CONTENTS)
    for each in tokens:
        rendered = each.render(messages)
        places = locate_contents(rendered, messages, {}, each.render)
        assert places is not None
        unescaped = [rendered[a:b].replace("\\n", "\n").replace('\\"', '"').strip() for a, b in places]
        assert sorted(unescaped) == sorted(message["content"].strip() for message in messages)


@pytest.mark.parametrize("text", ["user", "system", "assistant", PREAMBLE, DATE_LINE, TODAY, "im_start", "INST", "doc"])
def test_nothing_that_the_template_writes_is_a_document(tokens, text):
    """Neither by the template's own writing nor where a message says the same elsewhere."""
    for each in tokens:
        assert matched(each, [{"role": "user", "content": "Who kept it?"}], [text])[0] == []
        content = f"They say: {text}, again."
        found, rendered = matched(each, [{"role": "user", "content": content}], [text])
        assert [rendered[start:end] for start, end in found] == [text]
        assert found[0][0] == rendered.index(content) + len("They say: ")


def test_a_document_across_a_contents_edge_hides_none_inside(tokens):
    document = "The keeper of the lighthouse was Marta Lind."
    for each in tokens:
        rendered = each.render([{"role": "user", "content": document}])
        across = rendered[max(0, rendered.index(document) - 7) : rendered.index(document) + len(document)].strip()
        found, _ = matched(each, [{"role": "user", "content": document}], [document, across])
        assert [rendered[start:end] for start, end in found] == [document]


def test_documents_and_descriptions_among_a_templates_arguments_are_contents(tokens_of, monkeypatch):
    for each in map(tokens_of, TOKENIZERS):
        monkeypatch.setattr(each.tokenizer, "chat_template", TEMPLATES["json"])
        document = "The keeper of the <doc>lighthouse</doc> was Marta Lind."
        messages = [{"role": "user", "content": "Who?"}]
        found, rendered = matched(each, messages, [document, "doc", "Who?"], documents=[document])
        assert [rendered[start:end] for start, end in found] == ["Who?", document]


def test_a_template_that_changes_contents_is_searched_as_a_whole(tokens_of, monkeypatch):
    each = tokens_of("byte_bpe")
    monkeypatch.setattr(each.tokenizer, "chat_template", CHATML.replace("m['content']", "m['content'].split('#')[0]"))
    document = "The keeper of the lighthouse was Marta Lind."
    messages = [{"role": "user", "content": f"{document} # aside"}]
    rendered = each.render(messages)
    assert locate_contents(rendered, messages, {}, each.render) is None
    found, _ = matched(each, messages, [document, "<|im_start|>user\nThe keeper of"])
    assert [rendered[start:end] for start, end in found] == [document]


def test_contents_in_blocks_are_one_content(tokens_of):
    each = tokens_of("byte_bpe")
    blocks = [{"type": "text", "text": "Who kept the lighthouse "}, {"type": "text", "text": "in 1890?"}]
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": None}]
    rendered = each.render(messages[:1])
    assert locate_contents(rendered, messages[:1], {}, each.render) is not None
    for text in ("Who kept the lighthouse", "kept the lighthouse in 1890"):
        found, _ = matched(each, messages[:1], [text, "user"])
        assert [rendered[start:end] for start, end in found] == [text]


def test_a_template_that_trips_over_marks_is_searched_as_a_whole(tokens_of, monkeypatch):
    each = tokens_of("byte_bpe")
    monkeypatch.setattr(each.tokenizer, "chat_template", "{{ [0, 1][messages[0]['content'] | int] }}" + CHATML)
    messages = [{"role": "user", "content": "1"}]
    rendered = each.render(messages)

    def trips(conversation, **options):
        return str([0, 1][int(conversation[0]["content"].removeprefix("KVBOOST")[0])])

    assert locate_contents(rendered, messages, {}, trips) is None
    assert matched(each, messages, ["user"])[0] != []


def test_a_content_that_holds_the_mark_itself(tokens_of):
    each = tokens_of("byte_bpe")
    messages = conversation("KVBOOSTCONTENT0E", "KVBOOSTCONTENT1E KVBOOSTCONTENTX0E", "user")
    rendered = each.render(messages)
    places = locate_contents(rendered, messages, {}, each.render)
    assert [rendered[start:end] for start, end in places] == [m["content"] for m in messages]
