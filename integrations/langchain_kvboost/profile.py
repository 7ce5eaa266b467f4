"""What a chat model can do, as `ChatKVBoost.profile` says it: found out without loading weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from langchain_core.language_models import ModelProfile

from kvboost_rag.adapters.constrained import is_available
from kvboost_rag.adapters.registry import EngineSpec
from kvboost_rag.config import GenerationParams, cache_dir
from langchain_kvboost.identity import is_held

_ONLY_TEXT = ("image", "image_url", "audio", "video", "pdf")


def profile_of(spec: EngineSpec, name: str, max_new_tokens: int | None) -> ModelProfile:
    """The profile of a model.

    Args:
        max_new_tokens: of the object's answers; prompts of `max_input_tokens` leave room for one.
    """
    answer = max_new_tokens or GenerationParams().max_new_tokens
    profile: dict[str, Any] = {
        "name": name,
        "open_weights": True,
        "text_inputs": True,
        "text_outputs": True,
        "max_output_tokens": answer,
        "tool_calling": True,
        "tool_choice": is_available(),
        "tool_call_streaming": True,
        "structured_output": True,
        "temperature": True,
        **{f"{kind}_inputs": False for kind in _ONLY_TEXT},
        **{f"{kind}_outputs": False for kind in ("image", "audio", "video")},
        "image_tool_message": False,
        "pdf_tool_message": False,
    }
    context = _context_tokens(spec)
    if context is not None:
        profile["max_input_tokens"] = max(1, context - answer)
    # What langchain-core's older releases do not know they would warn about.
    known = {key: value for key, value in profile.items() if key in ModelProfile.__annotations__}
    return ModelProfile(**known)  # type: ignore[typeddict-item]


def _context_tokens(spec: EngineSpec) -> int | None:
    """The model's context, from the engine or model object if there is one, else from its config file, or None."""
    engine = spec.peek()
    if engine is not None:
        return engine.context_tokens
    if is_held(spec.model):
        from kvboost_rag.serving.limits import context_tokens

        return context_tokens(spec.model)
    path = _config_file(str(spec.model), spec.load.get("hub") or {})
    try:
        config = json.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return None
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit = config.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 and "dynamic" not in json.dumps(rope) else None


def _config_file(name: str, hub: Mapping[str, Any]) -> Path | None:
    """Where a model's config lies on this machine."""
    if name.startswith("bundled:"):
        return cache_dir() / "models" / f"{name.removeprefix('bundled:')}-float32" / "config.json"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        where = {key: hub.get(key) for key in ("revision", "cache_dir")}
        found = try_to_load_from_cache(name, "config.json", **where)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
