"""Published measurements to compare costs with.

The files are not in the repository; `traces_folder` returns their folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prism.errors import ConfigError

SILICON = "silicon_h100_h200_dense_agg.csv"
SPLITWISE = "splitwise_perf_model.csv"
DEDICATED = "prism_dedicated_latency.csv"
DEDICATED_SUITE = "generate_e2e_benchmark_reqs"
SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "a100-80gb": "a100-80", "h100-80gb": "h100"}


@dataclass(frozen=True)
class ServingRow:
    """Closed-loop benchmark of aiconfigurator's sample: mean TTFT with queueing, and TPOT."""

    gpu: str
    engine: str
    model: str
    tp: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class StepRow:
    """Measurement of one batch of equal prompts without queueing (Splitwise, ISCA '24)."""

    gpu: str
    model: str
    tp: int
    input_tokens: int
    output_tokens: int
    batch: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class DedicatedRow:
    """P99 latencies of a model on a dedicated H100 under Prism's trace."""

    model: str
    ttft_s: float
    tpot_s: float


def traces_folder() -> Path:
    """Returns PRISM_TRACES, or by default shared/traces next to the checkout."""
    return Path(os.environ.get("PRISM_TRACES", Path(__file__).parents[3] / "shared/traces"))


def silicon_rows(folder: Path) -> list[ServingRow]:
    """Returns the rows of SILICON. Raises ConfigError if the file is not as expected."""
    return [_serving_row(row) for row in _rows(folder / SILICON, "silicon_tpot_ms")]


def splitwise_rows(folder: Path) -> list[StepRow]:
    """Returns the rows of Llama-2-70B on GPUs without power cap. Raises ConfigError."""
    rows = _rows(folder / SPLITWISE, "prompt_time")
    return [
        StepRow(
            gpu=SYSTEMS[row["hardware"]],
            model="meta-llama/Llama-2-70B",
            tp=int(row["tensor_parallel"]),
            input_tokens=int(row["prompt_size"]),
            output_tokens=int(row["token_size"]),
            batch=int(row["batch_size"]),
            prefill_s=float(row["prompt_time"]) / 1000,
            decode_s=float(row["token_time"]) / 1000,
        )
        for row in rows
        if row["model"] == "llama2-70b" and row["hardware"] in SYSTEMS
    ]


def dedicated_rows(folder: Path) -> list[DedicatedRow]:
    """Returns the rows of the suite with reliable model names. Raises ConfigError."""
    return [
        DedicatedRow(
            model=row["model_path"].split("_", 2)[2],
            ttft_s=float(row["ttft_s"]),
            tpot_s=float(row["tpot_ms"]) / 1000,
        )
        for row in _rows(folder / DEDICATED, "tpot_ms")
        if row["suite"] == DEDICATED_SUITE
    ]


def _serving_row(row: dict[str, str]) -> ServingRow:
    model = row["model_path"]
    eight_bit = row["precision"] == "fp8" and not model.endswith("FP8")
    return ServingRow(
        gpu=SYSTEMS[row["system"]],
        engine=row["backend"],
        model=f"{model}-FP8" if eight_bit else model,
        tp=int(float(row["tp_size"])),
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=int(float(row["batch_size"])),
        ttft_s=float(row["silicon_ttft_ms"]) / 1000,
        tpot_s=float(row["silicon_tpot_ms"]) / 1000,
    )


def _rows(path: Path, column: str) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if column not in (reader.fieldnames or ()):
                raise ConfigError(
                    f"{path}: does not have column {column!r}; check that it is the right file"
                )
            yield from reader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
