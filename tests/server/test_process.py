"""`kvboost-rag serve` as a process: it refuses to be open to all, and loses no stream when it is told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from server_processes import COMMAND, StartProcess, is_ready


@pytest.mark.slow
def test_sigterm_lets_streams_end(start_process: StartProcess):
    process, url = start_process()
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
def test_two_populations_beside_each_other(start_process: StartProcess):
    """A stable and a canary process: what each says of itself is what a router's header asked for."""
    _, stable = start_process("--no-enabled")
    _, canary = start_process("--enabled")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    seen = [httpx.post(f"{u}/v1/chat/completions", json=body, timeout=60).headers for u in (stable, canary)]
    assert [h["x-kvboost-enabled"] for h in seen] == ["false", "true"]


def test_reachable_without_a_key_is_refused_before_a_model_is_loaded(tmp_path: Path):
    run = subprocess.run([*COMMAND, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "no API key" in run.stderr
