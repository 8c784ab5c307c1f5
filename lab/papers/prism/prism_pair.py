"""Two models on one GPU: Prism's Figures 3, 8 and 11 (§3.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lab.papers.prism.prism_setup import FAIR, Cluster, prepared
from lab.papers.prism.prism_sweeps import SLO_SCALES
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, problems, row
from lab.papers.study.sources import without_slo
from lab.papers.study.trial import Series, Trial, TrialOutcome
from lab.papers.study.tuning import Systems
from prism_replay.lengths import Lengths, LengthSource, requests_at
from prism_replay.trace import Trace, TraceRequest

GB = 1e9
SLO_SCALE = SLO_SCALES["arena-chat"]
PAIR = [("Llama-3.1-8B", 1), ("Llama-3.1-8B", 1)]
ONE_GPU: dict[str, Any] = {"gpus": {"type": "h100", "count": 1}}

Phase = tuple[float, float, float]
"""Duration in seconds, and the requests per second of the first and of the second model."""


def phased(
    lab: Lab, phases: Sequence[Phase], lengths: Sequence[LengthSource], wave: float = 0.0
) -> Trace:
    """Returns Poisson arrivals of two models with a rate for each phase.

    Args:
        wave: Amplitude of a periodic change of the rates within a minute, as a fraction of them.
    """
    rng = np.random.default_rng([lab.seed, 13])
    found: list[TraceRequest] = []
    for model, source in enumerate(lengths):
        moments_s: list[float] = []
        start_s = 0.0
        for seconds, *rates in phases:
            highest = rates[model] * (1 + wave)
            drawn = np.sort(rng.uniform(0, seconds, rng.poisson(highest * seconds)))
            swing = 1 + wave * np.sin(2 * np.pi * (drawn / 60 + 0.5 * model))
            kept = drawn[rng.random(len(drawn)) * (1 + wave) < swing]
            moments_s += (start_s + kept).tolist()
            start_s += seconds
        requests = requests_at(f"m{model}", np.array(moments_s), source, rng)
        found += [without_slo(request, request.model) for request in requests]
    return sorted(found, key=lambda request: request.timestamp)


def kv_line(found: TrialOutcome) -> list[tuple[float, float]]:
    """Returns (time, KV memory in bytes of both models)."""
    series = _series(found)
    held = zip(series.time_s, zip(*series.kv_bytes.values(), strict=True), strict=True)
    return [(t, sum(values)) for t, values in held]


def tokens_line(found: TrialOutcome) -> list[tuple[float, float]]:
    return list(zip(_series(found).time_s, _series(found).tokens, strict=True))


def mean_between(line: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    inside = [value for t, value in line if start_s <= t < end_s]
    return sum(inside) / len(inside) if inside else 0.0


def _series(found: TrialOutcome) -> Series:
    assert found.series is not None
    return found.series


def with_series(
    lab: Lab, config: str, policies: Systems
) -> tuple[dict[str, TrialOutcome], list[str]]:
    """Returns the outcomes of the simulated policies, and the reasons why others were not."""
    trials = [
        Trial(config, {"slo_scale": SLO_SCALE, "policy": policy}, variant=variant, series=True)
        for policy, variant in policies.values()
    ]
    outcomes = lab.run(trials, "policies")
    found = {p: o for p, o in zip(policies, outcomes, strict=True) if o.series is not None}
    return found, problems(outcomes)


# --- Figure 3 ------------------------------------------------------------------------------

BY_DEADLINE = "qlm, late queues by deadline"
FIG3 = {
    "muxserve++": ("muxserve++", ""),
    "static": ("static", ""),
    "qlm": ("qlm-first-idle", ""),
    BY_DEADLINE: ("qlm-first-idle", "by-deadline"),
    "prism": ("prism", ""),
}
"""Name -> (policy, variant). If not all requests of a queue can meet their deadlines, QLM's
published code orders it by deadline. Ours minimizes late requests, which serves more requests in
time and swaps less."""


def fig3(lab: Lab) -> Findings:
    """Runs Figure 3.

    In T1 both models fluctuate and the first has more requests. In T2 the first is idle and the
    second has a spike.
    """
    half_s, fast = lab.pick(120.0, 10.0), lab.pick(1.0, 0.1)
    phases = [(half_s, 36.0 * fast, 12.0 * fast), (2 * half_s, 0.0, 70.0 * fast)]
    trace = phased(lab, phases, [lab.sources.sharegpt()] * 2, wave=0.6)
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    found, remarks = with_series(lab, cluster.config, FIG3)
    kv = {p: kv_line(o) for p, o in found.items()}
    first = {p: mean_between(line, 0, half_s) / GB for p, line in kv.items()}
    then = {p: mean_between(line, half_s, 3 * half_s) / GB for p, line in kv.items()}
    drops, by_deadline = (
        _drops(kv[name], half_s) if name in kv else None for name in ("qlm", BY_DEADLINE)
    )
    source, t2 = "§3.2, Figure 3", ("qlm", ("muxserve++", "static"))
    compared = [
        findings.order("T1: mean KV memory (GB)", first, ("muxserve++", "static"), source),
        findings.order("T2: mean KV memory (GB), first model idle", then, t2, source),
        findings.claim(
            "T1: QLM's KV memory drops to nearly nothing as it swaps",
            None if drops is None else drops > 0,
            {"times": drops},
            "periodically",
            source,
        ),
        *by_deadline_drops(drops, by_deadline),
        findings.unpublished(
            "T2: KV memory, Prism over MuxServe++ (Prism is not in the figure)",
            findings.ratio(then.get("prism"), then.get("muxserve++")),
            "ours",
        ),
    ]
    table = [
        row(o, policy=p, kv_t1_gb=first[p], kv_t2_gb=then[p], load="T1, T2")
        for p, o in found.items()
    ]
    plots = {"kv": Plot("KV memory", "s", "GB", plotted(kv, GB))}
    return Findings(compared, table, plots, [FAIR, cluster.described()], remarks)


def plotted(found: Mapping[str, Sequence[tuple[float, float]]], unit: float = 1.0) -> Lines:
    return {name: [(t, value / unit) for t, value in line] for name, line in found.items()}


def by_deadline_drops(drops: int | None, changed: int | None) -> list[Statement]:
    """Returns the ablation of QLM's order; an empty list if QLM itself has drops."""
    if drops is None or changed is None or drops > 0:
        return []
    verdict = "names the cause" if changed else "is not the cause"
    what = f"ablation: T1: drops of {BY_DEADLINE}"
    found = Statement(what, "", "not published", verdict, "ours")
    return [findings.noted(found, {"times": changed})]


