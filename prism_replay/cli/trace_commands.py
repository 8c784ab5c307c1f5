"""The commands on traces that `prism-replay` and `prism-sim trace` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from prism.cli.exit_codes import new_app
from prism.cli.terminal import new_console
from prism.errors import ConfigError
from prism_replay import transforms
from prism_replay.cli import options as opts
from prism_replay.formats.reader import read_window
from prism_replay.formats.rows import ReadOptions
from prism_replay.generators.base import GeneratorConfig
from prism_replay.generators.base import generate as generate_trace
from prism_replay.generators.bursty import PRESETS
from prism_replay.generators.kinds import KINDS, config_of, config_of_preset
from prism_replay.lengths import LengthSource
from prism_replay.slo import parse_slos, with_slos
from prism_replay.trace import SECONDS_MAX, TraceRequest, models_of, write_trace

INPUT_TOKENS, OUTPUT_TOKENS = "40:1024", "211:1024"

Models = Annotated[
    str | None,
    typer.Option(help="Names, most popular first; NAME:SHARE fixes a share (production)."),
]
Kind = Annotated[
    str,
    typer.Option(help="production: sessions; bursty: groups and pauses; steady: MuxServe."),
]
Preset = Annotated[
    str | None, typer.Option(help=f"Bursty with the settings of {', '.join(PRESETS)}.")
]
Start = Annotated[float, typer.Option(help="Seconds to skip.", min=0)]
Thin = Annotated[float, typer.Option(help="Fraction of the requests to keep (maf, servegen).")]
Window = Annotated[float | None, typer.Option(help="Seconds to read from --start.", min=0)]


def commands(program: str) -> typer.Typer:
    """Returns an app with these commands, whose examples begin with `program`."""
    app = new_app("Read, measure, transform and generate multi-model traces.")
    for command, example in EXAMPLES.items():
        epilog = f"Example: {program} {command.__name__} {example}"
        app.command(epilog=epilog)(command)
    return app


def generate(
    *,
    out: opts.Out,
    models: Models = None,
    kind: Kind = "production",
    preset: Preset = None,
    seconds: Annotated[float, typer.Option(help="Length, before --time-scale.")] = 3600.0,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s, before --time-scale; default 1 or the preset's."),
    ] = None,
    seed: opts.Seed = 0,
    time_scale: opts.TimeScale = 1.0,
    alpha: Annotated[float, typer.Option(help="Skew of popularity (steady).")] = 0.9,
    gap_cv: Annotated[
        float | None, typer.Option(help="CV of gaps: 1 for Poisson (steady), 2.5 (production).")
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help=f"Median:max tokens of prompts, such as {INPUT_TOKENS}.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help=f"Median:max tokens of outputs, such as {OUTPUT_TOKENS}.")
    ] = None,
    lengths: opts.LengthsOption = None,
    prefix_share: Annotated[
        float,
        typer.Option(help="Fraction that repeats an earlier prompt (production).", min=0, max=1),
    ] = 0.0,
    slo: opts.SloOption = None,
) -> None:
    """Generates a seeded trace.

    production has sessions per model and the statistics that Prism §3.1 reports. bursty is closer
    to its idle intervals; --preset selects one of its traces. steady has MuxServe's power law of
    rates with Poisson or Gamma gaps. Without shares, popularity is a power law in which the last
    60 % of the models get 25 % of the requests. Without token counts, lengths are drawn as in the
    Chatbot Arena sample, for steady as in ShareGPT.
    """
    settings = {
        "seconds": seconds,
        "rate_rps": rate,
        "seed": seed,
        "alpha": alpha,
        "gap_cv": gap_cv,
        "prefix_share": prefix_share,
        "lengths": _lengths(lengths, input_tokens, output_tokens),
    }
    config = _generator(kind, preset, models, settings)
    default, per_model = parse_slos(slo or [])
    requests = with_slos(generate_trace(config), default, per_model)
    unknown = sorted(set(per_model) - set(models_of(requests)))
    if unknown:
        raise ConfigError(f"--slo: {unknown[0]!r} is not a model of the trace")
    save(transforms.scale_time(requests, time_scale), out)


def stats(
    trace: opts.TraceFile,
    *,
    time_scale: opts.TimeScale = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="The trace's length, if it does not end with an arrival.")
    ] = None,
    format_: opts.Format = "prism",
    start: Start = 0.0,
    window: Window = None,
    seed: opts.Seed = 0,
    thin: Thin = 1.0,
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--report", "--html", help="Also write a page with plots.")
    ] = None,
) -> None:
    """Prints popularity, idleness and burstiness, compared with the published values."""
    from prism_replay.report.console import print_stats
    from prism_replay.report.stats import describe

    for path in (json, html):
        opts.check_writable(path)
    if seconds is not None and not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"--seconds {seconds:g}: must be > 0 and <= {SECONDS_MAX:g}")
    options = ReadOptions(seed=seed, start_s=start, seconds=window or 3600.0, thin=thin)
    requests = read_window(trace, format_, options, window)
    requests = transforms.scale_time(requests, time_scale)
    found = describe(requests, seconds)
    print_stats(new_console(), found)
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if html:
        from prism_replay.report.trace_page import write_page

        write_page(trace.name, requests, found, html)
        new_console().print(f"page: {html}")


def convert(
    trace: opts.TraceFile,
    *,
    out: opts.Out,
    models: Annotated[
        str | None,
        typer.Option(help="Models to map onto, most popular first; default: no mapping."),
    ] = None,
    map_: Annotated[str, typer.Option("--map", help=", ".join(transforms.MAPS))] = "popularity",
    format_: opts.Format = "prism",
    to: Annotated[str, typer.Option(help="Format to write: prism or mooncake.")] = "prism",
    only: Annotated[str | None, typer.Option(help="Keep only these models of the trace.")] = None,
    sample_models: Annotated[
        int | None, typer.Option(help="Keep N models, drawn from all ranks of popularity.", min=1)
    ] = None,
    context: Annotated[int | None, typer.Option(help="Clip to this context.", min=2)] = None,
    output_max: Annotated[int | None, typer.Option(help="Longest output.", min=1)] = None,
    length_scale: Annotated[float, typer.Option(help="Multiplies token counts.")] = 1.0,
    start: Start = 0.0,
    window: Window = None,
    rate_scale: opts.RateScale = 1.0,
    time_scale: opts.TimeScale = 1.0,
    limit: opts.Limit = None,
    seed: opts.Seed = 0,
    rate: Annotated[float, typer.Option(help="Requests/s of traces without times.")] = 1.0,
    thin: Thin = 1.0,
    lengths: opts.LengthsOption = None,
    slo: opts.SloOption = None,
) -> None:
    """Converts a public trace to one for the given models.

    Its models are ranked by popularity and split into groups of equal size, one per target, which
    keeps the long tail. Without --slo, the trace keeps its SLOs.
    """
    options = ReadOptions(seed, rate, start_s=start, seconds=window or 3600.0, thin=thin)
    if lengths:
        options = replace(options, lengths=opts.parse_lengths(lengths))
    requests = read_window(trace, format_, options, window)
    requests = (
        transforms.only_models(requests, opts.parse_names("--only", only)) if only else requests
    )
    if sample_models:
        requests = transforms.sample_models(requests, sample_models, seed)
    requests = scaled(requests, rate_scale, time_scale, limit, seed)
    if models:
        requests = transforms.map_onto(requests, list(opts.parse_models(models)), map_, "--map")
    if context:
        rule = transforms.LengthRule(context, length_scale, output_max)
        requests = transforms.fit_lengths(requests, rule)
    elif length_scale != 1.0 or output_max:
        raise ConfigError("--length-scale and --output-max need --context")
    if slo or requests[0].slo_ttft_ms is None:
        requests = with_slos(requests, *parse_slos(slo or []))
    save(requests, out, to)


EXAMPLES: dict[Callable[..., None], str] = {
    generate: "--models a:0.5,b,c --seconds 600 --rate 2 --slo 2000/200 --slo a=1000/100"
    " --out trace.jsonl",
    stats: "traces/demo.jsonl --time-scale 8 --seconds 1200",
    convert: "arena_chat27_vtc.csv --format arena --models tiny-llama,tiny-qwen3 --context 1024"
    " --limit 300 --time-scale 0.5 --out t.jsonl",
}


def scaled(
    trace: list[TraceRequest], rate: float, time: float, limit: int | None, seed: int
) -> list[TraceRequest]:
    found = transforms.scale_rate(trace, rate, seed) if rate != 1.0 else trace
    found = transforms.scale_time(found, time) if time != 1.0 else found
    return transforms.limit(found, limit) if limit else found


def save(requests: list[TraceRequest], out: Path, to: str = "prism") -> None:
    """Writes the trace and prints its requests per model. Raises TraceError, ConfigError."""
    opts.check_writable(out)
    if to == "mooncake":
        from prism_replay.formats.writers import write_mooncake

        write_mooncake(out, requests)
    elif to == "prism":
        write_trace(out, requests)
    else:
        raise ConfigError(f"--to {to!r}: must be prism or mooncake")
    end_s = requests[-1].arrival_s
    counts = Counter(request.model for request in requests)
    shown = ", ".join(f"{name} {counts[name]}" for name in models_of(requests)[:8])
    more = f" and {len(counts) - 8} more models" if len(counts) > 8 else ""
    summary = f"{out}: {len(requests)} requests in {end_s:.1f} s: {shown}{more}"
    new_console().print(summary, soft_wrap=True)


def _generator(
    kind: str, preset: str | None, models: str | None, settings: dict[str, Any]
) -> GeneratorConfig:
    if preset is not None:
        names = None if models is None else opts.parse_names("--models", models)
        return config_of_preset(preset, names, settings)
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind!r} is not one of {', '.join(KINDS)}")
    if models is None:
        raise ConfigError("--models: name at least one model, the most popular first")
    if kind != "production":
        return config_of(kind, opts.parse_names("--models", models), settings)
    shares = opts.parse_models(models)
    fixed = {name: share for name, share in shares.items() if share is not None}
    return config_of(kind, list(shares), {**settings, "shares": fixed})


def _lengths(source: str | None, inputs: str | None, outputs: str | None) -> LengthSource | None:
    """Returns the given lengths; None for the generator's default."""
    if source:
        return opts.parse_lengths(source)
    if inputs or outputs:
        return opts.parse_token_counts(inputs or INPUT_TOKENS, outputs or OUTPUT_TOKENS)
    return None
