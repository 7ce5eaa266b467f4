"""The text of a node as it stands in prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

PROMPT_MODES = (MetadataMode.LLM, MetadataMode.NONE)
"""Synthesizers write a node with the metadata meant for the model; the citation engine first takes its bare text."""


def node_text(node: Any, mode: MetadataMode = MetadataMode.LLM) -> str:
    """What a node (or a retrieved one, or plain text) is in a prompt, without white space around it.

    Raises:
        TypeError: neither a node nor text.
    """
    if isinstance(node, NodeWithScore):
        node = node.node
    if isinstance(node, str):
        return node.strip()
    if not isinstance(node, BaseNode):
        raise TypeError(f"expected a node or a text, got {type(node).__name__}")
    return node.get_content(metadata_mode=mode).strip()


def node_texts(nodes: Any, modes: Sequence[MetadataMode] = (MetadataMode.LLM,)) -> list[str]:
    """Texts of nodes (or of a single one) in each of several modes, empty ones left out, each once."""
    if isinstance(nodes, (str, BaseNode, NodeWithScore)):
        nodes = [nodes]
    texts = (node_text(node, mode) for node in nodes for mode in modes)
    return list(dict.fromkeys(text for text in texts if text))
