"""Evaluation prompts: a question over documents, with accepted answers where they are known."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.corpus import pydoc_corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "You answer questions using the passages."
TASK = "Answer the question using only the passages below."

_FUNCTION = re.compile(r"^    ([a-z_]+)\([^)\n]*\)(?: -> [^\n]*)?\n        ([A-Z][^\n]{25,100})\.$", re.MULTILINE)
"""A function in a reference text and the sentence that says what it does."""


@dataclass(frozen=True)
class EvalQuestion:
    """One evaluation prompt. `support` are the indices of the documents that hold the answer, where known."""

    question: str
    documents: tuple[str, ...]
    answers: tuple[str, ...] = ()
    support: tuple[int, ...] = ()

    def messages(self, instruction: str = "Answer with a short phrase.") -> list[dict[str, str]]:
        """The prompt: nothing is put around a document, so that its text is found."""
        body = "\n\n".join([TASK, *self.documents, f"Question: {self.question}\n{instruction}"])
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": body}]


def prompt_of(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> str | Sequence[Mapping[str, str]]:
    """What a model is given: the messages, or for a base model, which has no chat template, their text to complete."""
    if getattr(tokenizer, "chat_template", None):
        return messages
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


def read_questions(path: str | Path) -> list[EvalQuestion]:
    """Questions of a file: a JSON list, or JSON lines, of `question`, `docs` (or `documents`) and, optionally,
    `answers` and `support`.

    Raises:
        ValueError: the file is not that; the message names the file and the record.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    try:
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor JSON lines: {error}") from None
    if not records:
        raise ValueError(f"{path} holds no questions")
    return [_question(record, f"{path}, record {number}") for number, record in enumerate(records)]


def _question(record: Any, where: str) -> EvalQuestion:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected an object with question and docs, got {type(record).__name__}")
    documents = record.get("docs", record.get("documents"))
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: question is missing or not text")
    if not isinstance(documents, list) or not documents or not all(isinstance(d, str) and d.strip() for d in documents):
        raise ValueError(f"{where}: docs must be a list of texts, none of them empty")
    answers = record.get("answers", record.get("answer", ()))
    answers = (answers,) if isinstance(answers, str) else tuple(map(str, answers))
    return EvalQuestion(question, tuple(documents), answers, tuple(record.get("support", ())))


def builtin_questions(
    count_tokens: Callable[[str], int], num_questions: int = 20, num_documents: int = 8, seed: int = 0
) -> list[EvalQuestion]:
    """Questions on reference texts of the standard library: which function does what this sentence says?

    The documents are chunks of 256 tokens: the one with the function, and others drawn from the corpus. Deterministic
    for one Python version and tokenizer.
    """
    chunker = FixedChunker(count_tokens, chunk_tokens=256)
    chunks = [chunk.text for source in pydoc_corpus().texts for chunk in chunker.split(source.text)]
    found = [(i, name, what) for i, chunk in enumerate(chunks) for name, what in _functions(chunk)]
    draw = random.Random(seed)
    chosen = draw.sample(found, min(num_questions, len(found)))
    return [_builtin(draw, chunks, found, one, num_documents) for one in chosen]


def _functions(chunk: str) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for m in _FUNCTION.finditer(chunk) if not m[1].startswith("_")]


def _builtin(
    draw: random.Random,
    chunks: Sequence[str],
    found: Sequence[tuple[int, str, str]],
    one: tuple[int, str, str],
    num_documents: int,
) -> EvalQuestion:
    index, name, what = one
    # A chunk that describes a function of the same words would be a second right answer.
    twins = {i for i, _, other in found if other == what}
    others = draw.sample([i for i in range(len(chunks)) if i not in twins], num_documents - 1)
    place = draw.randrange(num_documents)
    order = [*others[:place], index, *others[place:]]
    question = f"What is the name of the function or method that is described like this: {what}?"
    return EvalQuestion(question, tuple(chunks[i] for i in order), (name,), (place,))
