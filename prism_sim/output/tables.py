"""The tables of a run: requests, models, devices and decisions, for CSV, Parquet and DataFrames.

docs/prism-sim-results.md is made from the columns' notes. Columns stay: later versions add some.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism_replay.results import METRICS, GroupSummary
from prism_sim.core.records import Decision, Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.costs.table import TableCost
from prism_sim.output.results import SimResults
from prism_sim.output.summary import columns, met

if TYPE_CHECKING:
    import polars as pl

Data = Mapping[str, NDArray[Any] | Sequence[Any]]
Row = dict[str, Any]
CSV_ROWS = 1 << 16
"""Converted at a time, so that a million requests need no more memory."""
TEXT, WHOLE, NUMBER, YES_NO = "text", "whole number", "number", "true or false"


class Column(NamedTuple):
    """kind: TEXT, WHOLE, NUMBER or YES_NO."""

    name: str
    kind: str
    note: str


class TableSource(NamedTuple):
    """What the tables are made of."""

    found: SimResults
    records: Records
    setup: ClusterSetup


@dataclass(frozen=True, slots=True)
class Table:
    """A row for each of something; None and NaN: there is no such value."""

    note: str
    columns: tuple[Column, ...]
    data: Callable[[TableSource], Data]


def requests(run: TableSource) -> Data:
    records, work = run.records, run.records.work
    timed = columns(records)
    within = met(timed, 1.0)
    return {
        "index": np.arange(len(work)),
        "model": _names(work.models, work.model),
        "device": _names((*(d.name for d in run.setup.devices), None), records.device),
        "arrival_s": np.asarray(work.arrival_s),
        **{
            name: np.where(np.asarray(times_s) >= 0, times_s, np.nan)
            for name, times_s in (
                ("started_s", records.started_s),
                ("first_token_s", records.first_s),
                ("end_s", records.end_s),
            )
        },
        "prompt_tokens": timed.prompt_tokens,
        "output_tokens": timed.output_tokens,
        "cached_tokens": np.asarray(records.cached_tokens),
        **{f"{m}_s": getattr(timed, f"{m}_ms") / 1000 for m in METRICS},
        **{f"slo_{m}_s": np.asarray(getattr(work, f"slo_{m}_s")) for m in METRICS},
        **{f"met_{m}": within[m] for m in METRICS},
        "error": _errors(records),
    }


def models(run: TableSource) -> Data:
    """The rows of all models with requests, then `total`."""
    setups = {model.name: model for model in run.setup.models}
    counted = Counter((decision.model, decision.kind) for decision in run.found.decisions)
    counted.update(("total", decision.kind) for decision in run.found.decisions)
    rows: list[Row] = []
    for name, group in run.found.summary.groups.items():
        setup = setups.get(name)
        cost = None if setup is None else setup.parts[setup.tp].cost
        about: Row = {
            "model": name,
            "tp": None if setup is None else setup.tp,
            "weight_bytes": None if setup is None else setup.weight_bytes,
            "costs": cost.table.source if isinstance(cost, TableCost) else None,
            "activations": counted[name, "active"],
            "evictions": counted[name, "evicted"],
            "migrations": counted[name, "migrated"],
        }
        rows += [about | measured for measured in _group_rows(group)]
    return _by_column(rows, MODELS)


def devices(run: TableSource) -> Data:
    started = np.asarray(run.records.device)
    tokens = np.asarray(run.records.output_tokens, dtype=np.float64)
    # the last place is of requests that started nowhere
    requests_of = np.bincount(started + 1, minlength=len(run.found.gpus) + 1)[1:]
    tokens_of = np.bincount(started + 1, tokens, len(run.found.gpus) + 1)[1:]
    active = Counter(d.device for d in run.found.decisions if d.kind == "active")
    return {
        "device": [gpu.name for gpu in run.found.gpus],
        "node": [gpu.node for gpu in run.found.gpus],
        "capacity_bytes": [gpu.capacity_bytes for gpu in run.found.gpus],
        "peak_bytes": [gpu.peak_bytes for gpu in run.found.gpus],
        "busy": [gpu.busy for gpu in run.found.gpus],
        "requests": requests_of,
        "output_tokens": tokens_of.astype(np.int64),
        "activations": [active[gpu.name] for gpu in run.found.gpus],
    }


def decisions(run: TableSource) -> Data:
    made = run.found.decisions
    found: dict[str, list[Any]] = {
        name: [getattr(decision, name) for decision in made] for name in Decision._fields
    }
    for name in ("device", "target"):
        found[name] = [place or None for place in found[name]]
    return found


REQUESTS = (
    Column("index", WHOLE, "Place in the trace, from 0."),
    Column("model", TEXT, "Its model."),
    Column("device", TEXT, "Where it started last (rank 0); empty if it never did."),
    Column("arrival_s", NUMBER, "Simulated time, like the next three."),
    Column("started_s", NUMBER, "When its engine took it; the first time, if it was retracted."),
    Column("first_token_s", NUMBER, "When its first token was there."),
    Column("end_s", NUMBER, "When its last token was there, or it was given up."),
    Column("prompt_tokens", WHOLE, "Tokens of its prompt."),
    Column("output_tokens", WHOLE, "Tokens that it was given."),
    Column("cached_tokens", WHOLE, "Of its prompt, found in a cache (`engine.prefix_reuse`)."),
    Column("ttft_s", NUMBER, "Arrival to first token."),
    Column("tpot_s", NUMBER, "Mean time of each further token; empty with fewer than two."),
    Column("e2e_s", NUMBER, "Arrival to last token; empty with an error."),
    Column("slo_ttft_s", NUMBER, "Its SLOs, at the file's `slo_scale`; infinite: none."),
    Column("slo_tpot_s", NUMBER, "Likewise."),
    Column("slo_e2e_s", NUMBER, "Likewise."),
    Column("met_ttft", YES_NO, "Whether it kept to its TTFT SLO. An error misses all SLOs."),
    Column("met_tpot", YES_NO, "Likewise; a single token meets it."),
    Column("met_e2e", YES_NO, "Likewise, from end to end."),
    Column("error", TEXT, "`unserved`: nothing could serve it. Empty: it got all its tokens."),
)
LATENCY_PARTS = ("mean", "p50", "p95", "p99")
LATENCIES = tuple(
    Column(f"{metric}_ms_{part}", NUMBER, f"{what}, {part}, over completed requests.")
    for metric, what in zip(METRICS, ("TTFT", "TPOT", "End-to-end latency"), strict=True)
    for part in LATENCY_PARTS
)
MODELS = (
    Column("model", TEXT, "The model; `total` in the last rows is all of them."),
    Column("tp", WHOLE, "GPUs that it is spread over, unless a placement chose otherwise."),
    Column("weight_bytes", WHOLE, "Of all its GPUs together."),
    Column("costs", TEXT, "Where its step costs are from."),
    Column("activations", WHOLE, "How often it came up on a device, moves included."),
    Column("evictions", WHOLE, "How often it left one, moves included."),
    Column("migrations", WHOLE, "How often it moved."),
    Column("requests", WHOLE, "Of the trace."),
    Column("completed", WHOLE, "Requests that got all their tokens."),
    Column("input_tokens", WHOLE, "Of completed requests."),
    Column("output_tokens", WHOLE, "Of all requests."),
    Column("slo_scale", NUMBER, "At which attainment is judged (`--judge`)."),
    Column("attainment_ttft", NUMBER, "Part of the requests within their TTFT SLO, 0 to 1."),
    Column("attainment_tpot", NUMBER, "Likewise, TPOT."),
    Column("attainment_e2e", NUMBER, "Likewise, end to end."),
    Column("attainment_all", NUMBER, "Likewise, all three."),
    *LATENCIES,
)
DEVICES = (
    Column("device", TEXT, "The GPU."),
    Column("node", TEXT, "Its machine."),
    Column("capacity_bytes", WHOLE, "Memory that models may use."),
    Column("peak_bytes", WHOLE, "The most that was reserved at a time."),
    Column("busy", NUMBER, "The part of the time in which some engine computed."),
    Column("requests", WHOLE, "Requests that started there last."),
    Column("output_tokens", WHOLE, "Tokens of these."),
    Column("activations", WHOLE, "Models that came up there."),
)
DECISIONS = (
    Column("time_s", NUMBER, "Simulated time."),
    Column("kind", TEXT, "activate, evict, migrate, refuse; active, evicted, migrated, failed."),
    Column("model", TEXT, "The model that it is about."),
    Column("device", TEXT, "Where (rank 0); the source of a migration. Empty: nowhere."),
    Column("target", TEXT, "Where a migration goes; empty for all else."),
    Column("reason", TEXT, "The policy's."),
)
TABLES: dict[str, Table] = {
    "requests": Table("A row for each request, in the order of arrival.", REQUESTS, requests),
    "models": Table("A row for each model with requests and each SLO scale.", MODELS, models),
    "devices": Table("A row for each GPU.", DEVICES, devices),
    "decisions": Table(
        "A row for each action of the cluster scheduler, and for its end.", DECISIONS, decisions
    ),
}


def frame(name: str, run: TableSource) -> pl.DataFrame:
    """A table as a polars DataFrame, null where there is no value. Raises ConfigError without
    polars."""
    if not has_polars():
        raise ConfigError("polars: is not installed; pip install 'prism-sim[frames]' brings it")
    table = TABLES[name]
    return _frame(table, table.data(run))


def _frame(table: Table, data: Data) -> pl.DataFrame:
    import polars as pl

    kinds = {TEXT: pl.String, WHOLE: pl.Int64, NUMBER: pl.Float64, YES_NO: pl.Boolean}
    schema = {column.name: kinds[column.kind] for column in table.columns}
    series = [
        pl.Series(key, _plain(data[key]), dtype=kind, strict=True, nan_to_null=True)
        for key, kind in schema.items()
    ]
    return pl.DataFrame(series)


def _plain(values: NDArray[Any] | Sequence[Any]) -> NDArray[Any] | Sequence[Any]:
    """polars reads texts from lists."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return list(values)
    return values


