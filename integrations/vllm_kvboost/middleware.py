"""For `vllm serve --middleware vllm_kvboost.BlendByDefault`: every request accepts documents' KV unless it says more.

Clients that cannot set `cache_salt` (most chat front ends) profit too. A request that brings a salt keeps it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_kvboost.policy import cache_salt

Message = MutableMapping[str, Any]
PATHS = ("/v1/completions", "/v1/chat/completions")
NAMESPACE = "KVBOOST_NAMESPACE"


class BlendByDefault:
    """ASGI middleware. The namespace comes from the variable `KVBOOST_NAMESPACE` (default: the empty one)."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client is gone
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = with_salt(body)
        headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


def with_salt(body: bytes) -> bytes:
    """The request with a salt; one that has a salt, and what is no JSON object, as it is (vLLM says what is wrong)."""
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict) or request.get("cache_salt") is not None:
        return body
    return json.dumps({**request, "cache_salt": cache_salt(os.environ.get(NAMESPACE, ""))}).encode()
