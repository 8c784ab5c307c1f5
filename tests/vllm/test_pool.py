"""vLLM and SGLang in the pool of prism-serve: one cluster, one device, a model of each.

`tests/engines` checks each engine alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.harness import (
    Answer,
    Cluster,
    async_client,
    cluster_yaml,
    complete,
    complete_all,
    model_yaml,
    prism_serve,
    serving,
)
from tests.acceptance.reference import judge, prompts
from tests.vllm.environment import vllm_python

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1800)]

TOKENS = 120


def config(models: tuple[str, str], python: str) -> dict[str, Any]:
    """Returns the YAML of a cluster: the first model on SGLang, the second on vLLM."""
    ours, theirs = models
    return cluster_yaml(
        [model_yaml(ours), model_yaml(theirs, adapter="vllm")],
        [{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 2}],
        engine={"python": {"vllm": python}},
    )


@pytest.fixture(scope="module")
def cluster(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with serving(config(tiny_models, str(vllm_python())), tmp_path_factory.mktemp("pool")) as made:
        yield made


def jobs_of(*models: str, count: int = 8) -> list[tuple[str, Any, int]]:
    return [(model, prompt, TOKENS) for model in models for prompt in prompts(model, count)]


def report(cluster: Cluster, model: str) -> dict[str, Any]:
    found = cluster.model_report(model)
    assert found is not None
    return found


def test_both_answer_at_once_as_transformers_do(
    cluster: Cluster, tiny_models: tuple[str, str]
) -> None:
    jobs = jobs_of(*tiny_models)
    assert not judge(jobs, complete_all(cluster, jobs))
    commands = [
        Path(f"/proc/{report(cluster, model)['engine_pid']}/cmdline").read_bytes().split(b"\0")
        for model in tiny_models
    ]
    assert [b"vllm" in command for command in commands] == [False, True]


def test_each_is_evicted_and_comes_up_again(cluster: Cluster, tiny_models: tuple[str, str]) -> None:
    """Activates in the same engine again: no process ends."""
    jobs = jobs_of(*tiny_models, count=2)
    assert not judge(jobs, complete_all(cluster, jobs))
    engines = [report(cluster, model)["engine_id"] for model in tiny_models]
    for model in tiny_models:
        assert cluster.operate("evict", model).returncode == 0
        assert cluster.model_report(model) is None
    assert not judge(jobs, complete_all(cluster, jobs))
    assert [report(cluster, model)["engine_id"] for model in tiny_models] == engines
    assert sum(agent["engine_restarts_total"] for agent in cluster.agents()) == 0


async def killed_in_flight(cluster: Cluster, model: str) -> list[Answer]:
    """Kills the engine while 8 requests are in flight, some of which have begun."""
    async with async_client(cluster) as client:
        jobs = [asyncio.create_task(complete(client, *job)) for job in jobs_of(model)]
        while (cluster.model_report(model) or {}).get("running", 0) < 4:
            await asyncio.sleep(0.05)
        os.kill(int(report(cluster, model)["engine_pid"]), signal.SIGKILL)
        return await asyncio.gather(*jobs)


def test_streams_go_on_when_their_engine_is_killed(
    cluster: Cluster, tiny_models: tuple[str, str]
) -> None:
    model = tiny_models[1]
    assert not judge(jobs_of(model), asyncio.run(killed_in_flight(cluster, model)))
    cluster.wait_until(
        lambda: sum(agent["engine_restarts_total"] for agent in cluster.agents()) == 1,
        "a replacement of the killed engine",
    )


def test_what_vllm_has_not_is_refused(cluster: Cluster, tiny_models: tuple[str, str]) -> None:
    async def asked(model: str) -> Answer:
        async with async_client(cluster) as client:
            return await complete(client, model, "x", 4, regex="[ab]+", ignore_eos=False)

    assert asyncio.run(asked(tiny_models[0])).error is None
    error = asyncio.run(asked(tiny_models[1])).error
    assert error is not None
    assert error["message"] == "regex: the vllm engine does not support grammars; remove it"


@pytest.mark.parametrize("fault", ["no vllm", "no prism", "a GPU", "tp"])
def test_a_cluster_that_cannot_have_it_does_not_start(
    tiny_models: tuple[str, str], tmp_path: Path, fault: str
) -> None:
    made = config(tiny_models, str(vllm_python()))
    if fault == "no vllm":
        del made["engine"]
        said = "devices[0].name: "
    elif fault == "no prism":
        made["engine"]["python"]["vllm"] = "/usr/bin/false"
        said = "engine.python.vllm: /usr/bin/false cannot run its engines (exit code 1)"
    elif fault == "a GPU":
        made["devices"][0]["name"] = "cuda:0"
        made["models"] = made["models"][1:]
        said = "devices[0].name: the vllm adapter cannot serve on cuda:0 yet"
    else:
        made["models"][1]["tp"] = 2
        said = "models[1].tp: vllm engines run on one device each; remove the key"
    path = tmp_path / "prism.yaml"
    path.write_text(yaml.safe_dump(made))
    done = subprocess.run(
        [prism_serve(), "check", "--config", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"error: {path}: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