def _drops(line: Sequence[tuple[float, float]], until_s: float) -> int:
    """Returns how often KV memory falls below a tenth of its mean."""
    held = [v / GB for t, v in line if t < until_s]
    low = [v < 0.1 * sum(held) / len(held) for v in held]
    return sum(now and not before for before, now in pairwise(low))


# --- Figure 8 ------------------------------------------------------------------------------

FIG8 = {"prism": ("prism", ""), "static": ("static", "")}


def fig8(lab: Lab) -> Findings:
    """Runs Figure 8: after 20 s, the first model's demand falls and the second one's surges."""
    fast, surge_s = lab.pick(1.0, 0.1), 20.0
    phases = [(surge_s, 40.0 * fast, 12.0 * fast), (lab.pick(40.0, 10.0), 2.0 * fast, 90.0 * fast)]
    end_s = sum(seconds for seconds, _, _ in phases)
    trace = phased(lab, phases, [lab.sources.sharegpt()] * 2)
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    found, remarks = with_series(lab, cluster.config, FIG8)
    kv, tokens = ({p: line(o) for p, o in found.items()} for line in (kv_line, tokens_line))
    means = [
        {p: mean_between(line, surge_s, end_s) / unit for p, line in each.items()}
        for each, unit in ((kv, GB), (tokens, 1))
    ]
    compared = [
        findings.factor(
            f"{what} after the surge, Prism over static partition",
            findings.ratio(values.get("prism"), values.get("static")),
            None,
            "§7.4, Figure 8",
        )
        for what, values in zip(("KV memory", "throughput"), means, strict=True)
    ]
    plots = {
        "kv": Plot("KV memory", "s", "GB", plotted(kv, GB)),
        "tokens": Plot("Output tokens", "s", "tokens/s", plotted(tokens)),
    }
    table = [
        row(o, policy=p, kv_gb=means[0][p], tokens_per_s=means[1][p], load="surge")
        for p, o in found.items()
    ]
    return Findings(compared, table, plots, [FAIR, cluster.described()], remarks)


# --- Figure 11 ---------------------------------------------------------------------------

KEPT = 90.0
GAINED = 40.0
FIRST_SCALE = 8.0
LOOSE_SCALE = 64.0
"""SLO scale of the first model in an ablation: the scheduler can only use its spare time."""
LOCAL = {"with": "prism", "without": "prism-fcfs"}
SMALLER_GPU: dict[str, Any] = {"gpus": {**ONE_GPU["gpus"], "memory": "56GB"}}
"""GPU with about 13 GB for KV in addition to two models of 8B, which compete for it."""

