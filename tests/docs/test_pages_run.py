"""Every Python block of README and docs runs as printed: in order, one clean process a page, without network.

So do the blocks of commands that have a setup."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks_of

from kvboost_rag.models.bundled import bundled_folder
from kvboost_rag.models.errors import ModelLoadError

RUN = {str(page): blocks for page in PAGES if (blocks := [block for block in blocks_of(page) if block.is_run])}
Outcome = subprocess.CompletedProcess[str]


def run_page(page: str, folder: Path, models: Path) -> Outcome:
    """Run a page's blocks in a folder that holds what a checkout's reader sees: README.md and docs."""
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "models").symlink_to(models)
    shutil.copy(ROOT / "README.md", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "blocks.json").write_text(json.dumps([[b.place, b.language, b.setup, b.code] for b in RUN[page]]))
    command = folder / "bin" / "kvboost-rag"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom kvboost_rag.cli import main\n\nmain()\n")
    command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBOOST_")}
    shelves = os.pathsep.join(str(ROOT / shelf) for shelf in ("", "kernels", "integrations"))
    home = {"HOME": str(folder), "KVBOOST_CACHE_DIR": str(folder / "cache")}
    home["PATH"] = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "page_process.py"), "blocks.json"],
        cwd=folder, env=kept | home | {"PYTHONPATH": shelves, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Outcome]]:
    """What came of a page; two are run at a time, all from the first call on."""
    try:
        models = bundled_folder("smollm2").parent
    except ModelLoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("pages")
    with ThreadPoolExecutor(2) as pool:
        runs = {page: pool.submit(run_page, page, folder / str(i), models) for i, page in enumerate(RUN)}
        yield lambda page: runs[page].result()


@pytest.mark.model
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_printed(page: str, outcome_of: Callable[[str], Outcome]) -> None:
    outcome = outcome_of(page)
    missing = re.findall(r"^ModuleNotFoundError: No module named '(\w+)", outcome.stderr, re.MULTILINE)
    if missing and find_spec(missing[-1]) is None and not os.environ.get("CI"):
        pytest.skip(f"{missing[-1]} is not installed")
    assert outcome.returncode == 0, f"{outcome.stdout}\n{outcome.stderr[-4000:]}"
    assert outcome.stdout.count("== ") >= len(RUN[page])


@pytest.mark.model
def test_the_first_program_answers_rightly_and_from_the_store(outcome_of: Callable[[str], Outcome]) -> None:
    printed = outcome_of("README.md").stdout.splitlines()
    answer = printed.index(f"== {RUN['README.md'][0].place}") + 1
    assert "Marta Lind" in printed[answer]
    assert any("cached_tokens=" in line and "cached_tokens=0" not in line for line in printed)
