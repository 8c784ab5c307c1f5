"""deploy/helm: rendered by Helm's library, and validated by the schemas of Kubernetes."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from prism.config.reader import convert
from prism.config.schema.access import KeysFile
from prism.config.schema.cluster_config import ServeYaml
from tests.deploy.tools import DEPLOY, call
from tests.packaging.test_deploy import only
from tests.test_tidy import name

CHART = DEPLOY / "helm" / "prism"
CASES = sorted((CHART / "ci").glob("*.yaml"))
VERSIONS = ("1.30", "1.37")
TEXT = {"type": "string"}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

# The fields of a PodMonitor (the CRD's API reference, v0.85) as far as the chart may use them.
ENDPOINT = only(
    ["port"],
    port=TEXT,
    path=TEXT,
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    scheme={"enum": ["http", "https"]},
    tlsConfig=only([], insecureSkipVerify={"type": "boolean"}),
    authorization=only(["credentials"], credentials=only(["name", "key"], name=TEXT, key=TEXT)),
)
POD_MONITOR = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata={"type": "object"},
    spec=only(
        ["selector", "podMetricsEndpoints"],
        selector=only(["matchLabels"], matchLabels={"type": "object"}),
        podMetricsEndpoints={"type": "array", "minItems": 1, "items": ENDPOINT},
    ),
)


def case(stem: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{stem}.yaml").read_text())
    return values | changes


def merged(values: dict[str, Any], below: dict[str, Any] = VALUES) -> dict[str, Any]:
    """Returns the values as Helm merges them with the chart's own."""
    found = copy.deepcopy(below)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(value, found[key]) if both else value
    return found


@cache
def rendered(text: str) -> dict[str, dict[str, Any]]:
    files = call("render", str(CHART), json.loads(text))["files"]
    parts = (part for file, t in files.items() if "NOTES" not in file for part in t.split("\n---"))
    return {each["kind"]: each for each in map(yaml.safe_load, parts) if each}


