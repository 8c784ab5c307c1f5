"""MuxServe on ChatLMSYS: Figure 7 (§4.3), at the rates and with the placements of its testbed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from lab.papers.ablations.mux_published import DAY_S
from lab.papers.muxserve import muxserve_setup as setup
from lab.papers.muxserve.muxserve_overall import PER_MODEL, RPS, SLO, highest_attainment
from lab.papers.study import findings
from lab.papers.study.a100 import slo
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, Points, best_ratio, cut, lines, ratio_at, study_of
from lab.papers.study.trial import TrialOutcome
from lab.papers.study.tuning import Systems, simulated
from prism_replay.lengths import ARENA, Lengths
from prism_replay.results import GroupSummary
from prism_replay.trace import Trace
from prism_sim.costs.grid import MUXSERVE, read_grid, write_grid
from prism_sim.costs.table import with_host

PUBLISHED_CHAT = {"spatial": 1.38, "temporal": 1.46}
"""Baseline -> maximum factor in throughput (§4.3)."""
QUITE_BAD_AT = 4.75
"""Rate at which temporal sharing is called "quite bad" (§4.3: 4.8)."""
RATES = {2.97: 500, 4.75: 800, 7.13: 1200, 9.5: 1600, 11.88: 2000}
"""Requests per second and model -> condensation of the trace."""
INPUT_PART = 100.17 / (100.17 + 261.31)
"""Part of the tokens that are input, by the mean lengths of the testbed's workload."""
ARENA_MEANS = (136.0, 256.0)
"""Mean input and output tokens of ARENA."""
PLACED: Systems = {
    "muxserve": ("muxserve", "published"),
    "spatial": ("dedicated", "published"),
    "temporal": ("muxserve", "published-fcfs"),
}
SOURCE = "§4.3, Figure 7"
MEASURED_SOURCE = "Figure 7's data"
LATER_S = 5e-3
"""Time between steps, in an ablation: on the testbed, the two 7B models with the fewest requests
took 3 to 5 ms more per token alone on a GPU than their steps in the profile."""
CHANGED_AT = 4.75
"""Rate of the ablation."""
OURS = ", our placement"
WITHIN = 0.25
"""Largest relative difference of a figure that agrees with the measured one."""
RESULTS = Path(__file__).with_name("chatlmsys_results.csv")
Row = Mapping[str, str]
Measured = Mapping[tuple[str, float], list[Row]]
"""(System, requests per second and model) -> rows of its models."""
MEASURES: dict[str, tuple[str, Callable[[GroupSummary], float | None]]] = {
    "mean TTFT (s)": ("ttft_mean_s", lambda found: found.ttft_ms.mean),
    "P99 TTFT (s)": ("ttft_p99_s", lambda found: found.ttft_ms.p99),
    "mean TPOT (s)": ("tpot_mean_s", lambda found: found.tpot_ms.mean),
    "P99 TPOT (s)": ("tpot_p99_s", lambda found: found.tpot_ms.p99),
    "P99 latency (s)": ("latency_p99_s", lambda found: found.e2e_ms.p99),
}
"""Measure of a model -> (column, ours in ms)."""


def read_measured() -> Measured:
    """Returns what the testbed measured, from MuxServe's repository (Apache-2.0)."""
    rate_of = {condense: rate for rate, condense in RATES.items()}
    found: dict[tuple[str, float], list[Row]] = {}
    with RESULTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["system"], rate_of[int(row["condense"])]), []).append(row)
    return found


