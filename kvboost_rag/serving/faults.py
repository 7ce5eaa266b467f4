"""Faults in reuse: counted, logged once a kind, raised in strict mode."""

from __future__ import annotations

import logging
from collections import Counter

from kvboost_rag.config import ResolvedConfig

logger = logging.getLogger(__name__)


class Faults:
    """What went wrong since the engine was made.

    Attributes:
        num_requests: served, with and without.
        counts: requests that fell back to plain prefill, by the type of the fault.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.counts: Counter[str] = Counter()

    def note(self, error: Exception, config: ResolvedConfig) -> str:
        """Count a fault; returns it in words. Re-raises it in strict mode."""
        if config.strict:
            raise error
        reason, kind = f"{type(error).__name__}: {error}", type(error).__name__
        if not self.counts[kind]:
            logger.warning("reuse failed, the request is served by plain prefill: %s", reason, exc_info=error)
        self.counts[kind] += 1
        return reason
