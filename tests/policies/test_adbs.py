"""ADBS: Algorithm 3's turns, quotas that follow demand, fairness against FCFS and round robin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.papers.ablations import round_robin
from prism.policies.baselines import adbs, temporal
from prism.policies.baselines.adbs import AdbsSettings, AdbsState
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepControl,
    StepRequest,
)
from tests.policies.machine import Machine, Request

SETTINGS = AdbsSettings()
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


def request(id: str, kv_tokens: int = 10) -> StepRequest:
    return StepRequest(id, 0.0, kv_tokens, kv_tokens)


def engine(name: str, prefill: int = 0, decode: int = 0, **more: object) -> EngineStepView:
    return replace(
        EngineStepView(
            name,
            tuple(request(f"{name}p{i}") for i in range(prefill)),
            tuple(request(f"{name}d{i}") for i in range(decode)),
            decode_sm_share=0.3,
        ),
        **more,  # type: ignore[arg-type]
    )


def device(*engines: EngineStepView, kv: int = 1000, sm_free: float = 1.0) -> DeviceStepView:
    return DeviceStepView(0.0, engines, kv, sm_free)


def jobs(view: DeviceStepView, state: AdbsState | None = None) -> list[tuple[str, Phase, float]]:
    choice, _ = adbs.choose(view, state or adbs.start(view, SETTINGS), SETTINGS)
    return [(j.model, j.phase, round(j.sm_share, 6)) for j in choice.jobs]


# --- turns ---------------------------------------------------------------------------------


def test_a_prefill_goes_first_and_decodes_take_the_rest() -> None:
    view = device(engine("a", decode=2), engine("b", prefill=1), engine("c", decode=1))
    assert jobs(view) == [("b", PREFILL, 0.5), ("a", DECODE, 0.3)]


def test_a_prefill_alone_takes_the_device() -> None:
    assert jobs(device(engine("a", prefill=1), engine("b"))) == [("a", PREFILL, 1.0)]
    with_decode = device(engine("a", prefill=1), engine("b", decode=1))
    assert jobs(with_decode) == [("a", PREFILL, 0.7), ("b", DECODE, 0.3)]


def test_prefills_go_one_at_a_time_and_in_turn() -> None:
    view = device(engine("a", prefill=1), engine("b", prefill=1))
    state, turns = adbs.start(view, SETTINGS), []
    for _ in range(4):
        choice, state = adbs.choose(view, state, SETTINGS)
        turns.append(choice.jobs[0].model)
    assert turns == ["a", "b", "a", "b"]
    busy = device(engine("a", busy=frozenset({PREFILL})), engine("b", prefill=1), sm_free=0.5)
    assert jobs(busy) == []


def test_a_prefill_without_compute_stops_new_decodes() -> None:
    """Checks `prefill_waiting` of Algorithm 3."""
    decoding = engine("a", decode=1, busy=frozenset())
    running = engine("b", busy=frozenset({DECODE}))
    view = device(decoding, running, engine("c", prefill=1), sm_free=0.3)
    assert jobs(view) == []
    assert jobs(device(decoding, running, sm_free=0.3)) == [("a", DECODE, 0.3)]


def test_a_prefill_without_memory_stops_nobody() -> None:
    full = engine("a", prefill=1, decode=1, kv_bytes=500)
    other = engine("b", prefill=1)
    assert jobs(device(full, other)) == [("b", PREFILL, 0.7), ("a", DECODE, 0.3)]
    assert jobs(device(full, engine("b"))) == [("a", DECODE, 1.0)]


def test_decodes_share_what_nobody_else_takes() -> None:
    """Assigns SMs at run time, all of them to a job that is alone (MuxServe §3.4)."""
    assert jobs(device(engine("a", decode=1), engine("b"))) == [("a", DECODE, 1.0)]
    both = device(engine("a", decode=1), engine("b", decode=1, decode_sm_share=0.1))
    assert jobs(both) == [("a", DECODE, 0.75), ("b", DECODE, 0.25)]
    beside = replace(both, sm_free=0.3)
    assert jobs(beside) == [("a", DECODE, 0.3)]
    running = engine("b", busy=frozenset({DECODE}))
    assert jobs(device(engine("a", decode=1), running, sm_free=0.4)) == [("a", DECODE, 0.4)]


def test_jobs_may_overlap_beyond_the_device() -> None:
    """Checks 20 %, as on MuxServe's testbed (`overload_threshold: 2`)."""
    more = AdbsSettings(overcommit=0.2)
    view = device(engine("a", decode=1, decode_sm_share=0.9), engine("b", decode=1))
    assert jobs(view) == [("a", DECODE, 0.9)]
    choice, _ = adbs.choose(view, adbs.start(view, more), more)
    assert [(j.model, round(j.sm_share, 6)) for j in choice.jobs] == [("a", 0.9), ("b", 0.3)]
    assert choice.holds_s > 0


