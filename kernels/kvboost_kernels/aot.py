"""Compile every kernel ahead of time, without a GPU, and print what each needs: `python -m kvboost_kernels.aot`.

What is compiled is what is launched: the `Launch` objects of the ops' own planning functions, specialised on strides
and alignment as Triton's launcher does it. A kernel that spills registers is a failure (exit status 1).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvboost_kernels.aot_cases import cases
from kvboost_kernels.dispatch import Launch, interpreting

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs.

    Attributes:
        registers: per thread (AMD: vector and accumulator registers).
        spills: NVIDIA: instructions that access thread-local memory, from the SASS, or stack bytes where these are
            more. AMD: spilled vector registers, or instructions that access scratch memory where these are more.
        scalar_spills: AMD: scalar registers parked in lanes of a vector register. No memory traffic.
        vector_bits: widest load from global memory.
    """

    case: str
    target: str
    kernel: str
    registers: int
    shared_bytes: int
    spills: int
    scalar_spills: int
    vector_bits: int
    num_warps: int


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """The compiled kernel (`asm` holds every stage) for `launch` on `target`; needs no GPU."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        kind, divisible = (
            ("constexpr", False) if parameter.is_constexpr else _specialise(value, parameter.do_not_specialize)
        )
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(ASTSource(launch.kernel, signature, constants, attributes), target=target, options=options)


def _specialise(value: Any, fixed: bool) -> tuple[str, bool]:
    """Type and divisibility by 16, by the rules of Triton's launcher; `fixed` numbers are not specialised."""
    if value is None or (not fixed and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), not fixed and value % 16 == 0


def usage(case: str, target_name: str, launch: Launch) -> Usage:
    """Compile `launch` for a target and read the resources it needs from the binary."""
    compiled = compile_launch(launch, TARGETS[target_name])
    read = _read_amd if TARGETS[target_name].backend == "hip" else _read_nvidia
    return Usage(
        case=case,
        target=target_name,
        kernel=launch.kernel.__name__,
        num_warps=launch.num_warps,
        shared_bytes=compiled.metadata.shared,
        **read(compiled),
    )


def _read_nvidia(compiled: Any) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        resources, sass = _cuobjdump("-res-usage", path), _cuobjdump("-sass", path)
    local = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    instructions = re.findall(r"\b(?:LDG|LDGSTS)[.\w]*", sass)  # LDG.E.128.CONSTANT: 128 bits; LDG.E: 32
    loads = [next((bits for bits in (128, 64) if f".{bits}" in i), 32) for i in instructions]
    spills = max(local, int(_find(r"STACK:(\d+)", resources)))
    return {
        "registers": int(_find(r"REG:(\d+)", resources)),
        "spills": spills,
        "scalar_spills": 0,
        "vector_bits": max(loads, default=0),
    }


def _cuobjdump(flag: str, path: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, flag, path], check=True, capture_output=True, text=True).stdout


def _read_amd(compiled: Any) -> dict[str, int]:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_spill_count")
    vgpr, agpr, spilled, scalar = (int(_find(rf"\.{name}:\s+(\d+)", text)) for name in names)
    # A frame may be reserved for scalar registers that found room elsewhere; only accesses cost anything.
    scratch = len(re.findall(r"\bscratch_(?:load|store)", text))
    loads = [32 * int(n or 1) for n in re.findall(r"\b(?:global|buffer)_load_dword(?:x(\d))?\b", text)]
    bits = max(loads, default=0)
    return {"registers": vgpr + agpr, "spills": max(spilled, scratch), "scalar_spills": scalar, "vector_bits": bits}


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in the compiler's output; its format has changed:\n{text[-2000:]}")
    return found[1]


def table(rows: Sequence[Usage]) -> str:
    """Markdown, one line a case and kernel, one group of columns a target."""
    names = list(dict.fromkeys(r.target for r in rows))
    lines = ["| case | kernel | warps | " + " | ".join(f"{n}: registers, shared, load, spills" for n in names) + " |"]
    lines.append("|---" * (3 + len(names)) + "|")
    grouped: dict[tuple[str, str, int], dict[str, Usage]] = {}
    for row in rows:
        grouped.setdefault((row.case, row.kernel, row.num_warps), {})[row.target] = row
    for (case, kernel, warps), found in grouped.items():
        cells = [
            f"{u.registers}, {u.shared_bytes / 1024:.3g} KiB, {u.vector_bits} bit, {u.spills}"
            + (f" (+ {u.scalar_spills} scalar)" if u.scalar_spills else "")
            for u in (found[n] for n in names)
        ]
        lines.append(f"| {case} | `{kernel}` | {warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    options = parser.parse_args(argv)
    if interpreting():
        parser.error("unset TRITON_INTERPRET: under the interpreter nothing is compiled")
    rows = [
        usage(name, target, launch)
        for target in options.target or TARGETS
        for name, launches in cases(hip=TARGETS[target].backend == "hip").items()
        if options.case is None or options.case in name
        for launch in launches
    ]
    print(json.dumps([asdict(r) for r in rows]) if options.json else f"{table(rows)}\n\nTriton {triton.__version__}")
    return 1 if any(r.spills for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
