"""Questions over source code of the standard library: where is a function defined, what does it return?

`benchmarks/data/code_40.json` names files and functions; their text is read from the interpreter that runs, so that
nothing is copied, and a question is left out where a version of Python has no such function or another answer. The file
is made by `python benchmarks/make_code_questions.py`.
"""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.bugs import Function, known_functions
from kvbench.cases import Case, of_question
from kvboost_rag.measure.calibrate import EvalQuestion

FILE = Path(__file__).parents[1] / "data" / "code_40.json"
LIBRARY = ("json", "email", "logging", "html", "http", "urllib", "xml", "unittest")
NUM_DOCUMENTS = 8
MAX_TOKENS = 300
MAX_ANSWER = 40
"""Characters of an expression that is asked for."""

Record = Mapping[str, Any]


def make_records(count_tokens: Callable[[str], int], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """As many questions of the one kind as of the other; the first half may be used to fit settings on."""
    draw, records = random.Random(seed), list[dict[str, Any]]()
    functions = [f for f in _library().values() if count_tokens(f.document) <= MAX_TOKENS]
    asked: set[str] = set()
    while len(records) < count:
        chosen = draw.sample(functions, NUM_DOCUMENTS)
        about = chosen[draw.randrange(NUM_DOCUMENTS)]
        distinct = len({f.name for f in chosen}) == len({f.module for f in chosen}) == NUM_DOCUMENTS
        kind = "where" if len(records) % 2 else "returns"
        answer = answer_to(kind, about)
        if not distinct or answer is None or about.name in asked or about.name.startswith("__"):
            continue
        asked.add(about.name)
        split = "fit" if len(records) < count // 2 else "test"
        documents = [f"{f.module}::{f.name}" for f in chosen]
        about_key = f"{about.module}::{about.name}"
        records.append({"kind": kind, "about": about_key, "answer": answer, "documents": documents, "split": split})
    return records


def answer_to(kind: str, function: Function) -> str | None:
    """The file, or what stands behind the only `return`; None where that is no answer to ask for."""
    if kind == "where":
        return function.module
    found = [node.value for node in ast.walk(ast.parse(function.source)) if isinstance(node, ast.Return)]
    if len(found) != 1 or found[0] is None or isinstance(found[0], (ast.Constant, ast.Name)):
        return None
    text = ast.unparse(found[0])
    return text if len(text) <= MAX_ANSWER and text in function.source else None


def code(count: int) -> list[Case]:
    """The file's questions that this version of Python has the sources for."""
    return [
        Case(**(vars(of_question("code", number, question)) | {"traits": (("split", record["split"]),)}))
        for number, record in enumerate(json.loads(FILE.read_text()))
        if (question := _question(record, _library())) is not None
    ][:count]


def _question(record: Record, library: Mapping[str, Function]) -> EvalQuestion | None:
    documents = [library[key] for key in record["documents"] if key in library]
    if len(documents) < len(record["documents"]):
        return None
    about = library[record["about"]]
    if answer_to(record["kind"], about) != record["answer"]:
        return None
    where = f"Which file defines the function {about.name}?"
    text = where if record["kind"] == "where" else f"Which expression does the function {about.name} return?"
    return EvalQuestion(text, _texts(documents), (record["answer"],), (documents.index(about),))


def _texts(functions: Sequence[Function]) -> tuple[str, ...]:
    return tuple(function.document for function in functions)


def _library() -> dict[str, Function]:
    """By file and name; names that a file defines more than once are left out."""
    keys = Counter(f"{f.module}::{f.name}" for f in known_functions())
    kept = (f for f in known_functions() if f.module.partition("/")[0] in LIBRARY)
    return {key: f for f in kept if keys[key := f"{f.module}::{f.name}"] == 1}
