"""Writers of other formats; prism-replay's own is `trace.write_trace`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from prism.errors import TraceError
from prism_replay.trace import Trace, TraceRequest, models_of, write_bytes

BLOCK_TOKENS = 512
PLACE = "{model}"


def write_mooncake(path: Path, trace: Trace) -> list[Path]:
    """Writes Mooncake's JSON lines (FAST '25), which have neither models nor SLOs.

    A path with "{model}" gives a file per model. Requests without hash_ids get unique ids. Returns
    the files. Raises TraceError for several models in one file, or if it cannot be written.
    """
    names = models_of(trace)
    if PLACE not in path.name and len(names) > 1:
        raise TraceError(
            f"{path}: Mooncake's format has one model per file and the trace has {len(names)}; put"
            f" {PLACE} into the file's name to write all, or select one with --only"
        )
    fresh = _fresh_ids(trace)
    lines: dict[str, list[bytes]] = {name: [] for name in names}
    for request in trace:
        lines[request.model].append(_line(request, fresh))
    paths = [path.with_name(path.name.replace(PLACE, name.replace("/", "-"))) for name in names]
    for file, name in zip(paths, names, strict=True):
        write_bytes(file, b"".join(lines[name]))
    return paths


def _line(request: TraceRequest, fresh: Iterator[int]) -> bytes:
    blocks = -(-request.input_length // BLOCK_TOKENS)
    ids = request.hash_ids or tuple(next(fresh) for _ in range(blocks))
    found = {
        "timestamp": round(request.timestamp),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": ids,
    }
    return msgspec.json.encode(found) + b"\n"


def _fresh_ids(trace: Trace) -> Iterator[int]:
    """Yields block ids that are not in the trace."""
    last = max((max(r.hash_ids) for r in trace if r.hash_ids), default=-1)
    while True:
        last += 1
        yield last
