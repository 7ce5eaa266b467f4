"""Finding documents in prompts: the fast search against an obvious one, and the spans that come of it."""

import threading
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.datamodels import SegmentKind
from kvboost_rag.prompt.segments import KnownTexts, Match, canonical_text, split_prompt

PREFIX, DOCUMENT, TEXT, SUFFIX = SegmentKind.PREFIX, SegmentKind.DOCUMENT, SegmentKind.TEXT, SegmentKind.SUFFIX
LONG_A = "The harbour of Valparaíso was rebuilt after the earthquake of 1906."
LONG_B = "Copper mines in the north paid for most of it, says the report."


def known_of(*texts):
    known = KnownTexts()
    for i, text in enumerate(texts):
        known.add(text, f"key{i}")
    return known


def whole(matches):
    return [(m.start, m.end) for m in matches if m.whole]


def kinds_and_texts(spans):
    return [(span.kind, span.text) for span in spans]


def obvious_inside_word(prompt, at):
    if not 0 < at < len(prompt):
        return False
    left, right = prompt[at - 1 : at + 1]
    if right == "\u0301" or (left, right) == ("\r", "\n"):
        return True  # one character
    spaceless = "灯塔"
    return all(c == "_" or unicodedata.category(c)[0] in "LNM" for c in (left, right)) and not (
        left in spaceless or right in spaceless
    )


def obvious_find(prompt, texts):
    """Every text at every place, longest first, leftmost first, unless something is there already; over and over
    without the places inside words at which nothing began where something ended.
    """
    allowed = set(range(len(prompt) + 1))
    while True:
        taken = obvious_greedy(prompt, {canonical_text(t) for t in texts} - {""}, allowed)
        kept = list(taken)
        while alone := [m for m in kept if any(obvious_inside_word(prompt, e) and not shared(e, kept) for e in m)]:
            kept = [m for m in kept if m not in alone]
        if kept == taken:
            return sorted(taken)
        allowed &= {edge for match in kept for edge in match}


def shared(edge, matches):
    return any(start == edge for start, _ in matches) and any(end == edge for _, end in matches)


def obvious_greedy(prompt, texts, allowed):
    candidates = []
    for text in texts:
        for start in range(len(prompt)):
            edges = (start, start + len(text))
            inside = {edge for edge in edges if obvious_inside_word(prompt, edge)}
            if prompt.startswith(text, start) and (not inside or (len(text) >= 16 and inside <= allowed)):
                candidates.append(edges)
    taken = []
    for start, end in sorted(candidates, key=lambda c: (c[0] - c[1], c[0])):
        if all(end <= a or b <= start for a, b in taken):
            taken.append((start, end))
    return taken


# Few letters and long repeats, so that nesting, overlap and shared beginnings of every index width happen.
words = st.sampled_from(
    ["ab", "a ", "b", "é", "e\u0301", "\r\n", "🙂", "_", "ab" * 9, "ba " * 6, "aab" * 13, ".", "灯塔"]
)
phrases = st.lists(words, max_size=8).map("".join)


@settings(max_examples=400, deadline=None)
@given(texts=st.lists(phrases, max_size=8), extra=st.lists(phrases, max_size=3), glue=phrases, data=st.data())
def test_find_equals_the_obvious_search(texts, extra, glue, data):
    usable = [text for text in texts if canonical_text(text)]
    picked = data.draw(st.lists(st.sampled_from([*usable, *extra, glue, "x"]), max_size=6))
    prompt = glue + data.draw(st.sampled_from(["", " ", "a"])).join(picked)
    more = known_of(*[text for text in extra if canonical_text(text)])
    found = known_of(*usable).find(prompt, extra=more)
    assert whole(found) == obvious_find(prompt, usable + extra)
    assert all(left.end <= right.start for left, right in pairwise(found))
    unbound = obvious_greedy(prompt, {canonical_text(t) for t in usable + extra} - {""}, set(range(len(prompt) + 1)))
    covered = {i for m in found for i in range(m.start, m.end)}
    assert covered >= {i for start, end in unbound for i in range(start, end)}, "protected even inside words"


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(phrases, max_size=8), gone=st.sets(st.integers(0, 7)), prompt=st.lists(words, max_size=25))
def test_find_after_removal_equals_never_having_known(texts, gone, prompt):
    usable = list(dict.fromkeys(canonical_text(t) for t in texts if canonical_text(t)))
    known = known_of(*usable)
    for i in gone:
        assert known.remove(f"key{i}") == (i < len(usable))
    kept = [text for i, text in enumerate(usable) if i not in gone]
    assert len(known) == len(kept)
    assert whole(known.find("".join(prompt))) == obvious_find("".join(prompt), kept)


