"""Every metric that the documentation names is there in a live cluster, and moves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from prism.frontend.http.error_bodies import OverloadedError, RateLimitError, SheddingError
from tests.serve.conftest import Cluster, serving, until

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples" / "monitoring"
DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(2)
]
UNITS = ("_seconds", "_bytes", "_total")
# Those that have no unit, or count tokens, requests, engines.
PLAIN = re.compile(
    r"_(ready|requests|depth|devices|engines|free|starting|kvpr|rate|placement|state|overload|up"
    r"|asleep)$"
)


MOVE = {
    "prism_requests_total",
    "prism_prompt_tokens_total",
    "prism_output_tokens_total",
    "prism_retries_total",
    "prism_ttft_seconds_count",
    "prism_tpot_seconds_count",
    "prism_e2e_seconds_count",
    "prism_queue_seconds_count",
    "prism_slo_total",
    "prism_engine_restarts_total",
    "prism_model_activations_stage_seconds_total",
    "prism_model_activations_total",
    "prism_model_prompt_tokens_total",
    "prism_model_output_tokens_total",
    "prism_model_finished_requests_total",
    "prism_model_maps_total",
    "prism_model_kv_mapped_bytes",
    "prism_model_kv_cached_bytes",
    "prism_token_rate",
    "prism_kvpr",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("metrics")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            folder,
            Path(temporary),
            '{"decode_step_ms": 20}',
            devices=DEVICES,
            frontend={"port": 0, "processes": 2},
            scheduler={"interval": "60s"},
        ) as made,
    ):
        yield made


def families(cluster: Cluster) -> dict[str, Metric]:
    text = httpx.get(f"{cluster.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def sums(found: dict[str, Metric], *labels: str) -> dict[tuple[str, ...], float]:
    """Returns the samples of each name, summed by these labels, without those that lack one."""
    total: dict[tuple[str, ...], float] = defaultdict(float)
    for sample in (sample for family in found.values() for sample in family.samples):
        if all(label in sample.labels for label in labels):
            key = (sample.name, *(sample.labels[label] for label in labels))
            total[key] += sample.value
    return total


def series(found: dict[str, Metric]) -> dict[tuple[Any, ...], float]:
    samples = [sample for family in found.values() for sample in family.samples]
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def grown(before: dict[str, Metric], after: dict[str, Metric], *labels: str) -> set[Any]:
    """Returns names of series that grew or came, with the values of these labels.

    A model that leaves a device takes its series with it.
    """
    earlier = series(before)
    keys = [key for key, value in series(after).items() if value > earlier.get(key, 0)]
    if not labels:
        return {name for name, _ in keys}
    named = [(name, dict(pairs)) for name, pairs in keys]
    return {(name, *(has.get(label) for label in labels)) for name, has in named}


async def work(cluster: Cluster) -> None:
    """Sends requests of both models at once and kills an engine under them."""
    bodies = [{"model": m, "prompt": [9, 8, i], "max_tokens": 100} for m in "ab" for i in range(6)]
    bodies[0]["slo_ttft_ms"] = 1
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=body | {"ignore_eos": True}))
            for body in bodies
        ]
        await asyncio.to_thread(until, lambda: running(cluster, "b") > 0, "requests run")
        os.kill(engine_pid(cluster, "b"), signal.SIGKILL)
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


def running(cluster: Cluster, model: str) -> float:
    return sums(families(cluster), "model")["prism_model_running_requests", model]


def engine_pid(cluster: Cluster, model: str) -> int:
    status = httpx.get(f"{cluster.url}/status").json()
    [pid] = [m["engine_pid"] for a in status["agents"] for m in a["models"] if m["model"] == model]
    return int(pid)


def ended_well(cluster: Cluster) -> float:
    return sums(families(cluster), "outcome")["prism_requests_total", "ok"]


def operate(cluster: Cluster, *arguments: str) -> None:
    done = cluster.operate(*arguments)
    assert done.returncode == 0, done.stderr


def documented(page: str) -> set[str]:
    return set(re.findall(r"\bprism_(?!sim\b|replay\b)[a-z0-9_]+", (DOCS / page).read_text()))


@pytest.fixture(scope="module")
def worked(cluster: Cluster) -> tuple[dict[str, Metric], dict[str, Metric]]:
    """Returns metrics before and after requests of both models, an engine's death, and actions."""
    before = families(cluster)
    asyncio.run(work(cluster))
    source = httpx.get(f"{cluster.url}/status").json()["placement"]["a"]
    target = "host:1" if source == "host:0" else "host:0"
    operate(cluster, "activate", "a", "--device", target)
    operate(cluster, "evict", "b")
    for model in "ab":
        assert cluster.post(model, max_tokens=60, ignore_eos=True).status_code == 200
    until(lambda: ended_well(cluster) == 14, "all requests are counted, over both frontends")
    until(lambda: grown(before, families(cluster)) >= MOVE, "all move")
    return before, families(cluster)


