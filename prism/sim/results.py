"""What a simulation leaves: results.json, models.csv, decisions.csv, report.html, and on request
requests.csv and a timeline. Nothing in them depends on the machine or on the wall clock."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism.errors import ConfigError
from prism.replay.results import Counters, GroupSummary, Results, RunConfig, Summary
from prism.replay.results import Sample as ReplaySample
from prism.sim.config import SimYaml
from prism.sim.records import Decision, Records, Sample
from prism.sim.summary import prefix_hits, request_records, summarize
from prism.sim.world import World

SCHEMA = "prism-sim/1"
PLOTTED_REQUESTS = 50_000


class GpuUse(msgspec.Struct, frozen=True):
    """busy: part of the time in which some engine computed; peak_bytes: most memory reserved."""

    name: str
    node: str
    capacity_bytes: int
    peak_bytes: int
    busy: float


class SimResults(msgspec.Struct, frozen=True, kw_only=True):
    """`counts`: decisions and retractions; `events`: of the kernel, for speed. prefix_hits: with
    `engine.prefix_reuse`, model -> part of its prompt tokens that were cached, and "total"."""

    config: SimYaml
    summary: Summary
    counts: dict[str, int]
    gpus: list[GpuUse]
    decisions: list[Decision]
    samples: list[Sample]
    events: int
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


def write_json(path: Path, results: SimResults) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_json(path: Path) -> SimResults:
    """Raises ConfigError where the file is no results file of this schema."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SimResults)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a results file of prism-sim: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path}: schema {found.schema!r}, this version reads {SCHEMA!r}")
    return found


def write_models_csv(path: Path, summary: Summary) -> None:
    """A row per model and SLO scale, the total last."""
    groups = {**summary.models, "total": summary.total}
    rows = [row for name, group in groups.items() for row in _group_rows(name, group)]
    _write_csv(path, list(rows[0]), (list(row.values()) for row in rows))


def write_decisions_csv(path: Path, decisions: Sequence[Decision]) -> None:
    _write_csv(path, Decision._fields, decisions)


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
    _write_csv(path, (heads + ",cached_tokens" * bool(work.hashes)).split(","), rows)


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
        ReplaySample(
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


def _write_csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(rows)


def _time(time_s: float) -> float | str:
    return time_s if time_s >= 0 else ""
