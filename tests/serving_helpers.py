"""A server in a thread of this process, and how to talk to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from kvboost_rag import KVBoost


@dataclass
class LiveServer:
    """Listens on a real socket."""

    uvicorn: Any
    thread: threading.Thread
    engine: KVBoost
    app: Any
    url: str

    @classmethod
    def start(cls, app: Any, settings: Any, engine: KVBoost) -> LiveServer:
        import uvicorn

        from kvboost_rag.server.run import DrainingServer

        config = uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning")
        server = DrainingServer(app, config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        return cls(server, thread, engine, app, f"http://{settings.host}:{settings.port}")

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{self.url}{path}", json=body, headers=named, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60)

    def chat(self, content: str = "Hello there.", **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        asked = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4} | body
        return httpx.post(f"{self.url}/v1/chat/completions", json=asked, headers=headers, timeout=60)


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Raises if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
