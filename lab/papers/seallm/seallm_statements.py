"""Statements of SeaLLM's paper, evaluated on the lines of its studies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.papers.seallm.seallm_setup import FIXED, LARGEST, others_tail_s, tail_s
from lab.papers.study import findings
from lab.papers.study.findings import Statement
from lab.papers.study.lines import Lines, Points, best_ratio, lines, ratio_at, ratios

BASELINES = ("vllm", "alpaserve", "muxserve")


def most(found: Lines, over: str, *, smaller: bool) -> float | None:
    """Returns SeaLLM's best factor over another system; None if that was not simulated."""
    return best_ratio(found, "seallm", over, smaller=smaller)


def shares_cause(what: str, found: Lines, *, smaller: bool) -> Statement:
    """Returns the ablation of MuxServe's use of free SMs."""
    here, fixed = (most(found, name, smaller=smaller) for name in ("muxserve", FIXED))
    return findings.cause(f"{what}, over muxserve with fixed shares of the compute", here, fixed)


def tail_cause(points: Points, name: str) -> Statement:
    """Returns the ablation of P99 latency without LARGEST, whose responses take longest."""
    whole, others = (most(lines(points, m), name, smaller=True) for m in (tail_s, others_tail_s))
    what = f"P99 latency, over {name}, of the slowest service but {LARGEST}"
    return findings.cause(what, whole, others)


def _others(found: Lines, place: int) -> list[float]:
    """Returns the baselines' figures at the x with this index."""
    return [v for n in BASELINES if n in found and (v := found[n][place][1]) is not None]


def best_everywhere(found: Lines, *, smaller: bool) -> tuple[bool | None, str]:
    """Returns whether SeaLLM is best at every x, and a text with the number of such x.

    None if a baseline equals SeaLLM at every x.
    """
    won = tied = 0
    for place, (_, own) in enumerate(found["seallm"]):
        others = _others(found, place)
        if own is None or any(findings.is_worse(own, v, smaller=smaller) for v in others):
            continue
        won += 1
        tied += any(findings.same(own, v) for v in others)
    whole = len(found["seallm"])
    equal = f", with an equal at {tied}" if tied else ""
    holds = None if tied == whole else won == whole
    return holds, f"at {won} of {whole}{equal}"


@dataclass(frozen=True)
class Fall:
    """Paper's text on a fall, and the range in points of attainment that we read it as."""

    text: str = "falls"
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


def falls(found: Lines, system: str, what: str, source: str, fall: Fall) -> Statement:
    """Compares whether SLO attainment falls from the first x to the last, within `fall`'s range.

    A difference of at most EQUAL is not a fall.
    """
    shares = [v for _, v in found.get(system, [])]
    first, last = (shares[0], shares[-1]) if shares else (None, None)
    what = f"{system}{what}{fall.reading}"
    if first is None or last is None:
        return findings.claim(what, None, "-", fall.text, source)
    down = first - last
    holds = findings.is_worse(last, first) and fall.least_points <= down <= fall.most_points
    return findings.claim(what, holds, {"% first": first, "% last": last}, fall.text, source)


def faster(found: Lines, over: str, what: str, said: str, source: str) -> Statement:
    """Compares whether SeaLLM's figure is smaller than that of `over` at every x.

    If they are equal at some x, the statement neither agrees nor disagrees.
    """
    each = ratios(found, "seallm", over, smaller=True)
    slower = [f"{x:g}" for x, r in each if r < 1 - findings.EQUAL]
    equal = [f"{x:g}" for x, r in each if abs(r - 1) <= findings.EQUAL]
    verdict = "holds"
    agrees: bool | None = True
    if len(each) < len(found["seallm"]):
        verdict, agrees = "cannot be formed here", None
    elif slower:
        verdict, agrees = f"not at {', '.join(slower)}", False
    elif equal:
        verdict, agrees = f"holds, but equal at {', '.join(equal)}", None
        if len(equal) == len(each):
            verdict = "no difference here"
    made = Statement(what, "", said, verdict, source, agrees)
    return findings.noted(made, {f"x at {x:g}": r for x, r in each})


SIMILAR = 0.25
"""Largest relative difference that we read as "similar"."""


def similar(found: Lines, other: str, what: str, source: str) -> Statement:
    """Compares whether SeaLLM's figure is similar to that of `other` at every x."""
    each = [r for _, r in ratios(found, "seallm", other)]
    what = f"{what} (read as: within {SIMILAR:.0%} at every x)"
    if len(each) < len(found["seallm"]):
        return findings.claim(what, None, "-", "similar", source)
    holds = all(abs(r - 1) <= SIMILAR for r in each)
    ours = {f"of {other}'s at least": min(each), "at most": max(each)}
    return findings.claim(what, holds, ours, "similar", source)


def shrinks(found: Lines, what: str, source: str, *, smaller: bool) -> Statement:
    """Compares whether SeaLLM's factor over the best baseline falls from first to last x."""
    ends = [found["seallm"][i][0] for i in (0, -1)]
    first, last = (_lead_at(found, x, smaller=smaller) for x in ends)
    if first is None or last is None:
        return findings.claim(what, None, "-", "get smaller", source)
    ours = {f"x at {ends[0]:g}": first, f"x at {ends[-1]:g}": last}
    return findings.claim(what, findings.is_worse(last, first), ours, "get smaller", source)


def _lead_at(found: Lines, x: Any, *, smaller: bool) -> float | None:
    each = (ratio_at(found, x, "seallm", n, smaller=smaller) for n in BASELINES if n in found)
    return min((r for r in each if r is not None), default=None)


def gains_of(found: Lines) -> list[tuple[Any, float]]:
    """Returns (x, SeaLLM's difference to the best baseline in points)."""
    return [
        (x, own - max(others))
        for place, (x, own) in enumerate(found["seallm"])
        if own is not None and (others := _others(found, place))
    ]


def crowded_cause(found: Lines) -> Statement:
    """Returns the ablation of MuxServe on the most crowded cluster.

    The paper's MuxServe found no placement there. SeaLLM's factor there without MuxServe is
    compared with its lead at all other x.
    """
    x, last = found["seallm"][-1]
    known = {n: ratio_at(found, x, "seallm", n) for n in BASELINES if n in found}
    leads = {name: r for name, r in known.items() if r is not None}
    others = gains_of({name: points[:-1] for name, points in found.items()})
    wanted = 1 + max((gain for _, gain in others), default=0.0) / max(last or 0.0, 1.0)
    return findings.cause(
        f"SLO attainment at {x:g}, over the best baseline but muxserve, which had no placement "
        "there in the paper",
        min(leads.values(), default=None),
        min((r for name, r in leads.items() if name != "muxserve"), default=None),
        wanted=max(wanted, 1 + findings.EQUAL),
    )
