"""Servers in processes of their own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

KVBOOST = (sys.executable, "-c", "from kvboost_rag.cli import main; main()", "serve")
TRANSFORMERS = (str(Path(sys.executable).with_name("transformers")), "serve")
START_S = 300.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        url: without a path.
    """

    process: subprocess.Popen[bytes]
    url: str

    @property
    def rss_bytes(self) -> int:
        """Memory of the process that is resident (Linux).

        Raises:
            OSError: it is over.
        """
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[ServerProcess]:
    """Start `command --port PORT`, wait until it is healthy, stop it at the end.

    Raises:
        RuntimeError: it ended early or did not become healthy; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", port], stdout=log, stderr=subprocess.STDOUT)
        server = ServerProcess(process, f"http://127.0.0.1:{port}")
        try:
            deadline = time.monotonic() + START_S
            while not _is_healthy(server.url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"{' '.join(command)} did not come up (status {process.poll()}):\n{said}")
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
