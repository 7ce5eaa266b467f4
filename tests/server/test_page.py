"""The page at `/`: served with safe headers, and drawn by a real browser where there is one (Debian's chromium)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from corpus_texts import document
from serving_helpers import LiveServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=6000")


def test_files_are_ours_alone(server: LiveServer):
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("page.css", "page.js"):
        assert f"/page/{name}" in page.text
        assert server.get(f"/page/{name}").status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    assert server.get("/page/app.py").status_code == server.get("/page/..%2Fapp.py").status_code == 404


def test_a_report_with_text_spells_the_prompt(server: LiveServer):
    asked = server.chat("Read.\n\n" + document(1, 2), documents=[document(1, 2)], headers={"x-kvboost-report": "text"})
    segments = asked.json()["kvboost"]["segments"]
    assert document(1, 2).strip() in [s["text"].strip() for s in segments if s["kind"] == "document"]
    plain = server.chat(headers={"x-kvboost-report": "true"}).json()["kvboost"]["segments"]
    assert "text" not in plain[0]


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_shows_figures_and_documents(server: LiveServer, tmp_path: Path):
    body = {"documents": [{"id": "handbook/<b>1</b>", "chunks": [document(1, 2)]}], "wait": True}
    server.post("/v1/documents", body).raise_for_status()
    server.chat()
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"{server.url}/"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<li>handbook/&lt;b&gt;1&lt;/b&gt;</li>" in dom  # as text, never as markup
    assert "<dt>Chunks known</dt><dd>1</dd>" in dom
    assert "<dt>Requests</dt><dd>1</dd>" in dom
