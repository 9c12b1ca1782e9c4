"""The manifests are valid, name only what exists, and lock pods down; the guide's commands render them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from updraft.cli.main import app
from updraft.cloud_engine.engine.ranks.meeting import KEY_VARIABLE
from updraft.cloud_engine.engine.stats import EngineStats
from updraft.cloud_engine.gateway.metrics import gateway_metrics
from updraft.cloud_engine.gateway.relay.counters import Counters
from updraft.cloud_engine.node.answers.latency import Latencies
from updraft.cloud_engine.node.api.metrics import node_metrics
from updraft.protocol.http.prometheus import render

yaml: Any = pytest.importorskip("yaml")
if shutil.which("kubectl") is None:
    pytest.skip("kubectl renders the manifests", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
SCHEMAS = json.loads((Path(__file__).parent / "custom_resources.json").read_text())
PROFILES = ("small", "gpu", "high-availability", "inference-extension")
NODES_IN_A_GATEWAYS_PLACE = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../small]
components: [../../components/inference-extension]
"""
KEY = re.compile(r"updraft-[\w-]{43}")
Object = dict[str, Any]


def commands_of_the_guide() -> str:
    """The commands that make the keys and render the manifests of a profile."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    first, last = (blocks.index(block) for block in blocks if block.startswith(("cd ", "kubectl kustomize")))
    return "".join(blocks[first : last + 1])


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """The objects of each profile, as somebody who follows the guide gets them."""
    root = tmp_path_factory.mktemp("clone")
    manifests = root / "deploy" / "kubernetes"
    shutil.copytree(ROOT / "deploy", root / "deploy", ignore=shutil.ignore_patterns("secrets"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / ".typing"), "UPDRAFT_HOME": str(root / "home")}
    subprocess.run(["bash", "-euc", commands_of_the_guide()], cwd=root, env=environment, check=True, timeout=120)
    secrets = manifests / "profiles" / "small" / "secrets"
    assert KEY.fullmatch((secrets / "register-key").read_text().strip())
    shutil.copytree(secrets, manifests / "profiles" / "gpu" / "secrets")
    shutil.copytree(secrets, manifests / "profiles" / "high-availability" / "secrets")
    for name in ("database-url", "limits-url"):
        (manifests / "profiles" / "high-availability" / "secrets" / name).write_text(f"{name}-value")
    several = manifests / "profiles" / "several-machines"
    shutil.copytree(secrets, several / "secrets")
    (several / "secrets" / "group-key").write_text("a key of the group")
    extension = manifests / "profiles" / "inference-extension"
    extension.mkdir()
    (extension / "kustomization.yaml").write_text(NODES_IN_A_GATEWAYS_PLACE)
    return {profile: kustomized(manifests / "profiles" / profile) for profile in (*PROFILES, several.name)}


def kustomized(folder: Path) -> list[Object]:
    text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True, timeout=60)
    return list(yaml.safe_load_all(text.stdout))


def kinds(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Metadata and specification of what deployments start."""
    for each in kinds(objects, "Deployment"):
        template = each["spec"]["template"]
        yield template["metadata"], template["spec"]


