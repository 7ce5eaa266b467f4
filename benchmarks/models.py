"""What models are reused, and why others are not: tiny random ones of every causal architecture in transformers.

usage: python benchmarks/models.py [--sample N] [--only NAME ...] [--page docs/models.md]

Each architecture is built from its own default config with everything small that has a size we know, loaded into an
engine, and asked with and without reuse: `reused` means that the probe passed and that recomputing every row gave
full prefill's logits within 1 %. The same is done with dtypes, quantisation and wrappers on three of them, where the
libraries for it are installed. `--sample N` takes the N names with the smallest SHA-256, the same on every machine.
`--page` writes the table between a page's markers, and how fast weights are hashed. Exit code 1 if an engine crashed
or a reused model's logits were wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from kvbench import compressed
from kvbench.machine import this_machine
from kvbench.tiny import tiny_tokenizer
from kvbench.tiny_models import NotBuilt, architectures, tiny_model

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.models.digest import WeightDigests

VARIED = ("llama", "gemma3_text", "deepseek_v3")
"""Plain attention, sliding windows, latent attention."""
DOCUMENTS = [f"The lamp of tower {i} burned oil for {i + 7} years. " * 3 for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which lamp burned longest?"])
SHORT = GenerationParams(max_new_tokens=4)
WITHIN = 0.01
HASHED_BYTES = 512 << 20
START, END = "<!-- models -->", "<!-- /models -->"


@dataclass(frozen=True)
class Row:
    """One model and what became of it."""

    architecture: str
    dtype: str = "float32"
    quantisation: str = ""
    wrapper: str = ""
    outcome: str = ""
    wrong: bool = False

    def __str__(self) -> str:
        cells = (self.architecture, self.dtype, self.quantisation, self.wrapper, self.outcome)
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def asked(row: Row, model: Any, **load: Any) -> Row:
    """Loads a model into an engine, as people do, and says what it did with documents."""
    try:
        with KVBoost.from_pretrained(model, tokenizer=tiny_tokenizer(), profile=None, **load) as engine:
            try:
                ids = torch.tensor([engine.tokens.ids(PROMPT)])
                engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
                full = engine.logits(PROMPT, reuse="off")
            except Exception as error:
                return replace(row, outcome=f"does not run by itself: {line(error)}")
            result = engine.generate(PROMPT, documents=DOCUMENTS, params=SHORT)
            if not engine.probe.reusable:
                return replace(row, outcome=f"no reuse: {engine.probe.reason}", wrong=result.reuse != "off")
            ours = engine.logits(PROMPT, documents=DOCUMENTS, repair="full", strict=True)
    except Exception as error:
        return replace(row, outcome=f"CRASH: {line(error)}", wrong=True)
    distance = float((ours - full).norm() / full.norm())
    limit = WITHIN if row.dtype == "float32" and not row.quantisation else 0.1
    if result.reuse != "blend" or not distance <= limit:
        return replace(row, outcome=f"WRONG: {result.reuse}, logits differ by {distance:.2g}", wrong=True)
    return replace(row, outcome="reused")


def line(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:140]


def architecture_rows(names: list[str]) -> Iterator[Row]:
    """One row an architecture, in float32."""
    for name in names:
        try:
            model = tiny_model(name)
        except NotBuilt as error:
            yield Row(name, outcome=f"not built: {error}")
            continue
        yield asked(Row(name), model)


def varied_rows(names: list[str]) -> Iterator[Row]:
    """Dtypes, quantisation and wrappers."""
    for name in names:
        for dtype in (torch.bfloat16, torch.float16):
            yield asked(Row(name, str(dtype).removeprefix("torch.")), tiny_model(name, dtype))
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(name).save_pretrained(folder)
            for label, config in quantisations():
                yield asked(Row(name, quantisation=label), folder, quantization_config=config)
            for scheme in compressed.SCHEMES if compressed.installed() else ():
                yield compressed_row(name, scheme, Path(folder))
            if find_spec("accelerate"):
                offload = {"offload_folder": f"{folder}/offload", "offload_buffers": True}
                row = Row(name, wrapper="disk offload")
                yield asked(row, folder, device_map={"": "disk"}, weights=offload)
        for label, wrap in wrappers():
            yield asked(Row(name, wrapper=label), wrap(tiny_model(name)))


def compressed_row(name: str, scheme: str, folder: Path) -> Row:
    """A checkpoint of compressed-tensors."""
    row = Row(name, quantisation=f"compressed-tensors {scheme}")
    try:
        made = compressed.compress(tiny_model(name), scheme, folder / scheme)
    except Exception as error:  # layers too small for a group, or of a kind the library does not know
        return replace(row, outcome=f"not built: {line(error)}")
    return asked(row, str(made))


def quantisations() -> Iterator[tuple[str, Any]]:
    """Those that run on a CPU, as far as they are installed."""
    if find_spec("torchao"):
        import torchao.quantization as ao

        for kind in (ao.Int8WeightOnlyConfig, ao.Int8DynamicActivationInt8WeightConfig):
            yield f"torchao {kind.__name__.removesuffix('Config')}", transformers.TorchAoConfig(kind())
    if find_spec("bitsandbytes"):
        yield "bitsandbytes 8 bit", transformers.BitsAndBytesConfig(load_in_8bit=True)
        for kind in ("fp4", "nf4"):
            config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)
            yield f"bitsandbytes 4 bit {kind}", config
    if find_spec("optimum") and find_spec("optimum.quanto"):
        yield "optimum-quanto int8", transformers.QuantoConfig(weights="int8")


def wrappers() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What people hand over instead of a model."""
    if find_spec("peft"):
        import peft

        def adapted(model: Any) -> Any:
            return peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            )

        yield "PeftModel (LoRA)", adapted
        prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        yield "PeftModel (prompt tuning)", lambda model: peft.get_peft_model(model, prompts)
    yield "torch.compile(model)", lambda model: torch.compile(model, backend="eager")
    yield "model.compile()", lambda model: model.compile(backend="eager") or model
    yield "DataParallel", torch.nn.DataParallel


