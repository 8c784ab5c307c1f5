"""Requests that run while their model moves: they end where they are, or resume at the target."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prism.policies import registry
from prism.policies.data import Action, Activate, ClusterView, Evict, Migrate, Settings, Waiting
from prism.policies.placement import Hosted, Placement, Unit
from prism_sim.cluster.device import Resident
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from prism_sim.scenario.scenario import load
from tests.sim.clusters import MIB, cluster, model, parts, request, work
from tests.sim.test_engine import Recorder

HERE = Placement(
    (Unit(("gpu:0",), (Hosted("a"),)), *(Unit((f"gpu:{number}",), ()) for number in (1, 2, 3)))
)
AT_S = 1.0


KV_BYTES_S = 1024 * 10_000.0  # that prefill makes
SLOW, FAST = 0.99 * KV_BYTES_S, 1.01 * KV_BYTES_S


def setup(network_bytes_s: float = SLOW, **changes: Any) -> ClusterSetup:
    """Puts devices 0 and 1 on one node, 2 and 3 on another. Weights are loaded at once."""
    one = model(0, "a", pinned_device="gpu:0", activation_s=0.0, **changes)
    speeds = ActivationSettings(
        layout_s=0.0, peer_bytes_s=10.0 * MIB, network_bytes_s=network_bytes_s
    )
    return cluster([one], 4, activation=speeds, warm=True)


def moved(
    target: str,
    *requests: tuple[float, int, int],
    move_running: bool = True,
    controlled: bool = False,
    peers: tuple[str, ...] = (),
    **changes: Any,
) -> Records:
    """Moves the model from gpu:0 at AT_S."""
    built = setup(**changes)
    policy = None
    if controlled:
        policy = dataclasses.replace(
            registry.get("alpaserve"), search=lambda problem: HERE, plan=once
        )
    trace = [request(at_s, "a", prompt, output) for at_s, prompt, output in requests]
    world = World(built, work(built, trace), policy)
    order = Migrate("a", "gpu:0", target, "test", peers, move_running)
    world.kernel.at(AT_S, world.controller.apply, order)
    return world.run()


def once(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Activates the model on gpu:0, and nothing else."""
    absent = [m for m in view.models if m.state == "absent"]
    return tuple(Activate(m.name, "gpu:0", "test") for m in absent)


