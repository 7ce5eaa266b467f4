"""Evaluation prompts: question files, needles, bugs in real packages, conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.bugs import make_bugs
from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.corpus import pydoc_corpus
from kvboost_rag.measure.calibrate import EvalQuestion, read_questions

CountTokens = Callable[[str], int]

NEEDLE_LENGTHS = (4, 8, 16)
"""Documents of 128 tokens in the prompt."""
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CITIES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Turin", "Bergen", "Lima", "Osaka", "Cork")


@dataclass(frozen=True)
class Case:
    """One prompt. `choices`: the letters of a multiple-choice question; it is then scored by the likeliest of them
    as the first token. `traits` go into the results (depth, length, turn)."""

    dataset: str
    name: str
    documents: tuple[str, ...]
    answers: tuple[str, ...]
    conversation: tuple[tuple[str, str], ...]
    choices: tuple[str, ...] = ()
    traits: tuple[tuple[str, Any], ...] = ()

    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.conversation]


def of_question(dataset: str, number: int, question: EvalQuestion) -> Case:
    turns = tuple((m["role"], m["content"]) for m in question.messages())
    return Case(dataset, f"{dataset}-{number}", question.documents, question.answers, turns)


def from_file(path: Path, count: int) -> list[Case]:
    """Questions of a HotpotQA- or MuSiQue-like file."""
    name = path.stem.partition("_")[0]
    return [of_question(name, i, q) for i, q in enumerate(read_questions(path)[:count])]


def needles(count_tokens: CountTokens, count: int, seed: int = 0) -> list[Case]:
    """A sentence with a number hidden at some depth among reference texts; the question asks for the number."""
    chunker = FixedChunker(count_tokens, chunk_tokens=128)
    hay = [chunk.text for source in pydoc_corpus().texts for chunk in chunker.split(source.text)]
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        length = NEEDLE_LENGTHS[i % len(NEEDLE_LENGTHS)]
        depth = NEEDLE_DEPTHS[i // len(NEEDLE_LENGTHS) % len(NEEDLE_DEPTHS)]
        city, number = draw.choice(CITIES), str(draw.randint(1000, 9999))
        documents = draw.sample(hay, length)
        place = min(length - 1, int(depth * length))
        text = documents[place]
        documents[place] = f"{text}\n\nThe access code of the archive in {city} is {number}."
        question = EvalQuestion(
            f"What is the access code of the archive in {city}?", tuple(documents), (number,), (place,)
        )
        case = of_question("needle", i, question)
        cases.append(Case(**(vars(case) | {"traits": (("documents", length), ("depth", depth))})))
    return cases


def bugs(count_tokens: CountTokens, count: int, seed: int = 0) -> list[Case]:
    """Which of four files holds the defect that a traceback describes?"""
    letters = ("A", "B", "C", "D")
    cases = []
    for i, bug in enumerate(make_bugs(count_tokens, count, len(letters), seed)):
        documents = tuple(f"File {letter}\n{source}" for letter, source in zip(letters, bug.sources, strict=True))
        task = "One of these four files holds a defect."
        question = f"Running the program ends like this:\n{bug.traceback}\nWhich file holds the defect, A, B, C or D?"
        body = "\n\n".join([task, *documents, question])
        turns = (
            ("system", "You are a careful programmer. Answer with one letter."),
            ("user", body),
        )
        cases.append(Case("bugs", f"bugs-{i}", documents, (letters[bug.place],), turns, letters))
    return cases


def conversations(path: Path, count: int, turns: int = 3, documents_per_turn: int = 4) -> list[Case]:
    """Several questions of a file asked one after the other, each with documents of its own; the last one counts."""
    questions = read_questions(path)
    cases = []
    for i in range(min(count, len(questions) // turns)):
        group = questions[i * turns : (i + 1) * turns]
        chosen = [_around_support(q, documents_per_turn) for q in group]
        messages: list[tuple[str, str]] = []
        for question, documents in zip(group, chosen, strict=True):
            if messages:
                messages.append(("assistant", group[len(messages) // 2 - 1].answers[0]))
            asked = EvalQuestion(question.question, documents).messages()
            messages += [(m["role"], m["content"]) for m in asked if m["role"] == "user" or not messages]
        case_documents = tuple(dict.fromkeys(d for documents in chosen for d in documents))
        cases.append(
            Case("turns", f"turns-{i}", case_documents, group[-1].answers, tuple(messages), (), (("turns", turns),))
        )
    return cases


def _around_support(question: EvalQuestion, count: int) -> tuple[str, ...]:
    """The documents that hold the answer and others, in the order of the file."""
    others = [i for i in range(len(question.documents)) if i not in question.support]
    kept = sorted([*question.support, *others][:count])
    return tuple(question.documents[i] for i in kept)


def rechunked(case: Case, count_tokens: CountTokens, chunk_tokens: int) -> Case:
    """The same prompt text with its documents reused in chunks of at most `chunk_tokens`."""
    chunker = FixedChunker(count_tokens, chunk_tokens=chunk_tokens)
    pieces = dict.fromkeys(chunk.text for text in case.documents for chunk in chunker.split(text))
    return Case(**(vars(case) | {"documents": tuple(pieces)}))


def reordered(case: Case, order: str) -> Case:
    """The case with its documents in another order: `reversed`, or `shuffled-SEED`.

    Results are kept apart from those in the retriever's order: the data set is called `hotpotqa, reversed`.

    Raises:
        ValueError: the documents do not stand one behind the other in one message.
    """
    documents = list(case.documents)
    if order == "reversed":
        documents.reverse()
    else:
        random.Random(order).shuffle(documents)
    before, after = ("\n\n".join(texts) for texts in (case.documents, documents))
    if not any(before in content for _, content in case.conversation):
        raise ValueError(f"{case.name}: documents that do not stand together have no other order")
    turns = tuple((role, content.replace(before, after)) for role, content in case.conversation)
    names = {"dataset": f"{case.dataset}, {order}", "name": f"{case.name}-{order}"}
    return Case(**(vars(case) | names | {"documents": tuple(documents), "conversation": turns}))


def edited(case: Case, seed: int = 0) -> tuple[Case, Sequence[str]]:
    """The case with one word of each document changed, and the texts before the edit."""
    draw = random.Random(seed)
    changed = {}
    for text in case.documents:
        words = text.split(" ")
        place = draw.randrange(len(words) // 2, len(words))
        words[place] = "seventeen" if words[place] != "seventeen" else "eighteen"
        changed[text] = " ".join(words)
    turns = []
    for role, content in case.conversation:
        for old, new in changed.items():
            content = content.replace(old, new)
        turns.append((role, content))
    after = Case(**(vars(case) | {"documents": tuple(changed.values()), "conversation": tuple(turns)}))
    return after, case.documents
