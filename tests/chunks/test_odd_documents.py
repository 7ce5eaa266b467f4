"""Documents of any script that contain each other, overlap, repeat, are empty, or are the question: ids are the
tokenizer's own, and a cold answer is a warm one to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_helpers import located

from kvboost_rag import KVBoost
from kvboost_rag.chunks.served import ServedPrompt
from kvboost_rag.config import EncodingConfig, GenerationParams
from kvboost_rag.datamodels import SegmentKind

MakeEngine = Callable[..., KVBoost]
LONG = "The keeper of the lighthouse was Marta Lind, the first woman to hold the office on this coast."
NEXT = "woman to hold the office on this coast. She kept the log in a small blue book until the war."
HAN = "灯塔建于一八五一年。一八九〇年的看守人是玛尔塔·林德，她是第一位担任此职的女性。"
THAI = "ประภาคารสร้างขึ้นในปีหนึ่งพันแปดร้อยห้าสิบเอ็ดและยังคงใช้งานอยู่จนถึงทุกวันนี้"
SETS: dict[str, tuple[list[str], str]] = {
    "nested": ([LONG, LONG[:59], LONG[4:], "Marta Lind"], f"So:\n\n{LONG}\n\n{LONG[:60]}\n\n{LONG[4:]}\n\nWho?"),
    "overlapping": ([LONG, NEXT], f"So:\n\n{LONG[:-39]}{NEXT}\n\n{LONG}\n\nWho?"),
    "repeated": ([LONG, LONG, f" {LONG}\n"], f"So:\n\n{LONG}\n\n{LONG}{LONG}\n\nWho?"),
    "empty": (["", " \n\t", LONG, "\u00a0", "."], f"So:\n\n{LONG}\n\n\n\n \n\nWho."),
    "the question": ([LONG, f"{LONG} Who?"], f"{LONG} Who?"),
    "everything": ([f"So:\n\n{LONG}\n\nWho?"], f"So:\n\n{LONG}\n\nWho?"),
    "Han, glued": ([HAN, LONG], f"据说{HAN}{LONG}{HAN}是谁？"),
    "Thai, glued": ([THAI, LONG], f"ว่า{THAI}และ{THAI} {LONG} ใคร"),
    "in words": ([LONG[4:40], LONG[4:39]], f"So:\n\n{LONG}\n\nWho?"),
    "one char": (["a", "é", "🙂", "灯"], "a é 🙂 灯 a question?"),
    "combining": (
        [LONG.replace("a", "a\u0301"), LONG],
        f"So:\n\n{LONG.replace('a', 'a' + chr(0x301))}\n\n{LONG}\n\nWho?",
    ),
}


def check_ids(engine: KVBoost, prompt: str, found: ServedPrompt) -> None:
    stock = engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert list(found.token_ids) == stock
    assert found.segments[0].start == 0
    assert all(left.end == right.start for left, right in pairwise(found.segments))
    for document in found.documents:
        assert document.record is not None
        start, ids = document.segment.chunk_start, document.segment.token_ids
        assert document.record.token_ids[start : start + len(ids)] == ids
        assert len(document.record.token_ids) >= engine.encoding.min_chunk_tokens


def check_cold_is_warm(engine: KVBoost, prompt: str, repair: str = "query", **options: Any) -> None:
    cold = engine.logits(prompt, (5, 6), repair=repair, strict=True, **options)
    warm = engine.logits(prompt, (5, 6), repair=repair, strict=True, **options)
    assert torch.equal(cold, warm)
    full, plain = (engine.logits(prompt, (5, 6), **way, **options) for way in ({"repair": "full"}, {"reuse": "off"}))
    torch.testing.assert_close(full, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("given", [True, False], ids=["given", "indexed"])
@pytest.mark.parametrize("name", sorted(SETS))
def test_odd_documents(engine: KVBoost, name: str, given: bool) -> None:
    documents, prompt = SETS[name]
    options = {"documents": documents} if given else {}
    if not given:
        engine.register(documents)
    check_ids(engine, prompt, located(engine, prompt, **options))
    check_cold_is_warm(engine, prompt, "query" if given else "none", **options)
    served = engine.generate(prompt, params=GenerationParams(max_new_tokens=2), strict=True, **options)
    assert served.usage.input_tokens == len(located(engine, prompt).token_ids)


def test_what_is_found_where(engine: KVBoost) -> None:
    def texts(name: str) -> list[str]:
        documents, prompt = SETS[name]
        found = located(engine, prompt, documents=documents).documents
        return [document.segment.text for document in found]

    assert texts("nested") == [LONG, LONG[4:]], "what ends inside a word is not found"
    assert texts("overlapping") == [LONG, LONG], "the longer of two that overlap"
    assert texts("repeated") == [LONG] * 3
    assert texts("empty") == [LONG]
    assert texts("the question") == [f"{LONG} Who?"]
    assert set(texts("Han, glued")) == {HAN, LONG}
    assert set(texts("Thai, glued")) == {THAI, LONG}
    assert texts("in words") == [LONG[4:39].strip()]
    assert texts("one char") == []


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_at_the_edge_of_the_least_chunk(make_engine: MakeEngine, num_tokens: int) -> None:
    engine = make_engine(encoding=EncodingConfig(min_chunk_tokens=16))
    words = LONG.split(" ")
    text = next(t for n in range(1, len(words)) if len(engine.tokens.ids(t := " ".join(words[:n]))) >= num_tokens)
    while len(engine.tokens.ids(text)) > num_tokens:
        text = text[1:].strip()
    prompt = f"So:\n\n{text}\n\nWho?"
    length = len(engine.tokens.document_ids(text))
    found = located(engine, prompt, documents=[text])
    check_ids(engine, prompt, found)
    assert bool(found.documents) == (length >= 16)
    check_cold_is_warm(engine, prompt, documents=[text])


@pytest.mark.parametrize("seed", range(3))
def test_random_texts_of_many_scripts(engine: KVBoost, seed: int) -> None:
    draw = random.Random(seed)
    odd = [
        "ﬁn",
        "\u200d",
        "🙂",
        "👩\u200d🚀",
        "e\u0301",
        "\r\n",
        "\n\n",
        "\t",
        "ß",
        "İ",
        "कि",
        "한국어",
        "שלום",
        "مرحبا",
    ]
    odd += [">", "_x", "1.5", "\u00a0", "\ufeff", "\u2028"]
    pieces = [*LONG.split(" "), *HAN, *THAI[:30], *odd, "<|im_end|"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(8, 40))) for _ in range(6)]
    cuts = [text[draw.randint(0, 5) : draw.randint(15, 60)] for text in texts]
    glue = draw.choice(["", " ", "\n\n", "</d><d>"])
    prompt = "So:" + glue + glue.join(draw.choices([*texts, *cuts], k=7)) + glue + "Who?"
    documents = [*texts, *cuts]
    found = located(engine, prompt, documents=documents)
    joined = engine.tokens.decode(found.token_ids)
    assert joined == prompt
    if "<|im_end|>" not in prompt:
        check_ids(engine, prompt, found)
    else:
        assert engine.tokenizer.eos_token_id not in found.token_ids or "<|im_end|>" not in "".join(documents)
    check_cold_is_warm(engine, prompt, documents=documents)
    assert all(s.kind is not SegmentKind.DOCUMENT or s.record for s in found.segments)
