"""Calibration of the studies of Prism: simulated figures against measured ones.

These are latencies on dedicated GPUs for base SLOs (§7.2), activation times (Figure 9), and Prism's
baseline (Table 5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from msgspec import structs

from lab.papers.prism.prism_setup import E2E_MODELS, ENGINE, model_names
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, row
from lab.papers.study.trial import Trial, TrialOutcome
from prism_sim.cli.options import EXAMPLES
from prism_sim.cluster.activation import activation_s
from prism_sim.scenario.scenario import load

MEASURED = {
    "ttft": (42.870, 40.772, 22.267, 46.499, 48.559, 39.885, 36.987, 21.877),
    "tpot": (11.463, 9.607, 6.097, 11.231, 11.084, 8.796, 6.115, 5.484),
}
"""Metric -> P99 in ms of each of E2E_MODELS on dedicated GPUs: constants of the published
prototype's end-to-end experiment (Apache-2.0)."""

ACTIVATIONS_S = {("Llama-3.1-8B", 1): 0.7, ("Qwen2.5-14B", 1): 1.3, ("Llama-3.1-70B", 8): 1.5}
NAIVE_14B_S = 7.1
FASTER_14B = 5.5
"""Activation times of Prism §7.4, Figure 9: with all optimisations, by plain copies, and the factor
between both."""


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
    labels, ours = [f"{n} {s}" for n, s in zip(names, E2E_MODELS, strict=True)], _tails(found)
    plots = {}
    for metric, measured in MEASURED.items():
        bars: Lines = {
            "measured": list(zip(labels, measured, strict=True)),
            "simulated": list(zip(labels, ours[metric], strict=True)),
        }
        title = f"P99 {metric.upper()} on a dedicated GPU"
        plots[metric] = Plot(title, "", "ms", bars, bars=True)
    return Findings(compared, table, plots, [CALIBRATED])


def _tails(found: TrialOutcome) -> dict[str, list[float]]:
    assert found.summary is not None
    groups = [found.summary.models[name] for name in model_names(len(E2E_MODELS))]
    return {
        "ttft": [group.ttft_ms.p99 or 0.0 for group in groups],
        "tpot": [group.tpot_ms.p99 or 0.0 for group in groups],
    }


def _errors(found: TrialOutcome) -> list[Statement]:
    tails, compared = _tails(found), []
    for shape in dict.fromkeys(E2E_MODELS):
        chosen = [i for i, name in enumerate(E2E_MODELS) if name == shape]
        for metric in MEASURED:
            ours, said = (
                float(np.median([each[metric][i] for i in chosen])) for each in (tails, MEASURED)
            )
            what = f"{shape}: P99 {metric.upper()}, median of {len(chosen)}"
            source = "published prototype's constants"
            compared.append(findings.value(what, ours, said, source, unit="ms"))
    return compared


def _activations(lab: Lab) -> dict[tuple[str, int], float]:
    """Returns (model, TP) -> activation time by the simulator's costs.

    (Qwen2.5-14B, 0) is the plain load of a restarted engine.
    """
    shapes = list(ACTIVATIONS_S)
    models = [{"name": name, "tp": tp} for name, tp in shapes]
    gpus = {"type": "h100", "count": 8}
    empty: dict[str, Any] = {"gpus": gpus, "models": models, "generate": {"seconds": 60}}
    path = Path(lab.write("activations", empty))
    setup = load(path).setup
    node, settings, times = setup.devices[0].node, setup.activation, {}
    for (name, tp), model in zip(shapes, setup.models, strict=True):
        ranks = setup.devices[:tp]
        times[name, tp] = activation_s(model, ranks, settings, restarts=False, weights_node=node)
        if (name, tp) == ("Qwen2.5-14B", 1):
            whole_s = activation_s(model, ranks, settings, restarts=True, weights_node=node)
            times[name, 0] = whole_s - settings.restart_s
    return times