@pytest.mark.parametrize("controlled", [False, True])
def test_they_go_on_at_the_target_without_computing_anything_again(controlled: bool) -> None:
    still = moved("gpu:1", (0.5, 500, 100), move_running=False, controlled=controlled)
    records = moved("gpu:1", (0.5, 500, 100), controlled=controlled)
    assert not records.errors
    assert (still.device[0], records.device[0]) == (0, 1)
    assert records.counts["moved"] == 1
    assert records.output_tokens[0] == 100
    assert "retractions" not in records.counts
    # 500 prompt tokens and those given out by then, in quanta of 64 KiB over 10 MiB/s
    kv_s = 64 * 1024 * -(-(500 + 45) // 64) / (10 * MIB)
    assert records.end_s[0] - still.end_s[0] == pytest.approx(kv_s, abs=0.002)
    evicted = next(d.time_s for d in records.decisions if d.kind == "evicted")
    assert evicted == pytest.approx(AT_S + kv_s, abs=0.02)
    assert next(d.time_s for d in still.decisions if d.kind == "evicted") > evicted


def test_between_nodes_what_runs_is_computed_again_where_that_takes_less_time() -> None:
    """Takes as long as a longer prompt at the target; the recorded prompt is still the trace's."""
    far = moved("gpu:2", (0.5, 500, 100))
    known = 500 + 45  # by AT_S
    fresh = moved("gpu:2", (0.5, 1, 1), (AT_S, known, 100 - 45), move_running=False)
    assert far.end_s[0] == pytest.approx(fresh.end_s[1], abs=0.05)
    assert list(far.output_tokens) == [100]
    assert (far.device[0], far.counts["moved"]) == (2, 1)


def test_between_nodes_kv_is_sent_where_that_takes_less_time() -> None:
    """Pauses two requests while all KV is sent; nothing is computed again."""
    requests = [(0.5, 500, 100), (0.5, 500, 100)]
    still = moved("gpu:2", *requests, move_running=False)
    records = moved("gpu:2", *requests, network_bytes_s=FAST)
    kv_s = 64 * 1024 * -(-2 * (500 + 39) // 64) / FAST
    assert records.end_s[0] - still.end_s[0] == pytest.approx(kv_s, abs=0.002)
    assert records.counts["moved"] == 2
    assert set(records.device) == {2}


def test_kv_of_several_ranks_does_not_go_to_another_node() -> None:
    """Ranks fetch only from ranks, as in prism-serve."""
    cost = Recorder()
    both = {degree: dataclasses.replace(part, cost=cost) for degree, part in parts().items()}
    requests = [(0.5, 500, 100)]
    for target, peer, again in (("gpu:1", "", 0), ("gpu:2", "", 0), ("gpu:2", "gpu:3", 540)):
        cost.steps.clear()
        ranks = 2 if peer else 1
        changes = {"tp": ranks, "parts": both, "network_bytes_s": 100 * FAST}
        records = moved(target, *requests, peers=(peer,) * (ranks - 1), **changes)
        assert list(records.output_tokens) == [100]
        assert records.counts["moved"] == 1
        computed = sum(sum(chunks) for chunks, _ in cost.steps)
        assert computed == pytest.approx(500 + again, abs=10)


@pytest.mark.parametrize("controlled", [False, True])
def test_all_that_it_holds_goes_whatever_state_it_is_in(controlled: bool) -> None:
    """Moves requests that decode, are between chunks of their prompt, or wait in the queue."""
    requests = [(0.5, 500, 100), (0.97, 4000, 5), (0.99, 100, 10), (1.02, 100, 10)]
    records = moved("gpu:1", *requests, controlled=controlled)
    assert not records.errors
    assert list(records.output_tokens) == [100, 5, 10, 10]
    assert set(records.device) == {1}
    assert records.counts["moved"] >= 2


def evicted(
    homes: Sequence[str], move_running: bool, requests: int = 1, network_bytes_s: float = SLOW
) -> Records:
    """Evicts the copy on gpu:0 at AT_S, with its part of the requests; `homes`: of all copies."""

    def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
        held = {m.device for m in view.models}
        return tuple(Activate("a", home, "test") for home in homes if home not in held)

    built = setup(network_bytes_s)
    policy = dataclasses.replace(
        registry.get("alpaserve"), search=lambda problem: HERE, plan=plan, is_balanced=None
    )
    world = World(built, work(built, [request(0.5, "a", 500, 100)] * requests), policy)
    world.kernel.at(
        AT_S, world.controller.apply, Evict("a", "gpu:0", "test", move_running=move_running)
    )
    return world.run()


def test_what_runs_in_an_evicted_copy_goes_on_at_another() -> None:
    """Implements SeaLLM §5: ongoing requests migrate, old engines stop."""
    homes = ("gpu:0", "gpu:1")
    still, records = (evicted(homes, moves) for moves in (False, True))
    assert (still.device[0], records.device[0]) == (0, 1)
    assert (records.counts["moved"], records.output_tokens[0]) == (1, 100)
    kv_s = 64 * 1024 * -(-(500 + 45) // 64) / (10 * MIB)
    assert records.end_s[0] - still.end_s[0] == pytest.approx(kv_s, abs=0.002)
    gone_s = [next(d.time_s for d in r.decisions if d.kind == "evicted") for r in (still, records)]
    assert gone_s == pytest.approx([still.end_s[0], AT_S + kv_s], abs=0.02)


def test_what_runs_in_an_evicted_copy_is_divided_among_the_others() -> None:
    """Divides nine requests: three in each copy, then those of gpu:0 are one more, and two more."""
    records = evicted(("gpu:0", "gpu:1", "gpu:2"), move_running=True, requests=9)
    assert not records.errors
    assert records.counts["moved"] == 3
    assert sorted(Counter(records.device).items()) == [(1, 5), (2, 4)]


@pytest.mark.parametrize(
    ("network_bytes_s", "at"), [(SLOW, [(2, 5), (3, 4)]), (FAST, [(2, 6), (3, 3)])]
)
def test_with_its_other_copies_on_another_node(
    network_bytes_s: float, at: list[tuple[int, int]]
) -> None:
    """Sends all KV to one of them; divides what is computed again."""
    homes = ("gpu:0", "gpu:2", "gpu:3")
    records = evicted(homes, move_running=True, requests=9, network_bytes_s=network_bytes_s)
    assert not records.errors
    assert records.counts["moved"] == 3
    assert sorted(Counter(records.device).items()) == at


def test_the_wait_of_a_copy_is_that_of_its_oldest_request() -> None:
    """Differs from its first request's if requests of another copy joined later."""
    built = setup()
    device = World(built, work(built, [request(0.0, "a")])).devices[0]
    resident = Resident(built.models[0], [device], 0.0, 0.0)
    for index, queued_s in enumerate((3.0, 1.0, 2.0)):
        resident.queue[str(index)] = SimRequest(index, 0, queued_s, 1, 1, deadline_s=9.0)
    assert resident.first_s == 1.0


def test_without_another_copy_it_waits_for_one_and_is_computed_again() -> None:
    still, records = (evicted(("gpu:0",), moves) for moves in (False, True))
    assert not records.errors
    assert records.output_tokens[0] == 100
    prefills_s = 0.01
    assert records.end_s[0] > still.end_s[0] + prefills_s


def test_who_finds_no_memory_at_the_target_is_computed_again_there() -> None:
    """Leaves 2 MiB at the target next to a neighbour; five requests have some 3 MiB by then."""
    cost = Recorder()
    built = setup(parts={1: dataclasses.replace(parts()[1], cost=cost)})
    big = model(1, "b", weight_bytes=30 * MIB, kv_floor_bytes=16 * MIB, pinned_device="gpu:1")
    built = dataclasses.replace(built, models=(*built.models, big))
    trace = [request(0.1 * i, "a", 600, 300) for i in range(5)]
    world = World(built, work(built, trace))
    world.kernel.at(
        AT_S, world.controller.apply, Migrate("a", "gpu:0", "gpu:1", "test", move_running=True)
    )
    records = world.run()
    assert not records.errors
    assert records.counts["moved"] == 5
    assert list(records.output_tokens) == [300] * 5
    assert set(records.device) == {1}
    computed = sum(sum(chunks) for chunks, _ in cost.steps)
    assert 5 * 600 + 600 < computed < 10 * 600 + 5 * 300


def test_the_yaml_says_whether_they_move(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "gpus: {type: h100, count: 1}\nmodels: [{name: a, shape: Llama-3.2-1B}]\ngenerate: {}\n"
    )
    assert not load(path).setup.settings.move_running
    assert load(path, {"scheduler.migrate_running": "move"}).setup.settings.move_running


def test_who_waits_for_another_copy_has_a_deadline_from_then_on() -> None:
    """Sets the next token's deadline within the TPOT SLO, as the live queue does. With its first
    deadline the request would queue after all that can be on time."""
    built = cluster([model(0, "a", activation_s=0.5, slo_tpot_s=0.2)], 1, warm=True)
    trace = work(built, [request(0.5, "a", 500, 100), request(1.01, "a", 100, 5)])
    world = World(built, trace)
    world.kernel.at(AT_S, world.controller.apply, Evict("a", "gpu:0", "test", move_running=True))
    seen: list[Waiting] = []
    device = world.devices[0]
    add = device.scheduler.add
    device.scheduler.add = lambda waiting: (seen.append(waiting), add(waiting))[1]  # type: ignore
    records = world.run()
    assert not records.errors
    resumed = next(w for w in seen if w.id == "0")
    moved_s = resumed.deadline_s - 0.2
    assert moved_s == pytest.approx(AT_S, abs=0.05)
    assert resumed.arrival_s == pytest.approx(moved_s)
    assert resumed.prompt_tokens > 500  # its prompt and its output so far