def manifests(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the manifests by kind."""
    return copy.deepcopy(rendered(json.dumps(values, sort_keys=True)))


def refusal(values: dict[str, Any]) -> str:
    error: str = call("render", str(CHART), values).get("error", "")
    return error


@pytest.mark.parametrize("values", CASES, ids=name)
def test_the_schema_takes_the_examples_and_names_every_value(values: Path) -> None:
    whole = merged(yaml.safe_load(values.read_text()))
    jsonschema.validate(whole, SCHEMA)
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)


WRONG: list[tuple[str, Any]] = [
    ("gpu", 1),
    ("gpus", -1),
    ("gpus", "two"),
    ("image", {"repo": "x"}),
    ("image", {"digest": "sha256:12"}),
    ("keys", {"create": [{"name": "a", "key": "short"}]}),
    ("keys", {"existingSecret": "Not A Name"}),
    ("config", {"devices": []}),
    ("config", {"devices": [{"name": "gpu0", "capacity": "1GiB"}]}),
    ("config", {"frontend": {"host": "127.0.0.1"}}),
    ("config", {"frontend": {"port": 0}}),
    ("sharedMemory", "32 GB"),
    ("service", {"type": "External"}),
    ("podMonitor", {"interval": "often"}),
    ("resources", {"limits": None}),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[str(each) for each in WRONG])
def test_the_schema_refuses_wrong_values(key: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(case("gpus", **{key: merged_key(key, value)})), SCHEMA)


def merged_key(key: str, value: Any) -> Any:
    below = merged(case("gpus")).get(key)
    return merged(value, below) if isinstance(value, dict) and isinstance(below, dict) else value


def test_each_value_is_documented() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    tops = [index for index, line in enumerate(lines) if line[:1].isalpha()]
    # A comment may be for the lines of Kubernetes's own fields that follow each other.
    without = [lines[i] for i in tops if not lines[i - 1].startswith("#")]
    own = {"podLabels", "nodeSelector", "tolerations", "affinity", "priorityClassName"}
    assert {line.split(":")[0] for line in without} <= own
    assert len(tops) == len(VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("values", CASES, ids=name)
def test_helm_lints_the_chart(values: Path) -> None:
    found = call("lint", str(CHART), yaml.safe_load(values.read_text()))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]
    worse = call("lint", str(CHART), {"gpu": 1})
    assert "gpu" in str(worse["errors"])


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", CASES, ids=name)
def test_kubernetes_takes_the_manifests(values: Path, version: str) -> None:
    found = manifests(yaml.safe_load(values.read_text()))
    jsonschema.validate(found.pop("PodMonitor"), POD_MONITOR)
    assert {"ConfigMap", "Deployment", "Pod", "Service", "ServiceAccount"} <= set(found)
    assert call("kubernetes_problem", list(found.values()), version) == ""
    container(found)["volumeMount"] = []
    assert "volumeMount" in call("kubernetes_problem", list(found.values()), version)


def container(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [only_one] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    each: dict[str, Any] = only_one
    return each


@pytest.mark.slow
@pytest.mark.parametrize("values", CASES, ids=name)
def test_the_manifests_fit_together(values: Path) -> None:
    found = manifests(yaml.safe_load(values.read_text()))
    pod, serve = found["Deployment"]["spec"]["template"], container(found)
    whole = convert(yaml.safe_load(found["ConfigMap"]["data"]["prism.yaml"]), ServeYaml)
    [port] = serve["ports"]
    assert port["containerPort"] == whole.frontend.port
    probes = [serve[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")]
    tls = whole.frontend.tls_certificate is not None
    assert {(p["port"], p["scheme"]) for p in probes} == {("api", "HTTPS" if tls else "HTTP")}
    assert [p["path"] for p in probes] == ["/health", "/health", "/docs"]
    service = found["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert not service["selector"].items() <= found["Pod"]["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == port["name"]
    monitor = found["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == service["selector"]
    mounts = {each["name"]: each["mountPath"] for each in serve["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert set(mounts) == set(volumes)
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert mounts["shared-memory"] == "/dev/shm"
    assert whole.access.keys is not None
    assert Path(whole.access.keys).parent == Path(mounts["keys"])
    secret = volumes["keys"]["secret"]["secretName"]
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "prometheus"}


@pytest.mark.slow
def test_a_pod_has_its_gpus_and_no_rights() -> None:
    found = manifests(case("gpus"))
    serve = container(found)
    assert serve["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in str(manifests(case("cpu"))["Deployment"])
    assert serve["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


@pytest.mark.slow
def test_the_secret_has_hashes_of_the_keys() -> None:
    made = case("cpu")["keys"]["create"]
    secret = manifests(case("cpu"))["Secret"]["stringData"]
    assert secret["prometheus"] == made[1]["key"]
    assert made[0]["key"] not in str(secret)
    keys = convert(yaml.safe_load(secret["keys.yaml"]), KeysFile).keys
    assert [key.sha256 for key in keys] == [
        hashlib.sha256(each["key"].encode()).hexdigest() for each in made
    ]
    assert [key.operator for key in keys] == [False, True]
    assert "Secret" not in manifests(case("gpus"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (case("gpus", gpus=1), "which is 2"),
    (case("gpus", keys={}), "openToAll"),
    (case("gpus", image={}), "image.repository"),
    (case("cpu", keys={"existingSecret": "x", **case("cpu")["keys"]}), "cannot be combined"),
    (case("cpu", keys={"create": case("cpu")["keys"]["create"][:1]}), "podMonitor.enabled"),
    (case("cpu", config=case("cpu")["config"] | {"frontend": {"admin": "x"}}), "frontend.admin"),
    (case("cpu", config=case("cpu")["config"] | {"frontend": {"tls_certificate": "x"}}), "tlsSec"),
    (case("cpu", gpu=1), "gpu"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_the_chart_refuses_what_cannot_work(values: dict[str, Any], why: str) -> None:
    assert why in refusal(values)


@pytest.mark.slow
def test_it_may_be_open_or_have_its_yaml_in_a_secret() -> None:
    found = manifests(case("gpus", keys={}, openToAll=True, podMonitor={}))
    whole = convert(yaml.safe_load(found["ConfigMap"]["data"]["prism.yaml"]), ServeYaml)
    assert whole.access.open_to_all
    assert "keys" not in str(container(found)["volumeMounts"])
    found = manifests(case("gpus", existingConfigSecret="prism-yaml"))
    assert "ConfigMap" not in found
    assert "prism-yaml" in str(found["Deployment"]["spec"]["template"]["spec"]["volumes"])


@pytest.mark.slow
def test_a_changed_configuration_replaces_the_pod() -> None:
    def pod(**changes: Any) -> dict[str, Any]:
        template: dict[str, Any] = manifests(case("cpu", **changes))["Deployment"]["spec"][
            "template"
        ]
        return template

    other = {"policy": "static", **case("cpu")["config"]}
    assert pod() != pod(config=other)
    assert pod(restartOnChange=False) == pod(restartOnChange=False, config=other)
