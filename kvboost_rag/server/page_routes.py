"""The page at `/`: static files, open to all; what it shows it asks for with the operator's key."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from kvboost_rag.server.errors import ApiError

router = APIRouter()
_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/")
async def index() -> Response:
    return await file("index.html")


@router.get("/page/{name}")
async def file(name: str) -> Response:
    if name not in _TYPES:
        raise ApiError(404, f"no file {name!r}", code="no_such_route")
    return FileResponse(_FOLDER / name, media_type=_TYPES[name], headers=_HEADERS)
