"""Requirements of `prism-serve up --ray` on Ray's machines, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prism.config.reader import convert
from prism.config.schema.cluster_config import ServeYaml
from prism.errors import ConfigError
from prism.serve.on_ray import ray_machines
from prism.serve.on_ray.command import ray_address, serve
from prism.serve.on_ray.ray_machines import (
    HOST_DEVICES,
    Placement,
    RayMachine,
    check_ray,
    layout,
    machines_with_devices,
    placements,
    with_absolute_paths,
    with_nodes,
)
from tests.ports import free_port

MODELS = [{"name": "m", "path": "m"}]
GPU = {"name": "cuda:*", "capacity": "70GiB"}
HOST = {"name": "host:*", "capacity": "1GiB"}
URL = "redis://:secret@10.0.0.9:6379"
FOUND = [
    RayMachine("10.0.0.1", {"CPU": 4.0}),
    RayMachine("10.0.0.2", {"GPU": 2.0, HOST_DEVICES: 1.0}),
    RayMachine("10.0.0.3", {HOST_DEVICES: 2.0}),
]


def placed(file: dict[str, Any]) -> list[Placement]:
    return placements(convert(with_nodes(file, FOUND), ServeYaml), FOUND)


def test_nodes_are_the_machines_that_have_such_devices() -> None:
    file = {"ray": "auto", "devices": [GPU, HOST], "models": MODELS, "redis": URL}
    assert placed(file) == [
        Placement("10-0-0-2", "10.0.0.2", [{"GPU": 1}, {"GPU": 1}, {HOST_DEVICES: 1}]),
        Placement("10-0-0-3", "10.0.0.3", [{HOST_DEVICES: 1}, {HOST_DEVICES: 1}]),
    ]
    whole = with_nodes(file, FOUND)
    assert "ray" not in whole
    assert "devices" not in whole
    assert [d["name"] for d in whole["nodes"][0]["devices"]] == ["cuda:0", "cuda:1", "host:0"]
    assert whole["nodes"][0]["devices"][1] == {"name": "cuda:1", "capacity": "70GiB"}
    assert [each.name for each in placed({**file, "devices": [GPU]})] == ["10-0-0-2"]


def test_a_layout_follows_from_the_machines_that_are_nodes() -> None:
    file = yaml.safe_dump({"ray": "auto", "devices": [GPU, HOST], "models": MODELS, "redis": URL})
    assert machines_with_devices(file, FOUND) == FOUND[1:]
    found = layout(file, FOUND[:0:-1])
    assert [each.name for each in found.placements] == ["10-0-0-3", "10-0-0-2"]
    assert [n["name"] for n in yaml.safe_load(found.text)["nodes"]] == ["10-0-0-3", "10-0-0-2"]
    named = {"nodes": [{"name": "x", "address": "10.0.0.2"}], "models": MODELS, "redis": URL}
    assert machines_with_devices(yaml.safe_dump(named), FOUND) is None


def test_named_nodes_stay_as_they_are() -> None:
    """Reserves host devices as far as Ray knows of them."""
    devices = [{"name": f"host:{i}", "capacity": "1GiB"} for i in range(2)]
    node = {"name": "x", "address": "10.0.0.2", "devices": devices}
    file = {"nodes": [node], "models": MODELS, "redis": URL}
    assert with_nodes(file, FOUND) == file
    assert placed(file) == [Placement("x", "10.0.0.2", [{HOST_DEVICES: 1}])]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"devices": [{**GPU, "name": "cuda:0"}]},
            "devices[0].name: 'cuda:0' cannot be combined with ray",
        ),
        ({"devices": [GPU, GPU]}, "devices[1].name: 'cuda:*' cannot be combined with ray"),
        ({"devices": [{**GPU, "capacity": "90%"}]}, "devices[0].capacity: must be a size such as"),
        ({"devices": [HOST, {"name": "cuda:*"}]}, "devices[1].capacity: must be a size such as"),
        ({"devices": []}, "devices: no machine of Ray has such devices"),
        ({"cluster_key": "key"}, "cluster_key: cannot be combined with ray"),
        (
            {"nodes": [{"name": "x", "address": "10.0.0.7"}]},
            "nodes[0].address: the Ray cluster does not have 10.0.0.7; it has 10.0.0.1,",
        ),
        (
            {"nodes": [{"name": "x", "address": "10.0.0.2", "devices": [GPU] * 3}]},
            "nodes[0].devices: 3 GPUs, but Ray's 10.0.0.2 has 2",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(changes: dict[str, Any], why: str) -> None:
    file = {"devices": [GPU, HOST], "models": MODELS, "redis": URL, **changes}
    with pytest.raises(ConfigError) as found:
        placed(file)
    assert str(found.value).startswith(why)


def test_ray_is_asked_of_only_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_machines, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        check_ray()
    monkeypatch.setattr(ray_machines, "find_spec", lambda _: object())
    monkeypatch.setattr(ray_machines, "version", lambda _: "2.51.1")
    with pytest.raises(
        ConfigError, match=r"Ray 2\.51\.1 does not support tokens; install 2\.52 or later"
    ):
        check_ray()
    monkeypatch.setattr(ray_machines, "version", lambda _: "2.60.0")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token"):
        check_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_ray()
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"ray": "auto", "models": MODELS}))
    assert ray_address(path) == "auto"
    with pytest.raises(ConfigError, match="redis: is required with Ray"):
        serve(path, "auto", {}, print)
    named = {"nodes": [{"name": "x", "address": "10.0.0.2"}], "models": MODELS, "redis": URL}
    path.write_text(yaml.safe_dump(named))
    monkeypatch.setattr("prism.serve.on_ray.command._machines", lambda _: [])
    with pytest.raises(ConfigError, match="ray: no Ray cluster was found for the nodes"):
        serve(path, "auto", {}, print)
    monkeypatch.setattr("prism.serve.on_ray.command._machines", lambda _: FOUND)
    file = {"devices": [HOST], "models": MODELS, "redis": f"redis://127.0.0.1:{free_port()}"}
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigError, match="redis: Error 111"):
        serve(path, "auto", {}, print)


def test_paths_are_those_of_the_files_folder() -> None:
    file: dict[str, Any] = {
        "models": [
            {"name": "m", "path": "m", "lora": [{"name": "l", "path": "l"}]},
            {"name": "n", "path": "/x/n"},
            {"name": "o", "path": "org/o@v1"},
        ],
        "access": {"keys": "k.yaml"},
        "frontend": {"port": 1, "tls_key": "../key.pem", "admin": "./admin.sock"},
        "engine": {"weight_store": "auto", "python": {"vllm": "v/bin/python"}},
    }
    found = yaml.safe_load(with_absolute_paths(file, Path("/f")))
    assert [m["path"] for m in found["models"]] == ["/f/m", "/x/n", "org/o@v1"]
    assert found["models"][0]["lora"][0]["path"] == "/f/l"
    assert found["access"] == {"keys": "/f/k.yaml"}
    assert found["frontend"] == {"port": 1, "tls_key": "/f/../key.pem", "admin": "/f/admin.sock"}
    assert found["engine"] == {"weight_store": "auto", "python": {"vllm": "/f/v/bin/python"}}
    assert file["models"][0]["path"] == "m"
    other: dict[str, Any] = {
        "models": [],
        "frontend": {"admin": "127.0.0.1:1"},
        "engine": {"weight_store": "w"},
    }
    found = yaml.safe_load(with_absolute_paths(other, Path("/f")))
    assert found["frontend"] == {"admin": "127.0.0.1:1"}
    assert found["engine"] == {"weight_store": "/f/w"}
