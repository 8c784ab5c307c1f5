"""The local scheduler on random devices and loads: no loss, no starvation, no overcommitment.

The device model itself asserts at each dispatch that slots and memory are available.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from prism.policies.data import Waiting
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from tests.scheduler.device import Device, Engine

MODELS = ("a", "b", "c")
CAPACITY_BYTES = 512

engines_strategy = st.fixed_dictionaries(
    {
        model: st.builds(
            Engine,
            token_bytes=st.sampled_from([1, 2, 4]),
            quantum_tokens=st.sampled_from([4, 8, 16]),
            block_tokens=st.sampled_from([1, 2, 4]),
            max_running=st.integers(1, 4),
            prefill_tokens_per_s=st.sampled_from([10.0, 1000.0]),
        )
        for model in MODELS
    }
)
# Each fits the empty device: 48 prompt tokens of 4 bytes, in whole quanta and with its blocks.
requests_strategy = st.lists(
    st.tuples(
        st.sampled_from(MODELS),
        st.integers(1, 48),  # prompt tokens
        st.integers(1, 6),  # max tokens
        st.integers(0, 30),  # step of arrival
        st.floats(0, 20, allow_nan=False),  # TTFT SLO
    ),
    max_size=40,
)


def waiting(number: int, row: tuple[str, int, int, int, float]) -> Waiting:
    model, prompt, max_tokens, arrival, slo_s = row
    return Waiting(f"{number:02}", model, prompt, max_tokens, arrival, arrival + slo_s)


@settings(max_examples=150, deadline=None)
@given(engines_strategy, requests_strategy, st.integers(1, 5), st.integers(1, 5))
def test_every_request_starts_exactly_once(
    engines: dict[str, Engine],
    rows: list[tuple[str, int, int, int, float]],
    passes_max: int,
    late_every: int,
) -> None:
    device = Device(CAPACITY_BYTES, engines)
    limits = Limits(headroom_tokens=4, passes_max=passes_max, late_every=late_every)
    scheduler = LocalScheduler(limits)
    requests = [waiting(n, row) for n, row in enumerate(rows)]
    device.requests = {request.id: request for request in requests}
    for now in range(31 + 8 * len(requests)):
        for request in requests:
            if request.arrival_s == now:
                scheduler.add(request)
        device.step(scheduler, float(now))
        arrived = {r.id for r in requests if r.arrival_s <= now}
        assert len(device.dispatched) + len(scheduler) == len(arrived)
        device.advance()
    assert sorted(device.dispatched) == [request.id for request in requests]


@example(1, 4, 8, False, [5, 8, 13, 11, 1])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(8, 48),
    st.booleans(),
    st.lists(st.integers(1, 16), min_size=5, max_size=5),
)
def test_a_flood_of_others_overtakes_a_bounded_number_of_times(
    passes_max: int, late_every: int, prompt: int, late: bool, flood: list[int]
) -> None:
    """Starts the victim although small urgent requests never stop."""
    engines = {model: Engine(max_running=4) for model in MODELS}
    device = Device(64, engines)
    limits = Limits(headroom_tokens=2, passes_max=passes_max, late_every=late_every)
    scheduler = LocalScheduler(limits)
    victim = Waiting("victim", "a", prompt, 2, 0.0, 0.0 if late else 10.0)
    device.requests["victim"] = victim
    scheduler.add(victim)
    for now in range(120):
        scheduler.remove([i for i in device.requests if i.startswith(f"{now - 5}-")])
        for n, size in enumerate(flood):
            other = Waiting(f"{now}-{n}", "bca"[n % 3], size, 2, float(now), now + 3.0)
            device.requests[other.id] = other
            scheduler.add(other)
        device.step(scheduler, float(now))
        device.advance()
        if "victim" in device.dispatched:
            break
    # Late, it is passed by late_every per turn; without memory, by passes_max; and those that
    # start in the very step in which it becomes the first are at most all the slots.
    bound = late_every + passes_max + 4 * len(MODELS)
    assert "victim" in device.dispatched
    if late:
        assert device.dispatched.index("victim") <= bound
