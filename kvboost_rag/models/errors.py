"""The error of loading."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be loaded. The message says where it was looked for and what to install or change."""


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
