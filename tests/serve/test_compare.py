"""`prism-replay compare` on prism-serve with fake engines."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism_replay.live.comparison import expected_loads, with_policy
from prism_replay.results import read_results
from prism_replay.trace import TraceRequest, write_trace
from tests.serve.conftest import write_yaml

FAKE = '{"decode_step_ms": 5, "activation_s": 0.05}'
DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(2)
]
POLICIES = ("prism", "muxserve++")


def trace(seed: int) -> list[TraceRequest]:
    slo = {"slo_ttft_ms": 2000.0, "slo_tpot_ms": 200.0}
    return [
        TraceRequest(timestamp=100 * i, model="ab"[i % 2], input_length=9, output_length=4, **slo)
        for i in range(8 + seed)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_yaml(tmp_path, devices=DEVICES, redis="redis://elsewhere:6379")
    for seed in (0, 1):
        write_trace(tmp_path / f"trace-{seed}.jsonl", trace(seed))
    return tmp_path


def compare(
    folder: Path, temporary: Path, *arguments: str, policies: str = ",".join(POLICIES)
) -> subprocess.CompletedProcess[str]:
    given = ("compare", str(folder / "trace-{seed}.jsonl"), "--config", str(folder / "prism.yaml"))
    options = ("--policies", policies, "--seeds", "2", "--token-ids", "32-96")
    command = [sys.executable, "-m", "prism_replay.cli.replay", *given, *options, *arguments]
    environment = {**os.environ, "TMPDIR": str(temporary), "PRISM_FAKE": FAKE}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_each_policy_replays_each_seed(folder: Path, short_dir: Path) -> None:
    """Repeats only what has changed when it is started again."""
    out = folder / "out"
    done = compare(folder, short_dir, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        (policy, seed): read_results(out / policy / f"trace-.jsonl-{seed}.json")
        for policy in POLICIES
        for seed in (0, 1)
    }
    assert [len(results.records) for results in found.values()] == [8, 9, 8, 9]
    assert all(record.ok for results in found.values() for record in results.records)
    seeds = rows(out / "seeds.csv")
    assert [(row["policy"], row["seed"]) for row in seeds] == [(p, str(s)) for p, s in found]
    assert {row["attainment_all"] for row in rows(out / "compare.csv")} == {"1.0"}
    [difference] = rows(out / "differences.csv")
    assert (difference["policy"], difference["against"]) == ("muxserve++", "prism")
    own = [float(row["ttft_p99_ms"]) for row in seeds]
    expected = (own[2] - own[0] + own[3] - own[1]) / 2
    assert float(difference["ttft_p99_ms"]) == pytest.approx(expected)
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "Differences from prism over common seeds" in page
    logs = (out / "muxserve++" / "trace-.jsonl-0-logs").glob("*scheduler*")
    assert "new placement" in "".join(path.read_text() for path in logs)
    assert not list(folder.glob(".prism-*")), "the changed YAML is gone"

    write_trace(folder / "trace-1.jsonl", trace(2))
    again = compare(folder, short_dir, "--out", str(out), "--against", "muxserve++")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line for line in again.stdout.splitlines() if line.endswith("requests")] == [
        f"{policy}, trace-.jsonl-1: 10 requests" for policy in POLICIES
    ]
    assert [row["against"] for row in rows(out / "differences.csv")] == ["muxserve++"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": "prism,fifo"}, "policy: 'fifo' is not a policy"),
        (
            {"arguments": ("--against", "static")},
            "--against static: is not one of prism, muxserve++",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    folder: Path, short_dir: Path, options: dict[str, object], message: str
) -> None:
    arguments = ("--out", str(folder / "out"), *options.pop("arguments", ()))
    done = compare(folder, short_dir, *arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_search_runs_once_and_knows_the_trace() -> None:
    data = {"models": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "frontend": {"port": 1}}
    changed = with_policy(data, "muxserve++", trace(3))
    assert changed["policy"] == "muxserve++"
    assert changed["scheduler"] == {"search_interval": None}
    assert changed["frontend"] == {}
    loads = dict(expected_loads(trace(3)))
    assert loads["a"] == {"rate": 6.0, "prompt_tokens": 9.0, "output_tokens": 4.0}
    assert [model.get("expected") for model in changed["models"]] == [loads["a"], loads["b"], None]
    assert with_policy(data, "prism", ())["models"] == data["models"]
