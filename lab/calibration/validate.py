"""Comparison of the costs with published measurements. Errors are reported without adjustment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer

from lab.calibration import measured
from lab.calibration.closed_loop import ClosedLoop, run_closed_loop
from lab.calibration.measured import DedicatedRow, ServingRow, StepRow
from prism.cli.exit_codes import new_app, run
from prism.errors import ConfigError
from prism_sim.costs.catalog import HOST_S, cost_table, model_shape
from prism_sim.costs.gpus import gpu_spec
from prism_sim.costs.model import CostModel, PromptChunk
from prism_sim.costs.roofline import roofline
from prism_sim.costs.table import TableCost, with_host

KV_MEMORY = 0.88
"""Fraction of a GPU's memory that engines use for weights and KV (SGLang's default)."""
ROUNDS = 10
"""Requests per client of a benchmark, typical for serving benchmarks."""
DEDICATED_PROMPT_TOKENS = 450
DEDICATED_BATCH = 4

Row = TypeVar("Row")

app = new_app()

_TEXT = Path(__file__).with_name("validation.md").read_text()
_HEAD, _SERVING, _STEPS, _DEDICATED = re.split(r"\n(?=## )", _TEXT)


@dataclass(frozen=True)
class Errors:
    """Relative errors of one row, predicted / measured - 1."""

    tpot: float
    tpot_roofline: float
    ttft_together: float
    ttft_spread: float

    @property
    def within(self) -> bool:
        """True if the measured TTFT is between the two predictions, with a tolerance of 10 %."""
        low, high = sorted((self.ttft_together, self.ttft_spread))
        return low <= 0.1 and high >= -0.1


def report(folder: Path) -> str:
    """Returns the text of docs/cost-validation.md. Raises ConfigError if a file is missing."""
    sections = [
        _HEAD.format(host_ms=HOST_S * 1000),
        serving_section(measured.silicon_rows(folder)),
        step_section(measured.splitwise_rows(folder)),
        dedicated_section(measured.dedicated_rows(folder)),
    ]
    return "\n".join(sections)


@cache
def grid_cost(gpu: str, model: str, tp: int, host_s: float = HOST_S) -> CostModel:
    return TableCost(with_host(cost_table(gpu, model, tp), host_s))


@cache
def roofline_cost(gpu: str, model: str, tp: int) -> CostModel:
    return TableCost(with_host(roofline(gpu_spec(gpu), model_shape(model), tp), HOST_S))


def serving_errors(row: ServingRow) -> Errors:
    """Returns the errors for clients that start together or spread over one request's time."""
    load = closed_loop_of(row)
    grid = grid_cost(row.gpu, row.model, row.tp)
    together = run_closed_loop(grid, load)
    request_s = together.ttft_s + together.tpot_s * (row.output_tokens - 1)
    spread = run_closed_loop(grid, replace(load, spread_s=request_s))
    bound = run_closed_loop(roofline_cost(row.gpu, row.model, row.tp), load)
    return Errors(
        tpot=together.tpot_s / row.tpot_s - 1,
        tpot_roofline=bound.tpot_s / row.tpot_s - 1,
        ttft_together=together.ttft_s / row.ttft_s - 1,
        ttft_spread=spread.ttft_s / row.ttft_s - 1,
    )


def closed_loop_of(row: ServingRow) -> ClosedLoop:
    shape = model_shape(row.model)
    kv_bytes = gpu_spec(row.gpu).memory_bytes * KV_MEMORY - shape.weight_bytes(row.tp)
    kv_tokens = kv_bytes / shape.kv_token_bytes(row.tp)
    return ClosedLoop(
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        concurrency=row.concurrency,
        requests=ROUNDS * row.concurrency,
        batch_max=max(1, int(kv_tokens / (row.input_tokens + row.output_tokens))),
        mixed=row.engine != "sglang",
    )


