"""Changes of a running cluster's configuration by another YAML."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from prism.config.reload import CHANGEABLE, DERIVED, FIXED, changes, reloaded
from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.access import ApiKey
from prism.config.schema.cluster_config import (
    ClusterConfig,
    DeviceConfig,
    EngineConfig,
    FrontendConfig,
    SchedulerConfig,
)
from prism.config.schema.endpoints import NodeConfig
from prism.config.schema.priority import PriorityConfig
from prism.config.schema.units import Seconds
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from tests.cluster.conftest import spec

RUNNING = ClusterConfig(
    namespace="prism-1",
    run_dir="/run/1",
    redis_url="unix://:secret@/run/1/redis/redis.sock",
    policy="prism",
    devices=[DeviceConfig("host:0", 1 << 26, 1 << 16, 2, idle_bytes=7)],
    models=[spec("a"), spec("b", kv_arrangement="token_interleaved")],
    engine=EngineConfig(adapter="fake", static_bytes=None),
    preloaded=True,
    port=8123,
)
# Result of `load`, without the state and the measurements of a run.
LOADED = replace(
    RUNNING,
    namespace="",
    run_dir="",
    redis_url="",
    port=8000,
    preloaded=False,
    devices=[DeviceConfig("host:0", 1 << 26, 1 << 16, 2)],
    models=[spec("a"), spec("b")],
)


def test_each_field_of_a_model_may_change_or_not() -> None:
    named = {field.name for field in msgspec.structs.fields(ModelSpec)}
    assert named | {"fixed_tp"} == {*CHANGEABLE, *FIXED, *DERIVED}


def test_degrees_stay_as_they_were_when_machines_come() -> None:
    running = replace(RUNNING, models=[spec("a", degrees=(1,))])
    more = replace(LOADED, models=[spec("a", tp=2, degrees=(2, 4))])
    assert reloaded(running, more, []).models == running.models


def test_the_same_file_changes_nothing() -> None:
    after = reloaded(RUNNING, LOADED, [])
    assert after == RUNNING
    assert changes(RUNNING, after) == []


def test_models_come_and_go_and_come_back() -> None:
    """Clears the bounds of a leaving model; one that returns before it is gone keeps its path."""
    pinned = replace(RUNNING, models=[spec("a"), spec("b", never_evict=True, replicas_min=2)])
    after = reloaded(pinned, replace(LOADED, models=[spec("c"), spec("a")]), [])
    assert [m.name for m in after.models] == ["c", "a"]
    assert [(m.name, m.never_evict, m.replicas_min) for m in after.leaving] == [("b", False, 1)]
    assert changes(pinned, after) == ["added c", "removed b"]
    again = reloaded(after, replace(LOADED, models=[spec("b", slo_ttft_s=9.0)]), ["b"])
    assert [m.name for m in again.models] == ["b"]
    assert {m.name for m in again.leaving} == {"a", "c"}
    assert again.models[0].slo_ttft_s == 9.0
    gone = reloaded(after, replace(LOADED, models=[spec("b", path="/elsewhere")]), [])
    assert gone.models[0].path == "/elsewhere"
    with pytest.raises(ConfigError, match=r"models\[0\].path of b, which is being removed: "):
        reloaded(after, replace(LOADED, models=[spec("b", path="/elsewhere")]), ["b"])


def test_what_may_change_does() -> None:
    keys = [ApiKey("x", "0" * 64)]
    changed = replace(
        LOADED,
        models=[spec("a", slo_tpot_s=0.5, pinned_device="host:0"), spec("b", tool_parser="none")],
        scheduler=SchedulerConfig(interval_s=Seconds("9s")),
        frontend=FrontendConfig(
            max_open_requests=7, queue_timeout_s=Seconds("3s"), priority=PriorityConfig(max=5)
        ),
        keys=[*keys, ApiKey("y", "1" * 64)],
    )
    running = replace(RUNNING, keys=keys)
    after = reloaded(running, changed, [])
    assert set(changes(running, after)) == {
        "a.slo.tpot 0.1 -> 0.5",
        "a.device None -> host:0",
        "b.tool_parser auto -> none",
        "scheduler.interval 5s -> 9s",
        "frontend.max_open_requests 4096 -> 7",
        "frontend.queue_timeout 60s -> 3s",
        "frontend.priority.max 0 -> 5",
        "access.keys are x, y",
    }
    assert after.models[1].kv_arrangement == "token_interleaved"
    assert (after.port, after.redis_url, after.devices) == (
        8123,
        RUNNING.redis_url,
        RUNNING.devices,
    )


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"redis_url": "redis://elsewhere"}, "redis"),
        ({"policy": "serverlessllm"}, "policy"),
        ({"devices": [DeviceConfig("host:0", 1 << 27, 1 << 16, 2)]}, "devices[0].capacity"),
        ({"devices": [DeviceConfig("host:1", 1 << 26, 1 << 16, 2)]}, "devices"),
        ({"engine": EngineConfig(adapter="fake", max_running=3)}, "engine.max_running"),
        ({"frontend": FrontendConfig(port=1, processes=2)}, "frontend.port, frontend.processes"),
        ({"hang_timeout_s": 99.0}, "hang_timeout"),
        ({"open_to_all": True}, "access.open_to_all"),
        (
            {"keys": [ApiKey("x", "0" * 64)]},
            "access.keys (adding the first key, or removing the last one)",
        ),
        ({"models": [spec("a", tp=2)]}, "models[0].tp of a"),
        ({"models": [spec("a", degrees=(1,))]}, "models[0].tp of a"),
        ({"models": [spec("a", num_layers=2, head_dim=32)]}, "models[0].path of a"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(edit: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reloaded(RUNNING, replace(LOADED, **edit), [])
    assert str(caught.value) == (
        f"{named}: cannot be changed while the cluster runs; revert it, or restart prism-serve"
    )


def test_a_fixed_partition_keeps_its_models() -> None:
    static = [replace(each, policy="static") for each in (RUNNING, LOADED)]
    slower = replace(static[1], models=[spec("a", slo_ttft_s=9.0), spec("b")])
    assert reloaded(static[0], slower, []).models[0].slo_ttft_s == 9.0
    with pytest.raises(ConfigError, match=r"models \(the policy static places"):
        reloaded(static[0], replace(static[1], models=[spec("a")]), [])


def test_a_searched_placement_gets_new_models() -> None:
    searched = [replace(each, policy="muxserve++") for each in (RUNNING, LOADED)]
    only = reloaded(searched[0], replace(searched[1], models=[spec("a")]), [])
    assert [model.name for model in only.models] == ["a"]


def test_models_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"models\[0\]"):
        reloaded(RUNNING, replace(LOADED, models=[spec("c", weight_bytes=1 << 27)]), [])


def test_processes_take_a_newer_file_and_no_other(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cluster.json"
    write_resolved(RUNNING, path)
    assert path.stat().st_mode & 0o777 == 0o600
    file = ConfigFile(path)
    assert file.config == RUNNING
    assert file.newer() is None
    newer = replace(RUNNING, revision=1, models=[spec("c")])
    write_resolved(newer, path)
    assert file.newer() == file.config == newer
    path.unlink()
    assert file.newer() is None
    write_resolved(RUNNING, path)  # an older revision, written again
    assert file.newer() is None
    path.write_bytes(msgspec.json.encode({"nothing": "of it"}))
    assert file.newer() is None
    assert "was not written by this version" in caplog.text
    assert file.config == newer


def several(*names: str, **more: Any) -> ClusterConfig:
    nodes = [NodeConfig(name, f"10.0.0.{name}", 7300, 1, 1) for name in names]
    devices = [DeviceConfig(f"host:0@{name}", 1 << 26, 1 << 16, 2) for name in names]
    return replace(LOADED, nodes=nodes, devices=devices, **more)


def test_machines_come_and_go() -> None:
    """Keeps the measurements of this machine."""
    running = several("1", "2", node="1", run_dir="/run/1")
    running.devices[0] = replace(running.devices[0], idle_bytes=7)
    after = reloaded(running, several("1", "2", "3", node="1"), [])
    assert [device.name for device in after.devices] == ["host:0@1", "host:0@2", "host:0@3"]
    assert after.devices[0].idle_bytes == 7
    assert changes(running, after) == ["added node 3"]
    left = reloaded(after, several("1", "3", node="1"), [])
    assert [node.name for node in left.nodes] == ["1", "3"]
    assert changes(after, left) == ["removed node 2"]


@pytest.mark.parametrize(
    ("names", "edit", "named"),
    [
        ("21", {}, "nodes: the order; append new ones"),
        ("312", {}, "nodes: the order; append new ones"),
        ("23", {}, "nodes: 1, which is this machine"),
        ("12", {"nodes": [NodeConfig(n, f"10.0.0.{n}", 9, 1, 1) for n in "12"]}, "nodes: port of "),
        ("12", {"policy": "serverlessllm"}, "policy: "),
        (
            "123",
            {"models": [spec("c")]},
            "added c; removed a; removed b: a running cluster of several machines",
        ),
        ("", {}, "nodes, nodes: 1, which is this machine"),
    ],
)
def test_what_machines_may_not_do(names: str, edit: dict[str, Any], named: str) -> None:
    running = several("1", "2", node="1", run_dir="/run/1")
    with pytest.raises(ConfigError) as caught:
        reloaded(running, replace(several(*names, node="1"), **edit), [])
    assert str(caught.value).startswith(named)
