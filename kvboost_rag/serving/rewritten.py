"""Says, once, that documents stand in prompts in another form than the one they were indexed in."""

from __future__ import annotations

import logging

from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.chunks.served import ServedPrompt

logger = logging.getLogger(__name__)

MIN_PROMPT_TOKENS = 256
"""Shorter prompts without a document are what chains ask on the side (a condensed question, a choice of tools)."""


class RewrittenNotice:
    """Frameworks cut, escape or summarise documents in some modes; such prompts are plain prefill, which is right but
    slow, and nothing else would tell why. One warning where documents begin in the prompt but do not go on as
    indexed, one line of information where nothing of them is found.
    """

    def __init__(self) -> None:
        self._said: set[int] = set()

    def check(self, prompt: ServedPrompt, registry: ChunkRegistry, namespace: str) -> None:
        """Look at a prompt in which no document was found. Costs nothing once said, or where one was found."""
        if prompt.documents or len(self._said) == 2 or len(prompt.token_ids) < MIN_PROMPT_TOKENS:
            return
        known = registry.known_texts(namespace)
        if not len(known):
            return
        num_tokens = len(prompt.token_ids)
        beginnings = known.num_beginnings("".join(s.segment.text for s in prompt.segments))
        if beginnings and logging.WARNING not in self._said:
            self._said.add(logging.WARNING)
            logger.warning(
                "the beginnings of indexed documents stand %d times in a prompt of %d tokens, but none of them whole: "
                "something between index and prompt cuts, escapes or rewrites them, so they are prefilled (said once)",
                beginnings,
                num_tokens,
            )
        elif not beginnings and logging.INFO not in self._said:
            self._said.add(logging.INFO)
            logger.info(
                "a prompt of %d tokens holds none of the %d indexed documents: it is prefilled (said once)",
                num_tokens,
                len(known),
            )
