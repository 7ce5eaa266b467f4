"""Servers in this process, over tiny models: real sockets, real clients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from prometheus_client import CollectorRegistry
from server_processes import COMMAND, StartProcess, is_ready
from serving_helpers import LiveServer, wait_until

from kvboost_rag import KVBoost
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.server.app import create_app
from kvboost_rag.server.settings import ServerSettings

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:  # its scripts are no package: clients are shared with them
    sys.path.append(BENCHMARKS)

StartServer = Callable[..., LiveServer]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def start_server(make_engine: Callable[..., KVBoost]) -> Iterator[StartServer]:
    """`start_server(keys=…, engine=…)` with fields of `ServerSettings`; stopped at the end."""
    started: list[LiveServer] = []

    def start(engine: KVBoost | None = None, **settings: Any) -> LiveServer:
        registry = CollectorRegistry()
        engine = engine or make_engine(metrics=Metrics("tiny", registry))
        made = ServerSettings(port=free_port(), model_name="tiny", **({"answer_tokens": 8} | settings))
        started.append(LiveServer.start(create_app(engine, made, registry), made, engine))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def server(start_server: StartServer) -> LiveServer:
    """One without keys."""
    return start_server()


@pytest.fixture
def start_process(model_folder: str, tmp_path: Path) -> Iterator[StartProcess]:
    """`start_process("--drain", "30")` gives a process that is ready, and its address."""
    made: list[subprocess.Popen[str]] = []

    def run(*options: str) -> tuple[subprocess.Popen[str], str]:
        port = str(free_port())
        env = os.environ | {"KVBOOST_CACHE_DIR": str(tmp_path / "cache")}
        arguments = ("--model", model_folder, "--model-name", "tiny", "--port", port, "--store", str(tmp_path / port))
        made.append(subprocess.Popen([*COMMAND, *arguments, *options], env=env, text=True, stderr=subprocess.PIPE))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url) or made[-1].poll() is not None, 120)
        assert made[-1].poll() is None
        return made[-1], url

    yield run
    for process in made:
        process.kill()
        process.wait(20)
