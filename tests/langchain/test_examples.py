"""The examples run as they are, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_the_script_runs() -> None:
    """On fewer modules than it shows, to be quick."""
    script = REPOSITORY / "examples" / "langchain_rag.py"
    code = (
        f"import runpy, kvboost_rag.corpus as c; real = c.pydoc_corpus; c.pydoc_corpus = lambda m: real(m[:1]); "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("reuse: first token after") == 3