def test_thousands_behind_one_header_and_a_text_shorter_than_every_width():
    header = "Source: annual report of the port authority, chapter 3, confidential. " * 3
    texts = [f"{header}Paragraph {i} on cranes." for i in range(3000)]
    known = known_of(*texts, "ok")
    prompt = f"{texts[2999]}\n{texts[17]}\n{header}\nis that ok"
    assert [prompt[m.start : m.end] for m in known.find(prompt)] == [texts[2999], texts[17], "ok"]


def test_short_text_only_at_word_boundaries():
    known = known_of("art")
    assert known.find("party of artists, smart") == []
    assert known.find("modern art.") == [Match(7, 10, "key0")]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("", "", True),
        ("says: ", " ", True),
        ("(", ").", True),
        ("x", " ", False),
        ("", "s", False),
        ("", "_7", False),
        ("", "7", False),
        ("", "ен", False),
        ("说", "是", True),  # scripts without spaces between words
        ("ที่", "ไทย", True),
        ("は", "ト", True),
        ("ភា", "သာ", True),
        ("", "\u0301", False),  # a part of the character
        ("", "\u200d", False),
    ],
)
def test_long_texts_begin_and_end_at_word_boundaries_too(before, after, found):
    text = "harbour of Valparaíso, rebuilt after 1906"
    known = known_of(text)
    wanted = [Match(len(before), len(before) + len(text), "key0")] if found else []
    assert [m for m in known.find(before + text + after) if m.whole] == wanted


def keys_found(known, prompt):
    return [match.key for match in known.find(prompt) if match.whole]


def test_texts_side_by_side_need_no_boundary_between_them():
    one, two, three = "first of the three texts", "second of the three texts", "third of the three texts"
    known = known_of(one, two, three)
    assert keys_found(known, f"{one}{two}{three}") == ["key0", "key1", "key2"]
    assert keys_found(known, f"{one}{two}{three}s") == []
    assert keys_found(known, f"{one}{two}s {three}") == ["key2"]


def test_a_text_inside_a_word_hides_nothing():
    known = known_of("the keeper of the lighthouse", "keeper of the lighthouse was Marta", "keeper of the light")
    assert keys_found(known, "the keeper of the lighthouses") == []
    assert keys_found(known, "at the keeper of the lighthouse was Martas") == ["key0"]
    assert keys_found(known_of("ab cd ef gh ij kl mn", "ab cd ef gh ij k"), "ab cd ef gh ij kl mno") == []
    assert keys_found(known_of("ab cd ef gh ij kl mn", "ab cd ef gh ij"), "ab cd ef gh ij kl mno") == ["key1"]


def test_a_short_text_that_ends_inside_a_word_gives_way_to_a_shorter_one():
    known = known_of("newer art", "newer")
    assert known.find("a newer artist") == [Match(2, 7, "key1")]


def test_loser_of_an_overlap_gives_way_to_a_shorter_text_at_its_place():
    known = known_of("aaaa bbbb cccc dddd eeee", "eeee ffff gggg hhhh iiii jjjj", "aaaa bbbb cccc dddd")
    prompt = "aaaa bbbb cccc dddd eeee ffff gggg hhhh iiii jjjj"
    assert [(m.start, m.end, m.key) for m in known.find(prompt)] == [(0, 19, "key2"), (20, 49, "key1")]


def test_adding_again_replaces_the_key_and_removing_takes_all_texts_of_a_key():
    known = KnownTexts()
    known.add(LONG_A, "old")
    known.add(f"  {LONG_A}\n", "new")
    known.add(LONG_B, "new")
    assert len(known) == 2
    assert not known.remove("old")
    assert [m.key for m in known.find(LONG_A + LONG_B)] == ["new", "new"]
    assert known.remove("new")
    assert len(known) == 0
    assert known.find(LONG_A + LONG_B) == []


