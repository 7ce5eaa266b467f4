"""The example and the notebook run, and say what they should."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index_kvboost.helpers import own_settings

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def clean(smollm2: Any) -> Iterator[None]:
    """Needs the bundled model; leaves no global settings, handlers or engines behind."""
    from kvboost_rag.adapters.registry import close_all
    from kvboost_rag.indexing.retrieval import MiniLM
    from kvboost_rag.models.errors import ModelLoadError

    try:
        MiniLM()
    except ModelLoadError as error:
        pytest.skip(str(error))
    handlers = list(get_dispatcher().event_handlers)
    with own_settings():
        yield
    get_dispatcher().event_handlers[:] = handlers
    close_all()


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--modules", "getpass", "--top-k", "2", "--neighbours", "1", "--questions", "1"]
    monkeypatch.setattr(sys, "argv", ["llama_index_rag.py", *small])
    runpy.run_path(str(EXAMPLES / "llama_index_rag.py"), run_name="__main__")
    out = capsys.readouterr().out
    off, blend = re.findall(r"(off|blend) .*?; ([\d,]+) of ([\d,]+) tokens reused: (.+)", out)
    assert (off[0], off[1], blend[0]) == ("off", "0", "blend")
    assert int(blend[1].replace(",", "")) > int(blend[2].replace(",", "")) / 2
    assert "full prefill / reuse" in out


def test_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "llama_index_rag.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    out = capsys.readouterr().out
    assert "1851" in out
    assert "'approximate': 1" in out
