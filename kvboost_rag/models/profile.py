"""What calibration found for one model, kept in a file that the engine reads when it starts.

A profile belongs to a model's fingerprint and to a version of transformers: either may change what reuse costs in
accuracy. Any other combination has no profile. Those that are shipped with the package hold for all versions with the
same first number.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvboost_rag.config import CalibratedDefaults, ConfigError, cache_dir

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Setting:
    """One way to reuse: at query time (strategy, ratio) and at index time (neighbours, quantisation).

    Attributes:
        repair: name of a strategy.
        weight: of the strategy `query`, see `repair.QueryRepair`.
        neighbours, contexts: chunks that each chunk is encoded after, and how many such contexts.
        quantization: codec of stored chunk KV.
    """

    repair: str = "query"
    recompute_ratio: float = 0.05
    weight: str | None = None
    neighbours: int = 0
    quantization: str = "none"
    contexts: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Parameters of the strategy."""
        return {} if self.weight is None else {"weight": self.weight}

    @property
    def label(self) -> str:
        """`query*deviation 5 %, 4 neighbours, k8v4`."""
        weight = f"*{self.weight}" if self.weight else ""
        ratio = "" if self.repair in ("none", "full") else f" {100 * self.recompute_ratio:g} %"
        codec = "" if self.quantization == "none" else f", {self.quantization}"
        contexts = "" if self.contexts == 1 else f", {self.contexts} contexts"
        return f"{self.repair}{weight}{ratio}, {self.neighbours} neighbours{contexts}{codec}"


@dataclass(frozen=True)
class Measured:
    """A setting on the evaluation prompts, against full prefill on the same token ids.

    Attributes:
        kl_first, kl_mean: KL(full ‖ reuse) in nats at the first answer token / over the reference's greedy answer,
            mean over the prompts.
        kl_upper: upper end of the 90 % bootstrap interval of the larger of the two; what the gate looks at.
        agreement: share of the answer's tokens with the same most likely token.
        identical: share of prompts with the very same greedy answer.
        f1_recovery: mean F1 / full prefill's mean F1, on the questions that full prefill answers; None if none.
        em_recovery: share of those questions that reuse answers too. A question counts as answered if an accepted
            answer stands in the text.
        ttft_ratio: TTFT by full prefill / TTFT by reuse, ratio of the medians.
    """

    setting: Setting
    num_prompts: int
    kl_first: float
    kl_mean: float
    kl_upper: float
    agreement: float
    identical: float
    f1_recovery: float | None
    em_recovery: float | None
    ttft_ratio: float


@dataclass(frozen=True)
class ModelProfile:
    """The outcome of a calibration.

    Attributes:
        fingerprint, transformers: what it holds for.
        max_kl: what the user tolerates, in nats.
        chosen: the cheapest measured setting within `max_kl`; None: the model failed the gate.
        measured: all settings, as measured.
        num_prompts, num_answered: evaluation prompts, and those that full prefill answers.
        data: where the prompts came from.
    """

    fingerprint: str
    transformers: str
    model: str
    max_kl: float
    chosen: Setting | None
    measured: tuple[Measured, ...]
    num_prompts: int
    num_answered: int
    data: str

    @property
    def passed(self) -> bool:
        return self.chosen is not None

    @property
    def defaults(self) -> CalibratedDefaults:
        """What the engine is to use where nobody says otherwise: exact reuse for a model that failed."""
        if self.chosen is None:
            return CalibratedDefaults(reuse="exact")
        return CalibratedDefaults(
            repair=self.chosen.repair,
            recompute_ratio=self.chosen.recompute_ratio,
            repair_options=self.chosen.options,
            neighbours=self.chosen.neighbours,
            contexts=self.chosen.contexts,
            quantization=self.chosen.quantization,
        )


def profile_path(fingerprint: str, transformers: str | None = None, folder: Path | None = None) -> Path:
    """Where the profile of a model is kept: `profiles` in the user's cache folder (`KVBOOST_CACHE_DIR`)."""
    name = f"{fingerprint[:32]}-transformers-{transformers or version('transformers')}.json"
    return (folder or cache_dir() / "profiles") / name


def save_profile(profile: ModelProfile, folder: Path | None = None) -> Path:
    """Write the profile where the engine looks for it; whole or not at all."""
    path = profile_path(profile.fingerprint, profile.transformers, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT} | asdict(profile), indent=1)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
    return path


def load_profile(fingerprint: str, folder: Path | None = None) -> ModelProfile | None:
    """The model's profile for the installed version of transformers, or None: the user's own, else one that is shipped.

    A file that cannot be used is logged and counts as none: a model must start without it.
    """
    path = profile_path(fingerprint, None, folder)
    shipped = None if path.is_file() else _shipped(fingerprint)
    path = shipped or path
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the profile %s cannot be read and is ignored: %s", path, error)
        return None
    try:
        profile = _from_json(raw)
        other_version = shipped is None and profile.transformers != version("transformers")
        if profile.fingerprint != fingerprint or other_version:
            raise ValueError("it belongs to another model or version of transformers")
        profile.defaults  # noqa: B018 - unknown strategies and ratios out of range raise here
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        logger.warning("the profile %s is ignored: %s: %s", path, type(error).__name__, error)
        return None
    return profile


def _shipped(fingerprint: str) -> Path | None:
    """The shipped file of the installed series of transformers; `scripts/ship_profiles.py` keeps one a model."""
    series = f"{version('transformers').partition('.')[0]}.*"
    return max(SHIPPED.glob(profile_path(fingerprint, series, SHIPPED).name), default=None)


def _from_json(raw: Any) -> ModelProfile:
    fields = dict(raw)
    if fields.pop("format") != FORMAT:
        raise ValueError("it was written by another version of kvboost-rag")
    fields["chosen"] = None if fields["chosen"] is None else Setting(**fields["chosen"])
    fields["measured"] = tuple(Measured(**(m | {"setting": Setting(**m["setting"])})) for m in fields["measured"])
    return ModelProfile(**fields)


SHIPPED = Path(__file__).with_name("profiles")
"""Profiles of the bundled models, as `save_profile(profile, SHIPPED)` writes them; part of the package."""

_said: set[str] = set()


@dataclass(frozen=True)
class ProfileNotice:
    """Says once in a process what a model runs on where that is not a profile it passed.

    Attributes:
        wanted: False where nobody needs to be told: reuse is impossible, or the caller chose the profile.
    """

    profile: ModelProfile | None
    fingerprint: str
    name: str
    wanted: bool = True

    def take(self) -> str | None:
        """The sentence; None if there is nothing to say, or it was said."""
        if not self.wanted or (self.profile is not None and self.profile.passed) or self.fingerprint in _said:
            return None
        _said.add(self.fingerprint)
        if self.profile is None:
            return (
                f"{self.name} was never calibrated with this version of transformers, so reuse runs on safe defaults; "
                f"measure what suits it with: kvboost-rag calibrate {self.name}"
            )
        return (
            f"{self.name} failed calibration (no setting within {self.profile.max_kl:g} nats of full prefill), so only "
            "exact reuse is used; reuse='blend' overrides that"
        )
