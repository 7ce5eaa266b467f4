"""What every chunker promises, and what each cuts at. Tokens are words here, so that sizes can be read off."""

import hashlib
import json
import re
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.indexing.chunking import CodeChunker, FixedChunker, SemanticChunker, language_of
from kvboost_rag.indexing.chunking.code import nesting_depths
from kvboost_rag.indexing.chunking.json_values import json_spans
from kvboost_rag.indexing.chunking.markdown import prose_units


def count_words(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


def embed_topics(texts):
    """Texts that name the same topic word are alike; anything else is told apart by its hash."""
    vectors = np.full((len(texts), 8), 0.01, dtype=np.float32)
    for row, text in zip(vectors, texts, strict=True):
        topic = re.search(r"copper|whale|violin", text)
        name = topic.group() if topic else text
        row[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 8] += 1
    return vectors


def semantic(**settings):
    return SemanticChunker(count_words, embed_topics, **{"min_tokens": 6, "max_tokens": 40} | settings)


CHUNKERS = {
    "fixed": FixedChunker(count_words, 64),
    "fixed_no_slide": FixedChunker(count_words, 64, slide_tokens=0),
    "whole": FixedChunker(count_words, None),
    "semantic": semantic(),
    "python": CodeChunker(count_words, "python", min_tokens=5, max_tokens=40),
    "indentation": CodeChunker(count_words, None, min_tokens=5, max_tokens=40),
}
LIMITS = {"fixed": 64, "fixed_no_slide": 64, "semantic": 40, "python": 40, "indentation": 40}

PROSE = ["Copper is mined. ", "One (two) three? ", "é🙂e\u0301", "\u200d", "word " * 50, "\u2028", "\n\n", "\r\n"]
MARKUP = ["- item one\n", "# Head\n", "| a | b |\n|---|---|\n| c | d |\n", "```\ncode {\n\n}\n```\n"]
SYNTAX = ["    x = 1\n", "def f(x):\n", "class A:\n    '''\n", '{"a": [1, 2]}', "[{"]
pieces = st.sampled_from(PROSE + MARKUP + SYNTAX)


@pytest.mark.parametrize("name", sorted(CHUNKERS))
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(pieces | st.text(max_size=20), max_size=12))
def test_every_character_is_in_one_chunk(name, parts):
    text = "".join(parts)
    chunks = CHUNKERS[name].split(text)
    at = 0
    for chunk in chunks:
        assert chunk.start >= at
        assert text[at : chunk.start].strip() == ""
        assert text[chunk.start : chunk.end] == chunk.text == chunk.text.strip() != ""
        assert count_words(chunk.text) <= LIMITS.get(name, len(text))
        at = chunk.end
    assert text[at:].strip() == ""
    assert CHUNKERS[name].split(text) == chunks


