"""Why a model is refused."""

from __future__ import annotations


class NotReusable(ValueError):
    """Why a model's KV cannot be reused; the message is meant for the user."""
