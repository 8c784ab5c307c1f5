"""`prism-replay`: generate, describe, convert and replay multi-model traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from prism.cli.exit_codes import new_app
from prism.cli.exit_codes import run as run_command
from prism.cli.terminal import new_console
from prism_replay.base_slos import read_base_slos
from prism_replay.cli import options as opts
from prism_replay.cli import trace_commands
from prism_replay.cli.compare import EXAMPLE, compare
from prism_replay.live.prompts import parse_token_range
from prism_replay.results import (
    ReplayResults,
    RunConfig,
    read_results,
    write_json,
    write_results,
)
from prism_replay.trace import TraceRequest, read_trace

if TYPE_CHECKING:
    from prism_replay.live.client import Endpoint

app = new_app(
    "Replay multi-model traces against a live server and report SLO attainment.", "prism-replay"
)
INTERRUPTED = 130


@app.command(
    epilog="Examples: prism-replay run traces/demo.jsonl --url http://127.0.0.1:8000 "
    "--slo-scale 0.5,1,2 --out results/demo.json --report results/demo.html   |   prism-replay run "
    "trace.jsonl --status-url unix:/run/prism/admin.sock --report report.html"
)
def run(
    trace: opts.TraceFile,
    *,
    url: opts.Url = "http://127.0.0.1:8000",
    api_key: opts.ApiKey = "",
    cacert: opts.CaFile = None,
    status_url: opts.StatusUrl = "",
    rate_scale: opts.RateScale = 1.0,
    time_scale: opts.TimeScale = 1.0,
    slo_scale: Annotated[
        str,
        typer.Option(help="Scales to judge SLOs at: 0.5,1,2. The server gets that nearest to 1."),
    ] = "1",
    seed: opts.Seed = 0,
    base_slos: opts.BaseSlosOption = None,
    timeout: opts.Timeout = 600.0,
    limit: opts.Limit = None,
    block_tokens: opts.BlockTokens = 512,
    token_ids: opts.TokenIds = "100-1000",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Results as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--report", "--html", help="One-page report.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a request failed.")] = False,
) -> None:
    """Sends the trace's requests at their times and measures TTFT, TPOT and E2E latency.

    Requests are sent without waiting for answers (open loop). Ctrl-C stops the replay and reports
    partial results.
    """
    endpoint = opts.endpoint(url, api_key, cacert)
    requests = trace_commands.scaled(read_trace(trace), rate_scale, time_scale, limit, seed)
    base = read_base_slos(base_slos) if base_slos else None
    requests = base.apply(requests) if base else requests
    config = RunConfig(
        trace=trace.name,
        url=endpoint.url,
        status_url=opts.status_address(status_url),
        requests=len(requests),
        rate_scale=rate_scale,
        time_scale=time_scale,
        slo_scales=opts.parse_scales(slo_scale, "--slo-scale"),
        seed=seed,
        timeout_s=timeout,
        block_tokens=block_tokens,
        token_ids=parse_token_range(token_ids),
        base_slos=base_slos.name if base_slos else "",
        execution_ms=base.execution_ms if base else {},
    )
    config = msgspec.structs.replace(config, sent_slo_scale=config.main_scale)
    for path in (out, html):
        opts.check_writable(path)
    results = _replay(requests, config, endpoint)
    _write(results, out, html)
    if results.config.interrupted:
        raise typer.Exit(INTERRUPTED)
    if strict and results.summary.total.errors:
        raise typer.Exit(1)


@app.command(epilog="Example: prism-replay report results/demo.json --out report.html")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="JSON of a replay.")],
    out: opts.Out = Path("report.html"),
) -> None:
    """Writes the HTML report of an earlier replay."""
    from prism_replay.report.page import write_report

    opts.check_writable(out)
    write_report(read_results(results), out)
    new_console().print(f"report: {out}")


@app.command(
    epilog="Example: prism-replay base-slos prism.yaml trace.jsonl --out slos.json; then"
    " prism-replay run trace.jsonl --base-slos slos.json --slo-scale 2,5,10"
)
def base_slos(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML of prism-serve.")],
    trace: opts.TraceFile,
    *,
    out: opts.Out,
    executions: Annotated[
        int, typer.Option(help="Requests of each model that run one at a time.", min=1)
    ] = 32,
    settle: Annotated[
        float, typer.Option(help="Idle seconds after a first request, for CUDA graphs.", min=0)
    ] = 10.0,
    seed: opts.Seed = 0,
    timeout: opts.Timeout = 600.0,
    limit: opts.Limit = None,
    block_tokens: opts.BlockTokens = 512,
    token_ids: opts.TokenIds = "100-1000",
    logs: Annotated[Path, typer.Option(help="Folder of the servers' logs.")] = Path("logs"),
) -> None:
    """Measures each model of the trace alone on its devices, as SLOs of `run --base-slos`.

    Starts prism-serve with one model at a time. Requests that run one at a time give its mean
    execution time, and the model's part of the trace at rate scale 1 the P95 of TTFT, TPOT and E2E.
    """
    from prism_replay.live.dedicated import Measurement, measure
    from prism_replay.report.console import LiveProgress, base_slos_table

    opts.check_writable(out)
    requests = trace_commands.scaled(read_trace(trace), 1.0, 1.0, limit, seed)
    console = new_console()

    def observer(model: str, sent: int) -> LiveProgress:
        console.print(f"measuring {model}: {sent} requests", highlight=False)
        return LiveProgress(console, sent, 1.0)

    options = RunConfig(
        trace=trace.name,
        url="",
        requests=len(requests),
        seed=seed,
        timeout_s=timeout,
        block_tokens=block_tokens,
        token_ids=parse_token_range(token_ids),
    )
    measurement = Measurement(
        config=config,
        trace=requests,
        options=options,
        executions=executions,
        settle_s=settle,
        logs=logs,
        observer=observer,
    )
    found = measure(measurement)
    write_json(out, found)
    console.print(base_slos_table(found))
    console.print(f"base SLOs: {out}")


app.command(epilog=EXAMPLE)(compare)
app.add_typer(trace_commands.commands("prism-replay"))


def main() -> None:
    """Runs the console script. Invalid input prints one line on stderr and exits with 2."""
    run_command(app, "prism-replay")


def _replay(requests: list[TraceRequest], config: RunConfig, endpoint: Endpoint) -> ReplayResults:
    from prism_replay.live.runner import run_replay
    from prism_replay.report.console import LiveProgress, print_results

    console = new_console()
    with LiveProgress(console, len(requests), config.main_scale) as progress:
        results = asyncio.run(run_replay(requests, config, progress, endpoint))
    print_results(console, results)
    if not results.config.sent_slo_scale:
        console.print("the server is not Prism and got neither SLOs nor priorities")
    return results


def _write(results: ReplayResults, out: Path | None, html: Path | None) -> None:
    console = new_console()
    if out:
        write_results(out, results)
        console.print(f"results: {out}")
    if html:
        from prism_replay.report.page import write_report

        write_report(results, html)
        console.print(f"report: {html}")


if __name__ == "__main__":
    main()
