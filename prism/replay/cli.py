"""`prism-replay`: generate, describe, convert and replay multi-model traces."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prism.errors import ConfigError
from prism.replay import generate as generator
from prism.replay import transforms
from prism.replay.formats import FORMATS, read_format
from prism.replay.prompts import parse_token_range
from prism.replay.results import Results, RunConfig, read_results, write_results
from prism.replay.slo import parse_slos, with_slos
from prism.replay.trace import TraceRequest, models_of, read_trace, write_trace

app = typer.Typer(
    name="prism-replay",
    help="Replay multi-model traces against a live server and report SLO attainment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
INTERRUPTED = 130

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines, .gz allowed.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="File to write.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.")]
TimeScale = Annotated[float, typer.Option(help="Multiplies timestamps; 0.5 is twice as fast.")]
RateScale = Annotated[float, typer.Option(help="Multiplies the number of requests.")]
Limit = Annotated[int | None, typer.Option(help="Take only the first N requests.", min=1)]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slo", help="TTFT/TPOT in ms, for all models or as MODEL=TTFT/TPOT; may be repeated."
    ),
]


@app.command(
    epilog="Example: prism-replay run traces/demo.jsonl --url http://127.0.0.1:8000 "
    "--slo-scale 0.5,1,2 --out results/demo.json --html results/demo.html"
)
def run(
    trace: TraceFile,
    *,
    url: Annotated[str, typer.Option(help="Server with OpenAI's routes.")] = (
        "http://127.0.0.1:8000"
    ),
    rate_scale: RateScale = 1.0,
    time_scale: TimeScale = 1.0,
    slo_scale: Annotated[str, typer.Option(help="Scales to judge SLOs at: 0.5,1,2")] = "1",
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", min=0.001)] = 600.0,
    limit: Limit = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens per hash id.", min=1)] = 512,
    token_ids: Annotated[str, typer.Option(help="Range of synthetic token ids.")] = "100-1000",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Results as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", "--report", help="One-page report.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit 1 when any request failed.")] = False,
) -> None:
    """Send the trace's requests at their times and measure TTFT, TPOT and end to end.

    Arrivals never wait for answers (open loop). Ctrl-C ends early with partial results.
    """
    requests = _scaled(read_trace(trace), rate_scale, time_scale, limit, seed)
    config = RunConfig(
        trace=trace.name,
        url=url.rstrip("/"),
        requests=len(requests),
        rate_scale=rate_scale,
        time_scale=time_scale,
        slo_scales=parse_scales(slo_scale),
        seed=seed,
        timeout_s=timeout,
        block_tokens=block_tokens,
        token_ids=parse_token_range(token_ids),
    )
    for path in (out, html):
        check_writable(path)
    results = _replay(requests, config)
    _write(results, out, html)
    if results.config.interrupted:
        raise typer.Exit(INTERRUPTED)
    if strict and results.summary.total.errors:
        raise typer.Exit(1)


@app.command(epilog="Example: prism-replay report results/demo.json --out report.html")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="JSON of a replay.")],
    out: Out = Path("report.html"),
) -> None:
    """Write the HTML report of an earlier replay."""
    from prism.replay.report import write_report

    check_writable(out)
    write_report(read_results(results), out)
    Console().print(f"report: {out}")


@app.command(
    epilog="Example: prism-replay generate --models a:0.5,b,c --seconds 600 --rate 2 "
    "--slo 2000/200 --slo a=1000/100 --out trace.jsonl"
)
def generate(
    *,
    models: Annotated[
        str, typer.Option(help="Names, most popular first; NAME:SHARE fixes a share.")
    ],
    out: Out,
    seconds: Annotated[float, typer.Option(help="Length, before --time-scale.")] = 3600.0,
    rate: Annotated[float, typer.Option(help="Requests/s, before --time-scale.")] = 1.0,
    seed: Seed = 0,
    time_scale: TimeScale = 1.0,
    input_tokens: Annotated[str, typer.Option(help="Median:max of the prompts.")] = "40:1024",
    output_tokens: Annotated[str, typer.Option(help="Median:max of the outputs.")] = "210:1024",
    prefix_share: Annotated[
        float, typer.Option(help="Part that repeats an earlier prompt.", min=0, max=1)
    ] = 0.0,
    slo: SloOption = None,
) -> None:
    """Generate a seeded trace with the statistics that Prism §3.1 reports.

    Without shares, popularity is a power law in which the last 60 % of the models give 25 % of
    the requests.
    """
    default, per_model = parse_slos(slo or [])
    config = generator.GeneratorConfig(
        shares=parse_models(models),
        seconds=seconds,
        rate_rps=rate,
        seed=seed,
        prefix_share=prefix_share,
        lengths=parse_lengths(input_tokens, output_tokens),
        slo=default,
        model_slos=per_model,
    )
    requests = transforms.scale_time(generator.generate(config), time_scale)
    _save(requests, out)


@app.command(epilog="Example: prism-replay stats traces/demo.jsonl --time-scale 8 --seconds 1200")
def stats(
    trace: TraceFile,
    *,
    time_scale: TimeScale = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="Length where it is more than the last arrival.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "prism",
) -> None:
    """Print popularity, idleness and burstiness beside the published values."""
    from prism.replay.console import print_stats
    from prism.replay.stats import describe

    requests = transforms.scale_time(read_format(trace, format_), time_scale)
    print_stats(Console(), describe(requests, seconds))


@app.command(
    epilog="Example: prism-replay convert arena_chat27_vtc.csv --format arena "
    "--models tiny-llama,tiny-qwen3 --context 1024 --limit 300 --time-scale 0.5 --out t.jsonl"
)
def convert(
    trace: TraceFile,
    *,
    models: Annotated[str, typer.Option(help="Models to map onto, most popular first.")],
    out: Out,
    format_: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "prism",
    context: Annotated[int | None, typer.Option(help="Clip to this context.", min=2)] = None,
    output_max: Annotated[int | None, typer.Option(help="Longest output.", min=1)] = None,
    length_scale: Annotated[float, typer.Option(help="Multiplies token counts.")] = 1.0,
    start: Annotated[float, typer.Option(help="Seconds to skip.", min=0)] = 0.0,
    rate_scale: RateScale = 1.0,
    time_scale: TimeScale = 1.0,
    limit: Limit = None,
    seed: Seed = 0,
    slo: SloOption = None,
) -> None:
    """Turn a public trace into one for the models at hand.

    The models of the requests taken are ranked by popularity and cut into as many runs of equal
    length as there are targets: the long tail stays. Without --slo, SLOs of the source are kept.
    """
    requests = read_format(trace, format_)
    requests = transforms.window(requests, start) if start else requests
    requests = _scaled(requests, rate_scale, time_scale, limit, seed)
    targets = list(parse_models(models))
    mapping = transforms.popularity_map(models_of(requests), targets)
    requests = transforms.map_models(requests, mapping)
    if context:
        rule = transforms.LengthRule(context, length_scale, output_max)
        requests = transforms.fit_lengths(requests, rule)
    elif length_scale != 1.0 or output_max:
        raise ConfigError("--length-scale and --output-max need --context")
    if slo or requests[0].slo_ttft_ms is None:
        requests = with_slos(requests, *parse_slos(slo or []))
    _save(requests, out)


def check_writable(path: Path | None) -> None:
    """Before minutes of work: raise ConfigError if `path` cannot be written afterwards."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; name a file in a writable folder")


