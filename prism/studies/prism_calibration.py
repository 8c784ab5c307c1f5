"""MuxServe++ beside MuxServe on one GPU: the calibration of Prism's baseline (Table 5)."""

from __future__ import annotations

from typing import Any

import yaml

from prism.sim.options import EXAMPLES
from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import row
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

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
"""Of SYSTEMS."""
BETTER = ("mean end to end (s)", "P95 end to end (s)", "mean TTFT (ms)", "mean TPOT (ms)")
"""Of PUBLISHED: where MuxServe++ is ahead, and by how much is compared too."""
SOURCE = "Table 5 (A.2)"
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "with fixed shares of the compute": ("fixed-sm", {}),
    "with 20ms of host time in each step": ("", {"engine.host": "20ms"}),
}
"""Of MuxServe: (variant, changes)."""


def calibration(lab: Lab) -> Findings:
    config: dict[str, Any] = yaml.safe_load((EXAMPLES / "muxserve_calibration.yaml").read_text())
    config["generate"]["seconds"] = lab.pick(600, 30)
    path = lab.write("calibration", config)
    trials = {name: Trial(path, {"policy": name, "seed": lab.seed}) for name in SYSTEMS}
    trials |= {
        what: Trial(path, {"policy": "muxserve", "seed": lab.seed, **changes}, variant=variant)
        for what, (variant, changes) in CHANGES.items()
    }
    found = dict(zip(trials, lab.run(list(trials.values()), "calibration"), strict=True))
    ours = {name: _figures(one) for name, one in found.items()}
    plots = {
        what: Plot(
            f"Mean {what}",
            "",
            unit,
            {
                "ours": [(name, ours[name][key]) for name in SYSTEMS],
                "published": list(zip(SYSTEMS, PUBLISHED[key], strict=True)),
            },
            bars=True,
        )
        for what, key, unit in (
            ("latency", "mean end to end (s)", "s"),
            ("TPOT", "mean TPOT (ms)", "ms"),
        )
    }
    rows = [row(one, policy=name) for name, one in found.items()]
    return Findings(_compared(ours), rows, plots, [BUDGET])


def _figures(found: Measured) -> dict[str, float | None]:
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


def _compared(ours: dict[str, dict[str, float | None]]) -> list[Comparison]:
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
            compared += [
                findings.cause(
                    f"{said}: muxserve {change}",
                    factor,
                    findings.ratio(ours[change][what], ours["muxserve++"][what]),
                )
                for change in CHANGES
            ]
    return compared


BUDGET = "Both place by the same search over the same trace; neither is tuned by hand."
STUDIES = (
    Study(
        "prism-table5",
        "MuxServe++ beside MuxServe: the calibration of the baseline that Prism compares with",
        "Prism, Table 5",
        "three Llama-3.1-8B on one H100-80G, 199, 262 and 22 requests a minute, ten minutes",
        "nothing",
        "Lengths are not published beyond their mean of 420 tokens a request (tokens over requests "
        "per second, so that of the two only requests can differ here): 146 in and 274 out "
        "follow from it and from the latencies of MuxServe++. At this load some 45 requests run "
        "and hold 2 to 3 GB of about 20 GB of KV memory, so that nothing here makes 5 % of them "
        "wait for 11 s, as in the authors' run of MuxServe; it is no queueing for memory.",
        calibration,
    ),
)