def has_polars() -> bool:
    return find_spec("polars") is not None


def write_tables(folder: Path, run: TableSource, names: Sequence[str] = tuple(TABLES)) -> None:
    """NAME.csv, and NAME.parquet where polars is installed."""
    for name in names:
        table = TABLES[name]
        data = table.data(run)
        _write_csv(folder / f"{name}.csv", table, data)
        if has_polars():
            _frame(table, data).write_parquet(folder / f"{name}.parquet")


def _write_csv(path: Path, table: Table, data: Data) -> None:
    """With one header line; empty where there is no value."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in table.columns)
        for rows in _csv_rows([data[column.name] for column in table.columns]):
            writer.writerows(rows)


def _csv_rows(values: Sequence[NDArray[Any] | Sequence[Any]]) -> Iterator[Iterator[tuple[Any]]]:
    for start in range(0, len(values[0]), CSV_ROWS):
        parts = [column[start : start + CSV_ROWS] for column in values]
        yield zip(*(_cells(part) for part in parts), strict=True)


def _cells(part: NDArray[Any] | Sequence[Any]) -> Sequence[Any]:
    if not isinstance(part, np.ndarray):
        return part
    cells: list[Any] = part.tolist()
    if part.dtype.kind == "f":
        return ["" if math.isnan(cell) else cell for cell in cells]
    if part.dtype.kind == "b":
        # as polars, pandas and R read it
        return ["true" if cell else "false" for cell in cells]
    return cells


def _names(names: Sequence[str | None], places: Sequence[int]) -> NDArray[np.object_]:
    found: NDArray[np.object_] = np.array(names, dtype=object)[np.asarray(places)]
    return found


def _errors(records: Records) -> NDArray[np.object_]:
    found = np.full(len(records.work), None, dtype=object)
    for index, code in records.errors.items():
        found[index] = code
    return found


def _group_rows(group: GroupSummary) -> Iterator[Row]:
    times = {
        f"{metric}_ms_{part}": getattr(getattr(group, f"{metric}_ms"), part)
        for metric in METRICS
        for part in LATENCY_PARTS
    }
    counts = ("requests", "completed", "input_tokens", "output_tokens")
    counted = {name: getattr(group, name) for name in counts}
    for scale, found in group.attainment.items():
        parts = {f"attainment_{m}": getattr(found, m) for m in (*METRICS, "all")}
        yield {**counted, "slo_scale": float(scale), **parts, **times}


def _by_column(rows: Sequence[Row], described: Sequence[Column]) -> Data:
    return {column.name: [row[column.name] for row in rows] for column in described}
