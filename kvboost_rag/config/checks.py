"""What makes a setting usable, and the error that says why it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

HALF_CHARACTER = "text.encode('utf-8', 'replace').decode() puts a question mark there"


class ConfigError(ValueError):
    """A setting is not usable. The message names the setting, the value and what would be accepted."""


def check_namespace(namespace: Any) -> str:
    """A namespace, as given.

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


def check_adapter(adapter: Any) -> str | tuple[str, ...] | None:
    """A name, or several as a tuple.

    Raises:
        ConfigError: something else.
    """
    if adapter is None or (isinstance(adapter, str) and adapter):
        return adapter
    names = tuple(adapter) if isinstance(adapter, (list, tuple)) else ("",)
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"adapter={adapter!r}: expected a name, a list of names ([] for the base model) or None")
    return names


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def check_strategy(name: str, value: Any) -> None:
    """Which strategies there are is known to `repair.STRATEGIES` alone."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}={value!r}: expected the name of a repair strategy")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")


def check_count(name: str, value: Any, low: int, of_what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r}: expected a whole number{of_what and ' of ' + of_what}, {low} or more")


def check_range(name: str, value: Any, low: float, high: float | None) -> None:
    if value is None:
        return
    wanted = f"a number from {low:g} to {high:g}" if high is not None else f"a number of at least {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r}: expected {wanted}")
    if not low <= value or (high is not None and value > high):  # `not <=` also catches NaN
        raise ConfigError(f"{name}={value!r}: expected {wanted}")


def check_whole(name: str, value: Any, low: int, high: int | None) -> None:
    if value is None:
        return
    fits = isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value)
    if not fits or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r}: expected a whole number, {low} or more")


def is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping))
