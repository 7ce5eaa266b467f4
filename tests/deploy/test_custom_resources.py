"""Custom resources against their own schemas: npm's `@kubernetes-models/*`, whose validators run in node."""

from __future__ import annotations

import json
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from node_modules import node_folder

MANIFESTS = Path(__file__).parents[2] / "deploy/manifests"
SCRIPT = Path(__file__).with_name("custom_resources.mjs")
PACKAGES = ("gateway-api", "keda", "prometheus-operator")
KINDS = ("HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule")


def custom_resources() -> list[dict[str, Any]]:
    made = [o for path in sorted(MANIFESTS.glob("*.yaml")) for o in yaml.safe_load_all(path.read_text()) if o]
    return [o for o in made if o["kind"] in KINDS]


def errors(resources: list[dict[str, Any]], folder: Path) -> list[str | None]:
    """What each schema says of each, None: valid."""
    found = node_folder(*(f"@kubernetes-models/{name}" for name in PACKAGES))
    if found is None or shutil.which("node") is None:
        pytest.skip("no node with @kubernetes-models (scripts/fetch_tools.sh)")
    (folder / "node_modules").symlink_to(found)
    script = folder / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    run = subprocess.run(
        ["node", str(script)], input=json.dumps(resources), capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    said: list[str | None] = json.loads(run.stdout)
    return said


def test_they_are_valid(tmp_path: Path):
    resources = custom_resources()
    assert {o["kind"] for o in resources} == set(KINDS)
    assert errors(resources, tmp_path) == [None] * len(resources)


def test_a_wrong_field_is_found(tmp_path: Path):
    broken = []
    for resource in custom_resources():
        wrong = deepcopy(resource)
        spec = wrong["spec"]
        if wrong["kind"] == "HTTPRoute":
            spec["rules"][0]["backendRefs"][0]["port"] = "eighty"
        elif wrong["kind"] == "ScaledObject":
            del spec["scaleTargetRef"]["name"]
        elif wrong["kind"] == "ServiceMonitor":
            spec["endpoints"][0]["interval"] = "now and then"
        else:
            spec["groups"][0]["rules"][0]["expr"] = [1]
        broken.append(wrong)
    assert all(errors(broken, tmp_path))