def _activation_times(times: dict[tuple[str, int], float]) -> list[Statement]:
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
    "Two parameters are fitted to these rows and used in every study of Prism for every policy: "
    f"{ENGINE['host']} of host time in each step, which has the smallest median error of TPOT, and "
    f"{ENGINE['request']} before a request is in its queue, the median of the remaining TTFT."
)


# --- Table 5 -----------------------------------------------------------------------------

SYSTEMS = ("muxserve++", "muxserve")
PUBLISHED: dict[str, tuple[float, float]] = {
    "mean end to end (s)": (5.25, 7.40),
    "P95 end to end (s)": (12.09, 18.85),
    "mean TTFT (ms)": (89.0, 1470.0),
    "P95 TTFT (ms)": (320.0, 11040.0),
    "mean TPOT (ms)": (18.82, 21.21),
    "P95 TPOT (ms)": (33.97, 31.95),
    "requests per second": (7.98, 7.97),
    "tokens per second": (3353.09, 3363.53),
}
"""Figure -> its values for SYSTEMS."""
BETTER = ("mean end to end (s)", "P95 end to end (s)", "mean TTFT (ms)", "mean TPOT (ms)")
"""Figures in which MuxServe++ is better, whose factor is compared as well."""
SOURCE = "Table 5 (A.2)"
FIXED = "with fixed shares of the compute"
"""Ablation of MuxServe."""


def calibration(lab: Lab) -> Findings:
    config: dict[str, Any] = yaml.safe_load((EXAMPLES / "muxserve_calibration.yaml").read_text())
    config["generate"]["seconds"] = lab.pick(600, 30)
    path = lab.write("calibration", config)
    trials = {name: Trial(path, {"policy": name, "seed": lab.seed}) for name in SYSTEMS}
    trials[FIXED] = structs.replace(trials["muxserve"], variant="fixed-sm")
    found = dict(zip(trials, lab.run(list(trials.values()), "calibration"), strict=True))
    ours = {name: _figures(one) for name, one in found.items()}
    plots = {}
    for what, unit, key in (("latency", "s", "end to end (s)"), ("TPOT", "ms", "TPOT (ms)")):
        bars: Lines = {
            "ours": [(name, ours[name][f"mean {key}"]) for name in SYSTEMS],
            "published": list(zip(SYSTEMS, PUBLISHED[f"mean {key}"], strict=True)),
        }
        plots[what] = Plot(f"Mean {what}", "", unit, bars, bars=True)
    rows = [row(one, policy=name) for name, one in found.items()]
    return Findings(_compared(ours), rows, plots, [BUDGET])


def _figures(found: TrialOutcome) -> dict[str, float | None]:
    assert found.summary is not None
    total = found.summary.total
    seconds = (total.e2e_ms.mean, total.e2e_ms.p95)
    figures = (
        *(None if ms is None else ms / 1000 for ms in seconds),
        *(total.ttft_ms.mean, total.ttft_ms.p95, total.tpot_ms.mean, total.tpot_ms.p95),
        found.completed_rps,
        found.completed_rps * (total.input_tokens + total.output_tokens) / total.completed,
    )
    return dict(zip(PUBLISHED, figures, strict=True))


def _compared(ours: dict[str, dict[str, float | None]]) -> list[Statement]:
    compared = [
        findings.value(f"{name}: {what}", ours[name][what], said[i], SOURCE)
        for i, name in enumerate(SYSTEMS)
        for what, said in PUBLISHED.items()
    ]
    for what in BETTER:
        plus, plain = PUBLISHED[what]
        factor = findings.ratio(ours["muxserve"][what], ours["muxserve++"][what])
        said = f"{what}, muxserve++ better"
        compared.append(findings.factor(said, factor, plain / plus, SOURCE))
        if not compared[-1].agrees:
            changed = findings.ratio(ours[FIXED][what], ours["muxserve++"][what])
            compared.append(findings.cause(f"{said}: muxserve {FIXED}", factor, changed))
    return compared


BUDGET = "Both use the same placement search over the same trace, and neither is tuned."
