"""Latencies on dedicated GPUs and times of activations, which the other studies of Prism stand on:
base SLOs (§7.2) and Figure 9 (§7.4), simulated beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.sim.activation import activation_s
from prism.sim.scenario import load
from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import E2E_MODELS, ENGINE, model_names, row
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial


@dataclass(frozen=True)
class Tail:
    """P99 on a dedicated GPU."""

    ttft_ms: float
    tpot_ms: float


MEASURED = (
    Tail(42.870, 11.463),
    Tail(40.772, 9.607),
    Tail(22.267, 6.097),
    Tail(46.499, 11.231),
    Tail(48.559, 11.084),
    Tail(39.885, 8.796),
    Tail(36.987, 6.115),
    Tail(21.877, 5.484),
)
"""Of E2E_MODELS, from the constants of the published prototype's end-to-end experiment
(Apache-2.0)."""

ACTIVATIONS_S = {("Llama-3.1-8B", 1): 0.7, ("Qwen2.5-14B", 1): 1.3, ("Llama-3.1-70B", 8): 1.5}
NAIVE_14B_S = 7.1
FASTER_14B = 5.5
"""Prism §7.4, Figure 9: with all optimisations, by plain copies, and how much faster."""


def dedicated(lab: Lab) -> Findings:
    trace = lab.sources.styled("arena-chat", model_names(8), lab.pick(1200.0, 120.0), lab.seed)
    names = model_names(len(E2E_MODELS))
    models = [{"name": n, "shape": s} for n, s in zip(names, E2E_MODELS, strict=True)]
    setup = {"gpus": {"type": "h100", "count": 8}, "models": models, "engine": ENGINE}
    config = lab.setup("dedicated", setup, trace)
    found = lab.run([Trial(config, {"policy": "dedicated"})], "dedicated GPUs")[0]
    times = _activations(lab)
    compared = [*_errors(found), *_activation_times(times)]
    table = [row(found, what="all models")]
    table += [{"what": f"activation of {m} at TP {tp}", "s": s} for (m, tp), s in times.items()]
    bars = {"measured": MEASURED, "simulated": _tails(found)}
    plots = {
        metric: Plot(
            f"P99 {metric.upper()} on a dedicated GPU",
            "",
            "ms",
            {
                name: [
                    (f"{n} {s}", getattr(t, f"{metric}_ms"))
                    for n, s, t in zip(names, E2E_MODELS, tails, strict=True)
                ]
                for name, tails in bars.items()
            },
            bars=True,
        )
        for metric in ("ttft", "tpot")
    }
    return Findings(compared, table, plots, [CALIBRATED])


def _tails(found: Measured) -> list[Tail]:
    assert found.summary is not None
    groups = [found.summary.models[name] for name in model_names(len(MEASURED))]
    return [Tail(g.ttft_ms.p99 or 0.0, g.tpot_ms.p99 or 0.0) for g in groups]


def _errors(found: Measured) -> list[Comparison]:
    tails, compared = _tails(found), []
    for shape in dict.fromkeys(E2E_MODELS):
        chosen = [i for i, name in enumerate(E2E_MODELS) if name == shape]
        for metric in ("ttft_ms", "tpot_ms"):
            ours, said = (_median(source, chosen, metric) for source in (tails, MEASURED))
            what = f"{shape}: P99 {metric[:4].upper()}, median of {len(chosen)}"
            source = "published prototype's constants"
            compared.append(findings.value(what, ours, said, source, unit="ms"))
    return compared


def _median(tails: Sequence[Tail], chosen: Sequence[int], metric: str) -> float:
    return float(np.median([getattr(tails[i], metric) for i in chosen]))


def _activations(lab: Lab) -> dict[tuple[str, int], float]:
    """By the simulator's own costs; (Qwen2.5-14B, 0): of a restarted engine's plain load."""
    shapes = list(ACTIVATIONS_S)
    models = [{"name": name, "tp": tp} for name, tp in shapes]
    gpus = {"type": "h100", "count": 8}
    empty: dict[str, Any] = {"gpus": gpus, "models": models, "generate": {"seconds": 60}}
    path = Path(lab.write("activations", empty))
    setup = load(path).setup
    node, times = setup.devices[0].node, {}
    for (name, tp), model in zip(shapes, setup.models, strict=True):
        ranks, how = setup.devices[:tp], setup.activation
        times[name, tp] = activation_s(model, ranks, how, restarts=False, weights_node=node)
        if (name, tp) == ("Qwen2.5-14B", 1):
            whole_s = activation_s(model, ranks, how, restarts=True, weights_node=node)
            times[name, 0] = whole_s - how.restart_s
    return times


def _activation_times(times: dict[tuple[str, int], float]) -> list[Comparison]:
    source = "§7.4, Figure 9"
    compared = [
        findings.value(f"activation of {name} at TP {tp}", times[name, tp], said, source, unit="s")
        for (name, tp), said in ACTIVATIONS_S.items()
    ]
    what = "Qwen2.5-14B loaded by plain copies, without the engine's restart"
    plain_s, fast_s = times["Qwen2.5-14B", 0], times["Qwen2.5-14B", 1]
    return [
        *compared,
        findings.value(what, plain_s, NAIVE_14B_S, source, unit="s"),
        findings.factor(
            "activation of Qwen2.5-14B, over plain copies", plain_s / fast_s, FASTER_14B, source
        ),
    ]


CALIBRATED = (
    "Two parameters are fitted to these rows and used in every study of Prism, for every policy "
    f"alike: {ENGINE['host']} of host time in each step, which has the least median error of TPOT, "
    f"and {ENGINE['request']} before a request is in its queue, the median of what TTFT then lacks."
)
STUDIES = (
    Study(
        "prism-dedicated",
        "Latencies on dedicated GPUs and times of activations, which base SLOs and costs stand on",
        "Prism, §7.2, Figure 9 (§7.4) and its prototype's measured tails",
        "8 models of 1B to 8B, each on an H100-80G of its own, Arena style at rate scale 1",
        "20 minutes of trace; the length and load of the measured runs are not published",
        "The measured rows differ from each other by up to half at one model, of the same shape "
        "and on the same GPU: their loads, which are not published, differ.",
        dedicated,
    ),
)
