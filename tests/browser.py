"""A headless Chromium that is driven over its debugging protocol (CDP)."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from serving_helpers import wait_until

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1400")


class Tab:
    """One page.

    Attributes:
        faults: uncaught exceptions, and what the page was not allowed to load.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._last = socket, 0
        self.faults: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(timeout=60))
            entry = said.get("params", {}).get("entry", {})
            if said.get("method") == "Runtime.exceptionThrown" or entry.get("level") in ("error", "warning"):
                self.faults.append(json.dumps(said["params"]))
            if said.get("id") == self._last:
                assert "error" not in said, said
                return said["result"]

    def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 120.0) -> None:
        wait_until(lambda: self.value(expression), seconds)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def tab(url: str, folder: Path) -> Iterator[Tab]:
    """A page in a browser of its own, whose profile lies in `folder`."""
    from websockets.sync.client import connect

    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder}/profile", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = folder / "profile/DevToolsActivePort"
        wait_until(lambda: told.exists() and len(told.read_text().splitlines()) == 2, 120)
        debugger = f"http://127.0.0.1:{told.read_text().splitlines()[0]}"
        pages = [p for p in httpx.get(f"{debugger}/json/list", timeout=60).json() if p["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, open_timeout=60) as socket:
            opened = Tab(socket)
            opened.send("Page.navigate", url=url)
            opened.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield opened
    finally:
        process.terminate()
        process.wait(30)
