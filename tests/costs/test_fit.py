"""The fit recovers a table from its own steps; otherwise it reports its error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_sim.costs.fit import MeasuredStep, dense_knots, fit, least_squares, predict
from prism_sim.costs.table import StepTable, TableCost

PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16)


def true_table(bend: float = 0.002) -> StepTable:
    return StepTable(
        gpu="host",
        model="m",
        tp=1,
        source="truth",
        dense_tokens=(1, 8, 64, 128),
        dense_s=(0.01, 0.011, 0.011 + bend * 56, 0.011 + bend * 56 + 0.2),
        pair_s=2e-7,
        request_s=0.004,
        decode_batch=(1, 2),
        decode_context=(0, 1000),
        decode_s=((0, 3e-4), (0, 6e-4)),
    )


def steps_of(table: StepTable) -> list[MeasuredStep]:
    cost = TableCost(table)
    blank = [MeasuredStep(True, tokens, 0, 1.0) for tokens in PROMPTS]
    blank += [MeasuredStep(False, b, b * context, 1.0) for b in BATCHES for context in (32, 1000)]
    return [
        MeasuredStep(step.prompt, step.tokens, step.context_tokens, predict(cost, step))
        for step in blank
    ]


@given(bend=st.floats(1e-5, 1e-2))
def test_a_table_is_recovered_from_its_own_steps(bend: float) -> None:
    truth = true_table(bend)
    fitted = fit(steps_of(truth), "host", "m", 1, "again")
    assert max(map(abs, fitted.errors)) < 1e-6
    found, wanted = TableCost(fitted.table), TableCost(truth)
    assert fitted.table.request_s == pytest.approx(truth.request_s, rel=1e-4)
    assert found.decode_run_s(5, 4000, 300) == pytest.approx(wanted.decode_run_s(5, 4000, 300))
    assert found.prefill_s(1500) == pytest.approx(wanted.prefill_s(1500))


def test_noise_shows_in_the_errors_and_hardly_in_the_table() -> None:
    rng = np.random.default_rng(3)
    steps = [
        MeasuredStep(s.prompt, s.tokens, s.context_tokens, s.seconds * rng.normal(1, 0.05))
        for s in steps_of(true_table())
    ]
    fitted = fit(steps, "host", "m", 1, "noisy")
    assert 0.005 < float(np.median(np.abs(fitted.errors))) < 0.1
    wanted = TableCost(true_table()).decode_s(8, 8000)
    assert TableCost(fitted.table).decode_s(8, 8000) == pytest.approx(wanted, rel=0.1)


def test_disturbed_steps_hardly_move_the_table() -> None:
    rng = np.random.default_rng(5)
    steps = [
        MeasuredStep(s.prompt, s.tokens, s.context_tokens, s.seconds * rng.normal(1, 0.02))
        for s in steps_of(true_table())
    ]
    for number in (3, 12):
        step = steps[number]
        steps[number] = MeasuredStep(
            step.prompt, step.tokens, step.context_tokens, 4 * step.seconds
        )
    cost = TableCost(fit(steps, "host", "m", 1, "disturbed").table)
    wanted = TableCost(true_table())
    assert cost.decode_s(8, 8000) == pytest.approx(wanted.decode_s(8, 8000), rel=0.1)
    assert cost.prefill_s(1024) == pytest.approx(wanted.prefill_s(1024), rel=0.1)


@given(seed=st.integers(0, 10_000), rows=st.integers(3, 20), columns=st.integers(1, 6))
def test_least_squares_meets_its_conditions(seed: int, rows: int, columns: int) -> None:
    """Has gradient 0 where x > 0, and a gradient that does not point inwards where x = 0 (Kuhn and
    Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    found = least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ found)
    assert np.all(found >= 0)
    assert np.all(gradient <= 1e-6)
    assert np.all(np.abs(gradient[found > 0]) <= 1e-6)


def test_knots_are_measured_counts_that_leave_the_long_prompts_straight() -> None:
    assert dense_knots(steps_of(true_table())) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    short = [MeasuredStep(True, tokens, 0, 1.0) for tokens in (1, 2, 3)]
    assert dense_knots(short) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([], "too few"),
        ([s for s in steps_of(true_table()) if s.prompt], "too few"),
        ([s for s in steps_of(true_table()) if not s.prompt or s.tokens < 60], "too few"),
        ([*steps_of(true_table()), MeasuredStep(False, 1, 5, 0.0)], "took no time"),
    ],
)
def test_too_little_to_go_by_is_said(steps: list[MeasuredStep], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fit(steps, "host", "m", 1, "")


def test_the_cost_of_a_request_is_separated_from_the_first_rise() -> None:
    """Has prompts that are all longer than any batch: the step rises between the two."""
    truth = StepTable(
        gpu="host",
        model="m",
        tp=1,
        source="truth",
        dense_tokens=(1, 4, 44),
        dense_s=(0.25, 0.25, 0.35),
        pair_s=0.0,
        request_s=0.015,
        decode_batch=(1, 2),
        decode_context=(0, 1000),
        decode_s=((0, 1e-4), (0, 2e-4)),
    )
    cost = TableCost(truth)
    steps = [MeasuredStep(True, n, 0, 0.015 + cost.prefill_s(n)) for n in (24, 48, 96, 192)]
    pairs = [(batch, batch * context) for batch in (1, 2, 4) for context in (24, 96)]
    steps += [MeasuredStep(False, b, context, cost.decode_s(b, context)) for b, context in pairs]
    fitted = fit(steps, "host", "m", 1, "again").table
    assert fitted.request_s == pytest.approx(0.015, rel=1e-3)
    assert TableCost(fitted).prefill_s(24) == pytest.approx(cost.prefill_s(24), rel=1e-3)