@pytest.mark.parametrize(
    ("text", "error"), [("", ValueError), (" \n", ValueError), (b"x", TypeError), (None, TypeError)]
)
def test_what_cannot_be_known(text, error):
    with pytest.raises(error):
        KnownTexts().add(text, "key")


def test_adding_while_finding():
    known, faults = known_of(LONG_A), []
    prompt = f"{LONG_B} {LONG_A} {LONG_B}"

    def find_many():
        try:
            for _ in range(300):
                assert any(prompt[m.start : m.end] == LONG_A for m in known.find(prompt))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=find_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(3000):
        known.add(f"{LONG_A} number {i}", str(i))
        known.remove(str(i - 1))
    for thread in threads:
        thread.join()
    assert not faults
    assert len(known) == 2


def test_spans_of_a_stuffed_prompt():
    prompt = f"Use this.\n\n{LONG_A}\n\n{LONG_B}\n\nWho paid?"
    spans = split_prompt(prompt, known_of(LONG_A, LONG_B))
    assert kinds_and_texts(spans) == [
        (PREFIX, "Use this.\n\n"),
        (DOCUMENT, LONG_A),
        (TEXT, "\n\n"),
        (DOCUMENT, LONG_B),
        (SUFFIX, "\n\nWho paid?"),
    ]
    assert [span.key for span in spans] == [None, "key0", None, "key1", None]


def test_documents_at_both_ends_and_side_by_side():
    spans = split_prompt(LONG_A + LONG_B + LONG_A, known_of(LONG_A, LONG_B))
    assert kinds_and_texts(spans) == [(DOCUMENT, LONG_A), (DOCUMENT, LONG_B), (DOCUMENT, LONG_A)]


def test_no_document_is_all_suffix():
    assert kinds_and_texts(split_prompt("  Hello?\r\n", KnownTexts())) == [(SUFFIX, "  Hello?\r\n")]


def test_prefix_of_another_document():
    known = known_of(LONG_A, f"{LONG_A} It took ten years.")
    spans = split_prompt(f"{LONG_A} It took ten years.\n{LONG_A} It took", known)
    assert [(s.key, s.kind) for s in spans] == [("key1", DOCUMENT), (None, TEXT), ("key0", DOCUMENT), (None, SUFFIX)]


def test_given_documents_only_add_candidates():
    known = known_of(LONG_A)
    prompt = f"{LONG_A}\n{LONG_B}\n?"
    spans = split_prompt(prompt, known, extra_texts=[f"\n{LONG_B}\n", LONG_A, "Not in there, at all.", "", "  "])
    assert [(s.kind, s.text, s.key) for s in spans] == [
        (DOCUMENT, LONG_A, "key0"),
        (TEXT, "\n", None),
        (DOCUMENT, LONG_B, None),
        (SUFFIX, "\n?", None),
    ]
    assert len(known) == 1
    assert kinds_and_texts(split_prompt("Who?", known, extra_texts=[LONG_B])) == [(SUFFIX, "Who?")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=5), st.lists(st.integers(0, 4), max_size=6), st.text(max_size=10))
def test_spans_joined_are_the_prompt(texts, order, glue):
    prompt = glue + "".join(texts[i] + glue for i in order if i < len(texts)) + "?"
    spans = split_prompt(prompt, KnownTexts(), extra_texts=texts)
    assert "".join(span.text for span in spans) == prompt
    assert all(span.text for span in spans)
    documents = [i for i, span in enumerate(spans) if span.kind is DOCUMENT]
    for i, span in enumerate(spans):
        if span.kind is DOCUMENT:
            assert span.text in {text.strip() for text in texts}
        elif not documents or i > documents[-1]:
            assert span.kind is SUFFIX
        else:
            assert span.kind is (PREFIX if i < documents[0] else TEXT)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", ValueError, "empty"),
        (None, TypeError, "NoneType"),
        (b"text", TypeError, "bytes"),
        (["x"], TypeError, "list"),
    ],
)
def test_prompts_that_cannot_be_answered(prompt, error, words):
    with pytest.raises(error, match=words):
        split_prompt(prompt, KnownTexts())


def test_one_string_is_no_list_of_documents():
    with pytest.raises(TypeError, match=r"\[text\]"):
        split_prompt("x", KnownTexts(), extra_texts="some document")
    with pytest.raises(TypeError, match="int"):
        split_prompt("x", KnownTexts(), extra_texts=[3])
