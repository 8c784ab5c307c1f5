"""How the studies of SeaLLM read lines: SeaLLM against each baseline at equal x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison
from prism.studies.seallm_setup import FIXED, LARGEST, others_tail_s, slo, tail_s
from prism.studies.trial import Measured

Lines = dict[str, list[tuple[Any, float | None]]]
Measure = Callable[[Measured], float | None]
Points = Mapping[Any, Mapping[str, Measured]]
BASELINES = ("vllm", "alpaserve", "muxserve")


def lines(points: Points, measure: Measure) -> Lines:
    names = list(next(iter(points.values())))
    return {name: [(x, measure(found[name])) for x, found in points.items()] for name in names}


def most(found: Lines, over: str, *, smaller: bool) -> float | None:
    """SeaLLM's best factor over `over` at equal x; smaller: is better."""
    if over not in found:
        return None
    ratios = [
        findings.ratio(b, a) if smaller else findings.ratio(a, b)
        for (_, a), (_, b) in zip(found["seallm"], found[over], strict=True)
    ]
    return max((r for r in ratios if r is not None), default=None)


def shares_cause(what: str, found: Lines, *, smaller: bool) -> Comparison:
    """What MuxServe's SMs, assigned as they are free, are worth to it."""
    here, fixed = (most(found, name, smaller=smaller) for name in ("muxserve", FIXED))
    return findings.cause(f"{what}, over muxserve with fixed shares of the compute", here, fixed)


def ahead(found: Lines, *, smaller: bool) -> list[tuple[Any, str]]:
    """Each x at which a baseline is better than SeaLLM, with that baseline."""
    known = [name for name in BASELINES if name in found]
    pairs = [(x, name) for x, _ in found["seallm"] for name in known]
    ratios = [(x, name, ratio_at(found, x, "seallm", name, smaller=smaller)) for x, name in pairs]
    return [(x, name) for x, name, r in ratios if r is not None and r < 1 - findings.EQUAL]


def ratio_at(found: Lines, x: Any, name: str, over: str, *, smaller: bool) -> float | None:
    """By what `name` is better than `over` at x."""
    a, b = (dict(found.get(system, [])).get(x) for system in (name, over))
    return findings.ratio(b, a) if smaller else findings.ratio(a, b)


def place_causes(what: str, found: Lines, queues: Lines, *, smaller: bool) -> list[Comparison]:
    """For each x and baseline that is ahead: what would be if MuxServe had fixed shares, and if
    SeaLLM had `queues` that sink in place of budgets. To be as good is enough."""
    rows = []
    for x, name in ahead(found, smaller=smaller):
        here = ratio_at(found, x, "seallm", name, smaller=smaller)
        wanted = 1 - findings.EQUAL
        if name == "muxserve":
            fixed = ratio_at(found, x, "seallm", FIXED, smaller=smaller)
            said = f"{what} at {x:g}, over muxserve with fixed shares of the compute"
            rows.append(findings.cause(said, here, fixed, wanted=wanted))
        both = {**found, "queues": queues.get("seallm", [])}
        sunk = ratio_at(both, x, "queues", name, smaller=smaller)
        said = f"{what} at {x:g}, over {name}, SeaLLM with feedback queues in place of budgets"
        rows.append(findings.cause(said, here, sunk, wanted=wanted))
    return rows


def tail_causes(points: Points, compared: list[Comparison]) -> list[Comparison]:
    """The tail without the service of several GPUs, whose longest answers it is made of, for each
    baseline over which SeaLLM's tail is no shorter. compared: one for each of BASELINES."""
    whole, others = lines(points, tail_s), lines(points, others_tail_s)
    pairs = zip(BASELINES, compared, strict=True)
    return [
        findings.cause(
            f"P99 latency, over {name}, of the slowest service but {LARGEST}",
            most(whole, name, smaller=True),
            most(others, name, smaller=True),
        )
        for name, said in pairs
        if said.agrees is False
    ]


def best_everywhere(found: Lines, *, smaller: bool) -> tuple[bool, str]:
    """Is SeaLLM best at every x; and in how many."""
    won = 0
    for place, (_, own) in enumerate(found["seallm"]):
        others = [v for n in BASELINES if n in found and (v := found[n][place][1]) is not None]
        sign = 1 if smaller else -1
        if own is not None and all(
            sign * own <= sign * v + findings.EQUAL * abs(v) for v in others
        ):
            won += 1
    whole = len(found["seallm"])
    return won == whole, f"at {won} of {whole}"


def falls(points: Points, system: str, what: str, source: str) -> Comparison:
    """Is a system's SLO attainment lower at the last x than at the first."""
    shares = [found[system] for found in points.values() if system in found]
    first, last = (slo(shares[i]) if shares else None for i in (0, -1))
    if first is None or last is None:
        return findings.claim(f"{system}{what}", None, "-", "falls", source)
    shown = f"{first:.1f} % to {last:.1f} %"
    holds = last < first * (1 - findings.EQUAL)
    return findings.claim(f"{system}{what}", holds, shown, "falls", source)


def fall_of(points: Points, system: str) -> float | None:
    """A system's SLO attainment at the first x over that at the last."""
    first, *_, last = (found[system] for found in points.values())
    return findings.ratio(slo(first), slo(last))


def gains_of(found: Lines) -> list[tuple[Any, float]]:
    """SeaLLM's lead over the best baseline, in points, by x."""
    gains = []
    for place, (x, own) in enumerate(found["seallm"]):
        others = [v for n in BASELINES if n in found and (v := found[n][place][1]) is not None]
        if own is not None and others:
            gains.append((x, own - max(others)))
    return gains


def crowded_cause(found: Lines) -> Comparison:
    """The paper's MuxServe found no placement on the most crowded cluster: what SeaLLM leads by
    there without it, and by how much more than anywhere else."""
    x = found["seallm"][-1][0]
    others = [name for name in BASELINES if name in found]
    ratios = {name: ratio_at(found, x, "seallm", name, smaller=False) for name in others}
    known = {name: r for name, r in ratios.items() if r is not None}
    elsewhere = gains_of({name: points[:-1] for name, points in found.items()})
    own = found["seallm"][-1][1] or 0.0
    wanted = 1 + max((gain for _, gain in elsewhere), default=0.0) / max(own, 1.0)
    without = [r for name, r in known.items() if name != "muxserve"]
    return findings.cause(
        f"SLO attainment at {x:g}, over the best baseline but muxserve, which had no placement "
        "there in the paper",
        min(known.values(), default=None),
        min(without, default=None),
        wanted=max(wanted, 1 + findings.EQUAL),
    )
