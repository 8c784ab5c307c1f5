"""`prism-replay compare`: live comparison of policies on the same devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from prism.cli.terminal import new_console
from prism.config.policy_knobs import named_policy
from prism.errors import ConfigError
from prism.policies import registry
from prism_replay.base_slos import BaseSlos, read_base_slos
from prism_replay.cli import options as opts
from prism_replay.cli import trace_commands
from prism_replay.live.prompts import parse_token_range
from prism_replay.results import RunConfig
from prism_replay.trace import TraceRequest, read_trace

if TYPE_CHECKING:
    from prism_replay.live.comparison import Comparison
    from prism_replay.report.console import LiveProgress

EXAMPLE = (
    "Example: prism-replay compare trace.jsonl --config prism.yaml --policies"
    " prism,muxserve++,static --seeds 5 --out results/compare"
)


TracesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="Traces. {seed} in a name is replaced by the seed: trace-{seed}.jsonl.",
    ),
]
Config = Annotated[
    Path, typer.Option("--config", "-c", help="YAML of prism-serve: devices and models.")
]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
Expected = Annotated[
    bool,
    typer.Option(
        "--expected/--no-expected",
        help="Whether policies know the rates and lengths of the trace beforehand.",
    ),
]


def compare(
    traces: TracesArgument,
    *,
    config: Config,
    policies: Annotated[
        str, typer.Option(help="Policies, or all.", autocompletion=opts.complete_policies)
    ] = "all",
    out: Folder,
    seeds: Annotated[int, typer.Option(help="Number of seeds of each trace.", min=1)] = 1,
    against: Annotated[
        str | None, typer.Option(help="Policy to compare the others with. Default: the first.")
    ] = None,
    seed: opts.Seed = 0,
    rate_scale: opts.RateScale = 1.0,
    time_scale: opts.TimeScale = 1.0,
    slo_scale: Annotated[str, typer.Option(help="Scales to judge SLOs at: 0.5,1,2")] = "1",
    base_slos: opts.BaseSlosOption = None,
    limit: opts.Limit = None,
    token_ids: opts.TokenIds = "100-1000",
    expected: Expected = True,
) -> None:
    """Replays traces under each policy in turn, and compares them over common seeds.

    Each run has its own prism-serve on the devices of the YAML. --out gets report.html with the
    plots, compare.csv (means, 95 % confidence intervals), differences.csv (paired over seeds),
    seeds.csv, and each run's results and logs. Runs that it has are not repeated.
    """
    from prism_replay.live.comparison import Comparison

    names = live_policies(policies)
    if against is not None and against not in names:
        raise ConfigError(f"--against {against}: is not one of {', '.join(names)}")
    base = read_base_slos(base_slos) if base_slos else None
    _warn_of_equal_seeds(traces, seeds, rate_scale)
    options = RunConfig(
        trace="",
        url="",
        requests=0,
        rate_scale=rate_scale,
        time_scale=time_scale,
        slo_scales=opts.parse_scales(slo_scale, "--slo-scale"),
        token_ids=parse_token_range(token_ids),
        base_slos=base_slos.name if base_slos else "",
        execution_ms=base.execution_ms if base else {},
    )
    options = msgspec.structs.replace(options, sent_slo_scale=options.main_scale)
    console = new_console()
    given = Comparison(
        config,
        traces,
        names,
        range(seed, seed + seeds),
        options,
        partial(_read, options, base, limit),
        out,
        expected,
        partial(_observer, console),
    )
    _report(console, given, against or names[0])


def _report(console: Console, given: Comparison, against: str) -> None:
    from prism_replay.live.comparison import compare as compare_live
    from prism_replay.report.compare_page import print_comparison, write_comparison

    page = given.out / "report.html"
    opts.check_writable(page)
    groups = compare_live(given)
    write_comparison(given.out, groups, against, given.config.stem)
    print_comparison(console, groups, against)
    console.print(f"report: {page}")


def _read(
    options: RunConfig, base: BaseSlos | None, limit: int | None, path: Path, seed: int
) -> list[TraceRequest]:
    """Returns the requests of a trace with a seed."""
    scales = options.rate_scale, options.time_scale
    found = trace_commands.scaled(read_trace(path), *scales, limit, seed)
    return base.apply(found) if base else found


def _observer(console: Console, name: str, requests: int) -> LiveProgress:
    from prism_replay.report.console import LiveProgress

    console.print(f"{name}: {requests} requests", highlight=False)
    return LiveProgress(console, requests, 1.0)


def live_policies(text: str) -> list[str]:
    """Parses "prism,static", or "all". Raises ConfigError for an unknown policy, and for one that
    lacks a simulator."""
    names = list(registry.names()) if text == "all" else opts.parse_names("--policies", text)
    for name in names:
        if named_policy(name).simulates:
            registry.simulator(name)
    return names


def _warn_of_equal_seeds(traces: Sequence[Path], seeds: int, rate_scale: float) -> None:
    from prism_replay.live.comparison import SEED

    same = [str(trace) for trace in traces if SEED not in str(trace)]
    if seeds > 1 and same and rate_scale == 1:
        print(
            f"warning: --seeds: {', '.join(same)} is the same for each seed, which changes only the"
            " tokens of prompts: intervals do not cover the differences between traces",
            file=sys.stderr,
        )
