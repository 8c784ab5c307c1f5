"""The files of deploy/: systemd's units and KubeRay's manifest, against the programs that read
them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from prism.cli.serve import app
from prism.config.reader import convert
from prism.config.schema.cluster_config import ServeYaml
from prism.serve.on_ray.ray_machines import Placement, RayMachine, placements, with_nodes
from tests.serve.ray_environment import ray_bin

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
BIN = "/opt/prism/bin"

# The fields of KubeRay's RayJob (its CRD API reference, v1.6.2) as far as the manifest may use
# them; Kubernetes has the rest.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def only(required: list[str], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }


HEAD = only(["rayStartParams", "template"], rayStartParams=TEXTS, template={"type": "object"})
WORKERS = only(
    ["groupName", "rayStartParams", "template"],
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template={"type": "object"},
)
AUTHENTICATION = only([], mode={"enum": ["disabled", "token"]}, secretName={"type": "string"})
CLUSTER = only(
    ["headGroupSpec"],
    rayVersion={"type": "string"},
    authOptions=AUTHENTICATION,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = only(
    ["entrypoint", "rayClusterSpec"],
    entrypoint={"type": "string"},
    backoffLimit=COUNT,
    shutdownAfterJobFinishes={"type": "boolean"},
    rayClusterSpec=CLUSTER,
)
RAY_JOB = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object"},
    spec=JOB,
)


def manifests() -> dict[str, Any]:
    """Returns the manifests by kind."""
    return {
        each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    }


def groups() -> list[dict[str, Any]]:
    cluster = manifests()["RayJob"]["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def templates() -> list[dict[str, Any]]:
    return [group["template"] for group in groups()]


def commands() -> list[list[str]]:
    """Returns the commands of the units and of the manifest, with their options."""
    lines = [
        line.removeprefix("ExecStart=").removeprefix(f"{BIN}/")
        for unit in UNITS
        for line in unit.read_text().splitlines()
        if line.startswith("ExecStart=")
    ]
    return [line.split() for line in (*lines, manifests()["RayJob"]["spec"]["entrypoint"])]


def options(command: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in command if word.startswith("-")}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Copies the programs to another place, since systemd checks that they exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("ray", "prism-serve"):
        shutil.copy("/bin/true", programs / name)
    copies = [tmp_path / unit.name for unit in UNITS]
    for unit, copy in zip(UNITS, copies, strict=True):
        copy.write_text(unit.read_text().replace(BIN, str(programs)))

    def problems() -> str:
        verify = ["systemd-analyze", "verify", "--man=no", *map(str, copies)]
        return subprocess.run(verify, capture_output=True, text=True, check=False).stderr

    assert len(copies) == 4
    assert problems() == ""
    copies[0].write_text(copies[0].read_text().replace("KillMode", "KillMood"))
    assert "KillMood" in problems()


def test_prism_serve_knows_its_options() -> None:
    used = [command for command in commands() if command[0] == "prism-serve"]
    assert len(used) == 3
    known = {option for each in get_command(app).params for option in each.opts}
    for command in used:
        assert options(command) <= known, command


def test_kuberay_takes_the_manifest() -> None:
    found = manifests()
    assert set(found) == {"Secret", "RayJob", "Service"}
    jsonschema.validate(found["RayJob"], RAY_JOB)
    worse = json.loads(json.dumps(found["RayJob"]))
    worse["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(worse, RAY_JOB)


def test_the_manifest_fits_together() -> None:
    """Checks that its YAML is ours, and that its service finds the serving pods and their port."""
    found = manifests()
    secret, (_, pod) = found["Secret"]["stringData"], templates()
    pods = [RayMachine("10.1.0.1", {"GPU": 0.0}), RayMachine("10.1.0.2", {"GPU": 1.0})]
    whole = convert(with_nodes(yaml.safe_load(secret["cluster.yaml"]), pods), ServeYaml)
    assert placements(whole, pods) == [Placement("10-1-0-2", "10.1.0.2", [{"GPU": 1}])]
    (container,) = pod["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == whole.access.keys_variable
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference["name"] == found["Secret"]["metadata"]["name"]
    assert reference["key"] in secret
    (port,) = container["ports"]
    assert port["containerPort"] == whole.frontend.port
    service = found["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == port["name"]
    folder = container["volumeMounts"][0]["mountPath"]
    assert all(model.path.startswith(f"{folder}/") for model in whole.models)


VALIDATE = """
import json, sys, kubernetes_validate
for each in json.load(sys.stdin):
    kubernetes_validate.validate(each, "1.37", strict=True)
"""


@pytest.mark.long
def test_kubernetes_takes_what_is_its_own() -> None:
    """Validates the pods of KubeRay as well."""
    found = manifests()
    pods: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": each}
        for each in templates()
    ]
    python = [str(ray_bin() / "python"), "-c", VALIDATE]

    def problem(*objects: dict[str, Any]) -> str:
        text = json.dumps(objects)
        done = subprocess.run(python, input=text, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    assert problem(found["Secret"], found["Service"], *pods) == ""
    pods[0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert "volumeMount" in problem(*pods)


@pytest.mark.long
def test_ray_knows_its_options() -> None:
    """Checks the options in units, and of KubeRay's `ray start`."""
    shown = subprocess.run(
        [ray_bin() / "ray", "start", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z-]+", shown.stdout))
    used = [options(command) for command in commands() if command[0] == "ray"]
    used += [{f"--{name}" for name in group["rayStartParams"]} for group in groups()]
    assert len(used) == 4
    for each in used:
        assert each <= known
