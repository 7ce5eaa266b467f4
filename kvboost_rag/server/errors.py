"""Errors in OpenAI's shape, and which of them an exception becomes."""

from __future__ import annotations

import logging
from typing import Any

from kvboost_rag.config import ConfigError
from kvboost_rag.serving.limits import ContextOverflowError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        param: the parameter that is to blame, or None.
        code: a word for programs.
        retry_after_s: seconds to wait before asking again, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after_s)))}


def refused(param: str, why: str, code: str = "unsupported_parameter") -> ApiError:
    """A parameter that cannot be honoured."""
    return ApiError(400, f"{param}: {why}", param, code)


def as_api_error(error: BaseException, begun: bool = False) -> ApiError:
    """What an exception of the engine is to a client.

    Args:
        begun: part of the answer is out, so that the request itself was good; what fails now is ours.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than it may", code="deadline_exceeded")
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, ImportError) and not begun:
        return ApiError(400, f"this server cannot do that: {error}", code="not_installed")
    if isinstance(error, ConfigError) or (isinstance(error, (ValueError, TypeError)) and not begun):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RuntimeError) and "closed" in str(error):
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
    logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    return ApiError(500, f"the server failed with {type(error).__name__}; its log says more", code="internal_error")
