"""Which requests may be given approximate KV: those that say so in their cache salt.

vLLM registers what a connector loads as blocks of its prefix cache, where nothing tells them from computed ones. Blocks
of another salt are never shared, so the salt is where a request says what it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

SALT = "kvboost"
POLICIES = ("blend",)


def cache_salt(namespace: str = "", policy: str = "blend") -> str:
    """The `cache_salt` of requests that accept documents' KV from the store (`extra_body={"cache_salt": …}`).

    Args:
        namespace: whose chunks; the one they were warmed under.
        policy: `blend`: stored chunk KV, realigned.

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    return f"{SALT}:{policy}:{namespace}"


@dataclass(frozen=True)
class Access:
    """Who may be given what.

    Attributes:
        namespaces: those that salts may name; any other claims nothing.
        default: the namespace of requests without a salt, or None where they get nothing (vLLM's prefix cache is on
            and would give their blocks to requests that expect exact ones).
    """

    namespaces: tuple[str, ...]
    default: str | None

    def namespace_of(self, salt: str | None) -> tuple[str | None, str]:
        """The namespace that a request may use, or None and why not (a word for the counters)."""
        if salt is None or not salt.startswith(f"{SALT}:"):
            return (self.default, "") if self.default is not None else (None, "no_salt")
        policy, _, namespace = salt[len(SALT) + 1 :].partition(":")
        if policy not in POLICIES:
            return None, "unknown_policy"
        return (namespace, "") if namespace in self.namespaces else (None, "namespace")
