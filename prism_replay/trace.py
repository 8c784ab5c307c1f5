"""The trace format: JSON lines in Mooncake's field names plus the model and its SLOs.

One request per line, ordered by `timestamp`:
{"timestamp": 1250, "model": "tiny-llama", "input_length": 64, "output_length": 32,
 "slo_ttft_ms": 2000, "slo_tpot_ms": 200, "slo_e2e_ms": 8200, "hash_ids": [0, 7]}
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from prism.errors import TraceError

Tokens = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class TraceRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Arrival, ms since the trace's start."""
    model: Annotated[str, msgspec.Meta(min_length=1)]
    input_length: Tokens
    output_length: Tokens
    slo_ttft_ms: Milliseconds | None = None
    """SLO of the time to first token; None for no such SLO."""
    slo_tpot_ms: Milliseconds | None = None
    """SLO of the time per output token; None for no such SLO."""
    slo_e2e_ms: Milliseconds | None = None
    """SLO of the end-to-end latency; None for no such SLO."""
    priority: Priority = 0
    """Scheduling priority: of the waiting requests, those with a higher value start first."""
    hash_ids: tuple[int, ...] = ()
    """One id per prompt block. Blocks with equal ids have equal tokens (Mooncake)."""
    prompt: str | None = None
    """Text sent instead of synthetic tokens. The server counts its tokens, not input_length."""

    @property
    def arrival_s(self) -> float:
        return self.timestamp / 1000.0


Trace = Sequence[TraceRequest]
DAY_MS = 86_400_000.0
REQUESTS_MAX = 20_000_000
"""Most requests of a trace that is generated, drawn from rates or scaled; limited by memory."""
SECONDS_MAX = 1e9
"""Longest such trace, about 30 years: time and memory grow with its sessions and minutes."""
TOKENS_MAX = 2**31 - 1
"""Most tokens of a prompt or an answer: tables of requests hold 32-bit counts."""
LONGEST_GAP_MS = 30 * DAY_MS
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
_DECODER = msgspec.json.Decoder(TraceRequest)
Line = TypeVar("Line")


def read_trace(path: Path) -> list[TraceRequest]:
    """Returns all requests of a `.jsonl` file, which may be compressed (.gz, .xz).

    Raises TraceError that names the file, the line and the key.
    """
    requests: list[TraceRequest] = []
    before_ms = 0.0
    for where, line in numbered_lines(path):
        request = decode_line(_DECODER, line, where)
        _check_time(where, request.timestamp, before_ms)
        requests.append(request)
        before_ms = request.timestamp
    if not requests:
        raise TraceError(f"{path}: the trace is empty; give a file with one JSON object per line")
    return requests


def _check_time(where: str, timestamp_ms: float, before_ms: float) -> None:
    if timestamp_ms < before_ms:
        raise TraceError(
            f"{where}: timestamp: {timestamp_ms:g} is before the line above "
            f"({before_ms:g}); sort the trace by timestamp"
        )
    if timestamp_ms - before_ms > LONGEST_GAP_MS:  # times since 1970, or in another unit
        days = (timestamp_ms - before_ms) / DAY_MS
        raise TraceError(
            f"{where}: timestamp: {days:.0f} days without a request before this one; timestamps "
            "are milliseconds since the trace's start: subtract the first one"
        )


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Writes a trace, compressed if the name ends in .gz. The same trace gives the same bytes.

    Raises TraceError if the file cannot be written.
    """
    write_bytes(path, b"".join(msgspec.json.encode(request) + b"\n" for request in trace))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, compressed if the name ends in .gz. Raises TraceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


def models_of(trace: Trace) -> list[str]:
    """Returns the model names, the most requested first and ties by name."""
    counts = Counter(request.model for request in trace)
    return sorted(counts, key=lambda name: (-counts[name], name))


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields ("file:line", content) for every line that is not blank. Raises TraceError."""
    try:
        raw = path.read_bytes()
        content = DECOMPRESS.get(path.suffix, bytes)(raw)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", line


def decode_line(decoder: msgspec.json.Decoder[Line], line: bytes, where: str) -> Line:
    """Returns the decoded line. Raises TraceError that begins with `where`."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {_explain(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: not a JSON object: {error}") from error


def _explain(error: msgspec.ValidationError) -> str:
    """Returns msgspec's message with the key first: "input_length: Expected `int` >= 1"."""
    reason, _, location = str(error).partition(" - at `$.")
    if "required field `model`" in reason:
        remedy = "prism-replay convert --format mooncake --models NAME"
        return f"{reason}; for a trace without models: `{remedy}`"
    return f"{location.rstrip('`')}: {reason}" if location else reason
