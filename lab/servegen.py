"""Simulation of 47 models with the traffic of ServeGen's production clients, on 8 to 32 GPUs.

python -m lab.servegen RATES [--gpus 8,16,24,32] [--seeds 11,23,31]
    [--policies prism,one-place,muxserve++] [--tp set|auto] [--minutes 20] [--out FOLDER]

RATES is `servegen_client_rates.csv.xz`, in one folder with its lengths. A seed draws an hour, 47 of
the clients that send 4 to 7,200 requests in it, and the model of each client: 14 of 1B, 12 of 3B,
13 of 8B, 4 of 14B, 2 of 32B (two GPUs each) and 2 of 70B (four GPUs). With `--tp auto` policies
choose the degrees. The SLOs are a TTFT of 2 s and a TPOT of 100 ms. "one-place" is prism without
copies. Each row has the requests that met both SLOs, P99 TTFT and the number of activations. Means
over the seeds and paired differences from the first policy follow. Setups and traces for `prism-sim
run` are written to `--out`.
"""

from __future__ import annotations

import argparse
import lzma
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars
import yaml

from prism.errors import ConfigError
from prism_replay.formats.rows import ReadOptions
from prism_replay.formats.servegen import WINDOW_S, read_servegen
from prism_replay.intervals import interval
from prism_replay.trace import TraceRequest, write_trace
from prism_sim import simulate

SHAPES = (
    *(("Llama-3.2-1B", 1),) * 14, *(("Llama-3.2-3B", 1),) * 12, *(("Llama-3.1-8B", 1),) * 13,
    *(("Qwen3-14B", 1),) * 4, *(("Qwen3-32B", 2),) * 2, *(("Llama-3.1-70B", 4),) * 2,
)  # fmt: skip
DAY_S = 86_400.0
REQUESTS_PER_HOUR = (4, 7_200)


def drawn(rates: Path, seed: int, seconds: float, folder: Path) -> list[TraceRequest]:
    """Returns the requests of 47 clients (models m00 to m46) in the first `seconds` of an hour."""
    rng = np.random.default_rng([seed, 9])
    packed = rates.read_bytes()
    day = polars.read_csv(lzma.decompress(packed) if rates.suffix == ".xz" else packed)
    begin_s = float(np.min(day["t_s"].to_numpy()))
    first_s = DAY_S * (1 + begin_s // DAY_S) + 3600.0 * int(rng.integers(0, 24))
    name = polars.concat_str("model", polars.lit("-"), "client").alias("name")
    hour = day.with_columns(name).filter(polars.col("t_s").is_between(first_s, first_s + 3599))
    sent = hour.group_by("name").agg(requests=polars.col("rate_rps").sum() * WINDOW_S)
    fit = sent.filter(polars.col("requests").is_between(*REQUESTS_PER_HOUR))["name"].sort()
    chosen = [fit[int(number)] for number in rng.permutation(len(fit))[: len(SHAPES)]]
    part = folder / f"rates-{seed}.csv"
    hour.filter(polars.col("name").is_in(chosen)).drop("name").write_csv(part)
    for lengths in rates.parent.glob("servegen*lengths*"):
        with suppress(FileExistsError):
            (folder / lengths.name).symlink_to(lengths.absolute())
    models = {client: f"m{number:02}" for number, client in enumerate(chosen)}
    return [
        msgspec.structs.replace(request, model=models[request.model])
        for request in read_servegen(part, ReadOptions(seed=seed, seconds=seconds))
    ]


def setup(
    shapes: Sequence[tuple[str, int | str]], policy: str, gpus: int, trace: Path
) -> dict[str, Any]:
    """Returns the setup of models m00, m01 ... of these (shapes, degrees)."""
    copies = {"replicas": {"max": 1}} if policy == "one-place" else {}
    models = [
        {"name": f"m{number:02}", "shape": shape, "tp": tp, **copies}
        for number, (shape, tp) in enumerate(shapes)
    ]
    return {
        "gpus": {"type": "h100", "count": gpus, "nodes": max(1, gpus // 8)},
        "models": models,
        "slo": {"ttft": "2s", "tpot": "100ms"},
        "trace": str(trace.absolute()),
        "policy": "prism" if policy == "one-place" else policy,
    }


def main() -> None:
    parser = options("lab.servegen", str(__doc__))
    parser.add_argument("rates", type=Path)
    parser.add_argument("--tp", choices=("set", "auto"), default="set")
    parser.set_defaults(gpus="8,16,24,32", seeds="11,23,31", policies="prism,one-place,muxserve++")
    asked = parser.parse_args()
    shapes = [(shape, "auto" if asked.tp == "auto" else tp) for shape, tp in SHAPES]
    print_table(asked, shapes, partial(drawn, asked.rates))


def options(prog: str, text: str) -> argparse.ArgumentParser:
    """Makes the parser of the options that `print_table` reads."""
    parser = argparse.ArgumentParser(prog=prog, description=text.splitlines()[0])
    parser.add_argument("--gpus")
    parser.add_argument("--seeds")
    parser.add_argument("--policies")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    return parser


def print_table(
    asked: argparse.Namespace,
    shapes: Sequence[tuple[str, int | str]],
    draw: Callable[[int, float, Path], list[TraceRequest]],
) -> None:
    """Simulates each seed, number of GPUs and policy, and prints a row for each.

    Args:
        draw: Returns the requests of a seed in a time in seconds. May write files to a folder.
    """
    met: dict[tuple[int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        out = asked.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        print(
            "| seed | GPUs | policy | both SLOs % | P99 TTFT s | activations |\n" + "|---" * 6 + "|"
        )
        for seed in map(int, asked.seeds.split(",")):
            trace = out / f"seed-{seed}.jsonl"
            write_trace(trace, draw(seed, asked.minutes * 60, out))
            for gpus in map(int, asked.gpus.split(",")):
                for policy in asked.policies.split(","):
                    config = setup(shapes, policy, gpus, trace)
                    try:
                        percent, rest = row(out, config, f"{gpus}-{policy}")
                    except ConfigError as refused:
                        print(f"| {seed} | {gpus} | {policy} | refused: {refused} | | |")
                        continue
                    met[gpus, policy].append(percent)
                    print(f"| {seed} | {gpus} | {policy} | {percent:.2f} | {rest} |", flush=True)
    print_means(met, asked.policies.split(",")[0])


def print_means(met: Mapping[tuple[int, str], Sequence[float]], first: str) -> None:
    """Prints means over the seeds, and the differences of the first policy from the others, over
    common seeds. Widths are those of 95 % confidence intervals."""
    print(f"\n| GPUs | policy | both SLOs % | {first} less it |\n" + "|---" * 4 + "|")
    for (gpus, policy), values in met.items():
        mean, ours = interval(values), ""
        if policy != first and (gpus, first) in met:
            pairs = zip(met[gpus, first], values, strict=True)
            less = interval([a - b for a, b in pairs])
            ours = f"{less.mean:+.2f} ± {less.half_width:.2f}"
        print(f"| {gpus} | {policy} | {mean.mean:.2f} ± {mean.half_width:.2f} | {ours} |")


def row(out: Path, config: dict[str, Any], name: str) -> tuple[float, str]:
    """Returns the percentage of requests that met both SLOs, and the columns after it."""
    file = out / f"{Path(config['trace']).stem}-{name}.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    made = simulate(file)
    total = made.summary.total
    activations = (made.decisions["kind"] == "activate").sum()
    met = 100 * (total.attainment["1"].all or 0.0)
    return met, f"{(total.ttft_ms.p99 or math.inf) / 1000:.1f} | {activations}"


if __name__ == "__main__":
    main()
