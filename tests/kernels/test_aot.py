"""Every kernel compiles for three cards without a GPU, spills nothing, and addresses with 64 bits.

In processes of their own: nothing compiles in one that interprets, and the compiler's state stays out of other tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvboost_kernels

pytest.importorskip("triton")

SHARED_LIMIT_BYTES = {"sm_80": 99 * 1024, "sm_90": 99 * 1024, "gfx942": 64 * 1024}
TARGETS = list(SHARED_LIMIT_BYTES)
ADDRESSES = """
import json, sys, triton
from kvboost_kernels.aot import TARGETS, compile_launch
from kvboost_kernels.aot_cases import cases
found = []
for case, launches in cases(hip=False).items():
    for launch in launches:
        asm = compile_launch(launch, TARGETS["sm_90"]).asm
        found.append({"case": case, "kernel": launch.kernel.__name__, "ttir": asm["ttir"], "ptx": asm["ptx"]})
print(json.dumps(found))
"""


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    shelf = str(Path(kvboost_kernels.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": shelf, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def usage(cache: Path) -> list[dict[str, Any]]:
    done = run("-m", "kvboost_kernels.aot", "--json", cache=cache)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def programs(cache: Path, usage: list[dict[str, Any]]) -> list[dict[str, str]]:
    done = run("-c", ADDRESSES, cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(usage, target) -> None:
    rows = [r for r in usage if r["target"] == target]
    assert {r["kernel"] for r in rows} == {
        "place_kernel",
        "attend_kernel",
        "merge_kernel",
        "mass_kernel",
    }
    for row in rows:
        assert row["spills"] == 0, row
        assert row["registers"] > 0, row
        assert row["shared_bytes"] <= SHARED_LIMIT_BYTES[target], row
        assert row["kernel"] == "merge_kernel" or row["vector_bits"] == 128, row


def test_same_cases_on_every_target(usage) -> None:
    named = {target: {(r["case"], r["kernel"]) for r in usage if r["target"] == target} for target in TARGETS}
    assert named["sm_80"] == named["sm_90"] == named["gfx942"]
    assert len(named["sm_80"]) > 20


def test_every_address_has_64_bits(programs) -> None:
    """No pointer arithmetic with 32-bit tensors: those would wrap in buffers of more than 2**31 elements.

    The tables of chunks and tiles, and single strides, may be stepped through with 32-bit numbers.
    """
    for program in programs:
        offsets = re.findall(r"tt\.addptr .* : tensor<[^>]*!tt\.ptr<(\w+)>>, tensor<[\dx]*(\w+)>", program["ttir"])
        assert offsets, program["case"]
        assert all(kind == "i64" for _, kind in offsets), program["case"]


def test_products_run_on_the_tensor_cores_in_the_inputs_dtype(programs) -> None:
    for program in programs:
        if program["kernel"] not in ("attend_kernel", "mass_kernel"):
            continue
        kinds = set(re.findall(r"\b(?:wgmma|mma)\.[\w.:]*?\.f32\.(bf16|f16|tf32)\.", program["ptx"]))
        dtype = {"bf16": "bf16", "fp16": "f16", "fp32": "tf32"}[program["case"].split()[1].rstrip(",")]
        assert kinds == {dtype}, program["case"]


def test_spilling_is_a_failure(cache) -> None:
    code = (
        "import sys; from kvboost_kernels import aot\n"
        "real = aot._read_nvidia\n"
        "aot._read_nvidia = lambda compiled: real(compiled) | {'spills': 1}\n"
        "sys.exit(aot.main(['--target', 'sm_90', '--case', 'row_attention bf16, 64, GQA 3']))"
    )
    done = run("-c", code, cache=cache)
    assert done.returncode == 1, done.stderr
    assert "`attend_kernel`" in done.stdout
