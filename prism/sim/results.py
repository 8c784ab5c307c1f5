"""What a simulation leaves: results.json, models.csv, decisions.csv, report.html, and on request
requests.csv and a timeline. Nothing in them depends on the machine or on the wall clock."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism.config.units import encoded
from prism.replay.results import (
    Counters,
    GroupSummary,
    Results,
    RunConfig,
    StatusSample,
    Summary,
)
from prism.sim.config import SimYaml
from prism.sim.records import ClusterSample, Decision, Records
from prism.sim.summary import prefix_hits, request_records, summarize
from prism.sim.world import World

SCHEMA = "prism-sim/1"
PLOTTED_REQUESTS = 50_000


class GpuUse(msgspec.Struct, frozen=True):
    """One GPU's part in the run."""

    name: str
    node: str
    capacity_bytes: int
    # The most memory that was reserved.
    peak_bytes: int
    # The part of the time in which some engine computed.
    busy: float


class SimResults(msgspec.Struct, frozen=True, kw_only=True):
    """All of one run."""

    config: SimYaml
    summary: Summary
    # Decisions and retractions.
    counts: dict[str, int]
    gpus: list[GpuUse]
    decisions: list[Decision]
    samples: list[ClusterSample]
    # Of the kernel, for speed.
    events: int
    # With `engine.prefix_reuse`: model -> part of its prompt tokens that were cached, and "total".
    prefix_hits: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    schema: str = SCHEMA


def results_of(config: SimYaml, world: World, scales: Sequence[float]) -> SimResults:
    """REQUIRES: `world` has run."""
    records = world.records
    seconds = max(records.end_time_s, 1e-9)
    return SimResults(
        config=config,
        summary=summarize(records, scales),
        counts=dict(sorted(records.counts.items())),
        gpus=[
            GpuUse(
                d.name,
                d.setup.node,
                d.setup.capacity_bytes,
                d.ledger.peak_bytes,
                d.gpu.busy_by(records.end_time_s) / seconds,
            )
            for d in world.devices
        ],
        decisions=records.decisions,
        samples=records.samples,
        events=records.events,
        prefix_hits=prefix_hits(records) if config.engine.prefix_reuse else msgspec.UNSET,
    )


def write_json(path: Path, found: SimResults | Sequence[msgspec.Struct]) -> None:
    encoded_ = msgspec.json.encode(found, enc_hook=encoded)
    path.write_bytes(msgspec.json.format(encoded_, indent=1) + b"\n")


def write_models_csv(path: Path, summary: Summary) -> None:
    """A row per model and SLO scale, the total last."""
    write_csv(path, [r for name, group in summary.groups.items() for r in _group_rows(name, group)])


def write_decisions_csv(path: Path, decisions: Sequence[Decision]) -> None:
    _write_rows(path, Decision._fields, decisions)


def write_requests_csv(path: Path, records: Records) -> None:
    """A row per request; times in seconds of simulated time, empty where there is none. Of a trace
    with hash_ids, cached_tokens as well."""
    work = records.work
    heads = (
        "index,model,arrival_s,started_s,first_token_s,end_s,prompt_tokens,output_tokens,"
        "slo_ttft_s,slo_tpot_s,error"
    )
    rows = (
        (
            i,
            work.models[work.model[i]],
            work.arrival_s[i],
            *(_time(column[i]) for column in (records.started_s, records.first_s, records.end_s)),
            work.prompt_tokens[i],
            records.output_tokens[i],
            work.slo_ttft_s[i],
            work.slo_tpot_s[i],
            records.errors.get(i, ""),
            *((records.cached_tokens[i],) if work.hashes else ()),
        )
        for i in range(len(work))
    )
    _write_rows(path, (heads + ",cached_tokens" * bool(work.hashes)).split(","), rows)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A column for each key of any row, empty where a row lacks it."""
    heads = heads_of(rows)
    _write_rows(path, heads, ([row.get(head, "") for head in heads] for row in rows))


def heads_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of all rows, in the order in which they come up."""
    return list(dict.fromkeys(key for row in rows for key in row))


def as_replay(results: SimResults, records: Records, scales: Sequence[float]) -> Results:
    """In prism-replay's form, for its tables and plots; of many requests a sample."""
    config = results.config
    counts = results.counts
    counters = Counters(
        retractions=counts.get("retractions", 0),
        activations=counts.get("active", 0),
        evictions=counts.get("evict", 0),
        migrations=counts.get("migrated", 0),
    )
    capacity_bytes = sum(gpu.capacity_bytes for gpu in results.gpus)
    names = records.work.models
    samples = [
        StatusSample(
            sample.time_s,
            {names[model]: size for model, size in sample.kv_bytes.items()},
            sample.reserved_bytes,
            capacity_bytes,
            Counters(),
        )
        for sample in results.samples
    ]
    run = RunConfig(
        trace=config.trace or "generated",
        url=f"a simulated cluster of {len(results.gpus)} GPUs",
        requests=len(records.work),
        rate_scale=config.rate_scale,
        slo_scales=tuple(scales),
        seed=config.seed,
    )
    shown = request_records(records, PLOTTED_REQUESTS)
    return Results(run, shown, samples, counters, results.summary)


def _group_rows(name: str, group: GroupSummary) -> list[dict[str, Any]]:
    times = {
        f"{metric}_{part}": getattr(getattr(group, metric), part)
        for metric in ("ttft_ms", "tpot_ms", "e2e_ms")
        for part in ("mean", "p50", "p95", "p99")
    }
    counted = {"model": name, "requests": group.requests, "completed": group.completed}
    return [
        {
            **counted,
            "slo_scale": scale,
            **{f"attainment_{m}": getattr(found, m) for m in ("ttft", "tpot", "e2e", "all")},
            **times,
        }
        for scale, found in group.attainment.items()
    ]


def _write_rows(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(rows)


def _time(time_s: float) -> float | str:
    return time_s if time_s >= 0 else ""
