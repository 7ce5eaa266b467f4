"""Time the GPU kernels against torch and flex_attention; correctness first.

    python benchmarks/kernels.py [--case NAME] [--json FILE]

Without a GPU it says so and exits with status 0. Times are medians of `triton.testing.do_bench` (L2 cache cleared
between runs), device time of the op alone: its launches, its host-side planning as far as it is not hidden, and the
allocation of its results; no model around it. `floor` is the time that the bytes and FLOPs of the op need at the rates
given by `--bandwidth` and `--flops` (defaults: H200, 4.8 TB/s and 990 TFLOP/s dense bfloat16), see `docs/kernels.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation, place_chunk
from kvboost_kernels.row_attention import row_attention

Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """A model's attention and a prompt. The default is Llama 3.1 8B with 16 chunks of 256 tokens and a question."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    chunks: int = 16
    chunk_tokens: int = 256
    rows: int = 256
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens


@dataclass(frozen=True)
class Case:
    """One op on one shape: calls that return the tensors they computed or wrote, and what has to move.

    `ours` and every baseline compute the same things; `tolerance` bounds the largest absolute difference.
    """

    name: str
    ours: Call
    baselines: dict[str, Call]
    bytes_moved: int
    flops: int = 0
    tolerance: float = 0.03
    notes: dict[str, str] = field(default_factory=dict)


def build_cases(shape: Shape, compile_flex: bool = True) -> list[Case]:
    """Every case on `shape`; tests build them on a small shape on the CPU, with flex_attention uncompiled."""
    return [
        _place("place_chunk, bfloat16", shape, quantised=False),
        _place("place_chunk, keys int8, values int4", shape, quantised=True),
        _attention("row_attention, scattered rows", shape, compile_flex, mass=False),
        _attention("row_attention, question with mass", shape, compile_flex, mass=True),
    ]


