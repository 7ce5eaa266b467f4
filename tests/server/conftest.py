"""Servers in this process, over tiny models: real sockets, real clients."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from prometheus_client import CollectorRegistry
from serving_helpers import LiveServer

from kvboost_rag import KVBoost
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.server.app import create_app
from kvboost_rag.server.settings import ServerSettings

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:  # its scripts are no package: clients are shared with them
    sys.path.append(BENCHMARKS)

StartServer = Callable[..., LiveServer]


@pytest.fixture
def start_server(make_engine: Callable[..., KVBoost]) -> Iterator[StartServer]:
    """`start_server(keys=…, engine=…)` with fields of `ServerSettings`; stopped at the end."""
    started: list[LiveServer] = []

    def start(engine: KVBoost | None = None, **settings: Any) -> LiveServer:
        registry = CollectorRegistry()
        engine = engine or make_engine(metrics=Metrics("tiny", registry))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made = ServerSettings(port=port, model_name="tiny", **({"answer_tokens": 8} | settings))
        started.append(LiveServer.start(create_app(engine, made, registry), made, engine))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def server(start_server: StartServer) -> LiveServer:
    """One without keys."""
    return start_server()
