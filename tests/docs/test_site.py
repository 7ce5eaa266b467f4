"""The documentation as a site: it is built without a warning, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; strict, so that a dead link or an unknown name is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert not [page for page in pages if not (site / page).exists()]


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^\s>]*|<link[^>]*href=["']?(?:https?:)?//[^\s>]*"""
    )
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert not {str(path): loaded.findall(text) for path, text in pages.items() if loaded.search(text)}
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert not [style for style in styles if re.search(r"@import|url\(['\"]?(?:https?:)?//", style)]


def test_the_reference_comes_from_the_docstrings(site: Path) -> None:
    page = (site / "api" / "engine.html").read_text()
    assert 'id="kvboost_rag.engine.KVBoost.generate"' in page
    assert "One worker thread serves" in page
    assert 'id="langchain_kvboost.chat.ChatKVBoost"' in (site / "api" / "langchain.html").read_text()
