"""Real text that every machine has, cut to size, and the prompts made of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.corpus import PYDOC_MODULES, pydoc_corpus
from kvboost_rag.prompt.tokens import PromptTokens

SYSTEM = "You answer questions using the passages."
TASK = "Answer the question using only the passages below."
MORE_MODULES = (
    "argparse",
    "logging",
    "tarfile",
    "zipfile",
    "calendar",
    "decimal",
    "fractions",
    "subprocess",
    "unittest",
)
"""Beside the corpus of the demo, for benchmarks that need more chunks than it has."""

QUESTIONS = (
    "Which function inserts an item into a sorted list so that the list stays sorted, and what are its arguments?",
    "How does a program ask for a password without showing what is typed, and what happens without a terminal?",
    "What does the class that reads rows of a table into dictionaries take as its arguments, and what does it return?",
    "Which function gives the median of grouped data, and how is the width of the intervals passed to it?",
    "How can a function's results be remembered between calls, and how is that memory bounded or cleared again?",
    "How are lines of text wrapped to a given width, and which argument sets the indent of the first line?",
    "Which call times a small piece of code, how often does it run, and which clock does it use by default?",
)


@dataclass(frozen=True)
class RagPrompt:
    """A question over documents, in the order in which they stand in the prompt.

    `history`: earlier turns as (role, content); their documents are among `documents` too.
    """

    question: str
    documents: tuple[str, ...]
    system: str = SYSTEM
    history: tuple[tuple[str, str], ...] = ()

    def messages(self) -> list[dict[str, str]]:
        earlier = [{"role": role, "content": content} for role, content in self.history]
        return [{"role": "system", "content": self.system}, *earlier, {"role": "user", "content": self.asked}]

    @property
    def asked(self) -> str:
        """The last user message."""
        told = "\n\n".join(content for _, content in self.history)
        fresh = [document for document in self.documents if document not in told]
        return "\n\n".join([TASK, *fresh, f"Question: {self.question}\nAnswer with a short phrase."])

    def text(self, tokens: PromptTokens) -> str:
        """The prompt as every contender gets it: rendered by the chat template."""
        return tokens.render(self.messages())


def pydoc_documents(tokens: PromptTokens, num_documents: int, chunk_tokens: int = 256) -> list[str]:
    """Different chunks of reference texts, each nearly `chunk_tokens` long.

    Raises:
        ValueError: the texts do not hold that many chunks.
    """
    chunker = FixedChunker(tokens.count, chunk_tokens=chunk_tokens, slide_tokens=0)
    chunks: dict[str, None] = {}
    for name in (*PYDOC_MODULES, *MORE_MODULES):
        for source in pydoc_corpus([name]).texts:
            # The last chunk of a text is shorter than asked for.
            chunks.update(dict.fromkeys(chunk.text for chunk in chunker.split(source.text)[:-1]))
        if len(chunks) >= num_documents:
            return list(chunks)[:num_documents]
    raise ValueError(f"the reference texts hold {len(chunks)} chunks of {chunk_tokens} tokens, {num_documents} wanted")
