"""Prefix reuse: which blocks an engine keeps and evicts; all other results are unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.calibration.measured import traces_folder
from prism.errors import ConfigError
from prism_replay.formats.reader import read_window
from prism_replay.formats.rows import ReadOptions
from prism_replay.results import write_json
from prism_replay.trace import TraceRequest, read_trace, write_trace
from prism_sim.cluster.world import World
from prism_sim.core.prefix import HASH_TOKENS, SimPrefixCache
from prism_sim.core.records import Records
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ClusterSetup
from prism_sim.engine.engine import SimEngine
from prism_sim.output.results import results_of
from prism_sim.scenario.scenario import load
from tests.sim.clusters import cluster, model, parts, request, work
from tests.sim.test_conservation import POLICIES, known, setups

POOL = 6


def reusing(setup: ClusterSetup, **changes: object) -> ClusterSetup:
    chosen: dict[str, Any] = {"prefix_reuse": True, **changes}
    return dataclasses.replace(setup, engine=dataclasses.replace(setup.engine, **chosen))


def prompt(
    arrival_s: float, ids: Sequence[int], rest: int = 40, output: int = 20, of: str = "a"
) -> TraceRequest:
    plain = request(arrival_s, of, HASH_TOKENS * len(ids) + rest, output)
    return msgspec.structs.replace(plain, hash_ids=(*ids, 99) if rest else tuple(ids))


@st.composite
def shared_traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Draws prompts of up to four blocks that often share a prefix."""
    seconds = draw(st.sampled_from([1.0, 30.0, 120.0]))
    ids = st.lists(st.integers(1, POOL), max_size=4)
    return [
        prompt(
            draw(st.floats(0.0, 1.0)) * seconds,
            draw(ids),
            draw(st.integers(0, 300)) or 1,
            draw(st.integers(1, 300)),
            draw(st.sampled_from("ab")),
        )
        for _ in range(draw(st.integers(1, 30)))
    ]


def simulate(setup: ClusterSetup, trace: Sequence[TraceRequest]) -> tuple[World, Records]:
    world = World(setup, work(setup, known(setup, trace)))
    return world, world.run()


