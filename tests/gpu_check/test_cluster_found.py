"""Checks and figures of the step "cluster" of scripts/gpu-check, for right and wrong loads."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.report import Report
from lab.gpu_check.serving import cluster_found
from lab.gpu_check.serving.cluster_found import Burst, Scale, Shape, judge
from lab.gpu_check.sizes import Sizes
from tests.gpu_check.steps import report_in

MIB = 1 << 20
BURST, KILL = Burst(3, 20, 6), Burst(2, 12, 40)
PEAKS = {"held_bytes": 60 * MIB, "used_bytes": 55 * MIB}


def answer(tokens: int, ttft_s: float = 0.1, tpot_s: float = 0.01) -> dict[str, Any]:
    found = {"ttft_s": ttft_s, "tpot_s": tpot_s, "tokens": tokens}
    return found | {"finish_reason": "length", "error": None}


def burst(phase: str, model: str, seconds: float) -> dict[str, Any]:
    answers = [answer(BURST.output_tokens) for _ in range(BURST.streams)]
    return {"phase": phase, "model": model, "seconds": seconds, "answers": answers}


def stream(resumed_s: float) -> dict[str, Any]:
    """Returns a stream that was interrupted at 0."""
    tokens = list(range(KILL.output_tokens))
    before = [-0.1 * n for n in range(10, 0, -1)]
    times_s = [*before, 0.002, *(resumed_s + 0.01 * n for n in range(KILL.output_tokens - 11))]
    ids = {"token_ids": tokens, "undisturbed_ids": tokens}
    return answer(KILL.output_tokens) | ids | {"times_s": times_s}


def measured() -> dict[str, Any]:
    idle = {"held_bytes": 40 * MIB, "used_bytes": 2 * MIB}
    agent = {"engine_restarts_total": 0, "gpu": {"drift_bytes": 0}}
    stages_s = {"engine": 3.0, "total": 5.0}
    models = [{"model": name, "stages_s": stages_s} for name in FAMILIES]
    return {
        "bursts": [
            *(burst("alone", name, 2.0) for name in FAMILIES),
            *(burst("turn", name, seconds) for name, seconds in (("llama", 2.5), ("qwen2", 2.0))),
        ],
        "graphs": 4,
        "series": [],
        "activations": dict.fromkeys(FAMILIES, stages_s),
        "kv_capacity_bytes": 100 * MIB,
        "given_bytes": dict.fromkeys(FAMILIES, MIB),
        "peaks": {
            "kill": {"llama": {"held_bytes": 99 * MIB, "used_bytes": 99 * MIB}},
            "turn llama": {"llama": PEAKS, "qwen2": idle},
            "turn qwen2": {"llama": idle, "qwen2": PEAKS},
        },
        "after_bursts": agent,
        "after_death": {**agent, "engine_restarts_total": 1, "models": models},
        "kill": {
            "victim": "llama",
            "pid": 1,
            "held_bytes": 64 * MIB,
            "is_named": True,
            "ledger_s": 0.4,
            "driver_s": 0.5,
            "tokens_at_kill": [11, 11],
            "streams": {
                "llama": [stream(2.5), stream(1.5)],
                "qwen2": [stream(0.01), stream(0.01)],
            },
        },
    }


def judged(found: dict[str, Any], folder: Path) -> Report:
    report = report_in(folder, "cluster")
    judge(report, found, BURST, KILL, fills_pages=True)
    return report


def test_what_is_right_passes(tmp_path: Path) -> None:
    report = judged(measured(), tmp_path)
    assert set(report.checks.values()) == {"passed"}
    figures = {
        name: (found["value"], found["reference"])
        for name, found in report.facts["figures"].items()
    }
    tokens = BURST.streams * BURST.output_tokens
    assert figures == {
        "llama_tokens_per_s": (tokens / 2.5, tokens / 2),
        "qwen2_tokens_per_s": (tokens / 2, tokens / 2),
        "ttft_p50": (0.1, 0.1),
        "ttft_p99": (0.1, 0.1),
        "attainment": (1.0, 1.0),
        "llama_kv_share": (0.6, None),
        "qwen2_kv_share": (0.6, None),
        "kv_peaks": (110.0, 100.0),
        "killed_ledger": (0.4, 0.5),
        "first_token": (1.5, 2.0),
    }


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a function that sets the item at `path` to the last element of `path`."""
    *way, last, value = path

    def change(found: Any) -> None:
        for key in way:
            found = found[key]
        found[last] = value

    return change


