"""Each metric that the documentation names follows what the cluster reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prism.frontend.metrics.cluster_metrics import ClusterCollector
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.external import ClientShare, ExternalServer, ServerLoad
from prism.messages.gpu_memory import ForeignProcess, GpuMemory
from tests.serve.test_metrics import MOVE

DOCS = Path(__file__).parents[2] / "docs"
# Metrics of a frontend's own requests. tests/serve/test_metrics.py, test_access.py and
# test_health.py check them with real requests.
OWN = {
    *(name.removesuffix("_count") for name in MOVE),
    "prism_key_requests_total",
    "prism_key_tokens_total",
    "prism_open_requests",
}


def filled(kind: type[Any], step: int, **given: Any) -> Any:
    """Returns a message in which every number and mapping of numbers grows with `step`."""
    values: dict[str, Any] = {}
    for number, field in enumerate(msgspec.structs.fields(kind), 1):
        value = number * 1000 + step
        if field.type in (int, float):
            values[field.name] = value
        elif field.type in (dict[str, int], dict[str, float]):
            values[field.name] = {"x": value}
        elif field.type is str:
            values[field.name] = "x"
    return kind(**values | given)


def samples(step: int) -> dict[str, dict[Any, float]]:
    """Returns the values of each metric by labels."""
    state, peers = ("active", ("cuda:2",)) if step else ("activating", ())
    model = filled(ModelReport, step, model="m", state=state, peers=peers)
    memory = filled(GpuMemory, step, foreign=(ForeignProcess(1, 10 + step),))
    agent = filled(AgentReport, step, device="cuda:0", models=[model], gpu=memory)
    client = filled(ClientShare, step, limit_bytes=10_000 + step, own_limit_bytes=None)
    problem = "" if step else "refused"
    load = filled(ServerLoad, step)
    server = ExternalServer("x", "http://x", problem, load, [client, client], asleep=bool(step))
    status = filled(
        ClusterStatus,
        step,
        placement={"m": f"cuda:{step}"},
        agents=[agent],
        external=[server],
        ready=bool(step),
        overload=["x"] if step else [],
        decisions=[],
    )
    collector = ClusterCollector(status)
    found: dict[str, dict[Any, float]] = {}
    text = generate_latest(collector.registry).decode()
    for sample in (s for f in text_string_to_metric_families(text) for s in f.samples):
        found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def test_each_metric_in_the_documentation_moves() -> None:
    named = {
        name
        for page in DOCS.glob("*.md")
        for name in re.findall(r"\bprism_[a-z0-9_]+(?=[`{\[ ,)])", page.read_text())
        if name not in ("prism_host_device", "prism_replay", "prism_sim")
    }
    before, after = samples(0), samples(1)
    moved = {name for name in after if before.get(name) != after[name]}
    assert len(named) > 50
    assert named - OWN - moved == set()


def test_what_is_of_a_device_says_of_which_machine_too() -> None:
    models = [ModelReport("m", "active", waiting=1)]
    reports = [AgentReport(d, 1, 0.0, 8, 4, 0, 0, 0, 1, 0, 1, models) for d in ("h:0@a", "h:0@b")]
    status = ClusterStatus(0.0, "prism", {"m": "h:0@a"}, reports, kvpr={"h:0@b": 1.0})
    collector = ClusterCollector(status)
    text = generate_latest(collector.registry).decode()
    families = list(text_string_to_metric_families(text))
    labels = [s.labels for family in families for s in family.samples if "device" in s.labels]
    assert all(each["node"] == each["device"][-1] for each in labels)
    named = {f.name for f in families if any("node" in s.labels for s in f.samples)}
    assert {"prism_placement", "prism_kvpr", "prism_queue_depth", "prism_model_state"} <= named


def test_an_external_server_has_samples_only_of_what_it_has() -> None:
    """Sums over ranks. A server without ranks on kvcached has no memory, one with a rank that is
    not limited has no limit."""
    limits = {"http://a": (8, 9), "http://b": (8, None), "http://c": ()}
    servers = [
        ExternalServer(
            "m",
            url,
            "refused" if url == "http://c" else "",
            ServerLoad(3),
            [ClientShare("n", "d", "c", 1, 1, 5, 2, 1, 4, limit, 4, None) for limit in of],
        )
        for url, of in limits.items()
    ]
    collector = ClusterCollector(ClusterStatus(0.0, "prism", {}, [], external=servers))
    text = generate_latest(collector.registry).decode()
    found: dict[str, list[float | None]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("prism_external_"):
            values = {s.labels["server"]: s.value for s in family.samples}
            assert all(s.labels["model"] == "m" for s in family.samples)
            found[family.name.removeprefix("prism_external_")] = [values.get(u) for u in limits]
    assert found == {
        "up": [1, 1, 0],
        "asleep": [0, 0, 0],
        "open_requests": [3, 3, 3],
        "kv_held_bytes": [10, 10, None],
        "kv_min_bytes": [8, 8, None],
        "kv_limit_bytes": [17, None, None],
    }