def test_all_move_and_frontends_sum(
    worked: tuple[dict[str, Metric], dict[str, Metric]],
) -> None:
    before, after = worked
    assert {("prism_actions_total", "migrate"), ("prism_actions_total", "evict")} <= grown(
        before, after, "action"
    )
    for model in "ab":
        queued = sums(after, "model")["prism_queue_seconds_count", model]
        assert queued == sums(after, "model", "outcome")["prism_requests_total", model, "ok"]
    slos = grown(before, after, "slo", "met")
    assert ("prism_slo_total", "ttft", "false") in slos
    assert ("prism_slo_total", "ttft", "true") in slos
    stages = {stage for _, stage in grown(before, after, "stage")}
    assert {"engine", "shrink", "reserve", "weights", "build", "ready"} <= stages


@pytest.mark.usefixtures("worked")
def test_some_are_chosen_by_name(cluster: Cluster) -> None:
    url = f"{cluster.url}/metrics?name[]=prism_slo_total&name[]=prism_kvpr"
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 1}

    def from_both() -> bool:
        """Asks for a token, since one frontend may have accepted all requests so far."""
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).is_success
        found = list(text_string_to_metric_families(httpx.get(url).text))
        assert {family.name for family in found} == {"prism_slo", "prism_kvpr"}
        frontends = {sample.labels.get("frontend") for family in found for sample in family.samples}
        return len(frontends - {None}) == 2

    until(from_both, "both frontends answer")


@pytest.mark.usefixtures("worked")
def test_those_in_the_documentation_are_there(cluster: Cluster) -> None:
    found = {f"{n}_total" if f.type == "counter" else n for n, f in families(cluster).items()}
    assert documented("operating.md") - found == set()


@pytest.mark.usefixtures("worked")
def test_names_are_as_prometheus_wants_them(cluster: Cluster) -> None:
    """Requires a help text and a unit, or a count. Ratios and states need no unit."""
    for name, family in families(cluster).items():
        shown = f"{name}_total" if family.type == "counter" else name
        assert family.documentation, name
        assert shown.endswith(UNITS) or PLAIN.search(shown), shown


@pytest.mark.usefixtures("worked")
def test_decisions_are_in_the_status_with_their_reasons(cluster: Cluster) -> None:
    decisions = httpx.get(f"{cluster.url}/status").json()["decisions"]
    assert all(each["reason"] and each["seconds"] is not None for each in decisions)
    moved = [each for each in decisions if each["kind"] == "migrate"]
    assert [each["model"] for each in moved] == ["a"]
    assert {moved[0]["device"], moved[0]["target"]} == {"host:0", "host:1"}


@pytest.mark.usefixtures("worked")
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_are_there(cluster: Cluster) -> None:
    found = {sample.name for family in families(cluster).values() for sample in family.samples}
    found |= {each for each in documented("gpu-memory.md") if each.startswith("prism_")}
    # The series exists only after the first unplaced request.
    found |= {"prism_unplaced_requests"}
    # This cluster has no external servers.
    found |= {name for name in families(cluster) if name.startswith("prism_external_")}
    asked = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    asked += [rule["expr"] for rule in alerts()]
    assert len(asked) > 40
    for expression in asked:
        names = set(re.findall(r"\b(?:prism_\w+|up)\b", expression)) - {"up"}
        assert names or "up{" in expression, expression
        assert names <= found, expression


def test_each_alert_has_its_line_in_the_runbook() -> None:
    rows = re.findall(r"^\| `(Prism\w+)` \|", (DOCS / "operating.md").read_text(), re.MULTILINE)
    assert rows == [rule["alert"] for rule in alerts()]


def test_a_client_beyond_its_limit_wakes_nobody() -> None:
    [rule] = [each for each in alerts() if each["alert"] == "PrismRequestsFail"]
    [pattern] = re.findall(r'outcome!~"([^"]+)"', rule["expr"])
    left_out = {error.code for error in (RateLimitError, SheddingError)} | {"ok", "cancelled"}
    assert set(pattern.split("|")) == left_out
    assert OverloadedError.code not in left_out


def test_panels_do_not_overlap() -> None:
    """Requires a unique id and a unique title of each panel as well."""
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels())
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels()}) == len(panels())


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    return found


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules
