"""Readers of trace formats: public traces are read as they were published.

A reader returns requests of the source's own models; `transforms.py` and `slo.py` turn them into a
trace for the user's models. Files may end in .gz or .xz. `ReadOptions` control how a reader draws
values that its source does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from prism.errors import TraceError
from prism_replay import transforms
from prism_replay.formats.rows import (
    ReadOptions,
    Row,
    poisson_times_s,
    read_rows,
    starting_at_zero,
    strict_order,
    warn_once,
)
from prism_replay.formats.sampled import read_maf, read_sharegpt
from prism_replay.formats.servegen import read_servegen
from prism_replay.trace import Tokens, TraceRequest, decode_line, numbered_lines, read_trace


@dataclass(frozen=True)
class CsvFormat:
    """Format of a CSV file with one request per row, ordered by time."""

    time: str
    """Name of the column with arrival times."""
    input_tokens: str
    """Name of the column with prompt lengths."""
    output_tokens: str
    """Name of the column with output lengths."""
    model: Callable[[Row], str | None] = lambda row: None
    """Function from a row to its model; None if the whole file is one model, named after it."""
    seconds: Callable[[str], float] = float
    """Function from the text of the time column to seconds."""
    from_zero: bool = True
    """True if times are shifted so that the first request arrives at 0."""
    drawn_times: bool = False
    """True if a file without the time column gets Poisson arrivals."""
    drops_unanswered: bool = False
    """True if requests without output tokens have failed and are left out."""

    def read(self, path: Path, options: ReadOptions) -> list[TraceRequest]:
        """Returns the requests of a file. Raises TraceError."""
        times_s = poisson_times_s(options)
        dropped = 0

        def request(row: Row) -> TraceRequest | None:
            nonlocal dropped
            drawn = self.drawn_times and self.time not in row
            time_s = next(times_s) if drawn else self.seconds(row[self.time])
            model = self.model(row)
            output_tokens = int(row[self.output_tokens])
            if self.drops_unanswered and not output_tokens:
                dropped += 1
                return None
            return TraceRequest(
                timestamp=round(time_s * 1000, 3),
                model=stem(path) if model is None else model,
                input_length=int(row[self.input_tokens]),
                output_length=output_tokens,
            )

        trace = strict_order(path, read_rows(path, request))
        if dropped:
            warn_once(f"{path}: left out {dropped} failed requests (without response tokens)")
        return starting_at_zero(path, trace) if self.from_zero else trace


def _azure_seconds(text: str) -> float:
    # The file of 2023 has 7 digits of a second, datetime only 6. The file of 2024 has a time zone.
    moment = datetime.fromisoformat(text.partition("+")[0][:26])
    return (moment - datetime(2023, 1, 1)).total_seconds()


ARENA = CsvFormat(
    "timestamp_s", "input_tokens", "output_tokens", lambda row: f"model-{int(row['model_id'])}"
)
"""The format of the Chatbot Arena sample in the VTC artifact."""
AZURE = CsvFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", seconds=_azure_seconds)
"""Azure's LLM inference traces of 2023 (Splitwise) and 2024 (DynamoLLM), one service per file."""
BURSTGPT = CsvFormat(
    "Timestamp",
    "Request tokens",
    "Response tokens",
    lambda row: row["Model"],
    drops_unanswered=True,
)
"""The format of BurstGPT (KDD '25)."""
OWN_CSV = CsvFormat(
    "timestamp_s",
    "input_tokens",
    "output_tokens",
    lambda row: row.get("model") or None,
    from_zero=False,
)
VIDUR = CsvFormat(
    "arrived_at",
    "num_prefill_tokens",
    "num_decode_tokens",
    from_zero=False,
    drawn_times=True,
)
"""The format of Vidur (MLSys '24), some of whose traces have lengths only, without arrived_at."""


def read_csv(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Reads OWN_CSV, or a folder with a .csv file per model, named after it. Raises TraceError."""
    files = sorted(path.glob("*.csv*")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: the folder does not have a .csv file")
    trace = [request for file in files for request in OWN_CSV.read(file, options)]
    return sorted(trace, key=lambda request: request.timestamp)


class MooncakeRequest(msgspec.Struct, frozen=True):
    """Line of Mooncake's traces (FAST '25); other keys are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Reads Mooncake's JSON lines. The file is one model, named after it. Raises TraceError."""
    requests, decoder = [], msgspec.json.Decoder(MooncakeRequest)
    for where, line in numbered_lines(path):
        found = decode_line(decoder, line, where)
        requests.append((where, TraceRequest(model=stem(path), **msgspec.structs.asdict(found))))
    return starting_at_zero(path, strict_order(path, requests))


Reader = Callable[[Path, ReadOptions], list[TraceRequest]]

FORMATS: dict[str, Reader] = {
    "prism": lambda path, options: read_trace(path),
    "arena": ARENA.read,
    "azure": AZURE.read,
    "burstgpt": BURSTGPT.read,
    "csv": read_csv,
    "maf": read_maf,
    "mooncake": read_mooncake,
    "servegen": read_servegen,
    "sharegpt": read_sharegpt,
    "vidur": VIDUR.read,
}

WINDOWED = ("maf", "servegen")
"""Formats of rates over days, whose readers apply the window themselves."""


def read_format(path: Path, name: str, options: ReadOptions | None = None) -> list[TraceRequest]:
    """Reads `path` in one of FORMATS. Raises TraceError."""
    if name not in FORMATS:
        raise TraceError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name](path, options or ReadOptions())


def read_window(
    path: Path, name: str, options: ReadOptions, window_s: float | None
) -> list[TraceRequest]:
    """Returns the requests of a trace in a window that starts at options.start_s.

    Raises TraceError.

    Args:
        window_s: Length of the window. None: to the trace's end, or an hour for WINDOWED formats.
    """
    requests = read_format(path, name, options)
    if name in WINDOWED or (not options.start_s and window_s is None):
        return requests
    end_s = float("inf") if window_s is None else options.start_s + window_s
    return transforms.window(requests, options.start_s, end_s)


def stem(path: Path) -> str:
    """Returns the file's name without its suffixes."""
    return path.name.partition(".")[0]
