"""`kvboost-rag demo`: the whole path on real text and a real model, with both ways measured side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, progress_bar, seconds_text, styled

if TYPE_CHECKING:
    from kvboost_rag.cli.asking import Passage, PassageSearch
    from kvboost_rag.cli.indexing import IndexReport
    from kvboost_rag.datamodels import GenerationResult
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.indexing.corpus import SourceText
    from kvboost_rag.prompt.tokens import PromptTokens

QUESTIONS = (
    "In which months does the harbour freeze?",
    "What is the name of the ferry to the island?",
    "Who is the headmaster of the school?",
)
DOCUMENTS = Path(__file__).with_name("demo_documents.md")
"""Short texts on an island that there is not, so that the model knows nothing of it but what they say."""


COLUMNS = ("", "prompt", "reused", "recomp.", "prefill", "full", "reuse", "faster", "same")


@dataclass(frozen=True)
class Comparison:
    """One question answered twice in the same run."""

    question: str
    passages: Sequence[Passage]
    full: GenerationResult
    reuse: GenerationResult

    @property
    def num_agreeing_tokens(self) -> int:
        """Tokens at the start of the answers that are the same."""
        pairs = zip(self.full.token_ids, self.reuse.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def agrees(self) -> bool:
        return self.full.token_ids == self.reuse.token_ids


def demo(
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    neighbours: Annotated[
        int | None, typer.Option(min=0, max=16, help="As for warm. Default: 4, in float32 2, to stay quick.")
    ] = None,
    passages: options.Passages = 10,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 32,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
    metrics_port: options.MetricsPort = None,
    page_file: Annotated[Path, typer.Option("--page", help="Where to write the page.")] = Path("demo.html"),
) -> None:
    """Index twelve short texts and ask three questions, by full prefill and by reuse.

    Writes a page that shows what was reused, recomputed and computed in each prompt, beside both answers.

    Example: kvboost-rag demo --passages 12
    """
    from kvboost_rag.cli.asking import PassageSearch
    from kvboost_rag.cli.indexing import ChunkPlan, index_sources
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import open_engine

    start = time.perf_counter()
    kept = options.StoreChoice.of(store, memory_budget, disk_budget, "demo")
    with open_engine(ModelChoice(model, dtype, device), kept, metrics_port=metrics_port) as engine:
        if neighbours is None:
            neighbours = 2 if str(engine.model.dtype) == "torch.float32" else 4
        report = index_sources(engine, demo_documents(), ChunkPlan(256, neighbours))
        console.print(index_line(report), highlight=False)
        comparisons = compare(engine, PassageSearch(engine), passages, max_new_tokens)
        written = write_page(page_file, engine, comparisons)
    console.print()
    console.print(comparison_table(comparisons))
    console.print(
        "full, reuse: time from the call with the prompt text to the first token (TTFT); lookup, loading "
        "from disk, realigning, repair and prefill of the question included. One measurement each, on this "
        "machine. same: whether both answers have the same tokens, or how many at the start do. "
        f"{written} The demo took {seconds_text(time.perf_counter() - start)}.",
        highlight=False,
    )


def demo_documents() -> list[SourceText]:
    """The texts, each a source of its own."""
    from kvboost_rag.indexing.corpus import SourceText

    sections = DOCUMENTS.read_text("utf-8").removeprefix("# ").split("\n# ")
    parts = (section.partition("\n") for section in sections)
    return [SourceText(f"demo:{title}", text.strip()) for title, _, text in parts]


def write_page(file: Path, engine: KVBoost, comparisons: Sequence[Comparison]) -> str:
    """Write the page; returns a sentence that says where it is, or why there is none."""
    from kvboost_rag.cli.asking import messages_for
    from kvboost_rag.cli.demo_page import Answered, page, token_kinds

    answers = []
    for one in comparisons:
        text = engine.tokens.render(messages_for(one.question, one.passages))
        pieces = prompt_pieces(engine.tokens, text, one.passages, one.reuse.usage.input_tokens)
        answers.append(Answered(one.question, pieces, token_kinds(one.reuse), one.full, one.reuse))
    precision = str(engine.model.dtype).removeprefix("torch.")
    setting = f"{engine.name}, {precision}, {machine()}"
    try:
        file.write_text(page(answers, setting), "utf-8")
    except OSError as error:
        return f"The page could not be written: {error}."
    return f"What was reused in each prompt: {file.absolute()}."


def prompt_pieces(tokens: PromptTokens, text: str, passages: Sequence[Passage], count: int) -> list[str]:
    """The prompt cut at its tokens: those of the whole text, or where they are not `count`, of its spans one by one."""
    whole = tokens.ids(text)
    if len(whole) != count:
        spans, rest = [], text
        for passage in passages:
            before, _, rest = rest.partition(passage.text)
            spans += [before, passage.text]
        whole = tuple(token for span in (*spans, rest) for token in tokens.ids(span))
    return [tokens.decode([token]) for token in whole]


def machine() -> str:
    """Processor and threads, in words."""
    import platform

    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())} ({torch.get_num_threads()} threads)"


def index_line(report: IndexReport) -> str:
    """What indexing did, or that there was nothing to do."""
    done = report.warm
    size = f"{done.num_chunks} chunks, {done.chunk_tokens:,} tokens of {report.num_sources} texts"
    if done.num_already_stored == done.num_chunks:
        return f"corpus     {size}: all on disk from an earlier run, nothing to encode"
    rate = done.encoded_tokens / done.seconds if done.seconds else 0
    return (
        f"corpus     {size}: {done.num_encoded} encoded ({done.num_already_stored} on disk already), "
        f"{bytes_text(done.num_bytes)} in {seconds_text(done.seconds)}, {rate:,.0f} tokens/s with encoding contexts"
    )


def compare(engine: KVBoost, search: PassageSearch, count: int, max_new_tokens: int) -> list[Comparison]:
    """Answer each question by full prefill and by reuse, and print both as they come."""
    from kvboost_rag.cli.asking import messages_for
    from kvboost_rag.cli.tables import reuse_line, sources_text
    from kvboost_rag.config import GenerationParams

    params = GenerationParams(max_new_tokens=max_new_tokens)
    # The first forward of a process also pays for threads and buffers: neither way shall.
    engine.generate("Hello", params=GenerationParams(max_new_tokens=2), reuse="off")
    comparisons = []
    for number, question in enumerate(QUESTIONS, 1):
        passages = search.nearest(question, count)
        messages = messages_for(question, passages)
        results = {}
        with progress_bar("{task.completed}/{task.total} tokens") as bar:
            for reuse, name in (("off", "full prefill"), ("blend", "reuse")):
                task = bar.add_task(f"question {number}: {name}", total=max_new_tokens)
                for event in engine.stream(messages, params=params, reuse=reuse):
                    bar.advance(task, 1 if event.delta else 0)
                    if event.result is not None:
                        results[reuse] = event.result
                bar.update(task, completed=max_new_tokens)
        comparison = Comparison(question, passages, results["off"], results["blend"])
        comparisons.append(comparison)
        console.print()
        console.print(styled(f"{number}. {question}", "bold"))
        console.print(f"   documents  {sources_text(passages)}", highlight=False)
        console.print(f"   tokens     {reuse_line(comparison.reuse)}", highlight=False)
        for label, result in answers(comparison):
            text = " ".join(result.text.split())
            console.print(f"   {label:<10} {text}", highlight=False)
    return comparisons


def answers(comparison: Comparison) -> list[tuple[str, GenerationResult]]:
    """What to print: one answer if both ways give the same, else both."""
    if comparison.agrees:
        return [("answer", comparison.reuse)]
    return [("reuse", comparison.reuse), ("full", comparison.full)]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One line a question."""
    table = Table(title="full prefill against reuse, same run", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for number, one in enumerate(comparisons, 1):
        usage = one.reuse.usage
        table.add_row(
            str(number),
            f"{usage.input_tokens:,}",
            f"{usage.cached_tokens:,}",
            f"{usage.recomputed_tokens:,}",
            f"{usage.prefilled_tokens:,}",
            f"{one.full.ttft_ms / 1000:.2f} s",
            f"{one.reuse.ttft_ms / 1000:.2f} s",
            f"{one.full.ttft_ms / one.reuse.ttft_ms:.1f} x" if one.reuse.ttft_ms else "",
            "yes" if one.agrees else f"{one.num_agreeing_tokens}/{len(one.full.token_ids)}",
        )
    return table
