"""The server as a process: listens, drains on SIGTERM."""

from __future__ import annotations

from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvboost_rag.server.settings import ServerSettings


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT: `/ready` says 503, new requests are refused, running answers end, then it stops.

    A second signal stops it at once.
    """

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.kvboost.draining = True
        super().handle_exit(sig, frame)


def serve(app: FastAPI, settings: ServerSettings, **options: Any) -> None:
    """Serve until told to stop; answers that run then have `drain_s` to end."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(settings.drain_s),
        server_header=False,
        **options,
    )
    DrainingServer(app, config).run()
