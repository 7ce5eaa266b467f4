"""Short texts for tests on tiny models: distinct, of odd lengths."""

from __future__ import annotations

SUBJECTS = ["store", "index", "prompt", "buffer", "query", "rotary table", "catalog", "worker", "anchor", "suffix"]


def document(number: int, sentences: int = 3) -> str:
    """A document about nothing in particular; another number or length gives another text."""
    parts = [
        f"Document {number}, line {i}: the {SUBJECTS[(number + i) % len(SUBJECTS)]} holds {number * 37 + i} entries."
        for i in range(sentences)
    ]
    return " ".join(parts)


def prompt(documents: list[str], question: str = "Which store is full?") -> str:
    """What a stock RAG chain would send: head, documents, question."""
    return "\n\n".join(["Answer from the documents.", *documents, f"Question: {question}\nAnswer:"])