def test_shares_may_be_fixed() -> None:
    """Follows SeaLLM §6.2 on MuxServe; the rest of the device stays idle."""
    fixed = AdbsSettings(wider=False)
    view = device(engine("a", decode=1), engine("b"))
    choice, _ = adbs.choose(view, adbs.start(view, fixed), fixed)
    assert [(j.model, j.sm_share) for j in choice.jobs] == [("a", 0.3)]


def test_decodes_beside_a_running_prefill_take_what_it_leaves() -> None:
    view = device(engine("a", decode=1, decode_sm_share=0.1), engine("b", prefill=1))
    choice, state = adbs.choose(view, adbs.start(view, SETTINGS), SETTINGS)
    assert [(j.model, round(j.sm_share, 6)) for j in choice.jobs] == [("b", 0.9), ("a", 0.1)]
    later = device(view.engines[0], engine("b", busy=frozenset({PREFILL})), sm_free=0.1)
    assert jobs(later, state) == [("a", DECODE, 0.1)]


def test_decodes_go_in_turn_while_compute_lasts() -> None:
    view = device(*(engine(name, decode=1) for name in "abcd"))
    choice, state = adbs.choose(view, adbs.start(view, SETTINGS), SETTINGS)
    assert [j.model for j in choice.jobs] == ["a", "b", "c"]
    assert choice.holds_s == 0.0
    assert [j.model for j in adbs.choose(view, state, SETTINGS)[0].jobs] == ["d", "a", "b"]


def test_decodes_side_by_side_hold_until_quotas_move() -> None:
    view = device(engine("a", decode=1), engine("b", decode=2))
    choice, _ = adbs.choose(view, adbs.start(view, SETTINGS), SETTINGS)
    assert choice.holds_s == SETTINGS.adapt_every_s
    waits_for_memory = device(engine("a", decode=1, prefill=1, kv_bytes=1000), engine("b"))
    assert adbs.choose(waits_for_memory, adbs.start(view, SETTINGS), SETTINGS)[0].holds_s > 0
    prefilling = device(engine("a", decode=1), engine("b", prefill=1))
    assert adbs.choose(prefilling, adbs.start(view, SETTINGS), SETTINGS)[0].holds_s == 0.0


def test_nobodys_turn_is_over_where_all_decode() -> None:
    view = device(engine("a", decode=1), engine("b", decode=1))
    before = adbs.start(view, SETTINGS)
    assert adbs.choose(view, before, SETTINGS)[1] == before


def test_a_decode_with_less_than_its_share_does_not_hold() -> None:
    """Ends the choice, since the next step could have a larger share."""
    others = engine("b", busy=frozenset({DECODE}), decode_sm_share=0.1)
    squeezed = device(engine("a", decode=1), others, sm_free=0.4)
    state = adbs.start(squeezed, SETTINGS)
    assert adbs.choose(squeezed, state, SETTINGS)[0].holds_s == 0.0
    whole = replace(squeezed, sm_free=0.75)
    assert adbs.choose(whole, state, SETTINGS)[0].holds_s > 0
    left_out = device(engine("a", decode=1), engine("b", decode=1), others, sm_free=0.5)
    assert adbs.choose(left_out, state, SETTINGS)[0].holds_s == 0.0


def test_requests_that_execute_count_against_the_batch() -> None:
    busy = engine("a", prefill=2, busy=frozenset({DECODE}), batch_max=3, executing=2)
    choice, _ = adbs.choose(device(busy), adbs.start(device(busy), SETTINGS), SETTINGS)
    assert choice.jobs[0].requests == ("ap0",)


# --- quotas --------------------------------------------------------------------------------


def test_quotas_start_at_the_fair_parts() -> None:
    view = device(engine("a", weight=3.0), engine("b", weight=1.0))
    assert adbs.control().kv_quotas(adbs.control().start(view)) == {"a": 750, "b": 250}
    assert adbs.fair_quotas(device(engine("a", weight=0), engine("b", weight=0)))["b"] == 500


def test_a_prefill_keeps_to_its_quota() -> None:
    view = device(engine("a", prefill=9, weight=1.0), engine("b", weight=19.0))
    choice, _ = adbs.choose(view, adbs.start(view, SETTINGS), SETTINGS)
    assert choice.jobs[0].requests == ("ap0", "ap1", "ap2", "ap3", "ap4")


def test_one_request_may_exceed_an_empty_models_quota() -> None:
    view = device(engine("a", prefill=2, weight=0.001), engine("b", weight=1.0))
    choice, _ = adbs.choose(view, adbs.start(view, SETTINGS), SETTINGS)
    assert choice.jobs[0].requests == ("ap0",)


