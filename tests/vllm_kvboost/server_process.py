"""vLLM in processes of its own: a server with the connector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 240


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "KVBOOST_NAMESPACE": "",
    }


@contextmanager
def running_server(model: str, store: Path, log: Path) -> Iterator[str]:
    """`vllm serve` with the connector and the middleware; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KVBoostConnector",
        "kv_connector_module_path": "vllm_kvboost",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store)},
    }
    # The command `vllm` looks for a distribution of that name, which the CPU build does not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    command += ["--middleware", "vllm_kvboost.BlendByDefault"]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while not _answers(f"{address}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