def parse_scales(text: str) -> tuple[float, ...]:
    """`"0.5,1,2"` to numbers. Raises ConfigError."""
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--slo-scale {text!r}: write numbers such as 0.5,1,2") from error
    if not all(0 < scale < float("inf") for scale in scales):
        raise ConfigError(f"--slo-scale {text!r}: every scale must be above 0")
    return scales


def parse_models(text: str) -> dict[str, float | None]:
    """`"a:0.5,b"` to {"a": 0.5, "b": None}. Raises ConfigError."""
    shares: dict[str, float | None] = {}
    for part in text.split(","):
        name, separator, share = part.strip().partition(":")
        if not name or name in shares:
            raise ConfigError(f"--models {text!r}: {name!r} is empty or given twice")
        try:
            shares[name] = float(share) if separator else None
        except ValueError as error:
            raise ConfigError(f"--models {text!r}: {share!r} is not a number") from error
    return shares


def parse_lengths(inputs: str, outputs: str) -> generator.Lengths:
    """`"40:1024"` is median and maximum. Raises ConfigError."""
    try:
        (input_median, input_max), (output_median, output_max) = (
            (float(part) for part in text.split(":")) for text in (inputs, outputs)
        )
    except ValueError as error:
        raise ConfigError(f"token counts {inputs!r}, {outputs!r}: write MEDIAN:MAX") from error
    if min(input_median, input_max, output_median, output_max) < 1:
        raise ConfigError(f"token counts {inputs!r}, {outputs!r}: must be at least 1")
    return generator.Lengths(
        input_median=input_median,
        input_max=int(input_max),
        output_median=output_median,
        output_max=int(output_max),
    )


def main() -> None:
    """The console script: wrong input is one line on stderr and exit code 2."""
    sys.exit(exit_code(app))


def exit_code(command: Callable[[], object]) -> int:
    try:
        command()
    except ConfigError as error:
        Console(stderr=True).print(f"prism-replay: {error}", markup=False, soft_wrap=True)
        return 2
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _replay(requests: list[TraceRequest], config: RunConfig) -> Results:
    from prism.replay.console import LiveProgress, print_results
    from prism.replay.runner import run_replay

    console = Console()
    scale = min(config.slo_scales, key=lambda value: abs(value - 1))
    with LiveProgress(console, len(requests), scale) as progress:
        results = asyncio.run(run_replay(requests, config, progress))
    print_results(console, results)
    return results


def _write(results: Results, out: Path | None, html: Path | None) -> None:
    console = Console()
    if out:
        write_results(out, results)
        console.print(f"results: {out}")
    if html:
        from prism.replay.report import write_report

        write_report(results, html)
        console.print(f"report: {html}")


def _scaled(
    trace: list[TraceRequest], rate: float, time: float, limit: int | None, seed: int
) -> list[TraceRequest]:
    scaled = transforms.scale_rate(trace, rate, seed) if rate != 1.0 else trace
    scaled = transforms.scale_time(scaled, time) if time != 1.0 else scaled
    return transforms.limit(scaled, limit) if limit else scaled


def _save(requests: list[TraceRequest], out: Path) -> None:
    check_writable(out)
    write_trace(out, requests)
    end_s = requests[-1].arrival_s
    counts = ", ".join(f"{m} {sum(r.model == m for r in requests)}" for m in models_of(requests))
    Console().print(f"{out}: {len(requests)} requests in {end_s:.1f} s: {counts}", soft_wrap=True)


if __name__ == "__main__":
    main()
