"""Values that the studies of Prism call published, against the paper."""

from __future__ import annotations

import pytest

from lab.papers.prism import prism_calibration, prism_large, prism_overall, prism_table1
from lab.papers.prism.prism_parts import best_idle, robust
from lab.papers.prism.prism_sweeps import AWARE, GIVEN, LISTED, PRISM_FIRST, with_named
from lab.papers.study import findings
from lab.papers.study.lines import Lines


def test_table_1_is_the_papers_and_its_order_that_of_its_shares() -> None:
    paper = {"prism": 99, "muxserve++": 51, "qlm": 45, "static": 39}
    gpus = {"prism": 2, "muxserve++": 5, "qlm": 8, "static": 7}
    for said, shown in ((paper, prism_table1.SHARES), (gpus, prism_table1.NEEDED)):
        both = {**dict.fromkeys((GIVEN, LISTED), said["muxserve++"]), AWARE: said["qlm"]}
        assert {**said, **both} == shown
    assert tuple(sorted(paper, key=lambda name: -paper[name])) == prism_table1.TABLE


def test_figure_7_is_the_papers() -> None:
    hyperbolic, arena = (prism_overall.MORE_REQUESTS[s] for s in ("hyperbolic", "arena-chat"))
    assert hyperbolic == {"muxserve++": 2.3, GIVEN: 2.3, "static": 3.5}
    assert set(arena) == {"muxserve++", GIVEN, "static", "qlm", "serverlessllm"}
    assert set(arena.values()) == {3.0}
    # the text orders no baselines but these: QLM below static by TTFT, ServerlessLLM last
    assert [levels for levels, _ in prism_overall.SAID["ttft"]] == [
        ("prism", ("muxserve++", "static", "qlm", "serverlessllm")),
        ("static", "qlm"),
        (("prism", "muxserve++", "static", "qlm"), "serverlessllm"),
    ]
    tpot = [levels for levels, _ in prism_overall.SAID["tpot"]]
    assert tpot == [("prism", "qlm"), ("qlm", "serverlessllm")]
    assert prism_overall.AT_99 == {
        ("hyperbolic", "ttft"): {"prism": 20},
        ("hyperbolic", "tpot"): {"prism": 22, "static": 26},
        ("arena-chat", "ttft"): {"prism": 10},
        ("arena-chat", "tpot"): {"prism": 3, "qlm": 3.5},
    }
    assert prism_overall.BEST_BASELINE == {"hyperbolic": 84.79, "arena-chat": 67.22}
    assert prism_overall.PRISM_GPUS == {"hyperbolic": 4, "arena-chat": 5}
    assert prism_overall.HIGHER == {"ttft": 3.3, "tpot": 2.0}


def test_figure_12_is_the_papers() -> None:
    assert prism_large.GPUS == {"prism": 16, "muxserve++": 32, GIVEN: 32}
    assert prism_large.EVEN_MORE == ("static", "qlm")
    assert prism_large.TPOT_GPUS == {"static": 20, "muxserve++": 29, "qlm": 29}
    assert prism_large.TPOT_ORDER == ("static", ("muxserve++", "qlm"))
    stays = [name for name, rises in prism_large.IMPROVES.items() if not rises]
    assert stays == ["qlm"]


def test_table_5_is_the_papers() -> None:
    assert prism_calibration.SYSTEMS == ("muxserve++", "muxserve")
    assert prism_calibration.PUBLISHED == {
        "mean end to end (s)": (5.25, 7.40),
        "P95 end to end (s)": (12.09, 18.85),
        "mean TTFT (ms)": (89, 1470),
        "P95 TTFT (ms)": (320, 11040),
        "mean TPOT (ms)": (18.82, 21.21),
        "P95 TPOT (ms)": (33.97, 31.95),
        "requests per second": (7.98, 7.97),
        "tokens per second": (3353.09, 3363.53),
    }


