"""How the studies of SeaLLM read lines: SeaLLM against each baseline at equal x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def tail_cause(points: Points, name: str) -> Comparison:
    """The tail over the baseline `name` without the service of several GPUs, whose longest answers
    it is made of."""
    whole, others = (most(lines(points, m), name, smaller=True) for m in (tail_s, others_tail_s))
    what = f"P99 latency, over {name}, of the slowest service but {LARGEST}"
    return findings.cause(what, whole, others)


def best_everywhere(found: Lines, *, smaller: bool) -> tuple[bool | None, str]:
    """Is SeaLLM best at every x, within EQUAL; and in how many, of which in how many it is not
    alone. Neither borne out nor refuted where it is alone in none."""
    won = tied = 0
    for place, (_, own) in enumerate(found["seallm"]):
        others = [v for n in BASELINES if n in found and (v := found[n][place][1]) is not None]
        if own is None or any(findings.behind(own, v, smaller=smaller) for v in others):
            continue
        won += 1
        tied += any(findings.same(own, v) for v in others)
    whole = len(found["seallm"])
    equal = f", with an equal at {tied}" if tied else ""
    holds = None if tied == whole else won == whole
    return holds, f"at {won} of {whole}{equal}"


@dataclass(frozen=True)
class Fall:
    """What a paper says of a fall, and the points of attainment that we read into it."""

    said: str = "falls"
    least_points: float = 0.0
    most_points: float = 100.0

    @property
    def reading(self) -> str:
        if self.least_points:
            return f" (read as: by {self.least_points:g} points or more)"
        return f" (read as: by up to {self.most_points:g} points)" if self.most_points < 100 else ""


FAST_FALL = Fall("degrades fast", least_points=10.0)
SLIGHT_FALL = Fall("slightly decreased", most_points=10.0)
WORSE = Fall("worse")


def falls(found: Lines, system: str, what: str, source: str, fall: Fall) -> Comparison:
    """Is a system's SLO attainment, of which `found` are the lines, lower at the last x than at the
    first, by as much as `fall` says. A fall of less than EQUAL is none."""
    shares = [v for _, v in found.get(system, [])]
    first, last = (shares[0], shares[-1]) if shares else (None, None)
    what = f"{system}{what}{fall.reading}"
    if first is None or last is None:
        return findings.claim(what, None, "-", fall.said, source)
    down = first - last
    holds = findings.behind(last, first) and fall.least_points <= down <= fall.most_points
    return findings.claim(what, holds, f"{first:.1f} % to {last:.1f} %", fall.said, source)


def faster(found: Lines, over: str, what: str, said: str, source: str) -> Comparison:
    """Is SeaLLM's figure smaller than `over`'s at every x; neither borne out nor refuted where they
    are equal at some."""
    xs = [x for x, _ in found["seallm"]]
    ratios = [(x, r) for x in xs if (r := ratio_at(found, x, "seallm", over, smaller=True))]
    shown = ", ".join(f"{r:.2f}x at {x:g}" for x, r in ratios)
    if len(ratios) < len(xs):
        return Comparison(what, shown or "-", said, "cannot be formed here", source)
    slower = [f"{x:g}" for x, r in ratios if r < 1 - findings.EQUAL]
    equal = [f"{x:g}" for x, r in ratios if abs(r - 1) <= findings.EQUAL]
    if slower:
        return Comparison(what, shown, said, f"not at {', '.join(slower)}", source, agrees=False)
    if len(equal) == len(xs):
        return Comparison(what, shown, said, "no difference here", source)
    verdict = f"holds, but equal at {', '.join(equal)}" if equal else "holds"
    return Comparison(what, shown, said, verdict, source, None if equal else True)


SIMILAR = 0.25
"""Within which part of the other we read "similar"."""


def similar(found: Lines, other: str, what: str, source: str) -> Comparison:
    """Is SeaLLM's figure near `other`'s at every x."""
    xs = [x for x, _ in found["seallm"]]
    ratios = [r for x in xs if (r := ratio_at(found, x, other, "seallm", smaller=True))]
    what = f"{what} (read as: within {SIMILAR:.0%} at every x)"
    if len(ratios) < len(xs):
        return findings.claim(what, None, "-", "similar", source)
    holds = all(abs(r - 1) <= SIMILAR for r in ratios)
    shown = f"{min(ratios):.2f} to {max(ratios):.2f} of {other}'s"
    return findings.claim(what, holds, shown, "similar", source)


def shrinks(found: Lines, what: str, source: str, *, smaller: bool) -> Comparison:
    """Is SeaLLM's factor over the best baseline smaller at the last x than at the first."""
    ends = [found["seallm"][i][0] for i in (0, -1)]
    first, last = (_lead_at(found, x, smaller=smaller) for x in ends)
    if first is None or last is None:
        return findings.claim(what, None, "-", "get smaller", source)
    shown = f"{first:.2f}x at {ends[0]:g}, {last:.2f}x at {ends[-1]:g}"
    return findings.claim(what, findings.behind(last, first), shown, "get smaller", source)


def _lead_at(found: Lines, x: Any, *, smaller: bool) -> float | None:
    known = [name for name in BASELINES if name in found]
    ratios = [ratio_at(found, x, "seallm", name, smaller=smaller) for name in known]
    return min((r for r in ratios if r is not None), default=None)


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
