"""Synthetic prompts, SLO arguments, and counters that restart with their process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prism.errors import ConfigError
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus, Decision
from prism_replay.live.prompts import PromptSource, parse_token_range
from prism_replay.live.sampling import Growth, StatusTracker
from prism_replay.results import Counters, DeviceMemory, PlacementChange
from prism_replay.slo import Slo, parse_slos
from tests.replay.records import a_request


@given(
    length=st.integers(1, 300),
    hashes=st.lists(st.integers(0, 99), max_size=5),
    seed=st.integers(0, 5),
)
def test_prompts_have_the_exact_length_and_range(length: int, hashes: list[int], seed: int) -> None:
    source = PromptSource(seed, 50, 60, block_tokens=64)
    request = a_request(input_length=length, hash_ids=tuple(hashes))
    prompt = source.prompt(request, 3)
    assert len(prompt) == length
    assert all(isinstance(token, int) and 50 <= token < 60 for token in prompt)
    assert prompt == PromptSource(seed, 50, 60, block_tokens=64).prompt(request, 3)


def test_equal_hashes_give_equal_prefixes_and_others_differ() -> None:
    source = PromptSource(block_tokens=16)
    one = source.prompt(a_request(input_length=40, hash_ids=(1, 2)), 0)
    two = source.prompt(a_request(input_length=40, hash_ids=(1, 3)), 1)
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[32:] != two[32:]
    assert source.prompt(a_request(), 0) != source.prompt(a_request(), 1)
    assert source.prompt(a_request(), 0) != PromptSource(1).prompt(a_request(), 0)


def test_a_prompt_in_the_trace_is_sent_as_it_is() -> None:
    assert PromptSource().prompt(a_request(prompt="Hello"), 0) == "Hello"


@pytest.mark.parametrize("text", ["5", "9-5", "a-b", "-1-5", "5-5"])
def test_bad_token_ranges(text: str) -> None:
    with pytest.raises(ConfigError, match="--token-ids"):
        parse_token_range(text)


def test_slo_arguments() -> None:
    assert parse_slos([]) == (Slo(), {})
    assert parse_slos(["900/90", "a=b=1/2"]) == (Slo(900, 90), {"a=b": Slo(1, 2)})
    assert Slo(100, 10).e2e_ms(5) == 140
    assert parse_slos(["900/90/5000"])[0].e2e_ms(7) == 5000
    for text in ("900", "x/1", "0/5", "inf/1", "nan/1", "1/2/0", "1/2/x", "1/2/3/4"):
        with pytest.raises(ConfigError, match="SLO"):
            parse_slos([text])


def test_growth_starts_at_the_first_value_and_survives_restarts() -> None:
    growth = Growth()
    assert growth.observe({"a": 100}) == 0
    assert growth.observe({"a": 130}) == 30
    assert growth.observe({}) == 30
    assert growth.observe({"a": 5}) == 35
    assert growth.observe({"a": 7, "b": 10}) == 37
    assert growth.observe({"b": 12}) == 39


def test_growth_from_zero_counts_what_is_first_seen_later() -> None:
    growth = Growth(from_zero=True)
    assert growth.observe({"a": 100}) == 0
    assert growth.observe({"a": 101, "b": 10}) == 11


@given(st.lists(st.integers(0, 50), min_size=1), st.lists(st.integers(0, 50)))
def test_growth_adds_up_over_a_restart(before: list[int], after: list[int]) -> None:
    growth, value, grown = Growth(), 0, 0
    growth.observe({"x": 0})
    for step in before:
        value += step
        grown = growth.observe({"x": value})
    assert grown == sum(before)
    value = 0
    for step in after:
        value += step
        # a counter that restarts is seen only once it is below its last value
        if value >= sum(before):
            return
        grown = growth.observe({"x": value})
        assert grown == sum(before) + value


def status(maps: int, activations: int) -> ClusterStatus:
    models = [
        ModelReport("a", "active", maps_total=maps, kv_mapped_bytes=5),
        ModelReport("b", "active", maps_total=1, retractions_total=maps),
    ]
    agent = AgentReport("host:0", 1, 0.0, 100, 1, 0, 0, 40, 0, 0, 2, models)
    actions = {"activate": activations, "activate_failed": maps, "migrate": maps}
    return ClusterStatus(0.0, "prism", {}, [agent, agent], actions_total=actions)


def test_a_status_becomes_a_sample_of_growth_and_bytes() -> None:
    tracker = StatusTracker()
    tracker.counters(status(10, 2))
    sample = tracker.sample(status(14, 3), 1.5)
    assert sample.counters == Counters(maps=4, retractions=4, activations=1, migrations=4)
    assert (sample.kv_bytes, sample.resident_bytes) == ({"a": 10, "b": 0}, 80)
    assert sample.capacity_bytes == 200


def test_the_memory_of_devices_and_the_changes_since_the_start() -> None:
    wide = ModelReport("wide", "active", static_bytes=7, kv_mapped_bytes=3, peers=("host:1",))
    agents = [AgentReport(f"host:{n}", 1, 0.0, 100, 1, 0, 0, 0, 0, 0, 2, []) for n in range(2)]
    agents[0] = structs.replace(agents[0], models=[wide])
    decisions = [
        Decision(990.0, "activate", "wide", "host:0"),
        Decision(1001.5, "migrate", "wide", "host:0", "host:1", "relief"),
        Decision(1002.0, "refuse", "big", ""),
    ]
    tracker = StatusTracker()
    for known in (decisions[:2], decisions[1:]):
        seen = ClusterStatus(0.0, "prism", {}, agents, decisions=known)
        sample = tracker.sample(seen, 1.0)
    memory = DeviceMemory(100, {"wide": 7}, {"wide": 3})
    assert sample.devices == {"host:0": memory, "host:1": memory}
    found = tracker.changes(1000.0)
    assert found == [PlacementChange(1.5, "migrate", "wide", "host:0", "host:1", "relief")]


def test_a_change_has_its_duration_once_it_has_ended() -> None:
    tracker = StatusTracker()
    begun = Decision(10.0, "activate", "a", "host:0")
    for decision in (begun, structs.replace(begun, seconds=0.7)):
        tracker.sample(ClusterStatus(0.0, "prism", {}, [], decisions=[decision]), 1.0)
    assert [change.seconds for change in tracker.changes(0.0)] == [0.7]
