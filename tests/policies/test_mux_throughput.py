"""MuxServe's estimator: equation 3, the batch by binary search, Algorithm 2's candidates."""

from __future__ import annotations

import pytest

from prism.policies.baselines import mux_throughput as mux
from prism.policies.baselines.mux_throughput import Candidate
from prism.policies.placement import StepTimes
from tests.policies.loads import GB, LAYER_KV_BYTES, spec, times

EVEN = StepTimes(lambda *_: 0.5, lambda *_: 0.1)
"""Every prefill takes 0.5 s, every decode step 0.1 s."""


def test_equation_3_by_hand() -> None:
    a = spec("a", rate=9.0, output_tokens=10.0, prompt_tokens=10.0, token_bytes=1)
    b = spec("b", rate=0.5, output_tokens=20.0, prompt_tokens=10.0, token_bytes=1)
    unit = [Candidate(a, 1, 0.5, 8), Candidate(b, 1, 0.5, 8)]
    # 195 bytes of KV: 9 x 20 = 180 to a and 0.5 x 30 = 15 to b, 9 requests and (at least) one.
    found = mux.estimate(unit, 195, EVEN)
    assert found.batches == {"a": 9, "b": 1}
    rate_a, rate_b = 9 / (0.5 + 0.5 + 1.0), 1 / (0.5 + 0.5 + 2.0)
    assert found.throughput_rps == pytest.approx(min(9.0, rate_a) + min(0.5, rate_b))
    assert found.strain == pytest.approx(max(9.0 / rate_a, 0.5 / rate_b))


def test_the_batch_is_the_smallest_that_meets_the_rate() -> None:
    model = spec("a", rate=5.0)
    clock = times((model,))
    limit = Candidate(model, 1, 1.0, 64)
    rate, batch = mux.smallest_batch(limit, 0.02, clock)

    def at(size: int) -> float:
        prefill = clock.prefill_s("a", 1, size, model.prompt_tokens, 1.0)
        decode = clock.decode_s("a", 1, size, mux.decode_context(model), 1.0)
        return size / (0.02 + prefill + decode * model.output_tokens)

    by_trying_all = next(size for size in range(1, 65) if at(size) >= 5.0)
    assert (rate, batch) == (at(by_trying_all), by_trying_all)
    assert 1 < batch < 64


def test_a_rate_beyond_reach_takes_the_largest_batch() -> None:
    model = spec("a", rate=1e6)
    assert mux.smallest_batch(Candidate(model, 1, 1.0, 32), 0.0, times((model,)))[1] == 32


def test_candidates_take_the_fewest_sms_that_meet_the_rate() -> None:
    slow, fast = spec("slow", rate=0.2), spec("fast", rate=6.0)
    clock = times((slow, fast))
    room = {1: 58 * GB, 2: 130 * GB}
    for model in (slow, fast):
        for tp, found in mux.candidates(model, clock, room).items():
            fewer = [share for share in mux.SM_SHARES if share < found.sm_share]
            limit = mux.batch_limit(model, room[tp])
            assert all(
                mux.smallest_batch(Candidate(model, tp, share, limit), 0.0, clock)[0]
                < model.rate_rps
                for share in fewer
            )
    slow_share = mux.candidates(slow, clock, room)[1].sm_share
    assert slow_share < mux.candidates(fast, clock, room)[1].sm_share


def test_one_candidate_per_degree_and_none_where_it_does_not_fit() -> None:
    model = spec("a", "65b", rate=0.5)
    found = mux.candidates(model, times((model,)), {4: 100 * GB, 8: 400 * GB})
    assert sorted(found) == [4, 8]


def test_a_rate_that_cannot_be_met_has_a_candidate_with_all_sms() -> None:
    model = spec("a", rate=1e6)
    found = mux.candidates(model, times((model,)), {1: 50 * GB})[1]
    assert (found.sm_share, found.batch) == (1.0, mux.batch_limit(model, 50 * GB))


def test_memory_is_shared_by_demand() -> None:
    """Checks that usage normalised by rate and size is equal (constraint of equation 2)."""
    models = [spec("a", rate=6.0), spec("b", "13b", rate=1.0), spec("c", rate=0.5)]
    shares = mux.fair_shares(models)
    assert sum(shares) == pytest.approx(1.0)
    normalised = [s / mux.demand(m) for s, m in zip(shares, models, strict=True)]
    assert normalised == pytest.approx([normalised[0]] * 3)
    assert mux.fair_shares([spec("a", rate=0.0), spec("b", rate=0.0)]) == [0.5, 0.5]


def test_a_neighbours_prefills_cost_throughput() -> None:
    hot, cold = spec("hot", rate=50.0), spec("cold", rate=3.0)
    clock = times((hot, cold))
    alone = mux.estimate([Candidate(hot, 1, 0.4, 1)], 50 * GB, clock)
    both = mux.estimate([Candidate(hot, 1, 0.4, 1), Candidate(cold, 1, 0.4, 1)], 50 * GB, clock)
    assert both.throughput_rps < alone.throughput_rps + 3.0
    assert alone.strain < both.strain


def test_shares_beyond_the_device_slow_decoding_down() -> None:
    models = [spec("a", rate=4.0), spec("b", rate=4.0)]
    clock = times(tuple(models))
    fits = mux.estimate([Candidate(m, 1, 0.3, 1) for m in models], 50 * GB, clock)
    crowded = mux.estimate([Candidate(m, 1, 0.9, 1) for m in models], 50 * GB, clock)
    halves = mux.estimate([Candidate(m, 1, 0.5, 1) for m in models], 50 * GB, clock)
    assert crowded == halves
    assert fits.strain > halves.strain


def test_batches_fit_into_the_memory() -> None:
    models = [spec("a", rate=30.0), spec("b", "13b", rate=30.0)]
    found = mux.estimate([Candidate(m, 1, 0.5, 1) for m in models], 30 * GB, times(tuple(models)))
    assert found.batches is not None
    used = sum(
        found.batches[m.name] * LAYER_KV_BYTES[size] * mux.request_tokens(m)
        for m, size in zip(models, ("7b", "13b"), strict=True)
    )
    assert used <= 30 * GB
