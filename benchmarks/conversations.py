"""Conversations: what each turn prefills, how soon its first token comes, how far it is from full prefill.

usage: python benchmarks/conversations.py [chat] [--turns 10] [--documents 6]
       python benchmarks/conversations.py agent       six steps, each with a tool's result behind it, no known document
       python benchmarks/conversations.py frameworks  LangChain's and LlamaIndex's RAG chats: other documents each turn
common: [--model bundled:smollm2] [--dtype float32]

`settled`: nobody asks before the last turn is settled. `at once`: the next turn comes before anything was settled.
`by hand`: transformers with one DynamicCache kept over the turns, cropped to what the new prompt shares with it; it has
the last answer's KV from decoding. All get the same messages: the answers are those of `settled`. Prefilled tokens are
those of the prompt that no cache held. A time runs from the messages to one token in the caller's hand: chat template,
tokenising, lookup, loading, repair and prefill included; ratios are of one run. KL is full prefill's at the first
answer token to ours, in nats, on the same token ids.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from kvbench.texts import pydoc_documents
from transformers import DynamicCache

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.models.hf_cache import cache_argument
from kvboost_rag.models.load import LoadedModel, load_model
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.stores import MemoryStore

Message = dict[str, str]
QUESTIONS = ("What is described here?", "Why is that so?", "Give an example.", "Who would use it?", "And if it fails?")


class ByHand:
    """transformers with a cache that its user keeps from turn to turn."""

    def __init__(self, engine: KVBoost) -> None:
        self.model, self.tokens = engine.model, engine.tokens
        self.argument = cache_argument(engine.model)
        self.cache, self.held = DynamicCache(), torch.empty(0, dtype=torch.long)

    def first_token(self, messages: Sequence[Message]) -> tuple[float, int]:
        """Milliseconds to the first token, and tokens that the cache did not hold."""
        start = time.perf_counter()
        ids = self._ids(self.tokens.render(messages))
        new = len(ids) - self._crop(ids)
        kwargs: dict[str, Any] = {self.argument: self.cache}
        self.model.generate(
            ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=1, do_sample=False, **kwargs
        )
        ms = (time.perf_counter() - start) * 1e3
        self.held = ids
        return ms, new

    def absorb(self, messages: Sequence[Message]) -> None:
        """The answer's KV, which decoding it would have left."""
        ids = self._ids(self.tokens.render(messages, add_generation_prompt=False))
        done = self._crop(ids)
        with torch.no_grad():
            self.model(ids[None, done:], logits_to_keep=1, use_cache=True, **{self.argument: self.cache})
        self.held = ids

    def _ids(self, text: str) -> torch.Tensor:
        ids = self.tokens.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        return ids.to(self.model.device)

    def _crop(self, ids: torch.Tensor) -> int:
        length = min(len(self.held), len(ids) - 1, self.cache.get_seq_length())
        differs = (self.held[:length] != ids[:length]).nonzero()
        common = int(differs[0]) if len(differs) else length
        if self.cache.get_seq_length() > common:
            self.cache.crop(common - self.cache.get_seq_length())
        return common


@contextmanager
def engine_of(loaded: LoadedModel, documents: Sequence[str]) -> Iterator[KVBoost]:
    with KVBoost(loaded, store=MemoryStore(8 << 30), profile=None) as engine:
        if documents:
            engine.warm(documents, neighbours=None)
        yield engine


def converse(loaded: LoadedModel, documents: Sequence[str], head: Message, asked: Sequence[Message]) -> None:
    """Print one row a turn."""
    params, messages = GenerationParams(max_new_tokens=24), [head]
    print(
        "| turn | prompt | settled: prefilled, KL, TTFT by hand / ours | at once: prefilled, KL | by hand: prefilled |"
    )
    print("|---|---|---|---|---|")
    with engine_of(loaded, documents) as settled, engine_of(loaded, documents) as at_once:
        hand = ByHand(settled)
        for engine in (settled, at_once):
            engine.generate("Are you there?", params=params)  # pays for what a process pays for once
        for turn, message in enumerate(asked, 1):
            messages.append(message)
            by_hand_ms, by_hand_new = hand.first_token(messages)
            result = settled.generate(messages, params=params, settle=True, strict=True)
            settled.finish_background()
            late = at_once.generate(messages, params=params, settle=True, strict=True)
            at_once.stop_settling()
            full = settled.logits(messages, reuse="off")
            kl = [
                float(kl_per_token(full, e.logits(messages, settle=True, strict=True))[0]) for e in (settled, at_once)
            ]
            print(
                f"| {turn} | {result.usage.input_tokens:,} | {result.usage.prefilled_tokens:,}, {kl[0]:.1e}, "
                f"{by_hand_ms / result.ttft_ms:.2f} | {late.usage.prefilled_tokens:,}, {kl[1]:.1e} | {by_hand_new:,} |",
                flush=True,
            )
            messages.append({"role": "assistant", "content": result.text})
            hand.absorb(messages)


