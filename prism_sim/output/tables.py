"""Tables of a run: requests, models, devices and decisions, for CSV, Parquet and DataFrames.

docs/prism-sim-results.md is generated from the columns' notes. Columns are a stable format: later
versions only add some.
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

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism_replay.metrics import met
from prism_replay.results import METRICS, GroupSummary
from prism_sim.core.columns import columns
from prism_sim.core.records import Decision, Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.costs.table import TableCost
from prism_sim.output.results import SimResults

if TYPE_CHECKING:
    import polars as pl

Data = Mapping[str, NDArray[Any] | Sequence[Any]]
Row = dict[str, Any]
CSV_ROWS = 1 << 16
"""Number of rows that are converted at a time, which bounds memory for a million requests."""
TEXT, WHOLE, NUMBER, YES_NO = "text", "whole number", "number", "true or false"


class Column(NamedTuple):
    """Description of a column."""

    name: str
    # TEXT, WHOLE, NUMBER or YES_NO.
    kind: str
    note: str


class TableSource(NamedTuple):
    """Input of the tables."""

    found: SimResults
    records: Records
    setup: ClusterSetup


@dataclass(frozen=True, slots=True)
class Table:
    """Description and content of a table. None and NaN mark missing values."""

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
        "prompt_tokens": timed.input_tokens,
        "output_tokens": timed.output_tokens,
        "cached_tokens": np.asarray(records.cached_tokens),
        **{f"{m}_s": getattr(timed, f"{m}_ms") / 1000 for m in METRICS},
        **{f"slo_{m}_s": np.asarray(getattr(work, f"slo_{m}_s")) for m in METRICS},
        **{f"met_{m}": within[m] for m in METRICS},
        "error": timed.error,
    }


def models(run: TableSource) -> Data:
    """Returns the rows of all models with requests, then `total`."""
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
    # Bin 0 counts requests that never started (device -1).
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
    Column("index", WHOLE, "Index in the trace, from 0."),
    Column("model", TEXT, "Model of the request."),
    Column("device", TEXT, "Device (rank 0) where it last started; empty if it never started."),
    Column("arrival_s", NUMBER, "Arrival, in simulated time."),
    Column("started_s", NUMBER, "First admission by an engine, in simulated time."),
    Column("first_token_s", NUMBER, "First output token, in simulated time."),
    Column("end_s", NUMBER, "Last output token or failure, in simulated time."),
    Column("prompt_tokens", WHOLE, "Prompt tokens."),
    Column("output_tokens", WHOLE, "Output tokens."),
    Column("cached_tokens", WHOLE, "Prompt tokens found in a cache (`engine.prefix_reuse`)."),
    Column("ttft_s", NUMBER, "Time from arrival to first token."),
    Column("tpot_s", NUMBER, "Mean time of each further token; empty with fewer than two tokens."),
    Column("e2e_s", NUMBER, "Time from arrival to last token; empty with an error."),
    Column("slo_ttft_s", NUMBER, "TTFT SLO at the file's `slo_scale`; infinite without an SLO."),
    Column("slo_tpot_s", NUMBER, "TPOT SLO, likewise."),
    Column("slo_e2e_s", NUMBER, "End-to-end SLO, likewise."),
    Column("met_ttft", YES_NO, "True if it met its TTFT SLO. An error misses all SLOs."),
    Column("met_tpot", YES_NO, "True if it met its TPOT SLO, as a single token always does."),
    Column("met_e2e", YES_NO, "True if it met its end-to-end SLO."),
    Column(
        "error",
        TEXT,
        "Error code: `unserved`, `context_length_exceeded`, or `kv_memory_exceeded` if its GPUs"
        " cannot hold its KV. Empty: it got all its tokens.",
    ),
)
LATENCY_PARTS = ("mean", "p50", "p95", "p99")
LATENCIES = tuple(
    Column(f"{metric}_ms_{part}", NUMBER, f"{what}, {part}, over completed requests.")
    for metric, what in zip(METRICS, ("TTFT", "TPOT", "End-to-end latency"), strict=True)
    for part in LATENCY_PARTS
)
MODELS = (
    Column("model", TEXT, "Model; `total` in the last rows covers all models."),
    Column("tp", WHOLE, "Tensor-parallel degree, unless a placement set another one."),
    Column("weight_bytes", WHOLE, "Weights on all its GPUs together."),
    Column("costs", TEXT, "Source of its step costs."),
    Column("activations", WHOLE, "Number of activations, including migrations."),
    Column("evictions", WHOLE, "Number of evictions, including migrations."),
    Column("migrations", WHOLE, "Number of migrations."),
    Column("requests", WHOLE, "Requests in the trace."),
    Column("completed", WHOLE, "Requests that got all their tokens."),
    Column("input_tokens", WHOLE, "Prompt tokens of completed requests."),
    Column("output_tokens", WHOLE, "Output tokens of all requests."),
    Column("slo_scale", NUMBER, "SLO scale of the attainment (`--judge`)."),
    Column("attainment_ttft", NUMBER, "Part of the requests within their TTFT SLO, 0 to 1."),
    Column("attainment_tpot", NUMBER, "Likewise, TPOT."),
    Column("attainment_e2e", NUMBER, "Likewise, end to end."),
    Column("attainment_all", NUMBER, "Likewise, all three."),
    *LATENCIES,
    Column(
        "normalized_latency",
        NUMBER,
        "Mean of end-to-end latency / mean execution time of the model's requests alone (SeaLLM"
        " eq. 1).",
    ),
    Column("requests_per_s", NUMBER, "Completed requests per second of the simulation."),
    Column("output_tokens_per_s", NUMBER, "Output tokens of all requests, likewise."),
    Column("active_s", NUMBER, "Time in which at least one of the requests was open."),
    Column("requests_per_active_s", NUMBER, "Completed requests per second of `active_s`."),
    Column("output_tokens_per_active_s", NUMBER, "Output tokens of all requests, likewise."),
)
DEVICES = (
    Column("device", TEXT, "GPU."),
    Column("node", TEXT, "Machine of the GPU."),
    Column("capacity_bytes", WHOLE, "Memory that models may use."),
    Column("peak_bytes", WHOLE, "Maximum of the reserved memory."),
    Column("busy", NUMBER, "The part of the time in which an engine computed."),
    Column("requests", WHOLE, "Requests that last started on the GPU."),
    Column("output_tokens", WHOLE, "Output tokens of these requests."),
    Column("activations", WHOLE, "Number of activations on the GPU."),
)
DECISIONS = (
    Column("time_s", NUMBER, "Simulated time."),
    Column("kind", TEXT, "activate, evict, migrate, refuse; active, evicted, migrated, failed."),
    Column("model", TEXT, "Model of the action."),
    Column("device", TEXT, "Device (rank 0); the source of a migration. Empty: none."),
    Column("target", TEXT, "Target device of a migration; otherwise empty."),
    Column("reason", TEXT, "Reason that the policy gave."),
)
TABLES: dict[str, Table] = {
    "requests": Table("One row per request, in the order of arrival.", REQUESTS, requests),
    "models": Table("One row per model with requests and SLO scale.", MODELS, models),
    "devices": Table("One row per GPU.", DEVICES, devices),
    "decisions": Table(
        "One row for each action of the cluster scheduler, and one for its completion.",
        DECISIONS,
        decisions,
    ),
}


def frame(name: str, run: TableSource) -> pl.DataFrame:
    """Returns a table as a polars DataFrame with null for missing values. Raises ConfigError
    without polars."""
    _check_polars()
    table = TABLES[name]
    return _frame(table, table.data(run))


def frame_of_rows(rows: Sequence[Row]) -> pl.DataFrame:
    """Returns rows as a polars DataFrame with a column for each key of any row. Raises ConfigError
    without polars."""
    _check_polars()
    import polars as pl

    return pl.DataFrame(rows, infer_schema_length=None)


def to_pandas(table: pl.DataFrame) -> Any:
    """Returns a DataFrame of `Results` or `Comparison` as one of pandas. Raises ConfigError without
    pandas or pyarrow, as polars names only one of them and not what to install."""
    missing = [name for name in ("pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{' and '.join(missing)}: {verb} not installed; run pip install 'prism-sim[pandas]'"
        )
    return table.to_pandas()


def _check_polars() -> None:
    if not has_polars():
        raise ConfigError("polars: is not installed; run pip install 'prism-sim[frames]'")


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
    """Returns texts as a list, from which polars reads them."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return list(values)
    return values


