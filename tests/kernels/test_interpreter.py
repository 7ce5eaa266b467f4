"""Run the interpreter tests, each file in a process of its own that has `TRITON_INTERPRET=1` from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreter"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the files are collected in this process")
@pytest.mark.parametrize("file", sorted(p.name for p in FOLDER.glob("test_*.py")))
def test_file(file: str) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(FOLDER / file),
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::RuntimeWarning",
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
