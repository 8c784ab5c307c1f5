"""Figures that a run must yield: the reference of each, and what is expected of it.

    python -m scripts.gpu_check.figures          the table of docs/gpu-results.md

The reference is taken on the same GPU in the same run, so that a ratio comes back and not only a
time. An expectation is stated before the figure is taken; a figure that misses it fails no step.
"""

from __future__ import annotations

from typing import Any

from scripts.gpu_check.expected import NOT_JUDGED, Expected
from scripts.gpu_check.serving.serving_figures import SERVING

EXPECTED: tuple[Expected, ...] = (
    *SERVING,
    Expected(
        "cluster",
        "llama_tokens_per_s",
        "output of the model of 1.1 billion parameters in bursts, in turn with the other model's",
        "tokens/s",
        "the same burst in the same cluster, nothing else running",
        at_least=0.9,
        of_ratio=True,
        source="bursts in turn share memory, not time",
    ),
    Expected(
        "cluster",
        "qwen2_tokens_per_s",
        "the same of the model of 1.5 billion parameters",
        "tokens/s",
        "the same burst in the same cluster, nothing else running",
        at_least=0.9,
        of_ratio=True,
        source="bursts in turn share memory, not time",
    ),
    Expected(
        "cluster",
        "ttft_p50",
        "TTFT in these bursts, median",
        "s",
        "that of the bursts alone",
        at_most=1.25,
        of_ratio=True,
        source="memory moves while prompts are computed",
    ),
    Expected(
        "cluster",
        "ttft_p99",
        "TTFT in these bursts, 99th percentile",
        "s",
        "that of the bursts alone",
        at_most=2,
        source="the SLO of the cluster's YAML",
    ),
    Expected(
        "cluster",
        "attainment",
        "requests of these bursts with TTFT below 2 s and TPOT below 100 ms",
        "",
        "that of the bursts alone",
        at_least=0.99,
        source="Prism, section 7: 99 %",
    ),
    Expected(
        "cluster",
        "kv_peaks",
        "the most KV in use by each model, added up",
        "MiB",
        "the memory for KV",
        at_least=1.2,
        of_ratio=True,
        source="Prism, section 4: memory moves between models",
    ),
    Expected(
        "cluster",
        "llama_kv_share",
        "the most of the memory for KV that the first model held",
        "",
        at_least=0.55,
        source="static halves would bound it at 0.5",
    ),
    Expected(
        "cluster",
        "qwen2_kv_share",
        "the same of the second model",
        "",
        at_least=0.55,
        source="static halves would bound it at 0.5",
    ),
    Expected(
        "cluster",
        "killed_ledger",
        "from kill -9 of an engine under load until the ledger has its memory",
        "s",
        "until the driver has it",
        at_most=10,
        source="an allocation of kvcached waits 10 s for it",
    ),
    Expected(
        "cluster",
        "killed_driver",
        "the same until the driver has its memory",
        "s",
        "a killed process that held as much and did nothing else",
        at_most=10,
        source="an allocation of kvcached waits 10 s for it",
    ),
    Expected(
        "cluster",
        "first_token",
        "from the kill until the first of the engine's streams goes on, on a new engine",
        "s",
        "the model's first activation",
        at_most=10,
        source="a fork, a context, an activation from the store",
    ),
    Expected(
        "probe",
        "page_create",
        "cuMemCreate of a page of 2 MiB, median",
        "us",
        "cuMemAlloc and cuMemFree of 2 MiB",
        at_most=250,
        source="193 us on an A100",
    ),
    Expected(
        "probe",
        "page_step",
        "map and access of a page whose handle exists, median",
        "us",
        "cuMemAlloc and cuMemFree of 2 MiB",
        at_most=60,
        source="37.5 us on an A100",
    ),
    Expected(
        "probe",
        "page_return",
        "unmap and release of a page, median",
        "us",
        "cuMemAlloc and cuMemFree of 2 MiB",
        at_most=100,
        source="26 us for the unmap on an A100",
    ),
    Expected(
        "probe",
        "page_under_load",
        "create, map and access of a page while the GPU computes",
        "us",
        "the medians of the same calls on an idle GPU",
        at_most=3,
        of_ratio=True,
        source="no call may wait for a decode step",
    ),
    Expected(
        "probe",
        "killed_process",
        "from the death of a process with 60 % of the memory until the driver grants it",
        "ms",
        at_most=10_000,
        source="an allocation of kvcached waits 10 s for it",
    ),
    Expected(
        "benches",
        "batched",
        "a page of a batched alloc and free, handles cached",
        "us",
        "one call for each page",
        at_most=0.7,
        of_ratio=True,
        source="one cuMemSetAccess and cuMemUnmap a run",
    ),
    Expected(
        "benches",
        "handles_made",
        "the same with handles made anew",
        "us",
        "handles cached",
        at_least=2,
        of_ratio=True,
        source="230 against 37.5 us on an A100",
    ),
    Expected(
        "benches",
        "fenced",
        "the same behind a stream's fence",
        "us",
        "without",
        at_most=1.2,
        of_ratio=True,
        source="an event's query is about 1 us",
    ),
    Expected(
        "benches",
        "guarded",
        "the same with holes that show the guard page",
        "us",
        "with holes that fault",
        at_most=3,
        of_ratio=True,
        source="a map, an access and an unmap more",
    ),
    Expected(
        "benches",
        "weights_link",
        "weights from the store into pages, 3 GB",
        "GB/s",
        "a pinned buffer copied again and again: the link's peak",
        at_least=0.9,
        of_ratio=True,
        source="the link",
    ),
    Expected(
        "benches",
        "weights_naive",
        "weights from the store into pages, 3 GB",
        "GB/s",
        "each tensor read and copied synchronously",
        at_least=4.8,
        of_ratio=True,
        source="Prism, section 5.2: 4.8 to 7.1",
    ),
    Expected(
        "benches",
        "interleaved_attention",
        "attention of a decode step, block-interleaved KV",
        "ms",
        "KV per layer",
        at_most=1.1,
        of_ratio=True,
        source="the closest peer loses 30 to 50 % of throughput",
    ),
    Expected(
        "models",
        "killed_process",
        "from the death of a process with most of the memory until another has it, in pages",
        "ms",
        at_most=10_000,
        source="an allocation of kvcached waits 10 s for it",
    ),
    Expected(
        "models",
        "load",
        "1.1 billion parameters from the store into pages, the last time",
        "s",
        at_most=0.7,
        source="Prism, section 7: 1 to 8 billion in 0.7 s",
    ),
    Expected(
        "fork",
        "first_result",
        "from the fork of a parent that imported torch to the first result on the GPU",
        "s",
        at_most=3,
        source="a forked engine starts in 2 to 3 s",
    ),
    Expected(
        "mps",
        "side_by_side",
        "products of small matrices by two clients at once",
        "1/s",
        "two processes without MPS, in turns",
        at_least=1.5,
        of_ratio=True,
        source="decision 112: engines compute side by side",
    ),
    Expected(
        "mps",
        "killed_client",
        "from kill -9 of a client at work until the other one has its memory, in pages",
        "s",
        "two processes without MPS",
        at_most=10,
        source="an allocation of kvcached waits 10 s for it",
    ),
)
BY_NAME = {(expected.step, expected.name): expected for expected in EXPECTED}


def figure(
    step: str, name: str, value: float, reference: float | None, *, judged: bool
) -> dict[str, Any]:
    """Returns a figure as it is kept in gpu-check.json. Raises KeyError for an unknown one."""
    expected = BY_NAME[step, name]
    ratio = value / reference if reference else None
    return {
        "value": round(value, 4),
        "unit": expected.unit,
        "reference": None if reference is None else round(reference, 4),
        "ratio": None if ratio is None else round(ratio, 4),
        "expected": expected.bound(),
        "verdict": expected.verdict(value, ratio) if judged else NOT_JUDGED,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Returns a figure on one line."""
    text = f"{name}: {found['value']:g} {found['unit']}".rstrip()
    if found["ratio"] is not None:
        text += f", {found['ratio']:g} of the reference"
    if found["verdict"] != NOT_JUDGED:
        text += f" (expected {found['expected']}: {found['verdict']})"
    return text


def table() -> str:
    """Returns the table of expectations in Markdown."""
    rows = ["| step | figure | what | unit | reference, in the same run | expected | source |"]
    rows.append("|---|---|---|---|---|---|---|")
    for e in EXPECTED:
        cells = (e.step, f"`{e.name}`", e.what, e.unit, e.reference or "none", e.bound(), e.source)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