@pytest.mark.parametrize("name", sorted(CHUNKERS))
def test_text_only(name):
    with pytest.raises(TypeError, match="bytes"):
        CHUNKERS[name].split(b"text")
    assert CHUNKERS[name].split(" \n") == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedChunker(count_words, 100), "chunk_tokens=100"),
        (lambda: FixedChunker(count_words, 64, slide_tokens=64), "slide_tokens=64"),
        (lambda: semantic(min_tokens=50), "min_tokens=50"),
        (lambda: semantic(percentile=101), "percentile=101"),
        (lambda: semantic(window=0), "window=0"),
        (lambda: CodeChunker(count_words, max_tokens=0), "max_tokens=0"),
    ],
)
def test_settings_that_cannot_be_used(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_fixed_slides_back_to_a_sentence_end_then_a_space():
    sentences = ["One two three four five six seven."] * 20  # 8 tokens each: 64 is 8 sentences
    chunks = FixedChunker(count_words, 64).split(" ".join(["Start", *sentences]))
    assert all(chunk.text.endswith("seven.") for chunk in chunks)
    assert [count_words(chunk.text) for chunk in chunks] == [57, 64, 40]
    unbroken = FixedChunker(count_words, 64).split("word " * 200)
    assert {chunk.text[-4:] for chunk in unbroken} == {"word"}


def test_fixed_does_not_part_a_letter_from_its_accent():
    text = "e\u0301" * 300
    chunks = FixedChunker(len, 64).split(text)
    assert all(chunk.text.startswith("e") for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == text


def test_semantic_cuts_where_the_subject_changes():
    copper = "The copper price rose. A copper mine opened. More copper was sold."
    whale = "A whale was seen. That whale sang. Another whale answered."
    chunks = semantic(percentile=20).split(f"{copper} {whale} {copper}")
    assert [chunk.text for chunk in chunks] == [copper, whale, copper]


def test_semantic_breaks_an_oversized_subject_at_its_weakest_gap():
    copper, whale = "The copper price rose again. ", "A whale was seen near here. "
    chunks = semantic(percentile=0, window=1, max_tokens=40).split(copper * 4 + whale * 4)
    assert [set(re.findall("copper|whale", chunk.text)) for chunk in chunks] == [{"copper"}, {"whale"}]


JSON = json.dumps({"name": "A. B. Copper", "list": [{"k": f"One. Two {i}."} for i in range(5)], "n": None}, indent=1)
MARKDOWN = f"""# Whales

Dr. Smith saw one. It sang, e.g. at night. Here is {{"msg": "Hello. World. All.", "n": [1, 2]}} inline. Then it left.

- first item. It has two sentences.
  And goes on.

  With a paragraph. Of its own.
- second item. Short.

| name | sound |
|---|---|
| blue | low. Very low. |
| beluga | high. Very. |

```python
def f():
    return "Done. Over."

# tail. end.
```

{JSON}

Last words. The end.
"""
WHOLE = [
    "- first item. It has two sentences.\n  And goes on.\n\n  With a paragraph. Of its own.",
    "- second item. Short.",
    "| blue | low. Very low. |",
    "| beluga | high. Very. |",
    MARKDOWN[MARKDOWN.index("```python") : MARKDOWN.rindex("```") + 3],
    '{"msg": "Hello. World. All.", "n": [1, 2]}',
    "Dr. Smith saw one.",
]


@pytest.mark.parametrize("size", [30, 40, 60, 200])
def test_semantic_never_cuts_inside_a_unit(size):
    chunks = semantic(min_tokens=0, max_tokens=size, percentile=100).split(MARKDOWN)
    for whole in WHOLE:
        assert any(whole in chunk.text for chunk in chunks), whole
    for chunk in chunks:
        assert not chunk.text.endswith("# Whales"), "a heading is parted from its text"


def test_blank_lines_inside_json_part_nothing():
    value = '{\n "a": "One thing.",\n\n "b": ["x",\n\n  "y"]\n}'
    text = f"Before it.\n\n{value}\n\nAfter it."
    units = [text[unit.start : unit.end].strip() for unit in prose_units(text)]
    assert units == ["Before it.", value, "After it."]


def test_too_large_json_is_cut_between_members_only():
    members = [json.dumps({"k": f"One. Two {i}."}) for i in range(5)]
    chunks = semantic(min_tokens=0, max_tokens=30).split(JSON)
    assert len(chunks) > 2
    for member in members:
        flat = re.sub(r"\s", "", member)
        assert any(flat in re.sub(r"\s", "", chunk.text) for chunk in chunks)
    assert any('"A. B. Copper"' in chunk.text for chunk in chunks)


def test_json_in_text():
    text = 'see [1] and {"a": {"b": 2}} but not {x} or [[ nor "[3'
    assert [text[a:b] for a, b in json_spans(text)] == ["[1]", '{"a": {"b": 2}}']
    assert json_spans("[" * 5000) == []


SOURCE = textwrap.dedent('''
    """Module. Two sentences."""
    import os

    # Above the function.
    @decorated
    def first(a,
              b):
        """Doc.

    unindented line of a string
        """
        if a:
            return b

        return a


    class Second:
        """Class doc."""

        def one(self):
            return 1

        def two(self):
            value = [
                1,
                2,
            ]
            return value
''').lstrip()


def test_code_is_cut_between_definitions():
    chunks = CodeChunker(count_words, "python", min_tokens=12, max_tokens=60).split(SOURCE)
    assert [chunk.text.splitlines()[0] for chunk in chunks] == [
        '"""Module. Two sentences."""',
        "# Above the function.",
        "class Second:",
    ]


def test_a_large_class_is_cut_between_methods():
    chunks = CodeChunker(count_words, "python", min_tokens=8, max_tokens=25).split(SOURCE[SOURCE.index("class") :])
    assert [chunk.text.splitlines()[0].strip() for chunk in chunks] == ["class Second:", "def two(self):"]


def test_depths_by_grammar_and_by_indentation():
    starts = [match.start() for match in re.finditer(r"^", SOURCE, re.MULTILINE)][: SOURCE.count("\n")]
    lines = SOURCE.splitlines()
    by_grammar = dict(zip(lines, nesting_depths(SOURCE, starts, "python"), strict=True))
    by_indent = dict(zip(lines, nesting_depths(SOURCE, starts, None), strict=True))
    assert by_grammar["class Second:"] == by_indent["class Second:"] == 0
    assert by_grammar["unindented line of a string"] > by_grammar["    if a:"], "a grammar knows strings"
    assert by_indent["unindented line of a string"] == 0
    assert by_grammar["    def two(self):"] < by_grammar["        return value"]
    assert by_grammar["@decorated"] > 0, "a comment stays with the line after it"


def test_a_missing_grammar_falls_back_to_indentation(caplog):
    chunks = CodeChunker(count_words, "no_such_grammar", min_tokens=5, max_tokens=60).split(SOURCE)
    assert chunks == CodeChunker(count_words, None, min_tokens=5, max_tokens=60).split(SOURCE)
    assert "pip install tree-sitter tree-sitter-no-such-grammar" in caplog.text


def test_language_by_file_name():
    assert language_of("a/b.PY") == "python"
    assert language_of("notes.md") is None
