"""`prism-sim calibrate`: what steps cost, by the shipped tables, against measurements, and here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prism.costs.catalog import HOST_S, cost_model, cost_table
from prism.costs.gpus import gpu_spec
from prism.costs.shapes import model_shape
from prism.errors import ConfigError
from prism.units import format_size

app = typer.Typer(
    name="calibrate",
    help="Step costs: show them, compare them with measurements, measure a live engine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
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
    """Print prefill and decode times of a model on a GPU, and where they are from."""
    cost = cost_model(gpu, model, tp, host_ms / 1000)
    shape, spec = model_shape(model), gpu_spec(gpu)
    console = Console()
    console.print(
        f"{shape.name} on {tp} x {spec.name}: weights {format_size(shape.weight_bytes(tp))} of"
        f" {format_size(spec.memory_bytes)} per GPU, KV {format_size(shape.kv_token_bytes(tp))} a"
        f" token; costs from {cost_table(gpu, model, tp).source}",
        soft_wrap=True,
    )
    table = Table("prompt", "prefill (ms)", "batch", f"decode at {CONTEXT_TOKENS} each (ms)")
    for prompt, batch in zip(PROMPTS, BATCHES, strict=True):
        prefill_s, decode_s = cost.prefill_s(prompt), cost.decode_s(batch, batch * CONTEXT_TOKENS)
        table.add_row(str(prompt), f"{prefill_s * 1e3:.2f}", str(batch), f"{decode_s * 1e3:.2f}")
    console.print(table)


@app.command(epilog="Example: prism-sim calibrate validate --out docs/cost-validation.md")
def validate(
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Markdown to write.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of the measurements; default PRISM_TRACES.")
    ] = None,
) -> None:
    """Compare the shipped costs with published measurements, error by group."""
    from prism.costs.measured import traces_folder
    from prism.costs.validate import report

    page = report(traces or traces_folder())
    if out is None:
        print(page)
        return
    try:
        out.write_text(page)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from error
    print(f"report: {out}")