def chat(lab: Lab) -> Findings:
    measured = read_measured()
    rows = sorted(measured["muxserve", 2.97], key=lambda row: -int(row["requests"]))
    models = [
        setup.PopularModel(row["llm"], row["model"], rank, float(row["requests"]))
        for rank, row in enumerate(rows)
    ]
    longer = {row["llm"]: _lengths(row) for row in rows}
    tuned = setup.tuned_systems(lab)
    setups: dict[float, str] = {}
    config = {**setup.cluster(models, 32), "patience": "10m"}
    for rate in lab.pick(tuple(RATES), (2.97, CHANGED_AT)):
        seconds = lab.pick(DAY_S / RATES[rate], 1.0)
        trace = setup.drawn_by_share(lab, models, rate * len(models), seconds, longer)
        setups[rate] = lab.setup(f"rate{rate:g}", config, trace)
        if rate == CHANGED_AT:
            later = {
                CHANGED_AT: lab.setup("peak", {**config, **_later(lab)}, peaked(trace, seconds))
            }
    placed, changed = simulated(lab, setups, PLACED), simulated(lab, later, PLACED)
    searched = simulated(lab, setups, setup.SYSTEMS, tuned)
    compared = [*_as_measured(placed, measured), *_causes(placed, changed, measured)]
    for label, points in (("", placed), (OURS, searched)):
        compared += _said(lines(points, throughput), lines(points, slo), label)
    points = {
        x: {**placed[x], **{name + OURS: found for name, found in searched[x].items()}}
        for x in setups
    }
    plots = {
        "throughput": Plot("ChatLMSYS", PER_MODEL, RPS, lines(points, throughput)),
        "slo": Plot("ChatLMSYS", PER_MODEL, SLO, lines(points, slo)),
    }
    return study_of(points, compared, plots, [setup.FAIR_TUNED, *tuned.log])


def _lengths(row: Row) -> Lengths:
    """Returns the Chatbot Arena sample's lengths with the mean of the model's tokens.

    Where a GPU is not busy, the measured P90, P95 and P99 latencies over TPOT have its tail.
    """
    tokens = float(row["tokens_per_s"]) / float(row["throughput_rps"])
    inputs, outputs = tokens * INPUT_PART, tokens * (1 - INPUT_PART)
    return setup.longer(ARENA, inputs / ARENA_MEANS[0], outputs / ARENA_MEANS[1])


def _later(lab: Lab) -> dict[str, Any]:
    """Returns a setup's steps that take LATER_S more."""
    grid = read_grid(MUXSERVE)
    tables = tuple(with_host(table, table.host_s + LATER_S) for table in grid.tables)
    path = lab.folder / "later.json.gz"
    write_grid(path, msgspec.structs.replace(grid, tables=tables))
    return {"cost_files": [str(path.resolve())]}


def peaked(trace: Trace, seconds: float) -> Trace:
    """Returns the trace with a rate that rises and falls once, up to about three times its mean.

    Half a day of chats has hours with more of them, which Poisson arrivals lack.
    """
    places = np.linspace(0, 1, 1001)
    until = np.cumsum(0.15 + np.exp(-(((places - 0.5) / 0.18) ** 2)))
    moved = np.interp([r.arrival_s / seconds for r in trace], until / until[-1], places)
    pairs = zip(trace, (moved * seconds * 1000).tolist(), strict=True)
    return [msgspec.structs.replace(r, timestamp=round(ms)) for r, ms in pairs]


def throughput(found: TrialOutcome) -> float | None:
    """Returns the throughput as the testbed's scripts compute it: of each model its requests over
    the time until its last one has ended, averaged by requests."""
    requests = sum(model.requests for model in found.models.values())
    rates = [(m.requests, m.requests / m.ended_s) for m in found.models.values()]
    return sum(n * rate for n, rate in rates) / requests if requests else None


def _as_measured(points: Points, measured: Measured) -> list[Statement]:
    """Compares the figures with the measured ones, with the testbed's placements."""
    compared: list[Statement] = []
    for system in PLACED:
        said = {x: measured[system, x] for x in points}
        ours = {x: throughput(found[system]) for x, found in points.items()}
        rates = {x: _mean(rows, "throughput_rps") for x, rows in said.items()}
        compared.append(near(f"{system}: throughput (req/s)", ours, rates))
        for what, (column, of) in MEASURES.items():
            ours = {x: _mean_of(found[system], of) for x, found in points.items()}
            figures = {x: _mean(rows, column) for x, rows in said.items()}
            compared.append(near(f"{system}: {what}, mean over the models", ours, figures))
    for baseline in ("spatial", "temporal"):
        found = lines(points, throughput)
        for x in points:
            best, base = (_mean(measured[s, x], "throughput_rps") for s in ("muxserve", baseline))
            what = f"throughput, MuxServe over {baseline}, at {x:g} req/s per model"
            ratio = ratio_at(found, x, "muxserve", baseline)
            compared.append(findings.factor(what, ratio, best / base, MEASURED_SOURCE))
    return compared


