"""Recording of the live system: calibrates the step costs of each model, then replays the trace.

Each of the two runs on a new prism-serve, so that calibration does not affect the replay.
"""

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

from lab.parity.compare import Inputs
from lab.parity.journals import read_journals
from prism.config.reader import read_mapping
from prism.config.resolve import load
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from prism.scheduler.decision_journal import INPUTS
from prism.serve.background import BackgroundServer, free_port, serving
from prism_replay.live.client import Endpoint
from prism_replay.live.prompts import PromptSource, parse_token_range
from prism_replay.live.runner import run_replay
from prism_replay.report.console import LiveProgress
from prism_replay.results import ReplayResults, RunConfig, write_results
from prism_replay.trace import TraceRequest, models_of
from prism_sim.costs.calibrate import CalibrationPlan, calibrate, save

GPU = "host"
SHORTEST_PROMPT = 4
SETTLE_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LiveConfig:
    config: Path
    trace_name: str
    trace: Sequence[TraceRequest]
    out: Path
    scales: tuple[float, ...]
    token_ids: str = "100-1000"
    seed: int = 0
    repeats: int = 3
    """Number of measurements of each calibrated step."""


def record(given: LiveConfig, console: Console) -> Inputs:
    """Calibrates and replays. Raises ConfigError, ServeFailedError.

    Writes live.yaml, costs.json, results.json and the logs to `given.out`.
    """
    config = load(given.config)
    _check_models(given, config)
    path = given.out / "live.yaml"
    path.write_text(yaml.safe_dump(journaled(given.config)))
    costs, logs = given.out / "costs.json", given.out / "calibration-logs"
    costs.unlink(missing_ok=True)
    _clear(logs)
    with serving(path, free_port(), logs, "parity") as server:
        for model in models_of(given.trace):
            console.print(f"calibrating {model}", highlight=False)
            _, fitted = calibrate(Endpoint(server.url), _plan(given, config, model), GPU, 1)
            save(costs, fitted.table)
    replay_logs = given.out / "logs"
    _clear(replay_logs)
    with serving(path, free_port(), replay_logs, "parity") as server:
        # Waits for the last reports of the initial placement.
        time.sleep(SETTLE_S)
        results = _replay(given, server, console)
    write_results(given.out / "results.json", results)
    journals, earlier = read_journals(replay_logs, config), read_journals(logs, config)
    return Inputs(config, results, journals, costs, given.scales, (earlier,))


def journaled(path: Path) -> dict[str, Any]:
    """Returns the YAML with a journal of all inputs and with absolute paths."""
    data = read_mapping(path)
    for model in data["models"]:
        model["path"] = str((path.parent / Path(model["path"]).expanduser()).resolve())
    kept = data.get("journal") or {}
    return {**data, "journal": {**kept, "keep": INPUTS}}


def _check_models(given: LiveConfig, config: ClusterConfig) -> None:
    names = [model.name for model in config.models]
    unknown = [name for name in models_of(given.trace) if name not in names]
    if unknown:
        raise ConfigError(
            f"--trace: {', '.join(unknown)} is not among the models of --config: {', '.join(names)}"
        )


def _plan(given: LiveConfig, config: ClusterConfig, model: str) -> CalibrationPlan:
    """Returns a plan with prompts up to the trace's longest and batches up to the engine's limit.

    The shortest prompt is as short as a batch of decodes. The difference of their times is the cost
    of a request outside of steps, which longer prompts cannot separate from that of a step.
    """
    longest = max(r.input_length for r in given.trace if r.model == model)
    lengths = (longest * eighths // 8 for eighths in (1, 2, 4, 8))
    longer = (max(SHORTEST_PROMPT * 2**n, length) for n, length in enumerate(lengths))
    prompts = {SHORTEST_PROMPT, *longer}
    largest = config.engine.max_running
    batches = {2**n for n in range(largest.bit_length()) if 2**n <= largest} | {largest}
    return CalibrationPlan(
        model=model,
        prompts=tuple(sorted(prompts)),
        batches=tuple(sorted(batches)),
        output_tokens=24,
        repeats=given.repeats,
        source=PromptSource(given.seed + 1, *parse_token_range(given.token_ids)),
    )


def _replay(given: LiveConfig, server: BackgroundServer, console: Console) -> ReplayResults:
    config = RunConfig(
        trace=given.trace_name,
        url=server.url,
        requests=len(given.trace),
        slo_scales=given.scales,
        seed=given.seed,
        token_ids=parse_token_range(given.token_ids),
    )
    with LiveProgress(console, len(given.trace), config.main_scale) as progress:
        results = asyncio.run(run_replay(given.trace, config, progress))
    # The address is not valid after this run.
    shown = msgspec.structs.replace(results.config, url="a separate prism-serve")
    return ReplayResults(shown, results.records, results.samples, results.counters, results.summary)


def _clear(logs: Path) -> None:
    """Removes the journals of an earlier run, to which records would be appended."""
    for path in logs.glob("journal-*.jsonl"):
        path.unlink()
