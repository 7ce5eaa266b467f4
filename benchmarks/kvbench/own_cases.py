"""Evaluation prompts that need no downloaded file: reference texts of the standard library, and short documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvbench.cases import Case, of_question
from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.corpus import pydoc_corpus
from kvboost_rag.indexing.embeddings import Embed
from kvboost_rag.measure.calibrate import EvalQuestion, read_questions

DATA = Path(__file__).parents[1] / "data"
CHUNK_TOKENS = 256
NUM_DOCUMENTS = 8


def reference_documents(count_tokens: Callable[[str], int]) -> list[list[str]]:
    """The chunks of each reference text, in order."""
    chunker = FixedChunker(count_tokens, chunk_tokens=CHUNK_TOKENS)
    return [[chunk.text.strip() for chunk in chunker.split(source.text)] for source in pydoc_corpus().texts]


def reference(count_tokens: Callable[[str], int], embed: Embed, count: int) -> list[Case]:
    """Questions over the reference texts, each with the eight most similar chunks in rank order.

    The file says which questions settings may be fitted on (`split` = `fit`) and which are reported (`test`).
    """
    chunks = list(dict.fromkeys(text for document in reference_documents(count_tokens) for text in document))
    records = json.loads((DATA / "reference_36.json").read_text())[:count]
    ranked = np.argsort(-(embed([r["question"] for r in records]) @ embed(chunks).T), axis=1)[:, :NUM_DOCUMENTS]
    cases = []
    for number, (record, places) in enumerate(zip(records, ranked, strict=True)):
        documents = tuple(chunks[place] for place in places)
        question = EvalQuestion(record["question"], documents, tuple(record["answers"]))
        case = of_question("reference", number, question)
        cases.append(Case(**(vars(case) | {"traits": (("split", record["split"]),)})))
    return cases


def short(count: int) -> list[Case]:
    """Two to six documents of 10 to 80 tokens, our own texts."""
    return [of_question("short", i, q) for i, q in enumerate(read_questions(DATA / "short_30.json")[:count])]