def _place(name: str, shape: Shape, quantised: bool) -> Case:
    size = (shape.layers, shape.kv_heads, shape.tokens, shape.head_dim)
    keys, values = (torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
    angles = torch.rand(shape.tokens, shape.head_dim // 2, device=shape.device) * 6.28
    rotation = Rotation(angles.cos(), angles.sin())
    chunks = [_chunk(shape, i * shape.chunk_tokens, quantised) for i in range(shape.chunks)]
    stored = sum(t.numel() * t.element_size() for c in chunks for t in c.tensors().values())

    def call(backend: str) -> Call:
        def run() -> tuple[torch.Tensor, ...]:
            place_chunk(chunks, keys, values, rotation=rotation, backend=backend)  # type: ignore[arg-type]
            return keys, values

        return run

    moved = stored + 2 * keys.numel() * keys.element_size() + 2 * angles.numel() * 4
    return Case(name, call("auto"), {"torch": call("reference")}, moved)


def _chunk(shape: Shape, start: int, quantised: bool) -> Chunk:
    size = (shape.layers, shape.kv_heads, shape.chunk_tokens, shape.head_dim)
    if not quantised:
        keys, values = (torch.randn(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
        return Chunk(keys, values, start)

    def codes(bits: int, token_group: int, channel_group: int, dtype: torch.dtype) -> Quantised:
        width = shape.head_dim * bits // 8
        packed = torch.randint(0, 256, (*size[:3], width), dtype=torch.uint8, device=shape.device)
        groups = (*size[:2], size[2] // token_group, size[3] // channel_group)
        scale = torch.full(groups, 2.0 / 2**bits, dtype=dtype, device=shape.device)
        return Quantised(packed, scale, -torch.ones_like(scale), 8 if bits == 8 else 4, token_group, channel_group)

    return Chunk(codes(8, shape.chunk_tokens, 1, torch.float32), codes(4, 1, 32, torch.float16), start)


def _attention(name: str, shape: Shape, compile_flex: bool, mass: bool) -> Case:
    """The question's rows stand at the end; repaired rows are scattered over the prompt."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = torch.randperm(shape.tokens, device=shape.device)[: shape.rows].sort().values
    if mass:
        rows = torch.arange(shape.tokens - shape.rows, shape.tokens, device=shape.device)
    query, key, value = _qkv(shape, len(rows))
    scaling = shape.head_dim**-0.5
    listed = torch.arange(len(rows), device=shape.device) if mass else None
    visible = torch.arange(shape.tokens, device=shape.device)[None] <= rows[:, None]
    block_mask = create_block_mask(
        lambda b, h, q, k: k <= rows[q], None, None, len(rows), shape.tokens, device=shape.device
    )
    flex = torch.compile(flex_attention) if compile_flex else flex_attention

    def ours() -> tuple[torch.Tensor, ...]:
        return (row_attention(query, key, value, rows, scaling=scaling, mass_rows=listed).output,)

    def sdpa() -> tuple[torch.Tensor, ...]:
        attend = torch.nn.functional.scaled_dot_product_attention
        return (attend(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True),)

    def flex_call() -> tuple[torch.Tensor, ...]:
        return (flex(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=True),)

    pairs = int(visible.sum()) * shape.heads
    seen = int(visible.any(0).sum())
    moved = (2 * query.numel() + 2 * shape.kv_heads * seen * shape.head_dim * (1.5 if mass else 1)) * key.element_size()
    baselines = {"torch SDPA, mask": sdpa, "flex_attention": flex_call}
    notes = {"baselines": "give no mass; ours reads the keys a second time for it"} if mass else {}
    return Case(name, ours, baselines, int(moved), pairs * shape.head_dim * (6 if mass else 4), notes=notes)


def _qkv(shape: Shape, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(1, shape.heads, num_rows, shape.head_dim, dtype=shape.dtype, device=shape.device)
    size = (1, shape.kv_heads, shape.tokens, shape.head_dim)
    return query, *(torch.randn(size, dtype=shape.dtype, device=shape.device) for _ in range(2))  # type: ignore[return-value]


def check(case: Case) -> float:
    """Largest absolute difference between ours and the baselines.

    Raises:
        AssertionError: it is above the case's tolerance; no time is reported for a wrong result.
    """
    found = [t.clone() for t in case.ours()]  # in-place ops return the buffers that the baseline writes next
    differences = [
        (mine.float() - theirs.float()).abs().max()
        for baseline in case.baselines.values()
        for mine, theirs in zip(found, baseline(), strict=True)
    ]
    worst = float(torch.stack(differences).max())  # unlike the built-in `max`, NaN if any is
    if not worst <= case.tolerance:
        raise AssertionError(f"{case.name}: results differ by {worst:.3g}, above {case.tolerance:g}")
    return worst


def measure(case: Case, bandwidth: float, flops: float) -> list[dict[str, object]]:
    """Median milliseconds of ours and the baselines, beside the floor."""
    from triton.testing import do_bench

    difference = check(case)
    floor_ms = 1e3 * max(case.bytes_moved / bandwidth, case.flops / flops)
    rows = []
    for name, call in {"ours": case.ours, **case.baselines}.items():
        median_ms = float(do_bench(call, warmup=100, rep=400, return_mode="median"))
        rows.append(
            {"case": case.name, "implementation": name, "median_ms": median_ms, "floor_ms": floor_ms}
            | {"times_floor": median_ms / floor_ms, "gb_per_s": case.bytes_moved / median_ms / 1e6}
            | {"largest_difference": difference}
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second of the card's memory")
    parser.add_argument("--flops", type=float, default=990e12, help="dense bfloat16 FLOP per second of the card")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("No GPU here: nothing to measure. The kernels' correctness is tested by tests/kernels without one.")
        return 0
    import triton

    torch.manual_seed(0)
    shape = Shape()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(
        f"{machine}\n{shape}\n\n| case | implementation | median ms | floor ms | × floor | GB/s |\n" + 6 * "|---" + "|"
    )
    rows = []
    with torch.inference_mode():
        for case in build_cases(shape):
            if options.case in case.name:
                for row in measure(case, options.bandwidth, options.flops):
                    rows.append(row)
                    figures = (row["median_ms"], row["floor_ms"], row["times_floor"], row["gb_per_s"])
                    print(
                        f"| {row['case']} | {row['implementation']} | " + " | ".join(f"{x:.3g}" for x in figures) + " |"
                    )
    if options.json:
        facts = {"machine": machine, "shape": {k: str(v) for k, v in asdict(shape).items()}, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
