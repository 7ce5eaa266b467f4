"""How chunks are encoded and kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvboost_rag.config.calibrated import CalibratedDefaults, check_encoding
from kvboost_rag.config.checks import ConfigError, check_count, check_flag
from kvboost_rag.config.environment import env_flag, env_int

CHUNK_TOKENS = (64, 128, 256, 512)


@dataclass(frozen=True)
class EncodingConfig:
    """How chunks are encoded and kept: fixed for an engine, because a chunk's KV is a function of it. A field left at
    None takes the environment's value, else that of the model's profile, else the default given here.

    Attributes:
        anchor: text in front of each chunk while it is encoded; `auto` is the chat template's head up to a user
            message's content, or BOS where there is no template; the empty string is no anchor.
        separator: text after each neighbour in an encoding context, as between documents in a prompt.
        quantization: codec of stored chunk KV: `none` (default), `k8v8` or `k8v4` (see `quantization`). Chunks stored
            with another one are encoded again when they are needed.
        batch_size: chunks encoded in one forward. Above 1 a chunk that is encoded again alone may differ in the last
            bits, and so may a cold answer from a warm one: matrix kernels round differently at other batch shapes.
        min_chunk_tokens: shorter chunks (headings, single words) are not reused: they stand in many prompts by chance,
            and computing them costs nothing.
        block_tokens: block length of the exact path (its first blocks are shorter); only whole blocks are found again
            in a longer prompt.
        neighbours: how many similar chunks of the corpus `warm` encodes a chunk after; default 4
            (`KVBOOST_NEIGHBOURS`). 0: none, and nothing is embedded.
        contexts: how many such contexts `warm` encodes a chunk after, one forward each: what stands before it in its
            document and the nearest chunks, then the next nearest. The KV after each is combined into one (see
            `context_weights`): nearer to full prefill, at the same size and the same cost when it is used. Default 2
            (`KVBOOST_CONTEXTS`), 1 with `groups`.
        context_weights: how they are combined, as calibration fitted it for the model
            (`encode.mixture.ContextWeights`); None: the profile's, and where there is none the plain mean.
        siblings: whether the first chunk of a chunk's document and the one just before it belong into its context.
        groups: `warm` encodes new chunks in groups of up to `neighbours` + 1 similar ones, in one forward, each after
            those before it: about one token forwarded per document token instead of `neighbours` + 1, and a part of the
            gain only; with two contexts the other way round as well. Not for models with experts.
        leading: also keep the KV that a chunk has after the anchor alone, in 8 bits, for prompts in which no document
            stands before it and little else: there it is nearly what full prefill gives. One more forward a chunk when
            it is encoded, a quarter more bytes in float32 and half as much again in 16 bits, nothing when it is used.
            Not with `groups`, nor on several ranks. Default off (`KVBOOST_LEADING`).
        embedder: what compares chunks: a name for sentence-transformers, an embedding object of LangChain or
            LlamaIndex, or a function (`embeddings.load_embedder`); None: all-MiniLM-L6-v2.
        sensitivity: also store how much each token of a chunk depends on what stands before it, for the strategy
            `sensitivity`; one more forward a chunk when it is encoded, nothing when it is used.
        donor_rules: which stored chunk may stand in for another one (`similarity.DonorRules`; None: its defaults).
    """

    anchor: str = "auto"
    separator: str = "\n\n"
    quantization: str | None = None
    batch_size: int = 1
    block_tokens: int = 256
    min_chunk_tokens: int = 16
    neighbours: int | None = None
    contexts: int | None = None
    context_weights: Any = field(default=None, repr=False, hash=False)
    siblings: bool = True
    groups: bool = False
    leading: bool | None = None
    embedder: Any = field(default=None, repr=False, hash=False)
    sensitivity: bool = False
    donor_rules: Any = None

    def __post_init__(self) -> None:
        for name in ("anchor", "separator"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a string")
        check_encoding(self.neighbours, self.quantization)
        if self.neighbours is None:
            env_int(os.environ, "KVBOOST_NEIGHBOURS")  # what cannot be used is said before a model is loaded
        if self.contexts is None:
            _contexts(os.environ)
        for name in ("batch_size", "block_tokens", "min_chunk_tokens"):
            check_count(name, getattr(self, name), 1)
        if self.contexts is not None:
            check_count("contexts", self.contexts, 1)
        if self.leading is not None:
            check_flag("leading", self.leading)
        for name in ("siblings", "groups", "sensitivity"):
            check_flag(name, getattr(self, name))

    def resolve(
        self, environ: Mapping[str, str] | None = None, calibrated: CalibratedDefaults | None = None
    ) -> EncodingConfig:
        """Fill what is unset from the environment, then from the model's profile, then from the defaults.

        Raises:
            ConfigError: an environment variable holds a value that cannot be used; the message names it.
        """
        default = calibrated or CalibratedDefaults()
        env = os.environ if environ is None else environ
        from_env = env_int(env, "KVBOOST_NEIGHBOURS")
        neighbours = default.neighbours if from_env is None else from_env
        contexts = _contexts(env) or (1 if self.groups else default.contexts)
        return replace(
            self,
            neighbours=neighbours if self.neighbours is None else self.neighbours,
            contexts=contexts if self.contexts is None else self.contexts,
            leading=env_flag(env, "KVBOOST_LEADING") if self.leading is None else self.leading,
            context_weights=default.context_weights if self.context_weights is None else self.context_weights,
            quantization=default.quantization if self.quantization is None else self.quantization,
        )


def _contexts(env: Mapping[str, str]) -> int | None:
    found = env_int(env, "KVBOOST_CONTEXTS")
    if found is not None:
        check_count("KVBOOST_CONTEXTS", found, 1)
    return found
