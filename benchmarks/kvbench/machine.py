"""What a figure was measured on."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """Hardware, versions and commit, for the head of every report."""

    processor: str
    threads: int
    memory_gb: float
    python: str
    torch: str
    transformers: str
    kvboost_rag: str
    commit: str

    def as_dict(self) -> dict[str, str | int | float]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"{self.processor}, {self.threads} threads, {self.memory_gb:.0f} GB; Python {self.python}, "
            f"torch {self.torch}, transformers {self.transformers}, kvboost-rag {self.kvboost_rag} ({self.commit})"
        )


def this_machine() -> Machine:
    return Machine(
        processor=torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        threads=torch.get_num_threads(),
        memory_gb=_memory_bytes() / 1e9,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=installed("transformers") or "",
        kvboost_rag=installed("kvboost-rag") or "not installed",
        commit=_commit(),
    )


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 0


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
