"""Every kind of service, started once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvboost_rag.stores.remote.store import RemoteStore
from tests.stores.remote import servers
from tests.stores.remote.connecting import connect

KINDS = ("valkey", "cluster", "folder", "s3")


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    if request.param == "folder":
        pytest.importorskip("obstore")
        yield f"file://{folder}/objects"
    elif request.param == "s3":
        pytest.importorskip("obstore")
        with servers.s3(folder) as found:
            yield found
    elif request.param == "valkey":
        with servers.valkey(folder / "one") as server:
            yield server.url
    else:
        with servers.valkey_cluster(folder) as nodes:
            yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


@pytest.fixture
def remote(url: str) -> Iterator[RemoteStore]:
    store = connect(url)
    yield store
    for key in list(store.backend.keys()):
        store.backend.delete(key)
    store.close()
