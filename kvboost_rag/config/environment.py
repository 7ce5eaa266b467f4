"""Environment variables, read again at each call, so that an operator can change them while the process runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, get_args

from platformdirs import user_cache_dir

from kvboost_rag.config.checks import ConfigError, check_choice, check_range

KernelSetting = Literal["auto", "on", "off"]


def env_text(env: Mapping[str, str], name: str) -> str | None:
    """The value, or None where it is unset or empty."""
    return env.get(name) or None


def env_int(env: Mapping[str, str], name: str) -> int | None:
    value = env_text(env, name)
    if value is None:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        raise ConfigError(f"{name}={value!r}: expected a whole number, 0 or more")
    return int(value)


def env_float(env: Mapping[str, str], name: str) -> float | None:
    value = env_text(env, name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r}: expected a number of at least 0") from None
    check_range(name, number, 0.0, None)
    return number


def env_flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name}={value!r}: expected 1 or 0")


def kernel_setting(environ: Mapping[str, str] | None = None) -> KernelSetting:
    """`KVBOOST_KERNELS`: `auto` (Triton on a GPU, numba on a CPU), `on` (Triton on any device), `off` (plain torch)."""
    value = (os.environ if environ is None else environ).get("KVBOOST_KERNELS", "").strip().lower() or "auto"
    check_choice("KVBOOST_KERNELS", value, get_args(KernelSetting))
    return cast(KernelSetting, value)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for converted models and the default stores: `KVBOOST_CACHE_DIR`, else the user's cache folder."""
    env = os.environ if environ is None else environ
    chosen = env.get("KVBOOST_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("kvboost-rag", appauthor=False))