def chosen(names: list[str], sample: int | None) -> list[str]:
    """All names, or those with the smallest SHA-256."""
    if sample is None:
        return names
    return sorted(sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:sample])


def hash_speed() -> str:
    """How fast all bytes of weights are read, when they must be."""
    tensors = [(str(i), torch.zeros(HASHED_BYTES // 4 // 8)) for i in range(8)]
    start = time.perf_counter()
    WeightDigests().of(tensors)
    rate = HASHED_BYTES / (time.perf_counter() - start) / 1e9
    threads = min(4, os.cpu_count() or 1)
    return f"{rate:.1f} GB/s with {threads} threads on {this_machine().processor}, weights in memory"


def page(rows: list[Row]) -> str:
    """What stands between the markers."""
    counts = [sum(row.outcome.startswith(kind) for row in rows) for kind in ("reused", "no reuse", "not built")]
    return "\n".join(
        [
            START,
            f"transformers {version('transformers')}, torch {torch.__version__}: {counts[0]} rows reused, {counts[1]} "
            f"served without reuse, {counts[2]} not built small enough to try. Hashing: {hash_speed()}.",
            "",
            "| architecture | dtype | quantisation | wrapper | what happened |",
            "|---|---|---|---|---|",
            *map(str, rows),
            END,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    names = args.only or chosen(architectures(), args.sample)
    varied = [name for name in VARIED if name in names or (args.only is None and args.sample is None)]
    rows = []
    for row in chain(architecture_rows(names), varied_rows(varied)):
        print(row, flush=True)
        rows.append(row)
    if args.page is not None:
        text = args.page.read_text("utf-8")
        before, after = text.partition(START)[0], text.partition(END)[2]
        args.page.write_text(before + page(rows) + after, "utf-8")
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()
