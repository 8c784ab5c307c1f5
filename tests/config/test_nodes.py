"""Several machines in one YAML: names, addresses, and the error of each mistake."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from prism.config.checks.nodes import check_node
from prism.config.resolve import load
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import nearest
from prism.curve import new_secret
from prism.errors import ConfigError
from prism.policies.data import GpuView
from prism.serve.drain import matching_devices
from prism.serve.node import run_dir
from prism.serve.node.preflight import check_addresses, check_ports, check_redis
from prism.serve.node.registration import namespace_of, state_of
from tests.frontend.tiny_model import make_model

REDIS = "redis://:secret@10.0.0.9:6379"
DEVICE = {"name": "host:0", "capacity": "16MiB", "page": "64KiB"}


def write(folder: Path, **changes: Any) -> Path:
    make_model(folder / "m")
    key = folder / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_text(new_secret())
    nodes = [
        {"name": "a", "address": "10.0.0.1", "devices": [DEVICE, {**DEVICE, "name": "host:1"}]},
        {"name": "b", "address": "fd00::2", "port": 8300, "frontends": 2, "devices": [DEVICE]},
    ]
    data = {
        "nodes": nodes,
        "models": [{"name": "m", "path": "m"}],
        "engine": {"adapter": "fake", "static": "1MiB"},
        "redis": REDIS,
        "cluster_key": "key",
        **changes,
    }
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
    return path


def loaded(folder: Path, node: str = "a", **changes: Any) -> ClusterConfig:
    config = load(write(folder, **changes), node=node)
    check_node(config)
    return config


def nodes(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    base = {"address": "10.0.0.1", "devices": [DEVICE]}
    return [{"name": f"n{i}", "port": 7300 + 100 * i, **base, **c} for i, c in enumerate(changes)]


def test_devices_have_names_of_their_own_in_the_cluster(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert [d.name for d in config.devices] == ["host:0@a", "host:1@a", "host:0@b"]
    assert [d.node for d in config.devices] == ["host 65536 a", "host 65536 a", "host 65536 b"]
    assert config.frontends_total == 3
    here = config.local()
    assert [d.name for d in here.devices] == ["host:0", "host:1"]
    assert here.namespace != loaded(tmp_path, "b").local().namespace


def test_where_everything_is_found(tmp_path: Path) -> None:
    a, b = (loaded(tmp_path, name) for name in "ab")
    assert a.own_scheduler_endpoints == ["ipc:///scheduler", "tcp://10.0.0.1:7300"]
    assert b.scheduler_endpoints == ["ipc:///scheduler", "tcp://10.0.0.1:7300"]
    assert a.own_cancel_endpoints("host:1@a") == ["ipc:///cancel-host1", "tcp://10.0.0.1:7302"]
    assert a.agent_cancel_endpoint("host:1@a") == "ipc:///cancel-host1"
    assert b.agent_cancel_endpoint("host:1@a") == "tcp://10.0.0.1:7302"
    assert a.agent_cancel_endpoint("host:0@b") == "tcp://[fd00::2]:8301"
    assert b.frontend_ports == range(8302, 8366)
    assert a.weights_endpoint("b") == "tcp://[fd00::2]:8366"
    name = "f1.3@b:8310:abc"
    assert a.frontend_endpoint(name) == "tcp://[fd00::2]:8310"
    assert b.frontend_endpoint(name) == "ipc:///frontend-f1.3"
    assert b.own_frontend_endpoints(name) == ["ipc:///frontend-f1.3", "tcp://[fd00::2]:8310"]


def test_a_link_is_as_fast_as_its_slower_end(tmp_path: Path) -> None:
    ends = nodes({"network_rate": "2GB"}, {"network_rate": "500MB"}, {"network_rate": "3GB"})
    first = loaded(tmp_path, "n0", nodes=ends)
    assert first.links_bytes_s() == {"n1": 5e8, "n2": 2e9}
    assert first.place("n0").disk_bytes_s == 2e9


def test_the_nearest_is_on_the_same_machine() -> None:
    assert nearest("host:0@a", ["host:0@b", "host:1@a", "host:2@a"]) == "host:1@a"
    assert nearest("host:0@a", ["host:0@b", "host:0@c"]) == "host:0@b"
    assert nearest("host:0", ["host:1", "host:2"]) == "host:1"
    assert nearest("host:0@a", []) is None


@pytest.mark.parametrize("name", ["f0@c:1:x", "f0@10.0.0.66:1:x", "f0@b:x:x", "f0@b", "../f0"])
def test_no_id_leads_beyond_the_cluster(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        loaded(tmp_path).frontend_endpoint(name)


def test_only_some_nodes_have_a_scheduler_ready(tmp_path: Path) -> None:
    five = nodes({}, {}, {}, {}, {})
    config = loaded(tmp_path, "n4", nodes=five)
    assert not config.schedules
    assert len(config.scheduler_endpoints) == 3
    assert loaded(tmp_path, "n2", nodes=five).schedules


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"cluster_key": None}, "cluster_key: is required with nodes"),
    "no file": ({"cluster_key": "none"}, "cluster_key: cannot read .*none: No such file"),
    "no Redis": ({"redis": None}, "redis: is required with nodes"),
    "both": ({"devices": [DEVICE]}, "devices: each of the nodes has its own"),
    "a name twice": ({"nodes": nodes({}, {"name": "n0"})}, r"nodes\[1\].name: 'n0' is used twice"),
    "a name": ({"nodes": nodes({"name": "A@b"})}, r"nodes\[0\].name: 'A@b' is not a valid name"),
    "an address": ({"nodes": nodes({"address": "x"})}, r"nodes\[0\].address: 'x' is not an IP"),
    "ports": ({"nodes": nodes({}, {"port": 7301})}, r"nodes\[1\].port: n0 uses the same address"),
    "no port": ({"nodes": nodes({"port": 65500})}, r"nodes\[0\].port: 65500 to 65566 are not"),
    "no network": (
        {"nodes": nodes({"network_rate": "0.5B"})},
        r"nodes\[0\].network_rate: 0.5B is not a rate",
    ),
    "no disk rate": (
        {"nodes": nodes({"disk_rate": "0.4B"})},
        r"nodes\[0\].disk_rate: 0.4B is not a rate",
    ),
    "no frontend": ({"nodes": nodes({"frontends": 0})}, "no node serves the API"),
    "a device twice": (
        {"nodes": nodes({}, {"devices": [DEVICE, DEVICE]})},
        r"nodes\[1\].devices\[1\].name: 'host:0@n1' is used twice",
    ),
    "a device's page": (
        {"nodes": nodes({"devices": [{**DEVICE, "page": "3KiB"}]})},
        r"nodes\[0\].devices\[0\].page: 3KiB is not a power of two",
    ),
    "too few for tp": (
        {"nodes": nodes({}, {}), "models": [{"name": "m", "path": "m", "tp": 2}]},
        r"models\[0\].tp: m needs .* on each of 2 devices .* and only 1 have it",
    ),
    "no model": ({"models": [{"name": "m", "path": "gone"}]}, r"models\[0\].path: .*gone"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, what: str) -> None:
    changes, message = MISTAKES[what]
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, **changes), node="a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("node", ["", "c"])
def test_which_machine_this_is_must_be_said(tmp_path: Path, node: str) -> None:
    with pytest.raises(ConfigError, match=r"--node: .*choose one of a, b"):
        loaded(tmp_path, node)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"cluster_key: .* is a secret that other users may read"):
        load(path)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "key").write_text("short")
    with pytest.raises(ConfigError, match=r"cluster_key: .* is not a valid key"):
        load(path)


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    """Uses TEST-NET-1, which no machine has."""
    config = loaded(tmp_path, "n0", nodes=nodes({"address": "192.0.2.1"}))
    with pytest.raises(ConfigError, match=r"n0 cannot listen on 192.0.2.1 port 7300"):
        check_ports(config)


def test_the_port_of_the_api_is_none_of_the_clusters_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "running", list)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    local = nodes({"address": "127.0.0.1", "port": port})
    config = loaded(tmp_path, "n0", nodes=local, frontend={"port": port})
    with pytest.raises(ConfigError, match=rf"n0 cannot listen on 127.0.0.1 port {port}: Address"):
        check_addresses(config)


@pytest.mark.parametrize("url", ["redis://10.0.0.9:6379", "redis://user@redis.example:6379/0"])
async def test_a_redis_that_others_can_use_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"redis: .* is another machine, and the URL does not have a password"
    ):
        await check_redis(url)


def test_nodes_compare_what_they_must_have_in_common(tmp_path: Path) -> None:
    a, b = (loaded(tmp_path, name) for name in "ab")
    assert namespace_of(a) == namespace_of(b)
    assert state_of(a).shared == state_of(b).shared
    other = loaded(tmp_path, "b", engine={"adapter": "fake", "static": "2MiB"})
    assert state_of(a).shared != state_of(other).shared


def test_policies_see_machines(tmp_path: Path) -> None:
    """Sets `GpuView.node` to the machine, within which TP stays."""
    views = [
        GpuView(d.name, d.models_bytes, engines_total=1, node=d.node)
        for d in loaded(tmp_path).devices
    ]
    assert len({view.node for view in views}) == 2


def test_operators_name_a_device_or_a_machine(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert matching_devices(config, "host:0@b") == ["host:0@b"]
    assert matching_devices(config, "@a") == ["host:0@a", "host:1@a"]
    for what in ("@c", "host:0", "a", ""):
        with pytest.raises(ConfigError, match=r"unknown device .*; devices: .*, @a, @b"):
            matching_devices(config, what)
