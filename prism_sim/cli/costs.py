"""`prism-sim calibrate`: shows the shipped step costs and measures those of a live engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from prism.cli.terminal import new_console
from prism.config.schema.units import format_size
from prism.errors import ConfigError
from prism_replay.cli.options import ApiKey, CaFile, Url, check_writable, endpoint
from prism_sim.costs.catalog import HOST_S, cost_model, cost_table, model_shape
from prism_sim.costs.fit import MeasuredStep
from prism_sim.costs.gpus import gpu_spec

app = typer.Typer(
    name="calibrate",
    help="Show the costs of steps, or measure those of a live engine.",
    no_args_is_help=True,
)

PROMPTS = (128, 512, 2048, 8192)
BATCHES = (1, 8, 32, 128)
CONTEXT_TOKENS = 1000


@app.command(epilog="Example: prism-sim calibrate show --gpu h100 --model Llama-3.1-8B --tp 2")
def show(
    *,
    gpu: Annotated[str, typer.Option(help="GPU type.")],
    model: Annotated[str, typer.Option(help="Model, by its public name.")],
    tp: Annotated[int, typer.Option(help="GPUs per model.", min=1)] = 1,
    host_ms: Annotated[float, typer.Option(help="Host time per step.", min=0)] = HOST_S * 1000,
) -> None:
    """Prints prefill and decode times of a model on a GPU, and their source."""
    cost = cost_model(gpu, model, tp, host_ms / 1000)
    shape, spec = model_shape(model), gpu_spec(gpu)
    console = new_console()
    state_bytes = shape.kept_by_rank(tp).state_bytes() if shape.state_bytes() else 0
    state = f" and {format_size(state_bytes)} a request" if state_bytes else ""
    console.print(
        f"{shape.name} on {tp} x {spec.name}: weights {format_size(shape.weight_bytes(tp))} of"
        f" {format_size(spec.memory_bytes)} per GPU, KV {format_size(shape.kv_token_bytes(tp))} a"
        f" token{state}; costs from {cost_table(gpu, model, tp).source}",
        soft_wrap=True,
    )
    table = Table("prompt", "prefill (ms)", "batch", f"decode at {CONTEXT_TOKENS} each (ms)")
    for prompt, batch in zip(PROMPTS, BATCHES, strict=True):
        prefill_s, decode_s = cost.prefill_s(prompt), cost.decode_s(batch, batch * CONTEXT_TOKENS)
        table.add_row(str(prompt), f"{prefill_s * 1e3:.2f}", str(batch), f"{decode_s * 1e3:.2f}")
    console.print(table)


@app.command(
    epilog="Example: prism-sim calibrate engine --url http://127.0.0.1:8000 --model smollm2-135m "
    "--gpu host --prompts 32,64,128,256,512 --batches 1,2,4,8 --out costs.json"
)
def engine(
    *,
    url: Url,
    model: Annotated[str, typer.Option(help="Model to measure.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to which the table is added.")],
    gpu: Annotated[str, typer.Option(help="Name of the GPU type in the table.")] = "host",
    tp: Annotated[int, typer.Option(help="GPUs that serve the model.", min=1)] = 1,
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "32,64,128,256,512,1024,2048",
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,2,4,8,16",
    output_tokens: Annotated[int, typer.Option(help="Tokens of a decode.", min=4)] = 32,
    repeats: Annotated[int, typer.Option(help="Measurements per point.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    token_ids: Annotated[str, typer.Option(help="Range of synthetic token ids.")] = "100-1000",
    api_key: ApiKey = "",
    cacert: CaFile = None,
) -> None:
    """Measures an idle live engine, on a GPU or a CPU, and writes its table of step costs.

    Simulations read the table through `cost_files`. The fit's error at every point is printed.
    """
    from prism_replay.live.prompts import PromptSource, parse_token_range
    from prism_sim.costs.calibrate import CalibrationPlan, calibrate, save

    check_writable(out)
    plan = CalibrationPlan(
        model=model,
        prompts=parse_counts("--prompts", prompts),
        batches=parse_counts("--batches", batches),
        output_tokens=output_tokens,
        repeats=repeats,
        source=PromptSource(seed, *parse_token_range(token_ids)),
    )
    steps, fitted = calibrate(endpoint(url, api_key, cacert), plan, gpu, tp, _print_step)
    save(out, fitted.table)
    table = Table("step", "tokens", "context", "measured (ms)", "error of the fit")
    for step, error in zip(steps, fitted.errors, strict=True):
        kind, time_ms = "prompt" if step.prompt else "decode", f"{step.seconds * 1e3:.2f}"
        table.add_row(kind, str(step.tokens), str(step.context_tokens), time_ms, f"{error:+.1%}")
    new_console().print(table)
    new_console().print(f"{out}: {fitted.table.name}, {fitted.table.source}", soft_wrap=True)


def _print_step(step: MeasuredStep) -> None:
    """Prints a measured step to stderr as progress, since a calibration on a CPU takes minutes."""
    kind = "prompt of" if step.prompt else "decode of"
    context = "" if step.prompt else f" at {step.context_tokens} tokens of context"
    text = f"{kind} {step.tokens}{context}: {step.seconds * 1e3:.2f} ms"
    new_console(stderr=True).print(text, highlight=False)


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Parses a list such as `"32,64"` into sorted numbers. Raises ConfigError."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r}: not a list of whole numbers such as 32,64"
        ) from error
    if counts[0] < 1:
        raise ConfigError(f"{option} {text!r}: numbers must be > 0")
    return counts
