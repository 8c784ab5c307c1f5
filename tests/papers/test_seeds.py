"""Findings over several seeds: means, confidence intervals, and what they decide."""

from __future__ import annotations

from functools import partial

import pytest

from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.seeds import merged, over_seeds, spaced

SEEDS = 3


def statement(*found: Statement) -> Statement:
    return over_seeds(found, SEEDS)


order = partial(findings.order, "x", published=("a", "b"), source="Figure 7")


def test_a_pair_is_decided_by_the_differences_of_the_same_seed() -> None:
    # The seeds differ by 40 points, the pairs always by about 5.
    ours = [(90.0, 84.0), (70.0, 65.0), (50.0, 46.0)]
    found = statement(*(order({"a": a, "b": b}) for a, b in ours))
    assert (found.verdict, found.agrees) == ("same order", True)
    assert found.ours == "a 70 ± 50 > b 65 ± 47"
    reverse = statement(*(order({"a": b, "b": a}) for a, b in ours))
    assert (reverse.verdict, reverse.agrees) == ("differs in 1 of 1 pairs: b before a", False)


def test_an_interval_with_zero_decides_no_order() -> None:
    unsure = statement(*(order({"a": a, "b": 50.0}) for a in (90.0, 80.0, 40.0)))
    assert (unsure.verdict, unsure.agrees) == ("cannot be said here", None)
    assert "a 70 ± 66 = b 50 ± 0" in unsure.ours
    # A certain difference of less than 2 % is none.
    equal = statement(*(order({"a": a, "b": a - 0.5}) for a in (90.0, 80.0, 70.0)))
    assert (equal.verdict, equal.agrees) == ("no difference here", None)


@pytest.mark.parametrize(
    ("ratios", "ours", "verdict", "agrees"),
    [
        ((2.0, 2.1, 2.2), "2.10 ± 0.25x", "same direction, 1.05 of the published factor", True),
        ((0.5, 3.0, 1.0), "1.50 ± 3.3x", "cannot be said here", None),
        ((0.5, 0.6, 0.5), "0.53 ± 0.14x", "the other way round", False),
        ((1.0, 1.01, 1.0), "1.00 ± 0.014x", "no difference here", False),
        ((2.0, None, 2.2), "2.10 ± 1.3x (2 of 3 seeds)", "cannot be said here", None),
    ],
)
def test_factor_over_seeds(
    ratios: tuple[float | None, ...], ours: str, verdict: str, agrees: bool | None
) -> None:
    found = statement(*(findings.factor("x", ratio, 2.0, "Table 1") for ratio in ratios))
    assert (found.ours, found.verdict, found.agrees) == (ours, verdict, agrees)


def test_a_cause_is_decided_by_the_differences_of_the_same_seed() -> None:
    def verdict(*changed: float) -> str:
        return statement(*(findings.cause("x", 0.9, ratio) for ratio in changed)).verdict

    assert verdict(1.5, 1.6, 1.7) == "names the cause"
    assert verdict(0.9, 0.9, 3.0) == "cannot be said here"
    assert verdict(0.9, 0.9, 0.91) == "is not the cause"


def test_a_value_is_that_of_the_mean() -> None:
    each = [findings.value("x", ours, 100.0, "Table 1", unit="%") for ours in (70.0, 80.0, 90.0)]
    assert [one.agrees for one in each] == [False, True, True]
    found = statement(*each)
    assert (found.ours, found.verdict, found.agrees) == ("80 ± 25 %", "near", True)


def test_other_claims_hold_if_they_hold_with_each_seed() -> None:
    each = [findings.claim("x", y > 50, {"% at 8": y}, "", "") for y in (40.0, 60.0, 80.0)]
    found = statement(*each)
    assert (found.ours, found.agrees) == ("60 ± 50 % at 8", None)
    assert found.verdict == "does not hold here (1 of 3 seeds); holds (2 of 3 seeds)"
    assert statement(*[each[1]] * 3).agrees is True
    named = [findings.claim("x", True, text, "", "") for text in ("qlm", "qlm", "static")]
    assert statement(*named).ours == "qlm (2 of 3 seeds); static (1 of 3 seeds)"
    placed = [findings.claim("x", True, {"%": y}, "", "") for y in (40.0, None, 40.0)]
    assert statement(*placed).ours == "40 ± 0 % (2 of 3 seeds)"


def test_a_seed_without_a_figure_is_left_out_of_the_pairs() -> None:
    ours = [(90.0, 84.0), (70.0, None), (50.0, 46.0)]
    found = statement(*(order({"a": a, "b": b}) for a, b in ours))
    assert (found.ours, found.agrees) == ("a 70 ± 254 = b 65 ± 241 (2 of 3 seeds)", None)


def run(ratio: float, share: float, *texts: str) -> Findings:
    compared = [findings.factor("x", ratio, 2.0, "Table 1")]
    if ratio < 1:
        compared.append(findings.cause("x", ratio, 2.0))
    compared.append(findings.factor("y", 2.0, 2.0, "Table 1"))
    rows = [{"system": "a", "gpus": 2, "ttft": share, "lost": 0}]
    return Findings(compared, rows, {"p": Plot("", "", "", {"a": [(2, share)]})}, list(texts))


def test_a_study_over_seeds() -> None:
    found = merged({0: run(2.0, 90.0, "same", "load 8"), 10: run(0.9, 80.0, "same", "load 9")})
    assert [one.what for one in found.comparisons] == ["x", "ablation: x", "y"]
    assert found.comparisons[1].ours == "0.90x, changed 2.00x (1 of 2 seeds)"
    assert all(one.judge is None and not one.figures for one in found.comparisons)
    (row,) = found.rows
    half = row.pop("ttft_ci95")
    assert half == pytest.approx(12.706 * 5, rel=1e-3)
    assert row == {"system": "a", "gpus": 2, "ttft": 85.0, "lost": 0}
    assert found.plots["p"].lines == {"a": [(2, 85.0)]}
    assert found.plots["p"].halves == {"a": [half]}
    assert found.budget == ["same", "Seed 0: load 8", "Seed 10: load 9"]


def test_a_single_seed_is_as_it_was() -> None:
    alone = run(0.9, 80.0, "load 9")
    found = merged({0: alone})
    assert [one.ours for one in found.comparisons] == [one.ours for one in alone.comparisons]
    assert (found.rows, found.plots, found.budget) == (alone.rows, alone.plots, alone.budget)


def test_seeds_do_not_share_traces() -> None:
    assert spaced(3, 2) == [3, 13]
