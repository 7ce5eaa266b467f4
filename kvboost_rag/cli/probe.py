"""`kvboost-rag probe`: can this model's KV be reused?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, styled

if TYPE_CHECKING:
    from kvboost_rag.kv.buffer import LayerGroup


def probe(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or bundled:smollm2.")],
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> None:
    """Say whether a model's KV can be reused, found by running it. Exit code 3 if it cannot.

    Example: kvboost-rag probe Qwen/Qwen2.5-0.5B-Instruct
    """
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import load
    from kvboost_rag.forward.probe import probe as run_probe

    report = run_probe(load(ModelChoice(model, dtype, device)).model)
    if not report.reusable:
        console.print(styled("not reusable", "bold red", f": {report.reason}. It still answers, by plain prefill."))
        raise typer.Exit(3)
    console.print(styled("reusable", "bold green"))
    layout = report.require_layout
    limit = "as long as the model allows" if report.max_positions is None else f"up to {report.max_positions:,} tokens"
    console.print(f"prompts    {limit}")
    for group in layout.groups:
        console.print(f"layers     {describe_group(group)}", highlight=False)
    dtype_name = str(layout.dtype).removeprefix("torch.")
    console.print(f"KV         {bytes_text(layout.bytes_per_token)} a token in {dtype_name}", highlight=False)
    console.print(
        f"distances  values {report.value_error:.1e}, keys {report.key_error:.1e} between two positions; "
        f"logits {report.logit_error:.1e} between partial and whole forward (relative L2)",
        highlight=False,
    )


def describe_group(group: LayerGroup) -> str:
    """Layers, heads and rotation of a group in one line."""
    shape = f"{len(group.layers)} ({span_text(group.layers)}): {group.num_kv_heads} KV heads of {group.key_head_dim}"
    if group.rotation is None:
        return f"{shape}, no rotation"
    return f"{shape}, {group.rotation.rotary_dim} dimensions rotated, {group.rotation.pairing} pairing"


def span_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `0-4, 6-10`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
