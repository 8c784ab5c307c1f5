"""Readers for public traces, so that users can bring the originals.

Each gives requests of the source's models; `transforms.popularity_map` and `slo.with_slos` turn
them into a trace for the models at hand. Files may end in .gz or .xz. What a source lacks (times,
lengths) is drawn by `ReadOptions`: see `sampled.py` and `servegen.py` for
sources that are counts, rates or texts. Rows that have times are in order of them, as in the
published files; invocations of Azure Functions, which are not, are sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from prism.errors import TraceError
from prism.replay import sampled, transforms
from prism.replay.rows import ReadOptions, Row, read_rows, say, starting_at_zero, strict_order
from prism.replay.servegen import read_servegen
from prism.replay.trace import Tokens, TraceRequest, explain, numbered_lines, read_trace


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of Mooncake's traces (FAST '25); keys beyond these are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


def read_arena(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Chatbot Arena sample of the VTC artifact: id,timestamp_s,model_id,input_tokens,..."""

    def request(row: Row) -> TraceRequest:
        return TraceRequest(
            timestamp=round(float(row["timestamp_s"]) * 1000, 3),
            model=f"model-{int(row['model_id'])}",
            input_length=int(row["input_tokens"]),
            output_length=int(row["output_tokens"]),
        )

    return starting_at_zero(path, strict_order(path, read_rows(path, request)))


def read_azure(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Azure LLM inference traces of 2023 (Splitwise) and 2024 (DynamoLLM): TIMESTAMP,
    ContextTokens, GeneratedTokens. A file is one service and so one model, named after the file.
    """

    def request(row: Row) -> TraceRequest:
        # datetime holds 6 digits of a second, the file of 2023 has 7; that of 2024 has a zone
        moment = datetime.fromisoformat(row["TIMESTAMP"].partition("+")[0][:26])
        return TraceRequest(
            timestamp=round((moment - datetime(2023, 1, 1)).total_seconds() * 1000, 3),
            model=stem(path),
            input_length=int(row["ContextTokens"]),
            output_length=int(row["GeneratedTokens"]),
        )

    return starting_at_zero(path, strict_order(path, read_rows(path, request)))


def read_burstgpt(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """BurstGPT (KDD '25): Timestamp (s), Model, Request tokens, Response tokens. Failed requests
    have no response tokens and are left out; a line on stderr says how many."""
    failed = 0

    def request(row: Row) -> TraceRequest | None:
        nonlocal failed
        if int(row["Response tokens"]) == 0:
            failed += 1
            return None
        return TraceRequest(
            timestamp=round(float(row["Timestamp"]) * 1000, 3),
            model=row["Model"],
            input_length=int(row["Request tokens"]),
            output_length=int(row["Response tokens"]),
        )

    requests = strict_order(path, read_rows(path, request))
    if failed:
        say(f"{path}: {failed} failed requests, without response tokens, are left out")
    return starting_at_zero(path, requests)


def read_vidur(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Vidur's (MLSys '24): arrived_at (s), num_prefill_tokens, num_decode_tokens. Its traces of
    lengths alone have no arrived_at: they get Poisson arrivals at options.rate_rps."""
    times_s = sampled.poisson_times_s(options)

    def request(row: Row) -> TraceRequest:
        given = row.get("arrived_at")
        return TraceRequest(
            timestamp=round(1000 * (float(given) if given is not None else next(times_s)), 3),
            model=stem(path),
            input_length=int(row["num_prefill_tokens"]),
            output_length=int(row["num_decode_tokens"]),
        )

    return strict_order(path, read_rows(path, request))


def read_csv(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """timestamp_s, input_tokens, output_tokens and, where it has one, model: rows in order. In a
    folder each .csv file is one model, named after it."""
    files = sorted(path.glob("*.csv*")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: the folder holds no .csv file")
    trace = [request for file in files for request in _read_model_csv(file)]
    return sorted(trace, key=lambda request: request.timestamp)


def read_mooncake(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Mooncake JSON lines, which name no model: all requests get the file's name as theirs."""
    requests = []
    for where, line in numbered_lines(path):
        try:
            found = msgspec.json.decode(line, type=MooncakeRequest)
        except msgspec.ValidationError as error:
            raise TraceError(f"{where}: {explain(error)}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"{where}: not a JSON object: {error}") from error
        request = TraceRequest(
            timestamp=found.timestamp,
            model=stem(path),
            input_length=found.input_length,
            output_length=found.output_length,
            hash_ids=found.hash_ids,
        )
        requests.append((where, request))
    return starting_at_zero(path, strict_order(path, requests))


Reader = Callable[[Path, ReadOptions], list[TraceRequest]]

FORMATS: dict[str, Reader] = {
    "prism": lambda path, options: read_trace(path),
    "arena": read_arena,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "csv": read_csv,
    "maf": sampled.read_maf,
    "mooncake": read_mooncake,
    "servegen": read_servegen,
    "sharegpt": sampled.read_sharegpt,
    "vidur": read_vidur,
}


WINDOWED = ("maf", "servegen")
"""Sources of rates: they are read by window."""


def read_format(path: Path, name: str, options: ReadOptions | None = None) -> list[TraceRequest]:
    """Read `path` in one of FORMATS. Raises TraceError."""
    if name not in FORMATS:
        raise TraceError(f"format {name!r}: known formats are {', '.join(FORMATS)}")
    return FORMATS[name](path, options or ReadOptions())


def read_window(
    path: Path, name: str, options: ReadOptions, window_s: float | None
) -> list[TraceRequest]:
    """The part of a trace from options.start_s on, `window_s` long (None: to its end; sources of
    rates take an hour). Raises TraceError."""
    requests = read_format(path, name, options)
    if name in WINDOWED or (not options.start_s and window_s is None):
        return requests
    end_s = float("inf") if window_s is None else options.start_s + window_s
    return transforms.window(requests, options.start_s, end_s)


def stem(path: Path) -> str:
    """The file's name without any suffix."""
    return path.name.partition(".")[0]


def _read_model_csv(path: Path) -> list[TraceRequest]:
    def request(row: Row) -> TraceRequest:
        return TraceRequest(
            timestamp=round(float(row["timestamp_s"]) * 1000, 3),
            model=row.get("model") or stem(path),
            input_length=int(row["input_tokens"]),
            output_length=int(row["output_tokens"]),
        )

    return strict_order(path, read_rows(path, request))
