"""Examples and the pages' Python are type-checked as users of the package: names, imports and keywords exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, added_lines, blocks_of

pytest.importorskip("mypy")

CONFIG = """\
[mypy]
strict = True
follow_imports = silent
namespace_packages = True
explicit_package_bases = True
ignore_missing_imports = True
disallow_subclassing_any = False
warn_unused_ignores = False

[mypy-snippets.*]
# Snippets: what a test runs needs no annotations, and a `diff` shows a part of a program.
disallow_untyped_calls = False
disallow_untyped_defs = False
disable_error_code = name-defined, no-redef, assignment
"""


def snippets() -> dict[str, str]:
    """A module for each page with Python: its blocks one after the other, and what its `diff` blocks end with."""
    modules = {}
    for page in PAGES:
        parts = [b.code for b in blocks_of(page) if b.language == "python"]
        parts += [added_lines(b.code) for b in blocks_of(page) if b.language == "diff"]
        if parts:
            modules[page.stem.replace("-", "_").lower()] = "\n".join(parts)
    return modules


def type_check(files: list[Path], folder: Path) -> str:
    """What mypy prints about files; its cache stays in the repository's folder for it."""
    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    shelves = os.pathsep.join(str(ROOT / shelf) for shelf in ("", "kernels", "integrations"))
    cache = ROOT / ".mypy_cache" / "users"
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache), *map(str, files)]
    env = os.environ | {"MYPYPATH": shelves}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """mypy over all of them in one run, and over a module that is wrong in four ways."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "snippets").mkdir()
    wrong = "\n".join(
        ["from kvboost_rag import KVBoost, NoSuchName", "engine = KVBoost.from_pretrained('x')", "engine.answer('?')",
         "engine.warm([], neighbors=None)", "engine.close(now=True)"]
    )  # fmt: skip
    for name, code in (snippets() | {"wrong": wrong}).items():
        (folder / "snippets" / f"{name}.py").write_text(code)
    return type_check([*sorted((ROOT / "examples").glob("*.py")), *sorted(folder.glob("snippets/*.py"))], folder)


def test_examples_and_snippets_are_well_typed(printed: str) -> None:
    errors = [line for line in printed.splitlines() if ": error:" in line and "snippets/wrong.py" not in line]
    assert not errors, "\n".join(errors)
    assert "Found 4 errors in 1 file" in printed, printed


def test_wrong_names_and_keywords_are_found(printed: str) -> None:
    assert sorted(set(re.findall(r"snippets/wrong.py:(\d+)", printed))) == ["1", "3", "4", "5"], printed