LLAMA = ("kill", "streams", "llama")
WRONG = [
    ("bursts", "a stream has 5 of 6 tokens", put("bursts", 2, "answers", 1, "tokens", 5)),
    ("bursts", "'stop'", put("bursts", 0, "answers", 0, "finish_reason", "stop")),
    ("bursts", "timeout", put("bursts", 3, "answers", 0, "error", "timeout: no answer")),
    ("bursts", "1 answers of 3", put("bursts", 2, "answers", [answer(6)])),
    ("bursts", "no burst in turn of qwen2", put("bursts", 3, "model", "llama")),
    ("bursts", "2 engines were replaced", put("after_bursts", "engine_restarts_total", 2)),
    ("bursts", "the bursts did not end", put("after_bursts", None)),
    ("memory_moves", "both fit", put("kv_capacity_bytes", 110 * MIB)),
    ("memory_moves", "more than the capacity", put("kv_capacity_bytes", 59 * MIB)),
    ("memory_moves", "gave no memory", put("given_bytes", "qwen2", 0)),
    ("memory_moves", "lack KV of a model", put("peaks", {"turn llama": {"llama": PEAKS}})),
    ("kill", "no engine was killed", lambda found: found.pop("kill")),
    ("kill", "39 of 40 tokens", put(*LLAMA, 0, "tokens", 39)),
    ("kill", "under the kill, qwen2", put("kill", "streams", "qwen2", 1, "error", "lost: gone")),
    ("kill", "llama: 1 streams of 2", lambda found: found["kill"]["streams"]["llama"].pop()),
    ("kill", "had ended when", put("kill", "tokens_at_kill", [40, 40])),
    ("kill", "the ledger still counts", put("kill", "ledger_s", None)),
    ("kill", "the driver still names", put("kill", "driver_s", None)),
    ("kill", "not exactly one engine was replaced", put("after_death", "engine_restarts_total", 0)),
    ("kill", "not exactly one engine was replaced", lambda found: found.pop("after_death")),
]


@pytest.mark.parametrize(("check", "says", "change"), WRONG)
def test_what_is_wrong_fails_its_check(
    check: str, says: str, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    found = deepcopy(measured())
    change(found)
    report = judged(found, tmp_path)
    failed = {name: text for name, text in report.checks.items() if text != "passed"}
    assert list(failed) == [check]
    assert says in failed[check]


def test_a_load_that_was_cut_yields_what_it_had(tmp_path: Path) -> None:
    found = measured()
    for name in ("kill", "after_bursts", "after_death"):
        del found[name]
    found["bursts"] = found["bursts"][:1]
    found["peaks"] = {}
    report = judged(found, tmp_path)
    assert all(text.startswith("failed") for text in report.checks.values())
    assert report.facts["bursts"][0]["tokens_per_s"] == 9.0
    assert judged({}, tmp_path).checks == {}


def test_a_stream_goes_on_where_its_longest_pause_ends() -> None:
    assert cluster_found.resumed_s(stream(2.5)) == 2.5
    assert cluster_found.resumed_s({"times_s": [-0.5, -0.4, -0.3]}) is None
    assert cluster_found.resumed_s({"times_s": []}) is None


def test_without_an_undisturbed_run_nothing_is_equal() -> None:
    found = measured()
    for streams in found["kill"]["streams"].values():
        for each in streams:
            each["undisturbed_ids"] = None
    assert cluster_found.death_facts(found)["equal_tokens"] == [0, 0, 0, 0]


def test_attainment_counts_what_met_both_slos() -> None:
    answers = [answer(6), answer(6, ttft_s=2.1), answer(6, tpot_s=0.11), answer(6)]
    answers[3]["error"] = "timeout"
    assert cluster_found.attainment([{"answers": answers}]) == 0.25


def test_percentiles_are_values_that_occur() -> None:
    values = [float(n) for n in range(1, 101)]
    found = [cluster_found.percentile(values, share) for share in (50, 99, 100)]
    assert found == [50.0, 99.0, 100.0]
    assert cluster_found.percentile([3.0], 99) == 3.0


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_capacity_of_large_models_is_below_what_both_bursts_take(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_found, "is_quick", lambda: is_quick)
    scale = Scale.of(Sizes(80 << 30, 64 << 30))
    shapes = [Shape(0, 22, 512), Shape(0, 28, 512)]
    bursts = [shape.kv_bytes(scale.burst.tokens, scale.page_bytes) for shape in shapes]
    least = [shape.kv_bytes(scale.context_length + 16, scale.page_bytes) for shape in shapes]
    assert sum(bursts) > 1.2 * (max(bursts) + shapes[1].kv_bytes(1, 2 * MIB) + sum(least))
