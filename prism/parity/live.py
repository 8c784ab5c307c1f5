"""The live half of a comparison: step costs of every model, then the trace, each on a fresh
prism-serve, so that what calibration asks for leaves no trace in the replay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console

from prism.config import ClusterConfig
from prism.config_load import load
from prism.config_yaml import read_mapping
from prism.costs.calibrate import Plan, calibrate, save
from prism.errors import ConfigError
from prism.journal import INPUTS
from prism.parity.journals import Journals, read_journals
from prism.replay.console import LiveProgress
from prism.replay.prompts import PromptSource, parse_token_range
from prism.replay.results import Results, RunConfig, write_results
from prism.replay.runner import run_replay
from prism.replay.trace import TraceRequest, models_of
from prism.served import Server, free_port, serving

GPU = "host"
SHORTEST_PROMPT = 4
SETTLE_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """repeats: of each calibrated step."""

    config: Path
    trace_name: str
    trace: Sequence[TraceRequest]
    out: Path
    scales: tuple[float, ...]
    token_ids: str = "100-1000"
    seed: int = 0
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Recorded:
    """costs: the file of tables. earlier: the journals of the calibration."""

    config: ClusterConfig
    results: Results
    journals: Journals
    earlier: Journals
    costs: Path


def record(wanted: Wanted, console: Console) -> Recorded:
    """Leaves live.yaml, costs.json, results.json and the logs in `wanted.out`. Raises ConfigError,
    ServeFailedError."""
    config = load(wanted.config)
    _check_models(wanted, config)
    path = wanted.out / "live.yaml"
    path.write_text(yaml.safe_dump(journaled(wanted.config)))
    costs, logs = wanted.out / "costs.json", wanted.out / "calibration-logs"
    costs.unlink(missing_ok=True)
    _clear(logs)
    with serving(path, free_port(), logs, "parity") as server:
        for model in models_of(wanted.trace):
            console.print(f"calibrating {model}", highlight=False)
            _, fitted = calibrate(server.url, _plan(wanted, config, model), GPU, 1)
            save(costs, fitted.table)
    replay_logs = wanted.out / "logs"
    _clear(replay_logs)
    with serving(path, free_port(), replay_logs, "parity") as server:
        # the last reports of the initial placement
        time.sleep(SETTLE_S)
        results = _replay(wanted, server, console)
    write_results(wanted.out / "results.json", results)
    return Recorded(
        config, results, read_journals(replay_logs, config), read_journals(logs, config), costs
    )


def journaled(path: Path) -> dict[str, Any]:
    """The YAML with a journal of all inputs; its paths hold from any folder."""
    data = read_mapping(path)
    for model in data["models"]:
        model["path"] = str((path.parent / Path(model["path"]).expanduser()).resolve())
    kept = data.get("journal") or {}
    return {**data, "journal": {**kept, "keep": INPUTS}}


def _check_models(wanted: Wanted, config: ClusterConfig) -> None:
    names = [model.name for model in config.models]
    unknown = [name for name in models_of(wanted.trace) if name not in names]
    if unknown:
        raise ConfigError(
            f"--trace: {', '.join(unknown)} is not under models: of --config, which has"
            f" {', '.join(names)}"
        )


def _plan(wanted: Wanted, config: ClusterConfig, model: str) -> Plan:
    """Prompts up to the trace's longest, batches up to what an engine runs. One prompt is as short
    as a batch of decodes: what it takes longer than their step is what a request costs outside of
    steps, which longer ones alone cannot tell from the first rise of the step."""
    longest = max(r.input_length for r in wanted.trace if r.model == model)
    parts = (longest * part // 8 for part in (1, 2, 4, 8))
    longer = (max(SHORTEST_PROMPT * 2**n, part) for n, part in enumerate(parts))
    prompts = {SHORTEST_PROMPT, *longer}
    most = config.engine.max_running
    batches = {2**n for n in range(most.bit_length()) if 2**n <= most} | {most}
    return Plan(
        model=model,
        prompts=tuple(sorted(prompts)),
        batches=tuple(sorted(batches)),
        output_tokens=24,
        repeats=wanted.repeats,
        source=PromptSource(wanted.seed + 1, *parse_token_range(wanted.token_ids)),
    )


def _replay(wanted: Wanted, server: Server, console: Console) -> Results:
    config = RunConfig(
        trace=wanted.trace_name,
        url=server.url,
        requests=len(wanted.trace),
        slo_scales=wanted.scales,
        seed=wanted.seed,
        token_ids=parse_token_range(wanted.token_ids),
    )
    scale = min(wanted.scales, key=lambda value: abs(value - 1))
    with LiveProgress(console, len(wanted.trace), scale) as progress:
        results = asyncio.run(run_replay(wanted.trace, config, progress))
    # the address was of this run alone
    shown = msgspec.structs.replace(results.config, url="a prism-serve of its own")
    return Results(shown, results.records, results.samples, results.counters, results.summary)


def _clear(logs: Path) -> None:
    """Journals of an earlier run would go on in the same files."""
    for path in logs.glob("journal-*.jsonl"):
        path.unlink()
