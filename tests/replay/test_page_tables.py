"""Tables of pages about several outcomes: words, units and few columns."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from prism_replay.metrics import summarize
from prism_replay.outcomes import PointOutcome, SeedGroup, difference_rows, sweep_rows
from prism_replay.report.compare_page import plots, write_comparison
from prism_replay.report.page_tables import difference_page_tables, outcome_tables
from tests.replay.records import a_record
from tests.replay.test_report import Page, texts_of


def group(policy: str, ttfts_ms: tuple[float, ...]) -> SeedGroup:
    """Returns a group with a seed for each TTFT. Four of its five requests take 50 ms less."""
    outcomes = []
    for seed, ttft_ms in enumerate(ttfts_ms):
        records = [a_record(n, ttft_ms=ttft_ms - (50 if n else 0)) for n in range(5)]
        summary = summarize(records, (1.0, 2.0), 10.0, None)
        changes = {"trace": "t.jsonl", "policy": policy, "seed": seed}
        outcomes.append(PointOutcome(changes, summary))
    return SeedGroup({"trace": "t.jsonl", "policy": policy}, outcomes)


def test_heads_are_words_and_columns_without_values_are_left_out() -> None:
    met, times = outcome_tables(sweep_rows([group("prism", (150.0,)), group("static", (90.0,))]))
    assert met.heads == ["trace", "policy", "SLO scale", "TTFT", "TPOT", "E2E", "all SLOs"]
    assert met.rows[0] == ["t.jsonl", "prism", "1", "80.0 %", "100.0 %", "100.0 %", "80.0 %"]
    assert len(met.rows) == 4
    assert times.heads[2:] == ["P99 TTFT", "P99 TPOT", "P99 E2E", "req/s", "output tok/s"]
    assert times.rows[1] == ["t.jsonl", "static", "88 ms", "20 ms", "180 ms", "0.50", "2.50"]


def test_counts_are_shown_where_one_is_not_0() -> None:
    (outcome,) = group("prism", (90.0,)).outcomes
    counted = structs.replace(outcome, counts={"active": 3}, busy=0.25)
    *_, work = outcome_tables(sweep_rows([SeedGroup({"policy": "prism"}, [counted])]))
    assert (work.heads, work.rows) == (
        ["policy", "GPUs busy", "activations"],
        [["prism", "25.0 %", "3"]],
    )


def test_points_with_a_problem_are_named_below_the_table() -> None:
    failed = SeedGroup({"gpus.count": 1}, [PointOutcome({}, problem="too small")])
    (met,) = outcome_tables(sweep_rows([failed]))
    assert met.heads[0] == "GPUs"
    assert met.notes == ["Not simulated: GPUs 1: too small"]


def test_seeds_give_intervals_and_signed_differences() -> None:
    groups = [group("prism", (90.0, 90.0)), group("static", (150.0, 90.0))]
    met, times = outcome_tables(sweep_rows(groups))
    assert met.rows[2][3:5] == ["2", "90.0 % ± 127.1"]
    met, times = difference_page_tables(difference_rows(groups, "prism"))
    assert met.heading.startswith("Differences from prism over common seeds")
    assert met.rows[0][3:5] == ["-10.0 ± 127.1", "+0.0 ± 0.0"]
    assert times.rows[0][2].startswith("+30 ms ± ")


def test_the_page_of_a_comparison_says_what_it_shows(tmp_path: Path) -> None:
    groups = [group("prism", (150.0,)), group("static", (90.0,))]
    titles = {text for svg in plots(groups).values() for text in texts_of(svg)}
    assert {"SLO attainment, t.jsonl", "P99 latency, t.jsonl"} <= titles
    write_comparison(tmp_path, groups, "prism", "hub")
    text = " ".join(Page((tmp_path / "report.html").read_text()).text.split())
    assert "One seed. All values are in compare.csv, seeds.csv." in text
    assert "_ms" not in text
    assert "attainment_" not in text