LONG = Lengths(input_median=900, input_sigma=0.6, input_max=4000, output_median=150)
SHORT = Lengths(input_median=300, input_sigma=0.6, input_max=2000, output_median=150)
Pair = dict[str, TrialOutcome]
Shares = dict[str, tuple[float, float]]
"""Name in LOCAL -> TTFT attainment of the first and the second model, in percent."""


def fig11(lab: Lab) -> Findings:
    """Runs Figure 11.

    The first model's SLO scale is 8. The second has shorter requests and a varied SLO scale.
    """
    scales = lab.pick((2.0, 4.0, 8.0, 16.0), (4.0,))
    table: list[dict[str, Any]] = []
    by_rate: dict[float, list[Pair]] = {}
    for rate in lab.pick((11.0, 13.0, 15.0), (4.0,)):
        cluster, by_rate[rate] = _at(lab, rate, scales)
        for scale, pair in zip(scales, by_rate[rate], strict=True):
            table += [
                row(o, scheduler=n, rate_rps=rate, slo_scale=scale, **_each(o))
                for n, o in pair.items()
            ]
    shares = {rate: [_shares(p) for p in pairs] for rate, pairs in by_rate.items()}
    gained, relative, kept_high = published_statements(shares)
    second: list[Statement] = []
    first: list[Statement] = []
    if not (gained.agrees and relative.agrees and kept_high.agrees):
        by_load = load_causes(shares)
        above = [rate for rate in shares if rate > min(shares)]
        longer = {r: [_shares(p) for p in _at(lab, r, scales, LOOSE_SCALE)[1]] for r in above}
        second, first = [by_load[0], *spare_time_cause(shares, longer)], by_load[1:]
    compared = [gained, relative, *second, kept_high, *first]
    last = max(by_rate)
    plots = _plots(f"at {last:g} req/s", scales, by_rate[last])
    return Findings(compared, table, plots, [FAIR, cluster.described()])


def _plots(where: str, scales: Sequence[float], pairs: Sequence[Pair]) -> dict[str, Plot]:
    xlabel, ylabel = "SLO scale of the second", "TTFT attainment (%)"
    plots = {}
    for number, model in enumerate(("m0", "m1")):
        lines: Lines = {
            name: [(x, _share(pair[name], model)) for x, pair in zip(scales, pairs, strict=True)]
            for name in LOCAL
        }
        plots[model] = Plot(f"Model {number + 1} {where}", xlabel, ylabel, lines)
    waiting: Lines = {
        name: list(zip(series.time_s, series.waiting["m1"], strict=True))
        for name, found in pairs[-1].items()
        if (series := found.series) is not None
    }
    queue = Plot("Second model's queue, last scale", "s", "requests", waiting)
    return {**plots, "queue": queue}


def _at(
    lab: Lab, rate_rps: float, scales: Sequence[float], first: float = FIRST_SCALE
) -> tuple[Cluster, list[Pair]]:
    """Runs with and without the scheduler at each SLO scale of the second model.

    Args:
        rate_rps: Rate of the first model. The second one's is 1.5 times as high.
        first: SLO scale of the first model.
    """
    phases = [(lab.pick(60.0, 8.0), rate_rps, 1.5 * rate_rps)]
    trace = phased(lab, phases, [LONG, SHORT])
    name = f"pair-{rate_rps:g}-rps-{LONG.input_median}-{SHORT.input_median}-tokens"
    cluster = prepared(lab, name, PAIR, trace, SMALLER_GPU)
    trials = [
        Trial(config, {"policy": policy}, series=True)
        for config in (_rescaled(lab, name, cluster, trace, (first, scale)) for scale in scales)
        for policy in LOCAL.values()
    ]
    outcomes = iter(lab.run(trials, f"{rate_rps:g} req/s"))
    return cluster, [{name: next(outcomes) for name in LOCAL} for _ in scales]


def _rescaled(
    lab: Lab, name: str, cluster: Cluster, trace: Trace, scales: tuple[float, float]
) -> str:
    """Writes the setup with SLOs multiplied by a scale for each model. Returns its path."""
    data, of_model = lab.read(cluster.config), dict(zip(("m0", "m1"), scales, strict=True))
    for model in data["models"]:
        model["slo"] = {
            key: f"{float(text.removesuffix('ms')) * of_model[model['name']]:.3f}ms"
            for key, text in model["slo"].items()
        }
    first, second = scales
    return lab.setup(f"{name}-scale-{first:g}-{second:g}", data, trace)


