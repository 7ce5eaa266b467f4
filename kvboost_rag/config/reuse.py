"""How stored KV is used: settings of an engine and of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from kvboost_rag.config.calibrated import CalibratedDefaults, ReuseMode
from kvboost_rag.config.checks import (
    ConfigError,
    check_adapter,
    check_choice,
    check_count,
    check_flag,
    check_namespace,
    check_range,
    check_strategy,
)
from kvboost_rag.config.environment import env_flag, env_float, env_int, env_text

DiskLoad = Literal["measured", "always"]


FULL_BELOW = 256
"""Default of `ReuseConfig.full_below`: by the short questions in `docs/benchmarks.md`."""


@dataclass(frozen=True)
class ReuseConfig:
    """How stored KV is used. A field left at None takes the environment's value, else that of the model's profile,
    else the default given here.

    Attributes:
        reuse: `blend` (default): chunk KV for documents, an exact prefix cache for what stands before them and for
            prompts without any. `exact`: a prefix cache over the whole prompt that never approximates. `off`: plain
            model. `KVBOOST_DISABLE=1` forces `off`.
        repair: name of a strategy in `repair.STRATEGIES`, which is where names are looked up (before a request is
            queued); default `query` (`KVBOOST_RECOMPUTE_STRATEGY`).
        recompute_ratio: share of document tokens to recompute, 0…1, default 0.05.
        top_k: rows per chunk instead of the ratio (`KVBOOST_RECOMPUTE_TOPK`).
        deviation_threshold: recompute all rows whose deviation is above it, instead of the ratio; strategies that
            measure deviation only (`KVBOOST_DEVIATION_THRESHOLD`).
        max_recompute_ratio: upper bound on recomputed / document tokens for every strategy but `full`, so that
            latency stays bounded; default max(0.30, recompute_ratio).
        full_below: documents that have together at most this many tokens are computed like the rest of the prompt,
            since that costs next to nothing; of n tokens above it at least (full_below / n)² · n are. Default 256
            (`KVBOOST_FULL_BELOW`), and 0 where one of the four settings above or `repair="none"` was given.
        tau_reuse, tau_recompute: chunk-level deviation below which `cacheblend` reuses a chunk as it is, and above
            which it recomputes all of it (within the bound); 0.02 and 0.20.
        disk_load: `measured` (default): a chunk that lies on disk is encoded again where that has been faster on this
            machine than loading, and gives the very bits that are stored; `always`: load.
        donors: make a chunk that is not stored out of a stored near-duplicate of it, for the request at hand
            (`KVBOOST_DONORS`, default off). A donor's KV has other last bits than the chunk's own, which is computed
            afterwards: the first answer about an edited document may differ from the later ones.
        adapter: the adapter of the model (or several) that is active for a call; `()`: none, the base model; None: as
            the model stands. Each has KV of its own.
        settle: True: the prompt is a turn of a conversation. It is recomputed exactly while nobody waits, and the turns
            that follow are served from exact KV of all that was said. None: on in sessions and chat classes, else off.
        settle_rows: with `settle`, begin while the answer is decoded: so many rows for each of its tokens, as long as
            nobody waits, in whole blocks; default 0: after the answer.
        namespace: whose chunks are found (a customer's, say). Enters every key; never taken from prompt text.
        strict: raise on a fault in reuse instead of falling back to plain prefill.
        shadow_rate: share of the requests served with `blend`, 0…1, that are compared with full prefill afterwards
            (see `shadow`); costs about one full prefill each, while nobody else is waiting.
        shadow_max_kl: mean KL in nats of those comparisons above which the engine goes over to exact reuse; None =
            only report.
    """

    reuse: ReuseMode | None = None
    repair: str | None = None
    recompute_ratio: float | None = None
    top_k: int | None = None
    deviation_threshold: float | None = None
    max_recompute_ratio: float | None = None
    full_below: int | None = None
    tau_reuse: float = 0.02
    tau_recompute: float = 0.20
    disk_load: DiskLoad = "measured"
    donors: bool | None = None
    adapter: str | tuple[str, ...] | None = None
    settle: bool | None = None
    settle_rows: int | None = None
    namespace: str = ""
    strict: bool = False
    shadow_rate: float = 0.0
    shadow_max_kl: float | None = None

    def __post_init__(self) -> None:
        check_choice("reuse", self.reuse, get_args(ReuseMode))
        check_strategy("repair", self.repair)
        check_choice("disk_load", self.disk_load, get_args(DiskLoad))
        check_range("recompute_ratio", self.recompute_ratio, 0.0, 1.0)
        check_range("max_recompute_ratio", self.max_recompute_ratio, 0.0, 1.0)
        check_range("deviation_threshold", self.deviation_threshold, 0.0, None)
        check_range("shadow_rate", self.shadow_rate, 0.0, 1.0)
        check_range("shadow_max_kl", self.shadow_max_kl, 0.0, None)
        check_range("tau_reuse", self.tau_reuse, 0.0, None)
        check_range("tau_recompute", self.tau_recompute, self.tau_reuse, None)
        if self.top_k is not None:
            check_count("top_k", self.top_k, 0, "rows per chunk")
        if self.full_below is not None:
            check_count("full_below", self.full_below, 0, "tokens")
        if self.settle_rows is not None:
            check_count("settle_rows", self.settle_rows, 0, "rows per token")
        object.__setattr__(self, "adapter", check_adapter(self.adapter))
        for name in ("donors", "settle"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
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
            raise ConfigError(
                f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}. "
                "Further settings of decoding belong into params=GenerationParams(…)"
            )
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    @property
    def adapters(self) -> tuple[str, ...] | None:
        """Names of those that are to be active, None: as the model stands."""
        return (self.adapter,) if isinstance(self.adapter, str) else self.adapter

    def namespace_or_own(self, namespace: str | None) -> str:
        """The namespace a call names, or else this one.

        Raises:
            ConfigError: it cannot be one.
        """
        return self.namespace if namespace is None else check_namespace(namespace)

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
            repair=self.repair if self.repair is not None else env_text(env, "KVBOOST_RECOMPUTE_STRATEGY"),
            top_k=self._unless_other_rule("top_k", env_int(env, "KVBOOST_RECOMPUTE_TOPK")),
            deviation_threshold=self._unless_other_rule(
                "deviation_threshold", env_float(env, "KVBOOST_DEVIATION_THRESHOLD")
            ),
        )
        default = calibrated or CalibratedDefaults()
        repair = from_env.repair or default.repair
        own = from_env.repair is None
        ratio = self._ratio(default if own else CalibratedDefaults())
        cap = self.max_recompute_ratio
        return ResolvedConfig(
            reuse="off" if env_flag(env, "KVBOOST_DISABLE") else self.reuse or default.reuse,
            repair=repair,
            recompute_ratio=ratio if cap is None else min(ratio, cap),
            top_k=from_env.top_k,
            deviation_threshold=from_env.deviation_threshold,
            max_recompute_ratio=max(0.30, ratio) if cap is None else cap,
            full_below=self._full_below(env_int(env, "KVBOOST_FULL_BELOW"), repair),
            tau_reuse=self.tau_reuse,
            tau_recompute=self.tau_recompute,
            adapters=self.adapters,
            namespace=self.namespace,
            strict=self.strict,
            shadow_rate=self.shadow_rate,
            shadow_max_kl=self.shadow_max_kl,
            disk_load=self.disk_load,
            donors=env_flag(env, "KVBOOST_DONORS") if self.donors is None else self.donors,
            settle=bool(self.settle),
            settle_rows=self.settle_rows or 0,
            repair_options=default.repair_options if own else {},
        )

    def _ratio(self, default: CalibratedDefaults) -> float:
        return default.recompute_ratio if self.recompute_ratio is None else self.recompute_ratio

    def _full_below(self, env_value: int | None, repair: str) -> int:
        """Not where somebody said how many rows there should be."""
        if self.full_below is not None:
            return self.full_below
        said = (self.recompute_ratio, self.top_k, self.deviation_threshold, self.max_recompute_ratio)
        if repair == "none" or any(rule is not None for rule in said):
            return 0
        return FULL_BELOW if env_value is None else env_value

    def _unless_other_rule(self, name: str, env_value: Any) -> Any:
        """An argument beats the environment, and so does an argument for one of the alternatives of the same rule."""
        own = getattr(self, name)
        if own is not None:
            return own
        rules = (self.recompute_ratio, self.top_k, self.deviation_threshold)
        return env_value if all(rule is None for rule in rules) else None


@dataclass(frozen=True)
class ResolvedConfig:
    """`ReuseConfig` with every choice made, as one request uses it."""

    reuse: ReuseMode
    repair: str
    recompute_ratio: float
    top_k: int | None
    deviation_threshold: float | None
    max_recompute_ratio: float
    tau_reuse: float
    tau_recompute: float
    namespace: str
    strict: bool
    full_below: int = 0
    adapters: tuple[str, ...] | None = None
    shadow_rate: float = 0.0
    shadow_max_kl: float | None = None
    disk_load: DiskLoad = "measured"
    donors: bool = False
    settle: bool = False
    settle_rows: int = 0
    repair_options: Mapping[str, Any] = field(default_factory=dict)
