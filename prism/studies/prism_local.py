"""Two models on one GPU with and without the GPU-local scheduler: Prism's Figure 11 (§7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prism.replay.generate import Lengths
from prism.replay.trace import Trace
from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_pair import MADE, ONE_GPU, PAIR, PRESSED, phased
from prism.studies.prism_setup import FAIR, Cluster, prepared, row
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

KEPT = 90.0
FIRST_SCALE = 8.0
LOCAL = {"with": "", "without": "no-local"}
SMALLER_GPU: dict[str, Any] = {"gpus": {**ONE_GPU["gpus"], "memory": "56GB"}}
"""Beside two models of 8B, some 13 GB for KV: what the two compete for, as in the figure."""

LONG = Lengths(input_median=900, input_sigma=0.6, input_max=4000, output_median=150)
SHORT = Lengths(input_median=300, input_sigma=0.6, input_max=2000, output_median=150)
TINY = Lengths(input_median=60, input_sigma=0.8, input_max=512, output_median=100)
Pair = dict[str, Measured]


@dataclass(frozen=True)
class Load:
    """rate_rps: of the first model, the second has half as many again; second: its lengths."""

    rate_rps: float
    second: Lengths = SHORT

    def trace(self, lab: Lab) -> Trace:
        phases = [(lab.pick(60.0, 8.0), self.rate_rps, 1.5 * self.rate_rps)]
        return phased(lab, phases, [LONG, self.second])


def fig11(lab: Lab) -> Findings:
    """The first model's SLO scale is eight; the second's requests are shorter, its scale varies."""
    scales = lab.pick((2.0, 4.0, 8.0, 16.0), (4.0,))
    table: list[dict[str, Any]] = []
    by_rate: dict[float, list[Pair]] = {}
    for rate in lab.pick((11.0, 13.0, 15.0), (4.0,)):
        cluster, by_rate[rate] = _at(lab, Load(rate), scales)
        for scale, pair in zip(scales, by_rate[rate], strict=True):
            table += [
                row(o, scheduler=n, rate_rps=rate, slo_scale=scale, **_each(o))
                for n, o in pair.items()
            ]
    last = max(by_rate)
    _, tiny = _at(lab, Load(last, TINY), scales)
    compared = [*_said(by_rate), *_causes(by_rate, tiny)]
    plots = {
        f"m{model}": Plot(
            f"Model {model + 1} at {last:g} req/s",
            "SLO scale of the second",
            "TTFT attainment (%)",
            {
                name: [
                    (x, _share(pair[name], f"m{model}"))
                    for x, pair in zip(scales, by_rate[last], strict=True)
                ]
                for name in LOCAL
            },
        )
        for model in (0, 1)
    }
    plots["queue"] = _queues(by_rate[last][-1])
    return Findings(compared, table, plots, [FAIR, cluster.described()])


def _at(lab: Lab, load: Load, scales: Sequence[float]) -> tuple[Cluster, list[Pair]]:
    """With and without the scheduler at each scale of the second model."""
    trace = load.trace(lab)
    cluster = prepared(lab, "pair", PAIR, trace, SMALLER_GPU)
    trials = [
        Trial(config, {"policy": "prism"}, variant=variant, series=True)
        for config in (_rescaled(lab, cluster.config, trace, scale) for scale in scales)
        for variant in LOCAL.values()
    ]
    outcomes = iter(lab.run(trials, f"{load.rate_rps:g} req/s"))
    return cluster, [{name: next(outcomes) for name in LOCAL} for _ in scales]


def _rescaled(lab: Lab, config: str, trace: Trace, second: float) -> str:
    """The setup with SLOs times a scale of each model's own."""
    data, scales = lab.read(config), {"m0": FIRST_SCALE, "m1": second}
    for model in data["models"]:
        model["slo"] = {
            key: f"{float(text.removesuffix('ms')) * scales[model['name']]:.3f}ms"
            for key, text in model["slo"].items()
        }
    return lab.setup(f"pair-{second:g}", data, trace)


def _share(found: Measured, model: str) -> float:
    return 100 * found.models[model].ttft


def _each(found: Measured) -> dict[str, float]:
    return {f"ttft_{name}": _share(found, name) for name in found.models}


def _gain(pairs: Sequence[Pair]) -> float:
    """Of the second model, in points, at the scale at which it is largest."""
    return max(_share(p["with"], "m1") - _share(p["without"], "m1") for p in pairs)


def _said(by_rate: Mapping[float, Sequence[Pair]]) -> list[Comparison]:
    source = "§7.4, Figure 11"
    kept = {rate: min(_share(p["with"], "m0") for p in pairs) for rate, pairs in by_rate.items()}
    return [
        findings.value(
            "second model's TTFT attainment gained, at most",
            max(_gain(pairs) for pairs in by_rate.values()),
            40.0,
            source,
            unit="points",
            within=0.5,
        ),
        findings.claim(
            f"first model keeps a high attainment (above {KEPT:g} %) at every load",
            min(kept.values()) > KEPT,
            ", ".join(f"{rate:g} req/s {share:.1f} %" for rate, share in kept.items()),
            "consistently",
            source,
        ),
    ]


def _causes(by_rate: Mapping[float, Sequence[Pair]], tiny: Sequence[Pair]) -> list[Comparison]:
    """What each of the two statements hangs on."""
    rates = sorted(by_rate)
    gains = ", ".join(f"{_gain(by_rate[rate]):+.1f} at {rate:g} req/s" for rate in rates)
    firsts = [
        max(_share(p["with"], "m0") - _share(p["without"], "m0") for p in by_rate[rate])
        for rate in rates
    ]
    lost = ", ".join(f"{f:+.1f} at {r:g} req/s" for r, f in zip(rates, firsts, strict=True))
    small = f"{_gain(by_rate[rates[-1]]):+.1f}, changed {_gain(tiny):+.1f}"
    less = _gain(tiny) < _gain(by_rate[rates[-1]]) / 2
    return [
        _named("load: second model's points gained", gains, _gain(by_rate[rates[0]]) < 20),
        _named("load: first model's points gained by the same scheduler", lost, min(firsts) >= 0),
        _named("second model's requests of 60 tokens: its points gained", small, less),
    ]


def _named(what: str, shown: str, named: bool) -> Comparison:
    verdict = "names a cause" if named else "is not the cause"
    return Comparison(f"ablation: {what}", shown, "not published", verdict, "ours")


def _queues(pair: Pair) -> Plot:
    lines: dict[str, list[tuple[Any, float | None]]] = {}
    for name, found in pair.items():
        assert found.series is not None
        lines[name] = list(zip(found.series.time_s, found.series.waiting["m1"], strict=True))
    return Plot("Second model's queue, last scale", "s", "requests", lines)


STUDIES = (
    Study(
        "prism-fig11",
        "With and without the GPU-local scheduler",
        "Prism, Figure 11, §7.4",
        PRESSED.replace("one H100-80G", "56 GB of one H100")
        + "; long prompts with SLO scale 8 beside prompts of a third with a varied SLO scale",
        "60 s of trace, three rates",
        MADE + " Without the scheduler, requests start in the order of their arrival. The load "
        "decides what there is to gain, and the paper does not state it: below, nothing waits; "
        "above, what one model gets the other lacks. Requests so small that they fit beside larger "
        "ones that wait for memory gain nothing.",
        fig11,
    ),
)
