"""What a `RemoteStore` asks of a service: small immutable values under a chunk's key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

TIMEOUT_S = 5.0
"""Of one operation on the network, connecting included."""
CONNECTIONS = 16


class RemoteError(RuntimeError):
    """The service could not be reached, refused, or has no room. The message says which."""


class Backend(ABC):
    """Values under `(key, name)`; all values of a key lie together, and those of many keys are spread.

    Every method may be called from several threads, waits `TIMEOUT_S` at most, and raises `RemoteError`.
    """

    @abstractmethod
    def get(self, key: str, names: Sequence[str]) -> list[bytes | None]:
        """The values, None for each that is not there."""

    @abstractmethod
    def create(self, key: str, name: str, data: bytes) -> bool:
        """Write a value unless there is one; whether it was written."""

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """Names of a key's values."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove all values of a key; whether there were any."""

    @abstractmethod
    def remove(self, key: str, name: str) -> None:
        """Remove one value, if it is there."""

    def place(self, key: str) -> str:
        """What of the service has the key's values and may fail by itself: a node. Never waits or raises."""
        return ""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Keys that have values, in no particular order."""

    @abstractmethod
    def close(self) -> None:
        """Release connections."""
