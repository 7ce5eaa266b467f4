"""The examples run as they are, offline."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from kvboost_rag.adapters.registry import close_all
from kvboost_rag.indexing.corpus import pydoc_corpus

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.model


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY / "integrations"), str(REPOSITORY / "kernels"), str(REPOSITORY)])
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


@pytest.mark.usefixtures("smollm2")
def test_the_notebook_executes() -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(REPOSITORY / "examples" / "langchain_rag.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment().items():
            patch.setenv(name, value)
        client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    assert "from the store" in printed


@pytest.mark.usefixtures("smollm2")
def test_the_script_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On one module and one question, to be quick."""
    spec = importlib.util.spec_from_file_location("langchain_rag", REPOSITORY / "examples" / "langchain_rag.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "pydoc_corpus", lambda modules: pydoc_corpus(modules[:1]))
    monkeypatch.setattr(script, "QUESTIONS", script.QUESTIONS[-1:])
    script.main()
    close_all()
    printed = capsys.readouterr().out
    assert "plain: first token after" in printed
    assert "reuse: first token after" in printed
