"""Sequences of prompts as applications send them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.texts import QUESTIONS, SYSTEM, RagPrompt

ANSWER = "It is described in the passages above."


@dataclass(frozen=True)
class Workload:
    """`make(documents, per_prompt, count, seed)` gives `count` prompts of `per_prompt` documents each."""

    name: str
    what: str
    make: Callable[[Sequence[str], int, int, int], list[RagPrompt]]


def reordered(documents: Sequence[str], per_prompt: int, count: int, seed: int = 0) -> list[RagPrompt]:
    """The same documents each time, in another order, with another question."""
    draw = random.Random(seed)
    return [_ask(i, draw.sample(list(documents[:per_prompt]), per_prompt)) for i in range(count)]


def popular(documents: Sequence[str], per_prompt: int, count: int, seed: int = 0) -> list[RagPrompt]:
    """Documents drawn by Zipf's law (the n-th most popular with weight 1 / n), none twice in a prompt."""
    draw = random.Random(seed)
    weights = [1 / (n + 1) for n in range(len(documents))]
    prompts = []
    for i in range(count):
        keys = sorted(range(len(documents)), key=lambda n: draw.random() ** (1 / weights[n]), reverse=True)
        prompts.append(_ask(i, [documents[n] for n in keys[:per_prompt]]))
    return prompts


def edited(documents: Sequence[str], per_prompt: int, count: int, seed: int = 0) -> list[RagPrompt]:
    """The same documents in the same order; before each question one word of one of them has changed."""
    draw = random.Random(seed)
    prompts = []
    for i in range(count):
        current = list(documents[:per_prompt])
        place = draw.randrange(per_prompt)
        words = current[place].split(" ")
        words[draw.randrange(len(words))] = f"revision{i}"
        current[place] = " ".join(words)
        prompts.append(_ask(i, current))
    return prompts


def timestamped(documents: Sequence[str], per_prompt: int, count: int, seed: int = 0) -> list[RagPrompt]:
    """The same documents in the same order behind a system prompt that says what time it is."""
    return [
        RagPrompt(
            QUESTIONS[i % len(QUESTIONS)],
            tuple(documents[:per_prompt]),
            f"The time is {9 + i // 60:02d}:{(17 * i + seed) % 60:02d}. {SYSTEM}",
        )
        for i in range(count)
    ]


def turns(documents: Sequence[str], per_prompt: int, count: int, seed: int = 0) -> list[RagPrompt]:
    """One conversation; each turn brings a few documents, some of which an earlier turn had already."""
    draw = random.Random(seed)
    fresh_per_turn = max(1, per_prompt // count)
    history: list[tuple[str, str]] = []
    seen: list[str] = []
    prompts = []
    for i in range(count):
        seen += draw.sample([d for d in documents if d not in seen], fresh_per_turn)
        prompt = RagPrompt(QUESTIONS[i % len(QUESTIONS)], tuple(seen), history=tuple(history))
        prompts.append(prompt)
        history += [("user", prompt.asked), ("assistant", ANSWER)]
    return prompts


def _ask(number: int, documents: Sequence[str]) -> RagPrompt:
    return RagPrompt(QUESTIONS[number % len(QUESTIONS)], tuple(documents))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("reordered", "same documents, another order and question each time", reordered),
        Workload("popular", "documents drawn by popularity (Zipf), fresh questions", popular),
        Workload("edited", "one word of one document changed before each question", edited),
        Workload("timestamp", "a system prompt that changes with every request", timestamped),
        Workload("turns", "one conversation, new documents at every turn", turns),
    )
}
