"""Runs cases through arms. One model, one engine for every way of encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvbench.arms import Arm
from kvbench.cases import Case, edited, rechunked
from kvbench.rounded import ROUNDED, rounded_row
from kvboost_rag import KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.indexing.embeddings import Embed
from kvboost_rag.indexing.neighbours import NeighbourRules, choose_contexts
from kvboost_rag.indexing.vector_index import VectorIndex
from kvboost_rag.measure.calibrate import Answered, Comparison, compare, prompt_of, reference_answer
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import MemoryStore
from kvboost_rag.stores.maintenance import evict_all

STORE_BYTES = 1 << 30
Documents = Sequence[Sequence[str]]
"""Chunk texts of each document, in order."""


@dataclass(frozen=True)
class Corpus:
    """The chunks of a data set."""

    index: VectorIndex
    num_tokens: Mapping[str, int]
    places: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, documents: Documents, embed: Embed, count_tokens: Callable[[str], int]) -> Corpus:
        texts = list(dict.fromkeys(text for document in documents for text in document))
        index = VectorIndex()
        index.add(texts, embed(texts))
        places = {text: (document[0], before) for document in documents for before, text in pairwise(document)}
        return cls(index, {text: count_tokens(text) for text in texts}, places)

    def contexts(self, texts: Sequence[str], arm: Arm) -> list[Any] | None:
        """What each text is encoded after; a piece of a document that is not a chunk here has no neighbours."""
        if not arm.neighbours:
            return None
        rules = NeighbourRules(arm.neighbours, contexts=arm.contexts)
        places = self.places if arm.siblings else {}
        found = choose_contexts(self.index, [t for t in texts if t in self.index], self.num_tokens, rules, places)
        return [found.get(text, ((),)) for text in texts]


class Runner(ExitStack):
    """Use as a context manager; engines are closed at its end."""

    def __init__(self, model: str, dtype: str, answer_tokens: int) -> None:
        super().__init__()
        self._model = model
        self._loaded = load_model(model, dtype=dtype)
        self._rounded: KVBoost | None = None
        self._answer_tokens = answer_tokens
        self._engines: dict[tuple[Any, ...], KVBoost] = {}
        self._corpora: dict[str, Corpus] = {}
        self._index_costs: dict[tuple[Any, ...], float] = {}
        self.count_tokens = self._engine(0, "none", "auto").tokens.count

    def read_corpora(self, cases: Sequence[Case], embed: Embed, documents: Mapping[str, Documents]) -> None:
        """All chunks of each data set, to choose encoding contexts from.

        Args:
            cases: of the whole data sets, also those that are not asked.
            documents: chunks of each document in order, by data set; of the others the cases' documents are all.
        """
        for dataset in dict.fromkeys(case.dataset for case in cases):
            alone = [[d] for case in cases if case.dataset == dataset for d in case.documents]
            self._corpora[dataset] = Corpus.of(documents.get(dataset, alone), embed, self.count_tokens)

    def rows(self, case: Case, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """One result per arm, ready for JSON."""
        references: dict[tuple[int | None, bool], tuple[Case, Answered]] = {}
        for arm in arms:
            key = arm.chunk_tokens, arm.edited
            if key not in references:
                shaped = self._shaped(case, arm)
                # An engine that cuts the prompt at the same places, so that the token ids are the same.
                plain = self._engine(0, "none", "auto", chunk_tokens=arm.chunk_tokens)
                references[key] = shaped, reference_answer(plain, shaped, self._answer_tokens)
            shaped, reference = references[key]
            if arm.rounded:
                yield rounded_row(self._rounded_engine(), shaped, reference, self._answer_tokens)
                continue
            engine = self._warmed(shaped, case, arm)
            ours = compare(engine, shaped, reference, arm.strategy, arm.ratio, full_below=arm.full_below)
            yield self._row(shaped, arm, reference, ours, engine)
        for engine in self._engines.values():  # the next case has other documents; the arms keep a store each
            evict_all(engine.store)

    def _shaped(self, case: Case, arm: Arm) -> Case:
        if arm.chunk_tokens is not None:
            return rechunked(case, self.count_tokens, arm.chunk_tokens)
        return edited(case)[0] if arm.edited else case

    def _warmed(self, shaped: Case, original: Case, arm: Arm) -> KVBoost:
        anchor = {"bos": self._loaded.tokenizer.bos_token or "", "head": self._head(shaped)}.get(arm.anchor, arm.anchor)
        engine = self._engine(arm.neighbours, arm.quantization, anchor, arm.kept, arm.chunk_tokens)
        if arm.edited:
            engine.warm(original.documents, neighbours=None)  # what stands in the prompt is not what was indexed
            return engine
        corpus = self._corpora.get(original.dataset.partition(",")[0])  # whatever the order of the documents
        contexts = corpus.contexts(shaped.documents, arm) if corpus is not None else None
        report = engine.warm(shaped.documents, neighbours=contexts)
        if report.encoded_chunk_tokens:  # else they are as an arm before left them
            cost = report.encoded_tokens / report.encoded_chunk_tokens
            self._index_costs[arm.neighbours, arm.contexts, arm.siblings, arm.kept] = cost
        return engine

    def _head(self, case: Case) -> str:
        """The prompt's text in front of the first document."""
        engine = self._engine(0, "none", "auto")
        prompt = prompt_of(engine.tokenizer, case.messages())
        text = prompt if isinstance(prompt, str) else engine.tokens.render(prompt)
        return text[: min((text.find(d) for d in case.documents if d in text), default=0)].rstrip()

    def _engine(
        self,
        neighbours: int,
        quantization: str,
        anchor: str,
        kept: tuple[str, ...] = (),
        chunk_tokens: int | None = None,
    ) -> KVBoost:
        # One for each chunk size: a whole document that is known would be found before its pieces.
        key = neighbours, quantization, anchor, kept, chunk_tokens
        if key not in self._engines:
            encoding = EncodingConfig(anchor=anchor, quantization=quantization, **dict.fromkeys(kept, True))
            engine = KVBoost(self._loaded, store=MemoryStore(STORE_BYTES), encoding=encoding, profile=None)
            self._engines[key] = self.enter_context(engine)
        return self._engines[key]

    def _rounded_engine(self) -> KVBoost:
        if self._rounded is None:
            loaded = load_model(self._model, dtype=ROUNDED)
            self._rounded = self.enter_context(KVBoost(loaded, store=MemoryStore(1 << 20), profile=None))
        return self._rounded

    def _row(self, case: Case, arm: Arm, reference: Answered, ours: Comparison, engine: KVBoost) -> dict[str, Any]:
        full_correct, our_correct = reference.correct, ours.correct
        if case.choices:
            full_correct = self._choice(case, reference.logits[0], engine) in case.answers
            our_correct = self._choice(case, ours.first_logits, engine) in case.answers
        return {
            "dataset": case.dataset,
            "case": case.name,
            "arm": arm.name,
            **dict(case.traits),
            "kl_first": ours.kl_first,
            "kl_mean": ours.kl_mean,
            "agreement": ours.agreement,
            "identical": ours.identical,
            "f1": ours.f1,
            "full_f1": reference.f1,
            "correct": our_correct,
            "full_correct": full_correct,
            "ttft_ms": ours.ttft_ms,
            "full_ttft_ms": reference.ttft_ms,
            "input_tokens": ours.input_tokens,
            "cached_tokens": ours.cached_tokens,
            "recomputed_tokens": ours.recomputed_tokens,
            "index_tokens": self._index_costs.get((arm.neighbours, arm.contexts, arm.siblings, arm.kept)),
        }

    @staticmethod
    def _choice(case: Case, logits: Any, engine: KVBoost) -> str:
        """The likeliest of the letters as the answer's first token."""
        ids = [engine.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in case.choices]
        return case.choices[int(logits[ids].argmax())]