@given(setups(POLICIES), shared_traces())
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_and_only_the_cache_stays(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    world, records = simulate(reusing(setup), trace)
    assert records.ended == len(world.work)
    for i, whole in enumerate(world.work.prompt_tokens):
        assert 0 <= records.cached_tokens[i] < whole
    if records.errors:
        return
    for device in world.devices:
        assert device.ledger.peak_bytes <= device.ledger.capacity_bytes
        assert device.ledger.claimed_bytes == 0
        for space in device.site.spaces:
            assert space.cache is not None
            assert space.live_blocks == space.idle_blocks
            assert space.live_blocks == len(space.cache) * space.cache.kv_blocks


@given(setups(POLICIES), shared_traces())
@settings(max_examples=25, deadline=None)
def test_runs_and_single_steps_agree(setup: ClusterSetup, trace: list[TraceRequest]) -> None:
    _, runs = simulate(reusing(setup), trace)
    _, steps = simulate(reusing(setup, run_steps=1), trace)
    assert runs.end_s.tolist() == pytest.approx(steps.end_s.tolist(), rel=1e-9)
    assert runs.first_s.tolist() == pytest.approx(steps.first_s.tolist(), rel=1e-9)
    assert runs.cached_tokens == steps.cached_tokens
    assert runs.counts == steps.counts


@given(setups(POLICIES), shared_traces())
@settings(max_examples=10, deadline=None)
def test_the_same_input_gives_the_same_bytes(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    (_, first), (_, second) = (simulate(reusing(setup), trace) for _ in range(2))
    assert first.end_s.tobytes() == second.end_s.tobytes()
    assert first.cached_tokens == second.cached_tokens


@given(setups(POLICIES), shared_traces())
@settings(max_examples=10, deadline=None)
def test_without_hashes_or_without_the_option_nothing_changes(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    bare = [msgspec.structs.replace(r, hash_ids=()) for r in trace]
    _, plain = simulate(setup, bare)
    for other, given_trace in ((reusing(setup), bare), (setup, trace)):
        _, found = simulate(other, given_trace)
        assert found.end_s.tobytes() == plain.end_s.tobytes()
        assert found.samples == plain.samples
        assert found.decisions == plain.decisions


def test_a_step_never_hands_out_idle_prefixes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares the memory of an engine's idle blocks with its neighbour, but grants it only once."""
    admit, homeless = SimEngine.admit, []

    def noting(engine: SimEngine, requests: Iterable[SimRequest]) -> None:
        taken = list(requests)
        admit(engine, taken)
        homeless.extend(r for r in taken if r in engine.prompts.retracted)

    monkeypatch.setattr(SimEngine, "admit", noting)
    sizes = {"weight_bytes": 26 << 20, "kv_floor_bytes": 0}
    setup = reusing(cluster([model(0, "a", **sizes), model(1, "b", **sizes)], policy="prism"))
    for seed in range(8):
        dice = Random(seed)
        trace = [
            prompt(
                dice.uniform(0, 10),
                [dice.randint(1, POOL) for _ in range(dice.randint(0, 4))],
                dice.randint(1, 300),
                dice.randint(1, 200),
                dice.choice("ab"),
            )
            for _ in range(60)
        ]
        simulate(setup, trace)
    assert homeless == []


def test_only_what_is_not_cached_is_computed() -> None:
    setup = reusing(cluster([model(0, "a")]))
    trace = [prompt(0.0, [1, 2]), prompt(10.0, [1, 2]), prompt(20.0, [1, 3]), prompt(30.0, [4])]
    trace.append(prompt(40.0, [1, 2], rest=0))
    _, records = simulate(setup, trace)
    # for a fully cached prompt, the last block is computed for its first token
    assert records.cached_tokens.tolist() == [0, 1024, 512, 0, 512]
    took_s = [first - at for first, at in zip(records.first_s, (0, 10, 20, 30, 40), strict=True)]
    assert took_s[1] < 0.1 * took_s[0]
    assert took_s[2] == pytest.approx(took_s[3], rel=1e-6)


def test_blocks_give_way_to_requests_the_oldest_first() -> None:
    """Runs one engine with room for about 4,000 tokens."""
    setup = reusing(cluster([model(0, "a", weight_bytes=60 << 20, kv_floor_bytes=0)]))
    trace = [prompt(float(n), [10 * n, 10 * n + 1, 10 * n + 2]) for n in range(1, 5)]
    trace += [prompt(5.0, [40, 41, 42]), prompt(6.0, [10, 11, 12])]
    world, records = simulate(setup, trace)
    assert records.cached_tokens.tolist() == [0, 0, 0, 0, 1536, 0]
    assert not records.errors
    assert records.counts.get("retractions", 0) == 0
    assert world.devices[0].ledger.peak_bytes <= world.devices[0].ledger.capacity_bytes


def test_a_neighbour_gets_the_memory_of_idle_prefixes() -> None:
    """Gives `a` 6 of the 8 MiB that are not weights, then `b` needs 3."""
    setup = reusing(
        cluster([model(0, "a", weight_bytes=28 << 20), model(1, "b", weight_bytes=28 << 20)])
    )
    trace = [prompt(float(n), [3 * n, 3 * n + 1, 3 * n + 2]) for n in range(4)]
    world, records = simulate(setup, [*trace, prompt(9.0, range(50, 55), of="b")])
    assert not records.errors
    assert records.first_s[4] < 10.0
    a, b = world.devices[0].site.spaces
    assert a.live_blocks < 4 * 96
    assert b.live_blocks == 5 * 32


def test_an_activation_gets_the_memory_of_idle_prefixes() -> None:
    """Replaces `c` with `b`, which is larger: some of `a`'s blocks are evicted."""
    sizes = {"a": 28, "b": 30, "c": 20}
    models = [model(i, name, weight_bytes=sizes[name] << 20) for i, name in enumerate(sizes)]
    big = {"parts": parts(kv=8), "token_bytes": 8192, "never_evict": True}
    models[0] = model(0, "a", weight_bytes=28 << 20, **big)
    trace = [request(50.0, "c"), prompt(80.0, [1, 2, 3]), request(110.0, "b")]
    world, records = simulate(reusing(cluster(models)), trace)
    assert not records.errors
    assert [d.model for d in records.decisions if d.kind == "evict"] == ["b", "c"]
    assert records.first_s[2] < 112.0
    (a, _) = world.devices[0].site.spaces
    assert 0 < a.live_blocks < 3 * 32


def test_a_block_in_use_stays_and_a_beginning_outlives_its_ends() -> None:
    cache = SimPrefixCache(32)
    first, second = cache.use([1, 2], 9), cache.use([1, 3], 9)
    assert first == second == []
    assert cache.extend(first, [1, 2]) == 0
    assert cache.extend(second, [1, 3]) == 1
    assert len(cache) == 3
    cache.leave(first, 1.0)
    assert cache.idle_blocks == 32
    cache.drop()
    assert [len(cache.use([1, 2], 9)), len(cache)] == [1, 2]
    cache.leave(second, 2.0)
    assert cache.idle_blocks == 32, "the beginning is used once more"


def test_hash_ids_come_through_files(tmp_path: Path) -> None:
    mooncake = tmp_path / "chat.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}\n'
    )
    trace = read_window(mooncake, "mooncake", ReadOptions(0, 1.0), None)
    write_trace(tmp_path / "own.jsonl", trace)
    assert read_trace(tmp_path / "own.jsonl")[0].hash_ids == (7, 8)
    setup = cluster([model(0, "chat")])
    assert list(work(setup, trace).hashes) == [(7,)], "the second block is not whole"


def test_a_real_conversation_reuses_what_its_ids_allow() -> None:
    """Matches an unbounded set of prefixes, since there is room for everything."""
    path = traces_folder() / "mooncake_conversation_trace.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}; set PRISM_TRACES")
    trace = read_window(path, "mooncake", ReadOptions(0, 1.0), None)[:60]
    far = [msgspec.structs.replace(r, timestamp=6e5 * i, model="a") for i, r in enumerate(trace)]
    setup = cluster([model(0, "a", parts={1: dataclasses.replace(parts()[1], quantum_bytes=64)})])
    _, records = simulate(reusing(setup), far)
    seen: set[tuple[int, ...]] = set()
    for found, r in zip(records.cached_tokens, far, strict=True):
        heads = [r.hash_ids[: n + 1] for n in range(r.input_length // HASH_TOKENS)]
        most = (r.input_length - 1) // HASH_TOKENS
        assert found == HASH_TOKENS * sum(head in seen for head in heads[:most])
        seen.update(heads)


def test_conversations_stay_with_the_copy_that_has_their_beginning() -> None:
    """Sends two at the same moments, in changing order; the first one finds both copies idle."""
    setup = cluster([model(0, "a", replicas_min=2, replicas_max=2)], 2)
    which = [0, 1, 1, 0] * 5
    trace = [prompt(100.0 + n // 2, [begins, 5], output=40) for n, begins in enumerate(which)]
    _, records = simulate(reusing(setup), trace)
    homes = {begins: set[int]() for begins in which}
    for begins, home in zip(which, records.device, strict=True):
        homes[begins].add(home)
    assert [len(found) for found in homes.values()] == [1, 1]
    assert sum(records.cached_tokens) == 18 * 2 * HASH_TOKENS
    _, plain = simulate(setup, trace)
    assert plain.device.tolist() == [0, 1] * 10, "without caches by load alone"


def scenario_file(folder: Path, **engine: object) -> Path:
    trace = [prompt(float(n), [1, 2, 3]) for n in range(3)]
    write_trace(folder / "trace.jsonl", trace)
    path = folder / "sim.yaml"
    path.write_text(
        "gpus: {type: h100, count: 1}\ntrace: trace.jsonl\n"
        "models: [{name: a, shape: Llama-3.2-1B}]\n"
        f"engine: {msgspec.json.encode(engine).decode()}\n"
    )
    return path


def test_results_say_how_much_was_cached(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, prefix_reuse=True)
    scenario = load(path)
    world = World(scenario.setup, scenario.work)
    world.run()
    share = 2 * 3 * HASH_TOKENS / (3 * (3 * HASH_TOKENS + 40))
    hits = results_of(scenario.config, world, (1.0,)).prefix_hits
    assert hits == {"a": pytest.approx(share), "total": pytest.approx(share)}
    off = load(path, {"engine.prefix_reuse": False})
    world = World(off.setup, off.work)
    world.run()
    write_json(tmp_path / "off.json", results_of(off.config, world, (1.0,)))
    assert b"prefix_hits" not in (tmp_path / "off.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": "muxserve"}, "engine.prefix_reuse: cannot be combined with policy 'muxserve'"),
        ({"engine.block_tokens": 48}, "48 must divide the 512 tokens of a hash_ids block"),
    ],
)
def test_what_it_cannot_go_with_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(scenario_file(tmp_path, prefix_reuse=True), changes)
