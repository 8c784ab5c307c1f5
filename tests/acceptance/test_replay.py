"""Replays through `prism-replay` on a live cluster: pages move, and SLOs are judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.harness import (
    MODELS,
    ROOT,
    Cluster,
    cluster_yaml,
    complete_all,
    model_yaml,
    serving,
)
from tests.acceptance.reference import judge, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

TRACES = Path(os.environ.get("PRISM_TRACES", ROOT.parent / "shared" / "traces"))
SCALES = (0.1, 1.0, 10.0)


def prism_replay(*arguments: str) -> None:
    command = [str(Path(sys.executable).parent / "prism-replay"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-3000:]


def replay(cluster: Cluster, trace: Path, out: Path, *options: str) -> dict[str, Any]:
    scales = ",".join(str(scale) for scale in SCALES)
    prism_replay(
        *("run", str(trace), "--url", cluster.url, "--slo-scale", scales, "--strict"),
        *("--out", str(out), *options),
    )
    return dict(json.loads(out.read_text()))


def test_a_replay_maps_and_unmaps_pages(tiny_models: tuple[str, str], tmp_path: Path) -> None:
    """Reaches 200 maps and 200 unmaps a minute at 16 KiB pages, counted by the ledger.

    Prefix caches fill the device; other clients' greedy output stays equal meanwhile.
    """
    trace = tmp_path / "trace.jsonl"
    shares = ",".join(f"{name}:0.5" for name in tiny_models)
    prism_replay(
        *("generate", "--models", shares, "--seconds", "15", "--rate", "4"),
        *("--seed", "5", "--input-tokens", "48:256", "--output-tokens", "16:64"),
        *("--slo", "1000/100", "--out", str(trace)),
    )
    config = cluster_yaml(
        [model_yaml(name) for name in tiny_models],
        [{"name": "host:0", "capacity": "72MiB", "page": "16KiB", "engines": 2}],
        engine={"static": "4MiB"},
    )
    jobs = [(model, prompt, 64) for model in tiny_models for prompt in prompts(model, 4)]
    with serving(config, tmp_path) as cluster, ThreadPoolExecutor(1) as beside:
        answers = beside.submit(complete_all, cluster, jobs)
        result = replay(cluster, trace, tmp_path / "out.json")
    summary = result["summary"]
    print({key: value for key, value in summary.items() if "maps" in key})
    assert summary["maps_per_minute"] >= 200
    assert summary["unmaps_per_minute"] >= 200
    assert not judge(jobs, answers.result())


@pytest.mark.long
def test_arena_chat_at_three_slo_scales(demo_models: tuple[str, ...], tmp_path: Path) -> None:
    """Replays 300 requests of the Chatbot Arena sample on the demo's models and devices."""
    source = TRACES / "arena_chat27_vtc.csv"
    if not source.exists():
        pytest.skip(f"{source} is not there; the trace is not part of the repository")
    demo = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    trace = tmp_path / "arena.jsonl"
    prism_replay(
        *("convert", str(source), "--format", "arena", "--models", ",".join(demo_models)),
        *("--context", "512", "--output-max", "64", "--limit", "300", "--time-scale", "2.0"),
        *("--slo", "500/50", "--slo", "smollm2-135m=2000/300", "--out", str(trace)),
    )
    demo["models"] = [model_yaml(m["name"], slo=m["slo"]) for m in demo["models"]]
    with serving(demo, tmp_path) as cluster:
        result = replay(cluster, trace, tmp_path / "out.json")
    total = result["summary"]["total"]
    attained = [attainment["all"] for attainment in total["attainment"].values()]
    print(f"attainment at SLO scales {SCALES}: {attained}")
    assert not total["errors"]
    # How fast the machine is decides where between the scales requests begin to be late.
    assert attained == sorted(attained)
    assert attained[0] < attained[-1]


@pytest.mark.long
def test_the_demo_answers_without_an_activation_after_idle_minutes(
    demo_models: tuple[str, ...], tmp_path: Path
) -> None:
    """Leaves README's cluster alone for five idle thresholds, in which idle models stay."""
    demo = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    demo["models"] = [
        {**m, "path": str(MODELS / m["name"])} for m in demo["models"] if m["name"] in demo_models
    ]
    with serving(demo, tmp_path) as cluster:
        begun = cluster.status()
        time.sleep(5 * float(demo["scheduler"]["idle_threshold"].removesuffix("s")))
        (answer,) = complete_all(cluster, [("smollm2-135m", prompts("smollm2-135m", 1)[0], 8)])
        ended = cluster.status()
    assert len(answer.ids) == 8
    assert begun["placement"].keys() >= {"smollm2-135m"}
    assert ended["placement"] == begun["placement"]
    assert ended["actions_total"] == begun["actions_total"]