def chat(loaded: LoadedModel, args: argparse.Namespace) -> None:
    """Documents in the first message, two more in the middle."""
    with engine_of(loaded, ()) as engine:
        documents = pydoc_documents(engine.tokens, args.documents + 2)
    asked = ["\n\n".join([*documents[:-2], QUESTIONS[0]])]
    asked += [QUESTIONS[n % len(QUESTIONS)] for n in range(1, args.turns)]
    asked[args.turns // 2] = "\n\n".join([*documents[-2:], "And these?"])
    head = {"role": "system", "content": "Answer from the documents."}
    converse(loaded, documents, head, [{"role": "user", "content": text} for text in asked])


def agent(loaded: LoadedModel, args: argparse.Namespace) -> None:
    """Long instructions, then steps with a tool's result each, which nobody indexed."""
    with engine_of(loaded, ()) as engine:
        texts = pydoc_documents(engine.tokens, 8)
    head = {"role": "system", "content": "\n\n".join(["You work in steps.", *texts[:2]])}
    results = [f"Result of step {n}:\n{text[:400]}" for n, text in enumerate(texts[2:])]
    converse(loaded, (), head, [{"role": "user", "content": text} for text in results])


def frameworks(loaded: LoadedModel, args: argparse.Namespace) -> None:
    """RAG chats that put other documents into the system message at each turn."""
    for name, talk in (("LangChain", _langchain), ("LlamaIndex", _llama_index)):
        with engine_of(loaded, ()) as engine:
            documents = pydoc_documents(engine.tokens, args.documents)
            engine.warm(documents, neighbours=None)
            engine.generate("Are you there?", max_new_tokens=24)  # pays for what a process pays for once
            watched = Watched(engine)
            print(f"\n{name}\n\n{Watched.HEAD}", flush=True)
            engine.stream = watched.stream  # type: ignore[method-assign,assignment] - they ask for their answers there
            talk(engine, documents, args.turns)


class Watched:
    """Requests of a framework, each also answered by hand, in one row each."""

    HEAD = (
        "| request | prompt | exact, approximate, recomputed, prefilled | KL | TTFT by hand / ours | by hand: prefilled"
        " |\n|---|---|---|---|---|---|"
    )

    def __init__(self, engine: KVBoost) -> None:
        self.engine, self.hand, self.count = engine, ByHand(engine), 0
        self._stream = engine.stream

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        """As `KVBoost.stream`."""
        by_hand_ms, by_hand_new = self.hand.first_token(prompt)
        result = None
        for event in self._stream(prompt, **options):
            result = event.result
            yield event
        assert result is not None
        self.engine.finish_background()  # the model is used by hand below
        how = {name: options[name] for name in ("settle", "documents") if name in options}
        kl = float(kl_per_token(self.engine.logits(prompt, reuse="off"), self.engine.logits(prompt, **how))[0])
        self.count, usage = self.count + 1, result.usage
        cells = (usage.exact_tokens, usage.approximate_tokens, usage.recomputed_tokens, usage.prefilled_tokens)
        print(
            f"| {self.count} | {usage.input_tokens:,} | {', '.join(f'{cell:,}' for cell in cells)} | {kl:.1e} | "
            f"{by_hand_ms / result.ttft_ms:.2f} | {by_hand_new:,} |",
            flush=True,
        )
        self.hand.absorb([*prompt, {"role": "assistant", "content": result.text}])


def _chosen(documents: Sequence[str], turn: int) -> list[str]:
    return [documents[(turn + i) % len(documents)] for i in range(3)]


def _langchain(engine: KVBoost, documents: Sequence[str], turns: int) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

    from langchain_kvboost import ChatKVBoost

    template = [("system", "Answer from:\n\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
    chain = ChatPromptTemplate.from_messages(template) | ChatKVBoost(model=engine, max_new_tokens=24)
    history: list[Any] = []
    for turn in range(turns):
        question = QUESTIONS[turn % len(QUESTIONS)]
        given = {"context": "\n\n".join(_chosen(documents, turn)), "history": history, "question": question}
        history += [HumanMessage(question), AIMessage(chain.invoke(given).text)]
        engine.finish_background()


def _llama_index(engine: KVBoost, documents: Sequence[str], turns: int) -> None:
    from llama_index.core.chat_engine import ContextChatEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.llms.kvboost import KVBoostLLM

    class Rotating(BaseRetriever):
        turn = -1

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            self.turn += 1
            return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in _chosen(documents, self.turn)]

    talk = ContextChatEngine.from_defaults(retriever=Rotating(), llm=KVBoostLLM(engine=engine, max_new_tokens=24))
    for turn in range(turns):
        talk.chat(QUESTIONS[turn % len(QUESTIONS)])
        engine.finish_background()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = {"chat": chat, "agent": agent, "frameworks": frameworks}
    parser.add_argument("suite", nargs="?", choices=suites, default="chat")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    suites[args.suite](load_model(args.model, dtype=args.dtype), args)


if __name__ == "__main__":
    main()
