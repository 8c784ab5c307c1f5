"""Chrome trace of a simulation (chrome://tracing, Perfetto).

It has a process per GPU, the wait, prefill and decode of each request, the decisions of the cluster
scheduler, and memory and queue length over time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup

CLUSTER = 0
Event = dict[str, Any]


def write_timeline(path: Path, setup: ClusterSetup, records: Records) -> None:
    """Writes one JSON object with an event per line."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        lines = (json.dumps(event, separators=(",", ":")) for event in _events(setup, records))
        file.write(",\n".join(lines))
        file.write("\n]}\n")


def _events(setup: ClusterSetup, records: Records) -> Iterator[Event]:
    names = ["cluster", *(device.name for device in setup.devices)]
    for pid, name in enumerate(names):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for index in range(len(records.work)):
        yield from _request(records, index)
    pids = {name: pid for pid, name in enumerate(names)}
    for decision in records.decisions:
        yield {
            "ph": "i",
            "s": "p",
            "name": f"{decision.kind} {decision.model}",
            "pid": pids.get(decision.device, CLUSTER),
            "tid": 0,
            "ts": _us(decision.time_s),
            "args": {"target": decision.target, "reason": decision.reason},
        }
    for sample in records.samples:
        at = {"ph": "C", "pid": CLUSTER, "tid": 0, "ts": _us(sample.time_s)}
        yield {
            **at,
            "name": "requests",
            "args": {"waiting": sample.waiting, "running": sample.running},
        }
        yield {
            **at,
            "name": "reserved GiB",
            "args": {"all": round(sample.reserved_bytes / 2**30, 3)},
        }


def _request(records: Records, index: int) -> Iterator[Event]:
    """Yields the phases of one request, as nested asynchronous events of one id."""
    work = records.work
    model = work.models[work.model[index]]
    end_s = records.end_s[index]
    phases = (
        ("wait", work.arrival_s[index], records.started_s[index]),
        ("prefill", records.started_s[index], records.first_s[index]),
        ("decode", records.first_s[index], end_s),
    )
    common = {"cat": model, "id": index, "pid": records.device[index] + 1, "tid": 0}
    tokens = {"prompt": work.prompt_tokens[index], "output": records.output_tokens[index]}
    for name, since_s, until_s in phases:
        if since_s < 0:
            return
        closed_s = until_s if until_s >= 0 else end_s
        yield {**common, "ph": "b", "name": name, "ts": _us(since_s), "args": tokens}
        yield {**common, "ph": "e", "name": name, "ts": _us(closed_s)}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)
