"""Readers for public traces, so that users can bring the originals.

Each gives requests of anonymous models; `transforms.popularity_map` and `slo.with_slos` turn
them into a trace for the models at hand.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from prism.errors import TraceError
from prism.replay.trace import Tokens, TraceRequest, explain, numbered_lines, read_trace

Row = Mapping[str, str]


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of Mooncake's traces (FAST '25); keys beyond these are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


def read_arena(path: Path) -> list[TraceRequest]:
    """Chatbot Arena sample of the VTC artifact: id,timestamp_s,model_id,input_tokens,..."""

    def request(row: Row) -> TraceRequest:
        return TraceRequest(
            timestamp=round(float(row["timestamp_s"]) * 1000, 3),
            model=f"model-{int(row['model_id'])}",
            input_length=max(1, int(row["input_tokens"])),
            output_length=max(1, int(row["output_tokens"])),
        )

    return _sorted(path, [_convert(request, row, where) for where, row in _rows(path)])


def read_azure(path: Path) -> list[TraceRequest]:
    """Azure LLM inference trace 2023 (Splitwise): TIMESTAMP,ContextTokens,GeneratedTokens.

    A file is one service and so one model, named after the file.
    """

    def request(row: Row) -> TraceRequest:
        # datetime holds 6 digits of a second, the file has 7
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        return TraceRequest(
            timestamp=round((moment - datetime(2023, 1, 1)).total_seconds() * 1000, 3),
            model=path.stem,
            input_length=max(1, int(row["ContextTokens"])),
            output_length=max(1, int(row["GeneratedTokens"])),
        )

    return _sorted(path, [_convert(request, row, where) for where, row in _rows(path)])


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Mooncake JSON lines, which name no model: all requests get the file's name as theirs."""
    requests = []
    for where, line in numbered_lines(path):
        try:
            found = msgspec.json.decode(line, type=MooncakeRequest)
        except msgspec.ValidationError as error:
            raise TraceError(f"{where}: {explain(error)}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"{where}: not a JSON object: {error}") from error
        requests.append(
            TraceRequest(
                timestamp=found.timestamp,
                model=path.name.partition(".")[0],
                input_length=found.input_length,
                output_length=found.output_length,
                hash_ids=found.hash_ids,
            )
        )
    return _sorted(path, requests)


FORMATS: dict[str, Callable[[Path], list[TraceRequest]]] = {
    "prism": read_trace,
    "arena": read_arena,
    "azure": read_azure,
    "mooncake": read_mooncake,
}


def read_format(path: Path, name: str) -> list[TraceRequest]:
    """Read `path` in one of FORMATS. Raises TraceError."""
    if name not in FORMATS:
        raise TraceError(f"format {name!r}: known formats are {', '.join(FORMATS)}")
    return FORMATS[name](path)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """A row a line. Raises TraceError."""
    lines = list(numbered_lines(path))
    try:
        rows = list(csv.DictReader([line.decode() for _, line in lines]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not CSV in UTF-8: {error}") from error
    if len(rows) != max(0, len(lines) - 1):
        raise TraceError(f"{path}: a quoted value spans lines; write one request a line")
    for (where, _), row in zip(lines[1:], rows, strict=True):
        yield where, row


def _convert(request: Callable[[Row], TraceRequest], row: Row, where: str) -> TraceRequest:
    try:
        found = request(row)
        if not math.isfinite(found.timestamp):
            raise TraceError(f"{where}: the time is {found.timestamp}; give a number")
        return found
    except KeyError as error:
        raise TraceError(f"{where}: column {error} is missing; is the format right?") from error
    except (ValueError, TypeError) as error:
        raise TraceError(f"{where}: {error}") from error


def _sorted(path: Path, requests: list[TraceRequest]) -> list[TraceRequest]:
    """By arrival, the first at 0: public files are not always ordered."""
    if not requests:
        raise TraceError(f"{path}: the trace is empty")
    requests.sort(key=lambda request: request.timestamp)
    start_ms = requests[0].timestamp
    return [
        msgspec.structs.replace(request, timestamp=round(request.timestamp - start_ms, 3))
        for request in requests
    ]