def has_polars() -> bool:
    return find_spec("polars") is not None


def write_tables(folder: Path, run: TableSource, names: Sequence[str] = tuple(TABLES)) -> None:
    """Writes NAME.csv and, if polars is installed, NAME.parquet."""
    for name in names:
        table = TABLES[name]
        data = table.data(run)
        _write_csv(folder / f"{name}.csv", table, data)
        if has_polars():
            _frame(table, data).write_parquet(folder / f"{name}.parquet")


def _write_csv(path: Path, table: Table, data: Data) -> None:
    """Writes a header line and the rows, with empty cells for missing values."""
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
        # polars, pandas and R read these.
        return ["true" if cell else "false" for cell in cells]
    return cells


def _names(names: Sequence[str | None], places: Sequence[int]) -> NDArray[np.object_]:
    found: NDArray[np.object_] = np.array(names, dtype=object)[np.asarray(places)]
    return found


def _group_rows(group: GroupSummary) -> Iterator[Row]:
    times = {
        f"{metric}_ms_{part}": getattr(getattr(group, f"{metric}_ms"), part)
        for metric in METRICS
        for part in LATENCY_PARTS
    }
    counts = ("requests", "completed", "input_tokens", "output_tokens")
    counted = {name: getattr(group, name) for name in counts}
    rates = msgspec.structs.asdict(group.throughput)
    measured = {**times, "normalized_latency": group.normalized_latency, **rates}
    for scale, found in group.attainment.items():
        parts = {f"attainment_{m}": getattr(found, m) for m in (*METRICS, "all")}
        yield {**counted, "slo_scale": float(scale), **parts, **measured}


def _by_column(rows: Sequence[Row], described: Sequence[Column]) -> Data:
    return {column.name: [row[column.name] for row in rows] for column in described}