def values(node: Any, key: str) -> Iterator[Any]:
    """The values under a key, wherever."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from values(value, key)


def seconds_of(argument: str, arguments: list[str]) -> float:
    (seconds,) = [each.removeprefix(f"{argument}=") for each in arguments if each.startswith(f"{argument}=")]
    return float(seconds)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_object_fits_its_schema(rendered: dict[str, list[Object]], profile: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in rendered[profile]:
        name = f"{each['apiVersion']}/{each['kind']}"
        if name in SCHEMAS:
            jsonschema.validate(each["spec"], {**SCHEMAS[name], "$defs": SCHEMAS["$defs"]})
        else:
            validate(each, "1.32", strict=True)


def test_schema_refuses_misspelt_fields(rendered: dict[str, list[Object]]) -> None:
    (scaled,) = kinds(rendered["gpu"], "ScaledObject")
    spec = {**scaled["spec"], "maxReplicas": 3}
    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        jsonschema.validate(spec, {**SCHEMAS["keda.sh/v1alpha1/ScaledObject"], "$defs": SCHEMAS["$defs"]})


@pytest.mark.parametrize("profile", PROFILES)
def test_the_command_line_takes_every_argument(rendered: dict[str, list[Object]], profile: str) -> None:
    commands: Any = typer.main.get_command(app)
    for _, pod in pods(rendered[profile]):
        (container,) = pod["containers"]
        command = commands.commands[container["name"]]
        context = command.make_context(container["name"], list(container["args"]))
        named = {each["name"] for each in container.get("env", ()) if each["name"].startswith("UPDRAFT_")}
        assert named <= {parameter.envvar for parameter in command.params}
        assert context.params["host"] == "0.0.0.0"
        given = {variable for argument in container["args"] for variable in re.findall(r"\$\((\w+)\)", argument)}
        configured = {name for each in kinds(rendered[profile], "ConfigMap") for name in each["data"]}
        assert given <= configured | {each["name"] for each in container.get("env", ())}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_metric_exists(rendered: dict[str, list[Object]], profile: str) -> None:
    metrics = [*gateway_metrics(Counters()), *node_metrics(EngineStats(), Latencies(), healthy=True)]
    served = set(re.findall(r"^# TYPE (\w+)", render(metrics), re.MULTILINE))
    configured = [json.dumps(each) for kind in ("ScaledObject", "ConfigMap") for each in kinds(rendered[profile], kind)]
    named = set(re.findall(r"updraft_(?:engine|gateway)_\w+", " ".join(configured)))
    assert named <= served
    assert bool(named) == (profile != "small")


@pytest.mark.parametrize("profile", PROFILES)
def test_pods_may_do_little_and_end_in_time(rendered: dict[str, list[Object]], profile: str) -> None:
    for _, pod in pods(rendered[profile]):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for each in (*pod["containers"], *pod.get("initContainers", ())):
            assert each["securityContext"]["readOnlyRootFilesystem"]
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["limits"]["memory"]
            assert re.fullmatch(r"registry\.example/updraft-[\w-]+:0\.1\.0", each["image"])
        (container,) = pod["containers"]
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        pause = sum(values(container.get("lifecycle", {}), "seconds"))
        drain = seconds_of("--drain-timeout-s", container["args"])
        assert pause + drain + 10 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("profile", PROFILES)
def test_referenced_objects_exist(rendered: dict[str, list[Object]], profile: str) -> None:
    objects = rendered[profile]
    held = {
        each["metadata"]["name"]: set(each["data"])
        for each in (*kinds(objects, "Secret"), *kinds(objects, "ConfigMap"))
    }
    for each in values(objects, "secretName"):
        assert each in held
    for reference in [*values(objects, "secretKeyRef"), *values(objects, "credentials")]:
        assert reference["key"] in held[reference["name"]]
    for reference in values(objects, "configMapRef"):
        assert reference["name"] in held
    labels = [metadata["labels"] for metadata, _ in pods(objects)]
    ports = {port["name"] for _, pod in pods(objects) for port in values(pod["containers"], "ports") for port in port}
    for each in objects:
        selectors = [each["spec"]["selector"]] if each["kind"] == "Service" else list(values(each, "matchLabels"))
        for selector in selectors:
            inside = any(set(selector.items()) <= set(pod.items()) for pod in labels)
            assert inside or each["kind"] == "NetworkPolicy", (each["metadata"]["name"], selector)
    assert {port["targetPort"] for each in kinds(objects, "Service") for port in each["spec"]["ports"]} <= ports


def test_secrets_are_in_secrets_only(rendered: dict[str, list[Object]]) -> None:
    shown = [json.dumps(each) for each in rendered["high-availability"] if each["kind"] != "Secret"]
    assert not KEY.search(" ".join(shown))
    assert "url-value" not in " ".join(shown)
    read = {name for each in values(rendered["high-availability"], "env") for name in (row["name"] for row in each)}
    assert {"UPDRAFT_GATEWAY_LEDGER", "UPDRAFT_GATEWAY_LIMITS_URL"} <= read
    arguments = [
        argument for _, pod in pods(rendered["high-availability"]) for argument in pod["containers"][0]["args"]
    ]
    assert not [argument for argument in arguments if re.match("--(ledger|limits-url)=", argument)]


def test_one_gateway_at_a_time_has_the_volume_and_several_have_none(rendered: dict[str, list[Object]]) -> None:
    for profile, objects in rendered.items():
        gateway = next(each for each in kinds(objects, "Deployment") if each["metadata"]["name"] == "updraft-gateway")
        claims = {each["metadata"]["name"] for each in kinds(objects, "PersistentVolumeClaim")}
        used = {each["claimName"] for each in values(gateway, "persistentVolumeClaim")}
        assert used == claims
        assert (gateway["spec"]["strategy"].get("type") == "Recreate") == bool(used) == (profile != "high-availability")


def test_the_machines_of_a_node_form_one_group(rendered: dict[str, list[Object]]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    objects = rendered["several-machines"]
    (group,) = kinds(objects, "LeaderWorkerSet")
    jsonschema.validate(group["spec"], {**SCHEMAS[f"{group['apiVersion']}/{group['kind']}"], "$defs": SCHEMAS["$defs"]})
    assert [each["metadata"]["name"] for each in kinds(objects, "Deployment")] == ["updraft-gateway"]
    held = {each["metadata"]["name"]: set(each["data"]) for each in kinds(objects, "Secret")}
    command: Any = typer.main.get_command(app)
    parts = group["spec"]["leaderWorkerTemplate"]
    variables = {"LWS_GROUP_SIZE": str(parts["size"]), "LWS_LEADER_ADDRESS": "updraft-node-0", "MODEL": "/models/big"}
    for rank, name in enumerate(("leaderTemplate", "workerTemplate")):
        pod = {"apiVersion": "v1", "kind": "Pod", **parts[name], "metadata": {"name": "x", **parts[name]["metadata"]}}
        validate(pod, "1.32", strict=True)
        labels = parts[name]["metadata"]["labels"]
        for policy in kinds(objects, "NetworkPolicy"):
            selected = policy["spec"]["podSelector"].get("matchLabels", {})
            assert set(selected.items()) <= set(labels.items()) or selected["app.kubernetes.io/component"] == "gateway"
        (container,) = pod["spec"]["containers"]
        own = {**variables, "LWS_WORKER_INDEX": str(rank), "POD_IP": "10.0.0.1"}
        words = [re.sub(r"\$\((\w+)\)", lambda found, own=own: own[found[1]], word) for word in container["args"]]
        given = command.commands["node"].make_context("node", words).params
        ranks = given["tensor_parallel"] * given["pipeline_parallel"]
        assert ranks == given["nnodes"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert (given["node_rank"], given["master_addr"]) == (rank, "updraft-node-0")
        (key,) = (each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == KEY_VARIABLE)
        assert key["key"] in held[key["name"]]
        assert ("readinessProbe" in container) == (rank == 0)
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