def _causes(placed: Points, changed: Points, measured: Measured) -> list[Statement]:
    """Compares with the ablation's figures: nearer to the measured ones, or not."""
    compared = []
    for system in PLACED:
        pair = [points[CHANGED_AT][system] for points in (placed, changed)]
        rows = measured[system, CHANGED_AT]
        measures = {"throughput (req/s)": ("throughput_rps", [throughput(each) for each in pair])}
        for what in ("mean TTFT (s)", "mean TPOT (s)"):
            column, of = MEASURES[what]
            measures[what] = (column, [_mean_of(each, of) for each in pair])
        for what, (column, values) in measures.items():
            said, (before, after) = _mean(rows, column), values
            if before is None or after is None:
                continue
            nearer = abs(after - said) < abs(before - said)
            text = "in its direction" if nearer else "is not the cause"
            change = f"at {CHANGED_AT:g}, {LATER_S * 1000:g} ms more a step and a peak"
            name = f"ablation: {system}: {what} {change}"
            made = Statement(name, "", f"{said:.3g}", text, "ours")
            compared.append(findings.noted(made, {"as run": before, "changed": after}))
    return compared


def near(
    what: str, ours: Mapping[float, float | None], measured: Mapping[float, float]
) -> Statement:
    """Returns a statement that holds if the figures are WITHIN of the measured ones at each
    rate."""
    known = {x: value for x, value in ours.items() if value is not None}
    holds = all(abs(value - measured[x]) <= WITHIN * measured[x] for x, value in known.items())
    said = ", ".join(f"{value:.3g} at {x:g}" for x, value in measured.items())
    figures = {f"at {x:g}": value for x, value in known.items()}
    return findings.claim(what, holds if known else None, figures, said, MEASURED_SOURCE)


def _mean(rows: Sequence[Row], column: str) -> float:
    """Returns the mean over the models by requests."""
    weights = [int(row["requests"]) for row in rows]
    return fmean([float(row[column]) for row in rows], weights)


def _mean_of(found: TrialOutcome, of: Callable[[GroupSummary], float | None]) -> float | None:
    """Returns the mean over the models by requests, in s."""
    if found.summary is None:
        return None
    groups = [g for g in found.summary.models.values() if of(g) is not None]
    return fmean([of(g) or 0.0 for g in groups], [g.requests for g in groups]) / 1000


def _said(rates: Lines, shares: Lines, label: str) -> list[Statement]:
    """Compares the statements of the paper's text."""
    compared: list[Statement] = []
    for name, said in PUBLISHED_CHAT.items():
        what = f"throughput, MuxServe over {name}"
        best = best_ratio(rates, "muxserve", name)
        compared.append(findings.factor(f"{what}, at most{label}", best, said, SOURCE))
    compared.append(highest_attainment(label, shares, "always", SOURCE))
    return [
        *compared,
        temporal_is_worst(cut(rates, {QUITE_BAD_AT}), cut(shares, {QUITE_BAD_AT}), label),
    ]


def temporal_is_worst(rates: Lines, shares: Lines, label: str = "") -> Statement:
    """Compares temporal sharing, which the paper calls "quite bad" at QUITE_BAD_AT.

    The statement is read as: worse than both others in both measures.
    """
    x = rates["temporal"][-1][0]
    values = [
        {name: y for name, line in found.items() if (y := line[-1][1]) is not None}
        for found in (rates, shares)
    ]
    holds = None
    if all(len(by_name) == len(setup.SYSTEMS) for by_name in values):
        holds = all(
            findings.is_worse(v["temporal"], v[name])
            for v in values
            for name in v
            if name != "temporal"
        )
    ours = {
        f"{unit} {name}": v
        for unit, by_name in zip(("req/s", "% SLO attainment"), values, strict=True)
        for name, v in by_name.items()
    }
    what = (
        f"temporal is worse than both others at {x:g} req/s per model, in throughput and"
        f" attainment{label}"
    )
    return findings.claim(what, holds, ours, '"quite bad"', SOURCE)
