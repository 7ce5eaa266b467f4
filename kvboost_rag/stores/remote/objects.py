"""Object storage: S3 and what speaks like it, Google Cloud, Azure, a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvboost_rag.stores.remote.backend import CONNECTIONS, TIMEOUT_S, Backend, RemoteError

T = TypeVar("T")

_ONCE: Any = {"max_retries": 0}


class ObjectBackend(Backend):
    """Objects `KE/KEY/NAME` below the URL's path.

    Args:
        url: `s3://BUCKET/PATH`, `gs://…`, `az://…` or `file:///FOLDER`; credentials, region and endpoint come from the
            environment, as the service's own tools take them (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …).

    Raises:
        ImportError: obstore is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise ImportError(
                "a store in an object storage needs obstore: pip install 'kvboost-rag[remote]'"
            ) from error
        self._api: Any = obstore
        self._errors = (obstore.exceptions.BaseError, OSError)
        if url.startswith("file://"):
            folder = Path(url.removeprefix("file://"))
            folder.mkdir(parents=True, exist_ok=True)
            self._store: Any = LocalStore(folder)
        else:
            # Attempts are counted and spaced in one place, `Guard`.
            client: Any = {"timeout": f"{TIMEOUT_S:g}s", "connect_timeout": f"{TIMEOUT_S:g}s", "allow_http": True}
            self._store = from_url(url, client_options=client, retry_config=_ONCE)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "kvboost-objects")

    def get(self, key: str, names: Sequence[str]) -> list[bytes | None]:
        return list(self._threads.map(lambda name: self._get(_path(key, name)), names))

    def _get(self, path: str) -> bytes | None:
        try:
            return bytes(self._run(lambda: self._api.get(self._store, path).bytes()))
        except FileNotFoundError:
            return None

    def create(self, key: str, name: str, data: bytes) -> bool:
        try:
            self._run(lambda: self._api.put(self._store, _path(key, name), data, mode="create", use_multipart=False))
        except FileExistsError:
            return False
        return True

    def names(self, key: str) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self._list(_path(key, "")))

    def delete(self, key: str) -> bool:
        names = self.names(key)
        for name in names:
            self.remove(key, name)
        return bool(names)

    def remove(self, key: str, name: str) -> None:
        with suppress(FileNotFoundError):
            self._run(lambda: self._api.delete(self._store, _path(key, name)))

    def keys(self) -> Iterator[str]:
        return iter(dict.fromkeys(path.rsplit("/", 2)[1] for path in self._list(None)))

    def _list(self, prefix: str | None) -> list[str]:
        def read() -> list[str]:
            return [item["path"] for page in self._api.list(self._store, prefix) for item in page]

        return self._run(read)

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (self._api.exceptions.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(str(error)) from error
        except (self._api.exceptions.AlreadyExistsError, FileExistsError) as error:
            raise FileExistsError(str(error)) from error
        except self._errors as error:
            raise RemoteError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _path(key: str, name: str) -> str:
    return f"{key[:2]}/{key}/{name}"
