"""The shape of the repository: one-way imports, light import, shelves, one version, a short README that runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import kvboost_rag

ROOT = Path(__file__).parents[1]
CORE = ROOT / "kvboost_rag"

LAYERS = (
    "config datamodels",
    "kv prompt observe",
    "models stores",
    "forward",
    "encode repair",
    "chunks",
    "indexing serving",
    "engine parts",
    "measure adapters",
    "server cli",
)
"""From top to bottom; a package may import from those above it and from those beside it (without a circle)."""


def part_of(path: Path) -> str:
    """The part of the core that a file belongs to: its package, or its own name."""
    relative = path.relative_to(CORE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Parts of the core that a file imports when it runs (not for type checking only), lazy imports included."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvboost_rag":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("kvboost_rag."))
    return found - {"__version__"}


def core_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        if path != CORE / "__init__.py":
            graph.setdefault(part_of(path), set()).update(imports_of(path) - {part_of(path)})
    return graph


def test_every_part_of_the_core_has_a_place():
    placed = [name for layer in LAYERS for name in layer.split()]
    assert sorted(placed) == sorted(core_graph())


def test_imports_point_one_way():
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer.split()}
    wrong = [
        f"{importer} imports {imported}"
        for importer, parts in core_graph().items()
        for imported in parts
        if rank[imported] > rank[importer]
    ]
    assert not wrong


def test_no_import_cycles_between_parts():
    graph, done = core_graph(), set()
    while len(done) < len(graph):
        free = {part for part, needs in graph.items() if part not in done and needs & graph.keys() <= done}
        assert free, f"cycle among {sorted(set(graph) - done)}"
        done |= free


FOREIGN_PRIVATES = {
    *("_attn_implementation", "_scaled_dot_product_flash_attention_for_cpu", "_expects_other_args"),
    *("_linear_pointwise", "_orig_mod", "_parameters", "_buffers"),
}
"""Of transformers, torch and LangChain, where they offer no public name for it."""


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Private names that a file makes (functions, classes, attributes), and those of others that it touches."""
    made, touched = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            made.add(node.attr)
        elif isinstance(node, ast.Attribute):
            touched.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            touched.update(alias.name for alias in node.names)
    private = re.compile(r"_[a-z]\w*$", re.IGNORECASE)
    return set(filter(private.match, made)), set(filter(private.match, touched))


def test_no_package_touches_anothers_private_parts():
    sources = [path for shelf in ("kvboost_rag", "kernels", "integrations") for path in (ROOT / shelf).rglob("*.py")]
    by_package: dict[Path, list[tuple[Path, set[str], set[str]]]] = {}
    for path in sources:
        package = CORE / part_of(path) if CORE in path.parents else path.parent
        by_package.setdefault(package, []).append((path, *private_names(ast.parse(path.read_text()))))
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for files in by_package.values()
        for path, _, touched in files
        for name in sorted(touched - FOREIGN_PRIVATES - set().union(*(made for _, made, _ in files)))
    ]
    assert not wrong


MAX_LINES, MAX_BODY, MAX_PARAMETERS = 300, 35, 6


def too_large(path: Path) -> list[str]:
    """What of a file is above the bounds: the file itself, bodies (docstrings apart), parameters (`self` apart)."""
    text, found = path.read_text(), []
    if len(text.splitlines()) > MAX_LINES:
        found.append("file")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body and node.end_lineno - body[0].lineno + 1 > MAX_BODY:
            found.append(f"{node.name} (body)")
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > MAX_PARAMETERS:
            found.append(f"{node.name} (parameters)")
    return found


def test_what_is_large_is_listed_with_its_reason():
    """In a table of CONTRIBUTING.md: a path (a folder stands for what is in it), what is too large, why."""
    rows = re.findall(r"^\| `([^`|]+)` \| ([^|]+) \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = {path: [item.strip(" `") for item in what.split(",")] for path, what, why in rows if why.strip()}

    def allowed(path: str, item: str) -> bool:
        names = [
            *listed.get(path, []),
            *(i for folder, items in listed.items() if path.startswith(folder) for i in items),
        ]
        return item in names or item.rsplit(" ", 1)[-1].strip("()") in names

    wrong, large = [], set()
    for shelf in ("kvboost_rag", "kernels", "integrations"):
        for path in (ROOT / shelf).rglob("*.py"):
            relative = str(path.relative_to(ROOT))
            items = too_large(path)
            large.update(name for name in listed if items and relative.startswith(name))
            wrong += [f"{relative}: {item}" for item in items if not allowed(relative, item)]
    assert not wrong
    assert not set(listed) - large, "listed, but small enough by now"


def test_the_engine_is_a_table_of_contents():
    assert len((CORE / "engine.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", ["langchain", "langchain_core", "llama_index", "langchain_kvboost"])
def test_core_knows_no_framework(name):
    pattern = re.compile(rf"^\s*(from|import) {name}\b", re.MULTILINE)
    assert not [path for path in CORE.rglob("*.py") if pattern.search(path.read_text())]


def test_kernels_know_nothing_of_the_core():
    pattern = re.compile(r"^\s*(from|import) kvboost_rag\b", re.MULTILINE)
    assert not [path for path in (ROOT / "kernels").rglob("*.py") if pattern.search(path.read_text())]


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_import_is_light():
    heavy = "('torch', 'transformers', 'numpy')"
    assert run_python(f"import kvboost_rag, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_command_line_is_light_until_a_command_runs():
    assert run_python("import kvboost_rag.cli, sys; print('torch' in sys.modules, 'transformers' in sys.modules)") == (
        "False False"
    )


def test_shelves_are_no_packages():
    shelves = ("kernels", "integrations", "integrations/llama_index", "integrations/llama_index/llms")
    assert not [shelf for shelf in shelves if (ROOT / shelf / "__init__.py").exists()]
    # A namespace portion named `kernels` lies on sys.path in a checkout; transformers must not take it for the package.
    code = "import transformers; from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert run_python(code) in ("True", "False")


def test_one_version():
    pattern = re.compile(r"""version\w*\s*=\s*["']\d+\.\d+""", re.IGNORECASE)
    ours = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],  # not what tools left in build/
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    stated = [path for path in ours if (ROOT / path).exists() and not path.startswith("tests/")]
    assert [path for path in stated if pattern.search((ROOT / path).read_text())] == ["kvboost_rag/__init__.py"]
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f"## {kvboost_rag.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    try:
        assert version("kvboost-rag") == kvboost_rag.__version__
    except PackageNotFoundError:
        pytest.skip("run from a folder that is not installed")


def test_readme_is_short_and_soon_shows_code():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 250
    assert any(line.startswith("```python") for line in lines[:45])
