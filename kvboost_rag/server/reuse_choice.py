"""Whether and how one request reuses KV: headers, the server's default, and switches that beat both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost_rag.adapters.reuse_settings import check_reuse
from kvboost_rag.engine import KVBoost
from kvboost_rag.server.errors import refused
from kvboost_rag.server.settings import ServerSettings

ENABLED, STRATEGY = "x-kvboost-enabled", "x-kvboost-strategy"
OFF = "off"
_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off")


@dataclass(frozen=True)
class ReuseChoice:
    """What was decided for one request.

    Attributes:
        enabled: whether stored KV is used.
        strategy: the repair strategy; `off` where nothing is reused, `exact` where nothing is approximated.
        options: for `KVBoost.stream`.
    """

    enabled: bool
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """For the answer."""
        return {ENABLED: str(self.enabled).lower(), STRATEGY: self.strategy}


def reuse_choice(headers: Mapping[str, str], engine: KVBoost, settings: ServerSettings) -> ReuseChoice:
    """Decide for one request.

    Raises:
        ApiError: a header that cannot be used.
    """
    options: dict[str, Any] = {"reuse": _wanted(headers.get(ENABLED), engine, settings)}
    if (strategy := headers.get(STRATEGY)) is not None:
        options["repair"] = strategy.strip()
        try:
            check_reuse(options)
        except ValueError as error:
            raise refused(STRATEGY, str(error), "invalid_value") from None
    if switched_off(settings.switch_file):
        options["reuse"] = OFF
    calibrated = engine.profile.defaults if engine.profile is not None else None
    resolved = engine.config.override(**options).resolve(calibrated=calibrated)
    mode = "exact" if resolved.reuse == "blend" and engine.shadow.tripped else resolved.reuse
    named = resolved.repair if mode == "blend" else mode
    return ReuseChoice(mode != OFF, named, options)


def switched_off(file: Path | None) -> bool:
    """Whether the switch file says so; one that is missing says nothing."""
    if file is None:
        return False
    try:
        return file.read_text().strip().lower() in (*_FALSE, "disabled")
    except OSError:
        return False


def _wanted(header: str | None, engine: KVBoost, settings: ServerSettings) -> str | None:
    """A mode of reuse, or None for the engine's own."""
    word = header.strip().lower() if header is not None else str(settings.enabled).lower()
    if word in _FALSE:
        return OFF
    if word in _TRUE:
        return "blend" if engine.config.reuse == OFF else None
    raise refused(ENABLED, f"{header!r} is neither true nor false", "invalid_value")
