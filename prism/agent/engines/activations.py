"""Duration of each activation by stage, the trace of them, and fingerprints of models."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.agent.state.device_state import HostedModel
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.engine import Activated

log = logging.getLogger(__name__)

TRACE_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class ActivationRecord:
    """Activation that succeeded."""

    model: str
    engine_id: str
    stages_s: dict[str, float]  # in order, "total" last
    activated: Activated | None = None  # the engine's message


def stages_of(hosted: HostedModel, activated: Activated, now_s: float) -> dict[str, float]:
    """Returns the duration of each stage, those of the engine between those of the agent.

    The agent's are "engine" (until an engine was free), "shrink" (until other engines had freed
    memory, failed tries included) and "ready" (messages between agent and engine).
    """
    inside_s = {name: s for name, s in activated.stages_s.items() if name != "total"}
    engine_s = activated.stages_s.get("total", 0.0)
    shrink_s = hosted.sent_s - hosted.asked_s + inside_s.pop("shrink", 0.0)
    return {
        "engine": hosted.asked_s - hosted.since_s,
        "shrink": shrink_s,
        **inside_s,
        "ready": max(0.0, now_s - hosted.sent_s - engine_s),
        "total": now_s - hosted.since_s,
    }


class Fingerprints:
    """Warm-up output of each model on a fresh engine, one that had served no model before."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def expected(self, model: str, is_fresh: bool) -> tuple[int, ...]:
        """Returns the output that an engine must reproduce; () for a fresh one, the reference."""
        return () if is_fresh else self._known.get(model, ())

    def learn(self, model: str, fingerprint: tuple[int, ...], is_fresh: bool) -> None:
        if fingerprint and (is_fresh or model not in self._known):
            self._known[model] = fingerprint


class TraceFile:
    """File of activations as Chrome trace events (chrome://tracing, ui.perfetto.dev).

    The file is a valid trace after every event: the format does not require the closing bracket. At
    TRACE_BYTES_MAX the file is renamed to `*.1` and a new one begins. Errors of the file are logged
    and not raised.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._device = device

    def add(self, record: ActivationRecord) -> None:
        """Appends the stages of an activation."""
        self._append(_events(record, self._device, time.time() * 1e6))

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


def _events(record: ActivationRecord, device: str, end_us: float) -> Iterator[dict[str, object]]:
    at_us = end_us - record.stages_s["total"] * 1e6
    for name, seconds in record.stages_s.items():
        if name == "total":
            continue
        yield {
            "name": name,
            "cat": "activation",
            "ph": "X",
            "ts": round(at_us),
            "dur": round(seconds * 1e6),
            "pid": device,
            "tid": record.engine_id,
            "args": _arguments(record, name),
        }
        at_us += seconds * 1e6


def _arguments(record: ActivationRecord, stage: str) -> dict[str, object]:
    links = record.activated.link_bytes if record.activated and stage == "weights" else {}
    return {"model": record.model} | ({"link_bytes": links} if links else {})
