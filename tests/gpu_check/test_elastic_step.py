"""Checks and figures of the steps "elastic" and "overhead" of scripts/gpu-check. Whole steps run on
the doubles in test_whole.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check.serving import elastic, overhead, process
from lab.gpu_check.sizes import GIB, MIB
from tests.gpu_check.steps import LARGE, report_in
from tests.gpu_check.test_serving import process_that

# --- elastic ---------------------------------------------------------------------------------

SLAB = 88 * MIB
LEVELS = [264, 352, 616, 1848, 792, 440, 264]  # MiB of KV in the phases of a load


def recorded() -> dict[str, Any]:
    """Returns the record of bench/sglang_elastic.py for a load without faults."""
    streams = [0, 1, 4, 16, 64, 16, 4, 1]
    levels = [level for level in (264, *LEVELS) for _ in range(100)]
    kv = [level * MIB for level in levels] + [440 * MIB] * 20
    samples = {
        "seconds": [0.01 * place for place in range(len(kv))],
        "streams": [count for count in streams for _ in range(100)] + [0] * 20,
        "needed": [int(0.8 * level) * MIB for level in levels] + [0] * 20,
        "kv": kv,
        "free": [None if i % 8 else 70 * GIB - level for i, level in enumerate(kv)],
        "torch": [None if i % 8 else GIB for i in range(len(kv))],
    }
    return {
        "samples": samples,
        "quantum_bytes": SLAB,
        "floor_bytes": SLAB,
        "capacity_bytes": 16 * GIB,
        "peak_bytes": 1848 * MIB,
        "needed_peak_bytes": 1478 * MIB,
        "mean_bytes": 900.0 * MIB,
        "needed_mean_bytes": 700.0 * MIB,
        "idle_bytes": 440 * MIB,
        "idle_s": 0.2,
        "retractions": 0,
        "wanted_tokens": [2, 1],
        "rounds": [{"model": "llama", "prompts": [[1], [2]], "tokens": [[3, 4], [5]]}],
    }


def test_a_load_that_is_right() -> None:
    for judge in elastic.CHECKS.values():
        judge(recorded())
    assert elastic.idle_bound(recorded()) == SLAB * (1 + 2 * 2 + 1)


def held(found: dict[str, Any], start: int, stop: int, mib: int) -> None:
    """Sets KV memory of some samples to a level, and the driver's free memory with it."""
    samples = found["samples"]
    for place in range(start, min(stop, len(samples["kv"]))):
        samples["kv"][place] = mib * MIB
        if samples["free"][place] is not None:
            samples["free"][place] = 70 * GIB - mib * MIB


BROKEN_LOADS: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("follows", "less KV memory than", lambda found: held(found, 450, 451, 88)),
    ("follows", "are left after", lambda found: held(found, 500, 820, 1848)),
    ("follows", "grew by 0 quanta", lambda found: held(found, 0, 100, 1848)),
    ("follows", "were retracted", lambda found: found.update(retractions=2)),
    ("idle", "the idle engine keeps", lambda found: found.update(idle_bytes=529 * MIB)),
    ("idle", "still fell", lambda found: found.update(idle_s=6.0)),
    (
        "driver",
        "are not explained",
        lambda found: (
            found["samples"].update(free=[60 * GIB] * len(found["samples"]["kv"]))
            or found["samples"].update(torch=[GIB] * len(found["samples"]["kv"]))
        ),
    ),
]


@pytest.mark.parametrize(("check", "says", "change"), BROKEN_LOADS)
def test_a_load_that_is_wrong(
    check: str, says: str, change: Callable[[dict[str, Any]], object]
) -> None:
    found = recorded()
    change(found)
    with pytest.raises(RuntimeError, match=says):
        elastic.CHECKS[check](found)


def test_the_series_is_short_and_has_the_peak() -> None:
    samples = recorded()["samples"]
    samples["kv"][451] = 2000 * MIB
    found = elastic.series(samples)
    assert 100 < len(found["t_s"]) <= elastic.POINTS_MAX
    assert {len(column) for column in found.values()} == {len(found["t_s"])}
    assert max(found["kv_mib"]) == 2000
    assert (found["t_s"][0], found["t_s"][-1]) == (0.0, 8.19)
    assert None in found["free_mib"]


def test_an_answer_that_is_cut_fails_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = recorded()
    found["rounds"][0]["tokens"][0].pop()
    file, text = str(tmp_path / "elastic.json"), json.dumps(found)
    monkeypatch.setattr(
        subprocess, "Popen", process_that(lambda _: f"open({file!r}, 'w').write({text!r})")
    )
    report = report_in(tmp_path, "elastic")
    with pytest.raises(process.ServingError, match="1 of 2 answers"):
        elastic.serve(report, elastic.options_of(LARGE), {})
    figures = report.facts["figures"]
    assert figures["mean_kv"]["ratio"] == pytest.approx(900 / 1848, abs=1e-3)
    assert figures["peak_kv"]["verdict"] == "met"


# --- overhead --------------------------------------------------------------------------------


def compared() -> dict[str, Any]:
    """Returns the figures that bench/sglang_throughput.py writes."""
    steps = {"steps": 80, "growth_steps": 3, "mean_ms": 5.2, "p99_ms": 6.0}
    steps |= {"plain_median_ms": 5.1, "growth_p99_ms": 7.0}
    return {
        "kvcached_steps": steps,
        "stock_steps": steps | {"mean_ms": 5.0, "growth_p99_ms": None},
        "kvcached_first_token_ms": [20.0, 22.0, 21.0],
        "stock_first_token_ms": [20.0, 20.0, 20.0],
        "kvcached_retractions_per_s": 0.0,
        "stock_retractions_per_s": 0.0,
        "agreement": {
            "requests": 50,
            "same_requests": 49,
            "same_first": 50,
            "tokens": 1000,
            "same_tokens": 990,
        },
    }


def test_a_comparison_that_is_right(tmp_path: Path) -> None:
    for judge in overhead.CHECKS.values():
        judge(compared())
    report = report_in(tmp_path, "overhead")
    overhead.record(report, compared())
    ratios = {name: figure["ratio"] for name, figure in report.facts["figures"].items()}
    assert ratios == {
        "decode": 1.04,
        "decode_p99": 1.0,
        "growth_step": 1.3725,
        "first_token": 1.05,
    }


BROKEN_COMPARISONS: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    (
        "same_tokens",
        "differ in their first token",
        lambda found: found["agreement"].update(same_first=49),
    ),
    ("same_tokens", "tokens are the same", lambda f: f["agreement"].update(same_tokens=899)),
    ("same_batches", "decode steps", lambda found: found["stock_steps"].update(steps=79)),
    ("same_batches", "decode steps", lambda found: found["kvcached_steps"].update(steps=0)),
    ("same_batches", "retracted", lambda found: found.update(kvcached_retractions_per_s=0.1)),
]


@pytest.mark.parametrize(("check", "says", "change"), BROKEN_COMPARISONS)
def test_a_comparison_that_is_wrong(
    check: str, says: str, change: Callable[[dict[str, Any]], object]
) -> None:
    found = deepcopy(compared())
    change(found)
    with pytest.raises(RuntimeError, match=says):
        overhead.CHECKS[check](found)
