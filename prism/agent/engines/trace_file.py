"""File of activations and other events of engines, as a Chrome trace."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.engine import Activated

log = logging.getLogger(__name__)

TRACE_BYTES_MAX = 8 << 20


class TraceFile:
    """File of activations as Chrome trace events (chrome://tracing, ui.perfetto.dev).

    The file is a valid trace after every event: the format does not require the closing bracket. At
    TRACE_BYTES_MAX the file is renamed to `*.1` and a new one begins. Errors of the file are logged
    and not raised.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._device = device

    def add(self, engine_id: str, activated: Activated) -> None:
        """Appends the stages of an activation that has ended."""
        self._append(_stage_events(self._device, engine_id, activated, time.time() * 1e6))

    def note(self, name: str, engine_id: str, arguments: Mapping[str, object]) -> None:
        """Appends an instant event."""
        event = {
            "name": name,
            "cat": "engine",
            "ph": "i",
            "s": "t",
            "ts": round(time.time() * 1e6),
            "pid": self._device,
            "tid": engine_id,
            "args": dict(arguments),
        }
        self._append([event])

    def captured(self, engine_id: str, model: str, seconds: Sequence[float]) -> None:
        """Appends an event for each CUDA graph that the engine captured, with its duration."""
        for duration_s in seconds:
            arguments = {"model": model, "seconds": round(duration_s, 3)}
            self.note("graph captured", engine_id, arguments)

    def _append(self, events: Iterable[Mapping[str, object]]) -> None:
        lines = "".join(f"{json.dumps(event)},\n" for event in events).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(lines if file.tell() else b"[\n" + lines)
                is_full = file.tell() > TRACE_BYTES_MAX
            if is_full:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error)


def trace_path(config: ClusterConfig, device: str) -> Path:
    """Returns the path of a device's trace, in the folder of the logs."""
    return Path(config.run_dir) / "logs" / f"activations-{device.replace(':', '')}.trace.json"


def _stage_events(
    device: str, engine_id: str, activated: Activated, end_us: float
) -> Iterator[dict[str, object]]:
    at_us = end_us - activated.stages_s["total"] * 1e6
    for name, seconds in activated.stages_s.items():
        if name == "total":
            continue
        yield {
            "name": name,
            "cat": "activation",
            "ph": "X",
            "ts": round(at_us),
            "dur": round(seconds * 1e6),
            "pid": device,
            "tid": engine_id,
            "args": _arguments(activated, name),
        }
        at_us += seconds * 1e6


def _arguments(activated: Activated, stage: str) -> dict[str, object]:
    links = activated.link_bytes if stage == "weights" else {}
    return {"model": activated.model} | ({"link_bytes": links} if links else {})
