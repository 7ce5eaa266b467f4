"""`kvboost-rag serve` as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import httpx

COMMAND = (sys.executable, "-c", "from kvboost_rag.cli import main; main()", "serve")
StartProcess = Callable[..., tuple["subprocess.Popen[str]", str]]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
