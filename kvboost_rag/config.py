"""Settings, validated, no logic.

Arguments of a call beat the engine's config, which beats environment variables, which beat what calibration found
for the model (its profile), which beats the defaults.

The environment is read again at each request, so that an operator can change it while the process runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast, get_args

from platformdirs import user_cache_dir

ReuseMode = Literal["blend", "exact", "off"]
KernelSetting = Literal["auto", "on", "off"]
DiskLoad = Literal["measured", "always"]
RepairName = Literal["none", "selective", "cacheblend", "query", "sensitivity", "full"]

CHUNK_TOKENS = (64, 128, 256, 512)

HALF_CHARACTER = "text.encode('utf-8', 'replace').decode() puts a question mark there"


class ConfigError(ValueError):
    """A setting is not usable. The message names the setting, the value and what would be accepted."""


@dataclass(frozen=True)
class CalibratedDefaults:
    """What a model's profile puts in the place of the defaults below.

    Attributes:
        reuse: `blend`, or `exact` for a model that failed the accuracy gate.
        repair_options: parameters of the strategy (such as the weight of `query`); they go with `repair` only.
        neighbours, quantization: how chunks are encoded and kept, see `EncodingConfig`.
    """

    reuse: ReuseMode = "blend"
    repair: RepairName = "query"
    recompute_ratio: float = 0.05
    repair_options: Mapping[str, Any] = field(default_factory=dict)
    neighbours: int = 4
    quantization: str = "none"

    def __post_init__(self) -> None:
        _check_choice("reuse", self.reuse, get_args(ReuseMode))
        _check_choice("repair", self.repair, get_args(RepairName))
        _check_range("recompute_ratio", self.recompute_ratio, 0.0, 1.0)
        _check_encoding(self.neighbours, self.quantization)


@dataclass(frozen=True)
class ReuseConfig:
    """How stored KV is used. A field left at None takes the environment's value, else that of the model's profile,
    else the default given here.

    Attributes:
        reuse: `blend` (default): chunk KV for documents, exact hits for the prefix only. `exact`: a prefix cache
            over the whole prompt that never approximates. `off`: plain model. `KVBOOST_DISABLE=1` forces `off`.
        repair: strategy name, default `query` (`KVBOOST_RECOMPUTE_STRATEGY`).
        recompute_ratio: share of document tokens to recompute, 0…1, default 0.05.
        top_k: rows per chunk instead of the ratio (`KVBOOST_RECOMPUTE_TOPK`).
        deviation_threshold: recompute all rows whose deviation is above it, instead of the ratio; strategies that
            measure deviation only (`KVBOOST_DEVIATION_THRESHOLD`).
        max_recompute_ratio: upper bound on recomputed / document tokens for every strategy but `full`, so that
            latency stays bounded; default max(0.30, recompute_ratio).
        tau_reuse, tau_recompute: chunk-level deviation below which `cacheblend` reuses a chunk as it is, and above
            which it recomputes all of it (within the bound); 0.02 and 0.20.
        disk_load: `measured` (default): a chunk that lies on disk is encoded again where that has been faster on this
            machine than loading, and gives the very bits that are stored; `always`: load.
        donors: make a chunk that is not stored out of a stored near-duplicate of it, for the request at hand
            (`KVBOOST_DONORS`, default off). A donor's KV has other last bits than the chunk's own, which is computed
            afterwards: the first answer about an edited document may differ from the later ones.
        namespace: tenant. Enters every key; never taken from prompt text.
        strict: raise on a fault in reuse instead of falling back to plain prefill.
        shadow_rate: share of the requests served with `blend`, 0…1, that are compared with full prefill afterwards
            (see `shadow`); costs about one full prefill each, while nobody else is waiting.
        shadow_max_kl: mean KL in nats of those comparisons above which the engine goes over to exact reuse; None =
            only report.
    """

    reuse: ReuseMode | None = None
    repair: RepairName | None = None
    recompute_ratio: float | None = None
    top_k: int | None = None
    deviation_threshold: float | None = None
    max_recompute_ratio: float | None = None
    tau_reuse: float = 0.02
    tau_recompute: float = 0.20
    disk_load: DiskLoad = "measured"
    donors: bool | None = None
    namespace: str = ""
    strict: bool = False
    shadow_rate: float = 0.0
    shadow_max_kl: float | None = None

    def __post_init__(self) -> None:
        _check_choice("reuse", self.reuse, get_args(ReuseMode))
        _check_choice("repair", self.repair, get_args(RepairName))
        _check_choice("disk_load", self.disk_load, get_args(DiskLoad))
        _check_range("recompute_ratio", self.recompute_ratio, 0.0, 1.0)
        _check_range("max_recompute_ratio", self.max_recompute_ratio, 0.0, 1.0)
        _check_range("deviation_threshold", self.deviation_threshold, 0.0, None)
        _check_range("shadow_rate", self.shadow_rate, 0.0, 1.0)
        _check_range("shadow_max_kl", self.shadow_max_kl, 0.0, None)
        _check_range("tau_reuse", self.tau_reuse, 0.0, None)
        _check_range("tau_recompute", self.tau_recompute, self.tau_reuse, None)
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0
        ):
            raise ConfigError(f"top_k={self.top_k!r}: expected a whole number of rows per chunk, 0 or more")
        if self.donors is not None and not isinstance(self.donors, bool):
            raise ConfigError(f"donors={self.donors!r}: expected True or False")
        check_namespace(self.namespace)
        if self.top_k is not None and self.deviation_threshold is not None:
            raise ConfigError("top_k and deviation_threshold are alternatives; set one of them")
        if None not in (self.recompute_ratio, self.max_recompute_ratio) and (
            self.recompute_ratio > self.max_recompute_ratio  # type: ignore[operator]
        ):
            raise ConfigError(
                f"recompute_ratio={self.recompute_ratio} is above max_recompute_ratio={self.max_recompute_ratio}"
            )

    def override(self, **changes: Any) -> ReuseConfig:
        """A copy with the given fields set; None leaves a field as it is.

        Raises:
            ConfigError: an unknown name; the message lists the known ones.
        """
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    def resolve(
        self, environ: Mapping[str, str] | None = None, calibrated: CalibratedDefaults | None = None
    ) -> ResolvedConfig:
        """Fill what is unset from the environment, then from the model's profile, then from the defaults.

        A profile's ratio and options were measured with its strategy: they apply only if that strategy does.

        Raises:
            ConfigError: an environment variable holds a value that cannot be used; the message names it.
        """
        env = os.environ if environ is None else environ
        from_env = replace(
            self,
            repair=self.repair if self.repair is not None else _env_choice(env),
            top_k=self._unless_other_rule("top_k", _env_int(env, "KVBOOST_RECOMPUTE_TOPK")),
            deviation_threshold=self._unless_other_rule(
                "deviation_threshold", _env_float(env, "KVBOOST_DEVIATION_THRESHOLD")
            ),
        )
        default = calibrated or CalibratedDefaults()
        repair = from_env.repair or default.repair
        own = from_env.repair is None
        fallback_ratio = default.recompute_ratio if own else CalibratedDefaults.recompute_ratio
        ratio = fallback_ratio if self.recompute_ratio is None else self.recompute_ratio
        cap = self.max_recompute_ratio
        disabled = _env_flag(env, "KVBOOST_DISABLE")
        return ResolvedConfig(
            reuse="off" if disabled else self.reuse or default.reuse,
            repair=repair,
            recompute_ratio=ratio if cap is None else min(ratio, cap),
            top_k=from_env.top_k,
            deviation_threshold=from_env.deviation_threshold,
            max_recompute_ratio=max(0.30, ratio) if cap is None else cap,
            tau_reuse=self.tau_reuse,
            tau_recompute=self.tau_recompute,
            namespace=self.namespace,
            strict=self.strict,
            shadow_rate=self.shadow_rate,
            shadow_max_kl=self.shadow_max_kl,
            disk_load=self.disk_load,
            donors=_env_flag(env, "KVBOOST_DONORS") if self.donors is None else self.donors,
            repair_options=default.repair_options if own else {},
        )

    def _unless_other_rule(self, name: str, env_value: Any) -> Any:
        """An argument beats the environment, and so does an argument for one of the alternatives of the same rule."""
        own = getattr(self, name)
        if own is not None:
            return own
        rules = (self.recompute_ratio, self.top_k, self.deviation_threshold)
        return env_value if all(rule is None for rule in rules) else None


@dataclass(frozen=True)
class EncodingConfig:
    """How chunks are encoded and kept: fixed for an engine, because a chunk's KV is a function of it. A field left at
    None takes the environment's value, else that of the model's profile, else the default given here.

    Attributes:
        anchor: text in front of each chunk while it is encoded; `auto` is the chat template's head up to a user
            message's content, or BOS where there is no template; the empty string is no anchor.
        separator: text behind each neighbour in an encoding context, as between documents in a prompt.
        quantization: codec of stored chunk KV: `none` (default), `k8v8` or `k8v4` (see `quantization`). Chunks stored
            with another one are encoded again when they are needed.
        batch_size: chunks encoded in one forward. Above 1 a chunk that is encoded again alone may differ in the last
            bits, and so may a cold answer from a warm one: matrix kernels round differently at other batch shapes.
        block_tokens: block length of the exact path (its first blocks are shorter); only whole blocks are found again
            in a longer prompt.
        neighbours: how many similar chunks of the corpus `warm` encodes a chunk behind; default 4
            (`KVBOOST_NEIGHBOURS`). 0: none, and nothing is embedded.
        groups: `warm` encodes new chunks in groups of up to `neighbours` + 1 similar ones, in one forward, each behind
            those before it: about one token forwarded per document token instead of `neighbours` + 1, and a part of the
            gain only. Not for models with experts.
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
    neighbours: int | None = None
    groups: bool = False
    embedder: Any = field(default=None, repr=False, hash=False)
    sensitivity: bool = False
    donor_rules: Any = None

    def __post_init__(self) -> None:
        for name in ("anchor", "separator"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a string")
        _check_encoding(self.neighbours, self.quantization)
        if self.neighbours is None:
            _env_int(os.environ, "KVBOOST_NEIGHBOURS")  # what cannot be used is said before a model is loaded
        for name in ("batch_size", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number, 1 or more")
        for name in ("groups", "sensitivity"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False")

    def resolve(
        self, environ: Mapping[str, str] | None = None, calibrated: CalibratedDefaults | None = None
    ) -> EncodingConfig:
        """Fill what is unset from the environment, then from the model's profile, then from the defaults.

        Raises:
            ConfigError: an environment variable holds a value that cannot be used; the message names it.
        """
        default = calibrated or CalibratedDefaults()
        from_env = _env_int(os.environ if environ is None else environ, "KVBOOST_NEIGHBOURS")
        neighbours = default.neighbours if from_env is None else from_env
        return replace(
            self,
            neighbours=neighbours if self.neighbours is None else self.neighbours,
            quantization=default.quantization if self.quantization is None else self.quantization,
        )


@dataclass(frozen=True)
class ResolvedConfig:
    """`ReuseConfig` with every choice made, as one request uses it."""

    reuse: ReuseMode
    repair: RepairName
    recompute_ratio: float
    top_k: int | None
    deviation_threshold: float | None
    max_recompute_ratio: float
    tau_reuse: float
    tau_recompute: float
    namespace: str
    strict: bool
    shadow_rate: float = 0.0
    shadow_max_kl: float | None = None
    disk_load: DiskLoad = "measured"
    donors: bool = False
    repair_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationParams:
    """Parameters of decoding; unset ones take the model's generation config. Names are those of transformers.

    Attributes:
        max_new_tokens: default 256.
        stop: strings at whose first occurrence the text ends; they are not part of it.
        stop_token_ids: tokens that end the answer, besides the model's own.
        extra: further keyword arguments for `generate` (for example `no_repeat_ngram_size`, `logits_processor`).
    """

    max_new_tokens: int = 256
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens!r}: expected a whole number, 1 or more")
        _check_range("temperature", self.temperature, 0.0, None)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0:
            raise ConfigError("repetition_penalty=0: expected a number above 0; 1 is no penalty")
        _check_whole("top_k", self.top_k, 0, None)
        _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in (("stop", "non-empty strings"), ("stop_token_ids", "token ids")):
            if not _is_list(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {what}")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # once: it may be a generator
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r}: expected non-empty strings")
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, 0, None)
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise ConfigError(f"extra={self.extra!r}: expected keyword arguments of `generate` by name")


def check_namespace(namespace: Any) -> str:
    """The name of a tenant, as given.

    Raises:
        ConfigError: not a string, or one that is not valid Unicode and cannot be kept.
    """
    if not isinstance(namespace, str) or lone_surrogate(namespace) is not None:
        raise ConfigError(f"namespace={namespace!r}: expected a string of valid Unicode")
    return namespace


def lone_surrogate(text: str) -> int | None:
    """Place of the first character that is half of one (`\\ud83d` without its other half), or None.

    Python strings may hold them, UTF-8 cannot: such a text can be neither tokenised nor stored.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def _check_encoding(neighbours: Any, quantization: Any) -> None:
    _check_choice("quantization", quantization, ("none", "k8v8", "k8v4"))
    if neighbours is None:
        return
    if isinstance(neighbours, bool) or not isinstance(neighbours, int) or neighbours < 0:
        raise ConfigError(f"neighbours={neighbours!r}: expected a whole number of chunks, 0 or more")


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    if value is None:
        return
    wanted = f"a number from {low:g} to {high:g}" if high is not None else f"a number of at least {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r}: expected {wanted}")
    if not low <= value or (high is not None and value > high):  # `not <=` also catches NaN
        raise ConfigError(f"{name}={value!r}: expected {wanted}")


def _check_whole(name: str, value: Any, low: int, high: int | None) -> None:
    if value is None:
        return
    fits = isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value)
    if not fits or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r}: expected a whole number, {low} or more")


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping))


def _env_choice(env: Mapping[str, str]) -> Any:
    value = env.get("KVBOOST_RECOMPUTE_STRATEGY") or None
    _check_choice("KVBOOST_RECOMPUTE_STRATEGY", value, get_args(RepairName))
    return value


def _env_int(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name) or None
    if value is None:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        raise ConfigError(f"{name}={value!r}: expected a whole number, 0 or more")
    return int(value)


def _env_float(env: Mapping[str, str], name: str) -> float | None:
    value = env.get(name) or None
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r}: expected a number of at least 0") from None
    _check_range(name, number, 0.0, None)
    return number


def _env_flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name}={value!r}: expected 1 or 0")


def kernel_setting(environ: Mapping[str, str] | None = None) -> KernelSetting:
    """`KVBOOST_KERNELS`: `auto` (Triton on a GPU, numba on a CPU), `on` (Triton on any device), `off` (plain torch)."""
    value = (os.environ if environ is None else environ).get("KVBOOST_KERNELS", "").strip().lower() or "auto"
    _check_choice("KVBOOST_KERNELS", value, get_args(KernelSetting))
    return cast(KernelSetting, value)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for converted models and the default stores: `KVBOOST_CACHE_DIR`, else the user's cache folder."""
    env = os.environ if environ is None else environ
    chosen = env.get("KVBOOST_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("kvboost-rag", appauthor=False))
