"""The page at `/`: served with safe headers, and drawn by a real browser where there is one (Debian's chromium)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import BROWSER, tab
from corpus_texts import document
from serving_helpers import LiveServer

from kvboost_rag.server.keys import Keys


def test_files_are_ours_alone(server: LiveServer):
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("page.css", "page.js", "icon.svg"):
        assert f"/page/{name}" in page.text
        assert server.get(f"/page/{name}").status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    assert server.get("/page/app.py").status_code == server.get("/page/..%2Fapp.py").status_code == 404


def test_a_report_with_text_spells_the_prompt(server: LiveServer):
    asked = server.chat("Read.\n\n" + document(1, 2), documents=[document(1, 2)], headers={"x-kvboost-report": "text"})
    segments = asked.json()["kvboost"]["segments"]
    assert document(1, 2).strip() in [s["text"].strip() for s in segments if s["kind"] == "document"]
    whole = "".join(s["text"] for s in segments)
    assert "Read.\n\n" + document(1, 2) in whole
    assert whole.endswith("assistant\n")  # the template's part, special tokens included
    plain = server.chat(headers={"x-kvboost-report": "true"}).json()["kvboost"]["segments"]
    assert "text" not in plain[0]


@pytest.mark.skipif(BROWSER is None, reason="no chromium (scripts/fetch_tools.sh)")
def test_a_browser_shows_figures_and_answers_both_ways(server: LiveServer, tmp_path: Path):
    pytest.importorskip("websockets")
    documents = [document(n, 2) for n in range(2)]
    body = {"documents": [{"id": "handbook/<b>1</b>", "chunks": documents}], "wait": True}
    server.post("/v1/documents", body).raise_for_status()
    server.chat()
    prompt = "Read.\n\n" + "\n\n".join([*documents, "What does it say of <i>keys</i>?"])
    with tab(f"{server.url}/", tmp_path) as page:
        page.wait("document.querySelectorAll('#figures dd').length > 5")
        shown = page.value("document.getElementById('figures').innerText")
        assert re.search(r"Chunks known\s+2\b", shown)
        assert re.search(r"Requests\s+1\b", shown)
        # As text, never as markup.
        assert page.value("document.querySelector('#documents li').textContent") == "handbook/<b>1</b>"

        page.value(f"document.getElementById('prompt').value = {json.dumps(prompt)}")
        page.value("document.getElementById('ask').click()")
        page.wait("!document.getElementById('ask').disabled && document.getElementById('full-time').textContent")
        marks = page.value("[...document.querySelectorAll('#segments mark')].map((m) => [m.className, m.textContent])")
        reused = [text.strip() for kind, text in marks if kind in ("approximate", "exact")]
        assert [text for text in documents if text.strip() in reused] == documents
        assert "What does it say of <i>keys</i>?" in "".join(text for kind, text in marks if kind == "prefilled")
        assert not page.value("document.querySelectorAll('#segments i, #documents b').length")
        colours = page.value("[...document.querySelectorAll('mark')].map((m) => getComputedStyle(m).backgroundColor)")
        assert len(set(colours)) >= 3
        for name, expected in (("reuse", r"[1-9]\d* of \d+ tokens reused"), ("full", r"\b0 of \d+ tokens reused")):
            assert re.search(expected, page.value(f"document.getElementById('{name}-time').textContent"))
            assert page.value(f"document.getElementById('{name}').textContent")
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 2_000
        assert not page.faults


@pytest.mark.skipif(BROWSER is None, reason="no chromium (scripts/fetch_tools.sh)")
def test_a_browser_asks_with_the_key_that_is_typed(start_server: Callable[..., LiveServer], tmp_path: Path):
    pytest.importorskip("websockets")
    server = start_server(keys=Keys.read(None, {"KVBOOST_API_KEY": "open-sesame-1234567890"}))
    with tab(f"{server.url}/", tmp_path) as page:
        page.wait("document.getElementById('status').textContent")
        page.value("document.getElementById('key').value = 'open-sesame-1234567890'")
        page.value("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.wait("document.querySelectorAll('#figures dd').length > 5")
        page.wait("!document.getElementById('status').textContent")
