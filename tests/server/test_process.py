"""`kvboost-rag serve` as a process: it refuses to be open to all, and loses no stream when it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serving_helpers import wait_until

COMMAND = (sys.executable, "-c", "from kvboost_rag.cli import main; main()", "serve")
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(model_folder: str, tmp_path: Path) -> Iterator[Start]:
    """`start("--drain", "30")` gives a process that is ready, and its address."""
    made: list[subprocess.Popen[str]] = []

    def run(*options: str) -> tuple[subprocess.Popen[str], str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = os.environ | {"KVBOOST_CACHE_DIR": str(tmp_path / "cache")}
        arguments = ("--model", model_folder, "--model-name", "tiny", "--port", port, "--store", str(tmp_path / port))
        made.append(subprocess.Popen([*COMMAND, *arguments, *options], env=env, text=True, stderr=subprocess.PIPE))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url) or made[-1].poll() is not None, 120)
        assert made[-1].poll() is None
        return made[-1], url

    yield run
    for process in made:
        process.kill()
        process.wait(20)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_sigterm_lets_streams_end(start: Start):
    process, url = start()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "stream": True}
    body["logit_bias"] = {"60": 100}  # so that it does not end by itself
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                process.send_signal(signal.SIGTERM)
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) in (0, -signal.SIGTERM)
    assert not is_ready(url)


@pytest.mark.slow
def test_two_populations_beside_each_other(start: Start):
    """A stable and a canary process: what each says of itself is what a router's header asked for."""
    _, stable = start("--no-enabled")
    _, canary = start("--enabled")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    seen = [httpx.post(f"{u}/v1/chat/completions", json=body, timeout=60).headers for u in (stable, canary)]
    assert [h["x-kvboost-enabled"] for h in seen] == ["false", "true"]


def test_reachable_without_a_key_is_refused_before_a_model_is_loaded(tmp_path: Path):
    run = subprocess.run([*COMMAND, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "no API key" in run.stderr
