"""Figure 10 runs each variant that it names."""

from __future__ import annotations

from lab.papers.prism import prism_parts


def test_each_part_is_run_without_the_scheduler_that_it_names() -> None:
    """Checks the variants: one was given as the folder of tables, and Prism itself was run."""
    trials = prism_parts.trials_of("x.yaml", {"policy": "prism"}, 0.5)
    assert [(t.variant, t.changes["policy"], t.tables) for t in trials] == [
        ("", "prism", ""),
        ("", "prism-free-memory", ""),
        ("in-order", "prism", ""),
        ("", "prism", ""),
    ]