def _share(found: TrialOutcome, model: str) -> float:
    assert found.summary is not None, found.problem
    return 100 * (found.summary.models[model].attainment["1"].ttft or 0.0)


def _each(found: TrialOutcome) -> dict[str, float]:
    return {f"ttft_{name}": _share(found, name) for name in found.models}


def _shares(pair: Pair) -> Shares:
    return {name: (_share(found, "m0"), _share(found, "m1")) for name, found in pair.items()}


def gain(pairs: Sequence[Shares]) -> float:
    """Returns the second model's largest gain over the scales, in points."""
    return max(pair["with"][1] - pair["without"][1] for pair in pairs)


def relative_gain(pairs: Sequence[Shares]) -> float | None:
    """Returns `gain` in percent of the second model's attainment without the scheduler."""
    ratios = [findings.ratio(pair["with"][1], pair["without"][1]) for pair in pairs]
    return max((100 * (ratio - 1) for ratio in ratios if ratio is not None), default=None)


def kept(pairs: Sequence[Shares]) -> float:
    """Returns the first model's lowest attainment with the scheduler."""
    return min(pair["with"][0] for pair in pairs)


def published_statements(by_rate: Mapping[float, Sequence[Shares]]) -> list[Statement]:
    """Compares the second model's gain, in points and relative, and the first's attainment.

    A gain counts only at loads at which the first model has KEPT: the paper states both together.
    """
    source, published = "§7.4, Figure 11", f"by more than {GAINED:g} %"
    what = f"second model's TTFT attainment gained at loads at which the first has {KEPT:g} %"
    high = [pairs for pairs in by_rate.values() if kept(pairs) > KEPT]
    readings = (
        ("points", "points", [gain(pairs) for pairs in high]),
        ("a part of what it has without", "%", [relative_gain(pairs) for pairs in high]),
    )
    compared = []
    for reading, unit, gains in readings:
        best = max((points for points in gains if points is not None), default=None)
        holds, ours = None if best is None else best > GAINED, {f"{unit} at most": best}
        compared.append(
            findings.claim(f"{what}, read as {reading}", holds, ours, published, source)
        )
    firsts = {f"% at {rate:g} req/s": kept(pairs) for rate, pairs in by_rate.items()}
    what = f"first model keeps a high attainment (above {KEPT:g} %) at every load"
    holds = min(firsts.values()) > KEPT
    return [*compared, findings.claim(what, holds, firsts, "consistently", source)]


def load_causes(by_rate: Mapping[float, Sequence[Shares]]) -> list[Statement]:
    """Returns the ablation of the load for each model.

    The load is a cause if the gains at two loads differ by more than EQUAL of all requests.
    """
    first = {
        rate: max(pair["with"][0] - pair["without"][0] for pair in pairs)
        for rate, pairs in by_rate.items()
    }
    second = {rate: gain(pairs) for rate, pairs in by_rate.items()}
    return [
        _by_load("second model's points gained", second),
        _by_load("first model's points gained by the same scheduler", first),
    ]


def spare_time_cause(
    by_rate: Mapping[float, Sequence[Shares]], changed: Mapping[float, Sequence[Shares]]
) -> list[Statement]:
    """Returns the ablation, at each load, of a looser SLO for the first model."""
    compared = []
    for rate, pairs in changed.items():
        before, after = kept(by_rate[rate]), kept(pairs)
        ours = {
            "points": gain(by_rate[rate]),
            "% for the first": before,
            "points changed": gain(pairs),
            "% for the first changed": after,
        }
        verdict = "is not the cause"
        if after > before + 100 * findings.EQUAL:
            holds = after > KEPT and gain(pairs) > GAINED
            verdict = "names the cause" if holds else "in its direction"
        what = (
            f"ablation: first model's SLO scale {LOOSE_SCALE:g} instead of {FIRST_SCALE:g}, "
            f"{rate:g} req/s: second model's points gained"
        )
        found = Statement(what, "", "not published", verdict, "ours")
        compared.append(findings.noted(found, ours))
    return compared


def _by_load(what: str, gains: Mapping[float, float]) -> Statement:
    apart = max(gains.values()) - min(gains.values()) > 100 * findings.EQUAL
    verdict = "names a cause" if apart else "is not the cause"
    found = Statement(f"ablation: load: {what}", "", "not published", verdict, "ours")
    return findings.noted(found, {f"at {rate:g} req/s": points for rate, points in gains.items()})