def serving_section(rows: Sequence[ServingRow]) -> str:
    errors = [serving_errors(row) for row in rows]
    pairs = list(zip(rows, errors, strict=True))
    groups = grouped(pairs, lambda pair: _serving_group(pair[0]))
    lines = [
        _serving_line(name, [error for _, error in members]) for name, members in groups.items()
    ]
    return _SERVING.format(lines="\n".join([_serving_line("**all**", errors), *lines]))


def step_section(rows: Sequence[StepRow]) -> str:
    groups = grouped(rows, lambda row: f"{row.gpu} | {row.tp} | {_batches(row)}")
    return _STEPS.format(lines="\n".join(_step_line(*group) for group in groups.items()))


def dedicated_section(rows: Sequence[DedicatedRow]) -> str:
    return _DEDICATED.format(
        prompt=DEDICATED_PROMPT_TOKENS,
        batch=DEDICATED_BATCH,
        lines="\n".join(_dedicated_line(row) for row in rows),
    )


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


def _serving_group(row: ServingRow) -> str:
    return f"{row.gpu} {row.engine} {row.model.rpartition('/')[2]} TP {row.tp}"


def _serving_line(name: str, errors: Sequence[Errors]) -> str:
    tpot = [error.tpot for error in errors]
    cells = [
        name,
        str(len(errors)),
        _percent(_size(tpot)),
        _signed(tpot),
        _percent(_size([error.tpot_roofline for error in errors])),
        _signed([error.ttft_together for error in errors]),
        _signed([error.ttft_spread for error in errors]),
        _percent(np.mean([error.within for error in errors])),
    ]
    return f"| {' | '.join(cells)} |"


def _batches(row: StepRow) -> str:
    return "1" if row.batch == 1 else "2-64"


def _step_line(name: str, rows: Sequence[StepRow]) -> str:
    predicted = [_steps(row) for row in rows]
    pairs = list(zip(predicted, rows, strict=True))
    prefill = [steps[0] / row.prefill_s - 1 for steps, row in pairs]
    decode = [steps[1] / row.decode_s - 1 for steps, row in pairs]
    missing_ms = np.median([row.decode_s - steps[1] for steps, row in pairs]) * 1000
    return f"| {name} | {len(rows)} | {_signed(prefill)} | {_signed(decode)} | {missing_ms:.1f} |"


def _steps(row: StepRow) -> tuple[float, float]:
    """Returns the seconds of the batch's prefill and of a mean decode step."""
    cost = grid_cost(row.gpu, row.model, row.tp)
    prefill_s = cost.step_s([PromptChunk(row.input_tokens)] * row.batch, 0, 0)
    run_s = cost.decode_run_s(row.batch, row.batch * row.input_tokens, row.output_tokens)
    return prefill_s, run_s / row.output_tokens


def _dedicated_line(row: DedicatedRow) -> str:
    cost = grid_cost("h100", row.model, 1)
    ttft_s = cost.prefill_s(DEDICATED_PROMPT_TOKENS)
    tpot_s = cost.decode_s(DEDICATED_BATCH, DEDICATED_BATCH * DEDICATED_PROMPT_TOKENS)
    times = (row.ttft_s, ttft_s, row.tpot_s, tpot_s, row.tpot_s - tpot_s)
    return f"| {row.model} | {' | '.join(f'{time_s * 1000:.1f}' for time_s in times)} |"


def _size(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))


def _signed(errors: Sequence[float]) -> str:
    return f"{np.median(errors):+.0%}"


def _percent(value: float | np.floating[np.typing.NBitBase]) -> str:
    return f"{value:.0%}"


@app.command(epilog="Example: python -m lab.calibration.validate --out docs/cost-validation.md")
def validate(
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Markdown to write.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of the measurements; default PRISM_TRACES.")
    ] = None,
) -> None:
    """Compares the shipped costs with published measurements, by group."""
    page = report(traces or measured.traces_folder())
    if out is None:
        print(page)
        return
    try:
        out.write_text(page)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from error
    print(f"report: {out}")


if __name__ == "__main__":
    run(lambda: app(prog_name="python -m lab.calibration.validate"), "validate")