def test_unused_blocks_move_to_those_who_fill_theirs() -> None:
    view = device(
        engine("idle", kv_peak_bytes=100),
        engine("full", kv_bytes=395),
        engine("some", kv_bytes=200),
    )
    quotas = {"idle": 400, "full": 400, "some": 200}
    assert adbs.adapted(view, quotas, SETTINGS) == {"idle": 250, "full": 475, "some": 275}
    content = device(engine("idle"), engine("full", kv_bytes=300), engine("some"))
    assert adbs.adapted(content, quotas, SETTINGS) == quotas


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 5)), min_size=1))
@settings(max_examples=200, deadline=None)
def test_adapting_keeps_the_sum_and_what_is_used(rows: list[tuple[int, int, int]]) -> None:
    engines = [
        engine(f"m{i}", kv_bytes=used, weight=float(weight))
        for i, (used, _, weight) in enumerate(rows)
    ]
    quotas = {f"m{i}": quota for i, (_, quota, _) in enumerate(rows)}
    moved = adbs.adapted(device(*engines), quotas, SETTINGS)
    assert sum(moved.values()) == sum(quotas.values())
    for i, (used, quota, _) in enumerate(rows):
        assert moved[f"m{i}"] >= min(used, quota)


# --- fairness (MuxServe §4.4, Figure 10) ---------------------------------------------------

RATES = {"7b": 8.0, "13b": 8.0, "30b": 2.0}
LENGTHS = {"7b": 40, "13b": 40, "30b": 80}
STEP_S = {"7b": 0.010, "13b": 0.016, "30b": 0.032}
TOKEN_BYTES = {"7b": 1, "13b": 2, "30b": 3}
END_S = 20.0


def step_s(model: str, phase: Phase, batch: int, sm_share: float) -> float:
    """Returns the speed of a job: a decode needs 40 % of the SMs, a prefill all of them."""
    if phase is DECODE:
        return STEP_S[model] * (1 + 0.01 * batch) / min(1.0, sm_share / 0.4)
    return 0.5 * STEP_S[model] * batch / sm_share


def arrivals(rates: dict[str, float]) -> list[Request]:
    return [
        Request(f"{name}{i}", name, (i + 1) / rate, LENGTHS[name], prompt_tokens=LENGTHS[name])
        for name, rate in rates.items()
        for i in range(int(END_S * rate))
    ]


def unit(control: StepControl, weights: dict[str, float]) -> Machine:
    engines = {
        name: EngineStepView(
            name, token_bytes=TOKEN_BYTES[name], weight=weights[name], decode_sm_share=0.4
        )
        for name in RATES
    }
    return Machine(control, engines, step_s, kv_capacity_bytes=3000)


def demand() -> dict[str, float]:
    return {name: RATES[name] * 2 * LENGTHS[name] * TOKEN_BYTES[name] for name in RATES}


def measured(control: StepControl) -> tuple[float, dict[str, float]]:
    """Returns requests per second and the normalised KV usage / demand of each model."""
    machine = unit(control, demand())
    done = machine.run(arrivals(RATES), until_s=END_S)
    usage = {name: machine.kv_byte_s[name] / demand()[name] for name in RATES}
    total = sum(usage.values())
    return len(done) / END_S, {name: part / total for name, part in usage.items()}


def unfairness(parts: dict[str, float]) -> float:
    """Returns 0 if usage is exactly proportional to demand (equation 2's constraint)."""
    return max(parts.values()) - min(parts.values())


def test_usage_follows_demand_and_throughput_is_highest() -> None:
    """Reproduces Figure 10a, where KV memory is short.

    ADBS is fairer than FCFS and round robin, and serves 1.5 times as many requests (the paper: 1.6
    and 1.5 times).
    """
    adaptive, fcfs, turns = (
        measured(c) for c in (adbs.control(), temporal.FCFS, round_robin.ROUND_ROBIN)
    )
    assert adaptive[0] > 1.5 * max(turns[0], fcfs[0])
    assert unfairness(adaptive[1]) < unfairness(turns[1])
    assert unfairness(adaptive[1]) < unfairness(fcfs[1])


def test_quotas_adapt_to_a_burst() -> None:
    """Gives blocks to a model that fills its quota, and takes them back later."""
    machine = unit(adbs.control(), {"7b": 1.0, "13b": 8.0, "30b": 1.0})
    machine.run(arrivals({"7b": 30.0, "13b": 0.5, "30b": 0.05}), until_s=END_S)
    quotas = adbs.control().kv_quotas(machine.state)
    assert quotas["7b"] > 2 * 300
    assert sum(quotas.values()) == 3000


rows = st.lists(
    st.tuples(st.sampled_from(["7b", "13b", "30b"]), st.integers(0, 60), st.integers(1, 30)),
    max_size=25,
)


@given(rows, st.integers(60, 600))
@settings(max_examples=60, deadline=None)
def test_everything_is_served_within_memory(found: Sequence[tuple[str, int, int]], kv: int) -> None:
    """Prefills never take more KV than there is; every request that fits ends."""
    machine = unit(adbs.control(), demand())
    machine.kv_capacity_bytes = kv
    requests = [
        Request(str(i), name, at / 10, decodes=2, prompt_tokens=size)
        for i, (name, at, size) in enumerate(found)
        if TOKEN_BYTES[name] * size <= kv
    ]
    assert len(machine.run(requests)) == len(requests)
    assert machine.kv_most <= kv + 3 * 2 * len(requests)
