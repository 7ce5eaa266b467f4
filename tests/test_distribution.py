"""What is built for users: every file of the packages and nothing else in the wheel, a checkout in the sdist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")
tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def tracked(*folders: str) -> set[str]:
    """Files that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, without a network: the build system is installed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    """Data files with the code: the page of the server, the demo's texts, profiles, markers of types."""
    wanted = {name for package in PACKAGES for name in tracked(package)}
    for shelf in ("kernels/", "integrations/"):
        wanted = {name.removeprefix(shelf) for name in wanted}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert {"kvboost_rag/cli/demo_documents.md", "kvboost_rag/server/page/index.html"} <= held


def test_every_package_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    for package in ("kvboost_rag", "kvboost_kernels", "langchain_kvboost", "vllm_kvboost", "llama_index/llms/kvboost"):
        assert f"{package}/py.typed" in wheel.namelist()
    assert "llama_index/__init__.py" not in wheel.namelist()  # a namespace that others share


def test_the_wheel_names_its_command_extras_and_licence(wheel: zipfile.ZipFile) -> None:
    info = next(name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert "kvboost-rag = kvboost_rag.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    metadata = wheel.read(f"{info}/METADATA").decode()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_sdist_is_a_checkout(built: Path) -> None:
    """Who builds from it can run the tests and make the site."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - held <= {".ci/run", ".pre-commit-config.yaml"}
    assert held - tracked() == {"PKG-INFO"}


def test_the_citation_is_of_this_version() -> None:
    import kvboost_rag

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {kvboost_rag.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation
    for key in ("cff-version: 1.2.0", "message:", "title:", "authors:", "type: software"):
        assert f"\n{key}" in f"\n{citation}"
