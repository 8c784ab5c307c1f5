"""Values of MuxServe's and SeaLLM's papers in the studies: their figures, and how words are
read."""

from __future__ import annotations

import pytest

from lab.papers.catalog import STUDIES
from lab.papers.muxserve import muxserve_chat, muxserve_parts
from lab.papers.muxserve import muxserve_overall as muxserve
from lab.papers.muxserve.muxserve_chat import temporal_is_worst
from lab.papers.muxserve.muxserve_overall import outperforms, requests_at_target
from lab.papers.seallm import seallm_overall as seallm
from lab.papers.seallm.seallm_overall import worst_of
from lab.papers.seallm.seallm_statements import (
    FAST_FALL,
    SLIGHT_FALL,
    WORSE,
    Fall,
    best_everywhere,
    falls,
    faster,
    shrinks,
    similar,
)
from lab.papers.study.lines import Lines


def line(*values: float) -> list[tuple[float, float | None]]:
    return list(zip((1.0, 2.0, 3.0), values, strict=False))


def test_muxserves_figures() -> None:
    """Checks §4.2 "up to 1.8x", "2.9x more requests"; §4.3 "1.38x and 1.46x"; §4.4 "1.3x", "1.7x",
    "another 1.2x", "by 3.6x"; the means of Figure 10's bars are §4.4's "1.43x and 1.85x"."""
    assert muxserve.PUBLISHED_SYNTHETIC == {"throughput": 1.8, "requests": 2.9}
    assert muxserve_chat.PUBLISHED_CHAT == {"spatial": 1.38, "temporal": 1.46}
    assert muxserve_parts.PUBLISHED_GREEDY == {"16 GPUs, 7 models": 1.3}
    assert tuple(muxserve_parts.PUBLISHED_PARTS.values()) == (1.7, 1.2, 3.6)
    for other, said in (("round-robin", 1.43), ("fcfs", 1.85)):
        bars = muxserve_parts.PUBLISHED_RPS.values()
        assert sum(unit["adbs"] / unit[other] for unit in bars) / 2 == pytest.approx(said, abs=0.01)


def test_seallms_figures() -> None:
    """Checks §6.2 over vLLM, AlpaServe, MuxServe; "up to 51.98x faster"; §6.3 SeaLLM-F and -M,
    -A."""
    said = {what: tuple(by_name.values()) for what, by_name in seallm.PUBLISHED.items()}
    assert said == {
        "normalised latency": (10.38, 9.52, 13.60),
        "P99 latency": (12.13, 5.80, 18.69),
        "SLO attainment": (1.82, 3.64, 2.11),
    }
    assert all(list(p) == ["vllm", "alpaserve", "muxserve"] for p in seallm.PUBLISHED.values())
    assert seallm.PUBLISHED_TTFT == 51.98
    assert seallm.PUBLISHED_PARTS == {("F", "M"): (4.17, 1.37), ("A",): (2.44, 1.33)}
    figures = {int(name.partition("fig")[2]) for name in STUDIES if name.startswith("seallm")}
    assert figures == {6, 7, 8, 10, 11, 12, 13, 14}


def test_what_is_not_as_in_the_paper_is_said() -> None:
    seallms = [s for s in STUDIES.values() if s.name.startswith("seallm") and "14" not in s.name]
    assert all("A800" in s.differs and "§6.1" in s.differs for s in seallms)
    assert "0.5" in STUDIES["seallm-fig11"].shortened
    assert "not run" in STUDIES["muxserve-fig5"].differs
    assert all("our" in STUDIES[f"muxserve-fig{n}"].differs for n in (8, 9))


def test_a_factor_of_which_the_text_says_nothing_is_not_counted() -> None:
    rates: Lines = {"muxserve": line(2.0, 3.0), "greedy": line(1.0, 1.0)}
    found = muxserve_parts._placed(dict.fromkeys(muxserve_parts.SCALES, rates))
    assert [(c.published, c.agrees) for c in found] == [("not published", None), ("1.30x", True)]
    both: Lines = {"seallm": line(1.0), **{name: line(2.0) for name in ("F", "M", "P", "A")}}
    parts = seallm._without("normalised latency", both, smaller=True)
    said = [c.published for c in parts]
    assert said == ["4.17x", "better", "better", "2.44x", "not published"]


