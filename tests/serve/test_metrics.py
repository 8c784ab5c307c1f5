"""Every metric that the documentation names is there in a live cluster, and moves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import Cluster, serving, until

DOCS = Path(__file__).parents[2] / "docs"
DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(2)
]
UNITS = ("_seconds", "_bytes", "_total")
# Those that have no unit, or count tokens, requests, engines.
PLAIN = re.compile(r"_(ready|requests|depth|engines|free|starting|kvpr|rate|placement|state)$")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("metrics")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            folder,
            Path(temporary),
            '{"decode_step_ms": 10}',
            devices=DEVICES,
            frontend={"port": 0, "processes": 2},
            scheduler={"interval": "60s"},
        ) as made,
    ):
        yield made


def families(cluster: Cluster) -> dict[str, Metric]:
    text = httpx.get(f"{cluster.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def sums(found: dict[str, Metric], *labels: str) -> Counter[tuple[str, ...]]:
    """The samples of each name, summed by these labels; those without them are left out."""
    total: Counter[tuple[str, ...]] = Counter()
    for sample in (sample for family in found.values() for sample in family.samples):
        if all(label in sample.labels for label in labels):
            key = (sample.name, *(sample.labels[label] for label in labels))
            total[key] += sample.value
    return total


def grown(before: dict[str, Metric], after: dict[str, Metric], *labels: str) -> set[Any]:
    """Names, with these labels' values."""
    earlier, later = sums(before, *labels), sums(after, *labels)
    return {key if labels else key[0] for key in later if later[key] > earlier[key]}


async def work(cluster: Cluster) -> None:
    """Requests of both models at once; an engine dies under them."""
    bodies = [{"model": m, "prompt": [9, 8, i], "max_tokens": 80} for m in "ab" for i in range(6)]
    bodies[0]["slo_ttft_ms"] = 1
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=body | {"ignore_eos": True}))
            for body in bodies
        ]
        await asyncio.to_thread(until, lambda: running(cluster) > 1, "requests run")
        os.kill(engine_pid(cluster, "b"), signal.SIGKILL)
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


def running(cluster: Cluster) -> float:
    return sums(families(cluster))["prism_model_running_requests",]


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
    return set(re.findall(r"\bprism_[a-z0-9_]+", (DOCS / page).read_text()))


def test_all_move_and_frontends_sum(cluster: Cluster) -> None:
    before = families(cluster)
    asyncio.run(work(cluster))
    source = httpx.get(f"{cluster.url}/status").json()["placement"]["a"]
    target = "host:1" if source == "host:0" else "host:0"
    operate(cluster, "activate", "a", "--device", target)
    operate(cluster, "evict", "b")
    assert cluster.post("b").status_code == 200
    until(lambda: ended_well(cluster) == 13, "all requests are counted, over both frontends")
    after = families(cluster)
    names = grown(before, after)
    assert names >= {
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


def test_some_are_chosen_by_name(cluster: Cluster) -> None:
    url = f"{cluster.url}/metrics?name[]=prism_slo_total&name[]=prism_kvpr"
    found = list(text_string_to_metric_families(httpx.get(url).text))
    assert {family.name for family in found} == {"prism_slo", "prism_kvpr"}
    frontends = {sample.labels.get("frontend") for family in found for sample in family.samples}
    assert len(frontends - {None}) == 2


def test_those_in_the_documentation_are_there(cluster: Cluster) -> None:
    found = {f"{n}_total" if f.type == "counter" else n for n, f in families(cluster).items()}
    assert documented("operating.md") - found == set()


def test_names_are_as_prometheus_wants_them(cluster: Cluster) -> None:
    """A unit, or a count; each with a help text. Ratios and states have none."""
    for name, family in families(cluster).items():
        shown = f"{name}_total" if family.type == "counter" else name
        assert family.documentation, name
        assert shown.endswith(UNITS) or PLAIN.search(shown), shown


def test_decisions_are_in_the_status_with_their_reasons(cluster: Cluster) -> None:
    decisions = httpx.get(f"{cluster.url}/status").json()["decisions"]
    assert all(each["reason"] and each["seconds"] is not None for each in decisions)
    moved = [each for each in decisions if each["kind"] == "migrate"]
    assert [each["model"] for each in moved] == ["a"]
    assert {moved[0]["device"], moved[0]["target"]} == {"host:0", "host:1"}