def test_an_order_says_nothing_inside_a_tuple() -> None:
    ours = {"prism": 99.0, "muxserve++": 50.0, GIVEN: 99.5, "static": 60.0, "qlm": 10.0}
    found = findings.order("x", ours, PRISM_FIRST, "Figure 7")
    assert (found.verdict, found.agrees) == ("same order", True)
    assert found.published == "prism > muxserve++, static, qlm, serverlessllm"
    given = findings.order("x", {**ours, GIVEN: 120.0}, with_named(PRISM_FIRST, GIVEN), "Figure 7")
    assert (given.verdict, given.agrees) == (
        f"differs in 1 of 3 pairs: {GIVEN} before prism",
        False,
    )


def test_a_baseline_below_the_target_from_the_start_bounds_the_factor() -> None:
    found: Lines = {
        "prism": [(8.0, 100.0), (32.0, 99.0)],
        "muxserve++": [(8.0, 100.0), (32.0, 90.0)],
        "qlm": [(8.0, 50.0), (32.0, 20.0)],
    }
    mux, qlm = prism_overall.more_requests("arena-chat", found)
    assert (mux.ours, mux.published, mux.agrees) == ("3.08x", "3.00x", True)
    assert (qlm.ours, qlm.agrees) == ("4.00x", True)
    low: Lines = {"prism": [(8.0, 90.0), (32.0, 90.0)], "qlm": found["qlm"]}
    assert prism_overall.more_requests("arena-chat", low)[0].agrees is None


@pytest.mark.parametrize(
    ("shares", "said", "agrees"),
    [
        ((99.5, 100.0), 3.0, None),  # at the least scale tried: below it is not known
        ((90.0, 98.0), 26.0, None),
        ((90.0, 98.0), 10.0, False),
        ((90.0, 99.0), 22.0, True),
    ],
)
def test_a_scale_that_was_not_tried(
    shares: tuple[float, float], said: float, agrees: bool | None
) -> None:
    points = list(zip((5.0, 20.0), shares, strict=True))
    assert prism_overall.at_scale("x", points, said).agrees is agrees


def test_baselines_at_the_target() -> None:
    shares = {"prism": 99.9, "muxserve++": 99.0, "qlm": 20.0}
    found = prism_overall.no_baseline_reaches("with 8 GPUs", shares, "Figure 7")
    assert (found.ours, found.agrees) == ("muxserve++ does", False)
    assert prism_overall.no_baseline_reaches("x", {"prism": 99.9}, "Figure 7").agrees is None
    tpot: Lines = {name: [(8, share)] for name, share in shares.items()}
    assert prism_overall.few_at_tpot("x", tpot).agrees is True
    assert prism_overall.few_at_tpot("x", {**tpot, "qlm": [(8, 99.0)]}).agrees is False
    higher = prism_overall.up_to_higher("x", "ttft", tpot)
    assert (higher.ours, higher.agrees) == ("5.00x", True)


def test_tpot_degrades_only_by_more_than_what_is_equal() -> None:
    lines = ([(8.0, 99.0), (48.0, 98.0)], [(8.0, 99.0), (48.0, 80.0)], [(8.0, 99.0)])
    found = [prism_overall.degrades("x", "static", line).agrees for line in lines]
    assert found == [False, True, None]


def test_what_58_models_need_and_gain() -> None:
    ttft: Lines = {"static": [(12, 50.0), (32, 80.0)], "qlm": [(12, 10.0), (32, 10.5)]}
    assert [c.agrees for c in prism_large.ttft_gpus(ttft, 32)] == [True, True, None]
    rising = prism_large.improvements({"ttft": ttft})
    assert {c.what.split(", ")[1]: c.agrees for c in rising} == {"static": True, "qlm": True}
    tpot: Lines = {"static": [(12, 99.0)], "muxserve++": [(32, 99.0)], "qlm": [(32, 50.0)]}
    assert prism_large.tpot_gpus(tpot, 32)[0].agrees is True
    assert prism_large.tpot_gpus({**tpot, "static": [(32, 50.0)]}, 32)[0].agrees is False


def test_thresholds_by_mean_ttft() -> None:
    assert best_idle({5: 60.0, 45: 50.0, 90: 70.0}).agrees is True
    assert best_idle({5: 40.0, 45: 50.0, 90: 70.0}).agrees is False
    assert robust({15: 55.0, 60: 54.0}).agrees is True
    assert robust({15: 50.0, 60: 60.0}).agrees is False
    assert robust({60: 60.0}).agrees is None
