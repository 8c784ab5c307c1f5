"""Replays of the same traces on the same devices under several policies in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import yaml

from prism.config.resolve import load
from prism.errors import ConfigError
from prism.policies import registry
from prism_replay.live import variants
from prism_replay.live.runner import Observer, run_replay
from prism_replay.live.variants import Data
from prism_replay.outcomes import PointOutcome, SeedGroup
from prism_replay.results import ReplayResults, RunConfig, read_results, write_results
from prism_replay.trace import Trace, TraceRequest, models_of

SEED = "{seed}"
"""Part of a trace's path that stands for the seed."""

Seeded = Callable[[Path, int], list[TraceRequest]]
"""Returns the requests of a trace with a seed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    config: Path
    """YAML of prism-serve. Its own policy is not used."""
    traces: Sequence[Path]
    """Traces. With SEED in its name, a trace is another file for each seed."""
    policies: Sequence[str]
    seeds: Sequence[int]
    options: RunConfig
    """Options of the replays, of which trace, url, requests and seed are not used."""
    read: Seeded
    out: Path
    """Folder of the results: POLICY/TRACE-SEED.json, and .yaml with the setup. Results that it has
    already for the same setup are not measured again."""
    expected: bool
    """Whether policies know the rates and lengths of the trace beforehand."""
    observer: Callable[[str, int], AbstractContextManager[Observer]]
    """Makes the observer of a replay from its name and number of requests."""

    def requests(self, trace: Path, seed: int) -> list[TraceRequest]:
        """Returns the requests of a trace with a seed."""
        return self.read(Path(str(trace).replace(SEED, str(seed))), seed)


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str
    trace: Path
    seed: int

    @property
    def name(self) -> str:
        return f"{self.trace.name.replace(SEED, '')}-{self.seed}"


def compare(given: Comparison) -> list[SeedGroup]:
    """Returns the outcomes of each policy on each trace.

    Policies take turns on each trace and seed, so that what changes with time on the machine is
    spread over all of them. Raises ConfigError or ServeFailedError.
    """
    found = {run: _replayed(given, run, requests) for run, requests in _checked(given).items()}
    pairs = product(given.traces, given.policies)
    return [_group(given, trace, policy, found) for trace, policy in pairs]


def _group(
    given: Comparison, trace: Path, policy: str, found: Mapping[_Run, ReplayResults]
) -> SeedGroup:
    changes = {"trace": trace.name, "policy": policy}
    outcomes = [
        outcome_of(found[_Run(policy, trace, seed)], {**changes, "seed": seed})
        for seed in given.seeds
    ]
    return SeedGroup(changes, outcomes)


def outcome_of(results: ReplayResults, changes: dict[str, Any]) -> PointOutcome:
    counters, counts = results.counters, {}
    if counters is not None:
        counts = {
            "active": counters.activations,
            "migrated": counters.migrations,
            "retractions": counters.retractions,
        }
    return PointOutcome(changes, results.summary, counts)


def _checked(given: Comparison) -> dict[_Run, Trace]:
    """Returns the requests of each run, in their order. Raises ConfigError for what would end a
    later one."""
    names = [trace.name for trace in given.traces]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]}: two traces have this name; rename one")
    runs: dict[_Run, Trace] = {}
    for seed, trace in product(given.seeds, given.traces):
        requests = given.requests(trace, seed)
        data = variants.read(given.config, requests)
        for policy in given.policies:
            with variants.yaml_file(given.config, with_policy(data, policy, requests)) as path:
                load(path)
            runs[_Run(policy, trace, seed)] = requests
    return runs


def _replayed(given: Comparison, run: _Run, requests: Trace) -> ReplayResults:
    folder = given.out / run.policy
    file, setup = folder / f"{run.name}.json", folder / f"{run.name}.yaml"
    options = msgspec.structs.replace(
        given.options, trace=run.trace.name, requests=len(requests), seed=run.seed, url=""
    )
    data = variants.read(given.config, requests)
    data = with_policy(data, run.policy, requests if given.expected else ())
    text = yaml.safe_dump(data, sort_keys=False)
    if file.exists() and setup.exists() and setup.read_text() == text:
        earlier = read_results(file)
        if _same(earlier, options, requests):
            return earlier
    folder.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    setup.write_text(text)
    logs = folder / f"{run.name}-logs"
    with (
        variants.served(given.config, data, logs, "compare") as server,
        given.observer(f"{run.policy}, {run.name}", len(requests)) as observer,
    ):
        live = msgspec.structs.replace(options, url=server.url)
        results = asyncio.run(run_replay(requests, live, observer))
    if results.config.interrupted:
        raise KeyboardInterrupt
    # The address is not valid after this run.
    shown = msgspec.structs.replace(results.config, url="")
    results = msgspec.structs.replace(results, config=shown)
    write_results(file, results)
    return results


def _same(earlier: ReplayResults, options: RunConfig, requests: Trace) -> bool:
    """Returns True if these are the results of a replay of the same requests with the same
    options."""
    sent = sorted(
        (r.model, r.arrival_s, r.input_tokens, r.expected_tokens) for r in earlier.records
    )
    asked = sorted((r.model, r.arrival_s, r.input_length, r.output_length) for r in requests)
    return sent == asked and msgspec.structs.replace(earlier.config, started_unix_s=0.0) == options


def with_policy(data: Data, policy: str, traffic: Trace) -> Data:
    """Returns the YAML with another policy.

    A policy with a placement search searches once, as in the papers that compare with it (Prism
    §7.2).

    Args:
        traffic: Requests whose rates and lengths the policy knows beforehand.
    """
    loads = dict(expected_loads(traffic))
    models = [
        {**model, "expected": loads[name]} if (name := model["name"]) in loads else model
        for model in data["models"]
    ]
    scheduler = dict(data.get("scheduler") or {})
    if registry.get(policy).search is not None:
        scheduler["search_interval"] = None
    return {**variants.variant(data, policy, models), "scheduler": scheduler}


def expected_loads(trace: Trace) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields each model of a trace with the values of its `expected` in the YAML."""
    seconds = max([1.0, *(request.arrival_s for request in trace)])
    for name in models_of(trace):
        own = [request for request in trace if request.model == name]
        yield (
            name,
            {
                "rate": len(own) / seconds,
                "prompt_tokens": fmean(request.input_length for request in own),
                "output_tokens": fmean(request.output_length for request in own),
            },
        )
