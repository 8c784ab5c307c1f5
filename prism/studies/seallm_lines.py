"""How the studies of SeaLLM read lines: SeaLLM against each baseline at equal x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison
from prism.studies.seallm_setup import FIXED
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
