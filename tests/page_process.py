"""Run the blocks of one page, in order, in this process: `page_process.py BLOCKS.json`; no network.

Each block is `[place, language, setup, code]`. What a log of ours warns about is printed as `WARNED` and fails the
page: a block that only works by falling back to plain prefill is not what its page promises.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

OURS = ("kvboost_rag", "langchain_kvboost", "llama_index.llms.kvboost", "kvboost_kernels")


class Warned(logging.Handler):
    """Keeps what our packages warn about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(OURS) and "never calibrated" not in record.getMessage():
            self.messages.append(record.getMessage())


def forbid_network() -> None:
    """Only this machine can be reached, as on a computer without network."""
    connect = socket.socket.connect

    def local_only(sock: socket.socket, address: Any) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"no network in this test: {address}")
        connect(sock, address)

    socket.socket.connect = local_only  # type: ignore[method-assign]


def main() -> None:
    forbid_network()
    warned = Warned()
    logging.getLogger().addHandler(warned)
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, language, setup, code in json.loads(Path(sys.argv[1]).read_text()):
        print(f"== {place}", flush=True)
        exec(compile(setup, f"setup before {place}", "exec"), names)
        if language != "python":
            subprocess.run(["sh", "-e", "-x", "-c", code], check=True)
            continue
        # Line numbers of errors are the page's.
        page, _, line = place.rpartition(":")
        exec(compile("\n" * (int(line) - 1) + code, page, "exec"), names)
    for message in warned.messages:
        print(f"WARNED {message}", flush=True)
    sys.exit(bool(warned.messages))


if __name__ == "__main__":
    main()
