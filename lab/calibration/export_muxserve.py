"""Exports MuxServe's measured steps to a file of cost tables in prism-sim's wheel.

    python -m lab.calibration.export_muxserve --steps muxserve_llama_a100_steps.csv.xz \\
        --out prism_sim/costs/data/muxserve.json.gz

The steps are those of `llama.json` in MuxServe's repository (Apache-2.0): rows
of model, gpus, sm_percent, batch, tokens (of each request), prefill_ms and decode_ms, which are -1
where memory was short. The fit is that of `prism-sim calibrate engine`. Outliers, such as decode
steps that took ten times as long as their neighbours, do not move it.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from prism_sim.costs.catalog import cost_table
from prism_sim.costs.fit import Fitted, MeasuredStep, fit
from prism_sim.costs.grid import Grid, write_grid
from prism_sim.costs.model import Row

Times = dict[tuple[int, MeasuredStep], float]
"""(SM percent, step with all SMs) -> seconds."""
GPU = "a100-80"
COMMIT = "223148033454e4740f4b4617c72910c370a5604b"
PREFILL_MAX = 8192
"""Most tokens of a prefill that is used. Larger ones took up to 3.5 times as long for twice the
tokens."""


def export(
    steps: Annotated[Path, typer.Option(help="CSV of the steps, .xz.")],
    out: Annotated[Path, typer.Option(help="File to write, .json.gz.")],
) -> None:
    """Writes a table for each model and degree of tensor parallelism, and prints its errors."""
    fits = [fitted(model, tp, times) for (model, tp), times in read(steps).items()]
    tables = tuple(each.table for each in fits)
    write_grid(out, Grid(package="MuxServe", version=COMMIT, license="Apache-2.0", tables=tables))
    print(f"{out}: {len(tables)} tables, {out.stat().st_size} bytes")
    errors = np.abs(np.concatenate([each.errors for each in fits]))
    print(
        f"median error {np.median(errors):.1%}, mean {errors.mean():.1%}, worst {errors.max():.0%}"
    )


def read(steps: Path) -> dict[tuple[str, int], Times]:
    """Returns the times of each (model, TP degree)."""
    rows: dict[tuple[str, int], dict[tuple[int, bool, int, int], float]] = {}
    with lzma.open(steps, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            percent, batch, length = (int(row[key]) for key in ("sm_percent", "batch", "tokens"))
            of_model = rows.setdefault((row["model"], int(row["gpus"])), {})
            of_model[percent, True, batch, length] = float(row["prefill_ms"]) / 1000
            of_model[percent, False, batch, length] = float(row["decode_ms"]) / 1000
    return {key: _times(of_model) for key, of_model in rows.items()}


def _times(rows: Mapping[tuple[int, bool, int, int], float]) -> Times:
    found: Times = {}
    for (percent, prompt, batch, length), seconds in rows.items():
        whole_s, tokens = rows[100, prompt, batch, length], batch * length
        if min(seconds, whole_s) <= 0 or (prompt and tokens > PREFILL_MAX):
            continue
        step = MeasuredStep(prompt, tokens if prompt else batch, 0 if prompt else tokens, whole_s)
        found[percent, step] = seconds
    return found


def fitted(model: str, tp: int, times: Times) -> Fitted:
    """Returns the table and its errors with all SMs.

    What a decode step of one request takes in addition to the kernels of the shipped table is host
    time: with eight GPUs most of the step, which hardly depends on the SM share there.
    """
    source = f"MuxServe {COMMIT[:8]}, measured on A100-80G"
    found = fit([step for percent, step in times if percent == 100], GPU, model, tp, source)
    table = found.table
    host_s = max(0.0, table.dense_s[0] - cost_table(GPU, model, tp).dense_s[0])
    shares = sorted({percent for percent, _ in times})
    prefill, decode = (
        tuple(slower(times, prompt, tokens, shares) for tokens in table.dense_tokens)
        for prompt in (True, False)
    )
    changed = msgspec.structs.replace(
        table,
        dense_s=tuple(seconds - host_s for seconds in table.dense_s),
        host_s=host_s,
        prompt_s=table.request_s,
        request_s=0.0,
        sm_shares=tuple(share / 100 for share in shares),
        sm_prefill=prefill,
        sm_decode=decode,
    )
    return Fitted(changed, found.errors)


def slower(times: Times, prompt: bool, tokens: float, shares: list[int]) -> Row:
    """Returns the factor on the time of a step of `tokens`, or of the nearest number measured, for
    each share: the median, and at least that of every larger share."""
    measured = {step.tokens for _, step in times if step.prompt == prompt}
    nearest = min(measured, key=lambda count: abs(count - tokens))
    factors = [
        float(
            np.median(
                [
                    seconds / step.seconds
                    for (percent, step), seconds in times.items()
                    if percent == share and step.prompt == prompt and step.tokens == nearest
                ]
            )
        )
        for share in shares
    ]
    return tuple(round(max(factors[i:]), 3) for i in range(len(factors)))


if __name__ == "__main__":
    typer.run(export)