def test_requests_within_99_percent_are_read_between_rates() -> None:
    shares: Lines = {
        "muxserve": line(100.0, 100.0, 98.0),
        "spatial": line(100.0, 98.0, 90.0),
        "temporal": line(98.0, 90.0, 80.0),
    }
    found = requests_at_target({0.9: shares})
    assert (found.ours, found.published) == (f"{2.5 / 1.5:.2f}x", "2.90x")
    nothing: Lines = {name: line(90.0) for name in shares}
    assert requests_at_target({0.9: nothing}).agrees is None


@pytest.mark.parametrize(("temporal", "holds"), [(0.5, True), (1.0, False), (1.5, False)])
def test_quite_bad_is_behind_both_in_both(temporal: float, holds: bool) -> None:
    rates: Lines = {"muxserve": line(2.0), "spatial": line(1.0), "temporal": line(temporal)}
    assert temporal_is_worst(rates, rates).agrees is holds
    assert temporal_is_worst({**rates, "spatial": [(1.0, None)]}, rates).agrees is None


@pytest.mark.parametrize(
    ("own", "agrees", "verdict"),
    [
        ((1.0, 1.0), True, "holds"),
        ((1.0, 2.5), False, "not at 2"),
        ((1.0, 2.0), None, "holds, but equal at 2"),
        ((2.0, 2.0), None, "no difference here"),
    ],
)
def test_always_faster_is_at_every_rate(
    own: tuple[float, float], agrees: bool | None, verdict: str
) -> None:
    found: Lines = {"seallm": line(*own), "alpaserve": line(2.0, 2.0)}
    said = faster(found, "alpaserve", "TPOT", "always faster", "Figure 7")
    assert (said.agrees, said.verdict) == (agrees, verdict)
    assert faster({"seallm": line(1.0)}, "alpaserve", "TPOT", "", "Figure 7").agrees is None


def test_the_worst_is_against_every_other() -> None:
    found: Lines = {"seallm": line(1.0), "vllm": line(3.0), "muxserve": line(2.0)}
    assert worst_of(found, "Figure 7").agrees is False
    assert worst_of({**found, "vllm": line(1.5)}, "Figure 7").agrees is True
    assert worst_of({"seallm": line(1.0)}, "Figure 7").agrees is None


@pytest.mark.parametrize(("other", "holds"), [(110.0, True), (130.0, False), (70.0, False)])
def test_similar_is_within_a_quarter(other: float, holds: bool) -> None:
    found: Lines = {"seallm": line(other, 100.0), "vllm": line(100.0, 100.0)}
    assert similar(found, "vllm", "TPOT", "Figure 7").agrees is holds


@pytest.mark.parametrize(
    ("last", "fall", "holds"),
    [
        (95.0, SLIGHT_FALL, True),
        (80.0, SLIGHT_FALL, False),
        (99.0, SLIGHT_FALL, False),
        (80.0, FAST_FALL, True),
        (95.0, FAST_FALL, False),
        (80.0, WORSE, True),
        (100.0, WORSE, False),
    ],
)
def test_a_fall_is_as_large_as_the_words(last: float, fall: Fall, holds: bool) -> None:
    found = falls({"vllm": line(100.0, last)}, "vllm", "'s SLO attainment", "Figure 12", fall)
    assert (found.agrees, found.published) == (holds, fall.text)


def test_benefits_get_smaller_over_the_best_baseline() -> None:
    found: Lines = {"seallm": line(1.0, 1.0), "vllm": line(3.0, 1.5), "muxserve": line(2.0, 9.0)}
    said = shrinks(found, "latency", "Figure 13", smaller=True)
    assert (said.ours, said.agrees) == ("2x at 1, 1.5x at 2", True)


def test_an_equal_is_named_where_seallm_is_the_best() -> None:
    found: Lines = {"seallm": line(100.0, 90.0), "vllm": line(100.0, 50.0)}
    assert best_everywhere(found, smaller=False) == (True, "at 2 of 2, with an equal at 1")
    equal: Lines = {"seallm": line(100.0, 90.0), "vllm": line(100.0, 91.0)}
    assert best_everywhere(equal, smaller=False)[0] is None
    assert best_everywhere({**equal, "vllm": line(100.0, 99.0)}, smaller=False)[0] is False


def test_muxserve_outperforms_only_whom_it_beats_somewhere() -> None:
    found: Lines = {
        "muxserve": line(2.0, 2.0),
        "spatial": line(1.0, 2.0),
        "temporal": line(2.0, 1.0),
    }
    assert outperforms(found) == (True, "it is")
    found["spatial"] = line(2.01, 2.0)
    assert outperforms(found) == (None, "equal to spatial at every rate")
    found["spatial"] = line(3.0, 1.0)
    assert outperforms(found)[0] is False
