"""One engine's steps: chunks of prompts, mixed steps, retraction, recomputation and readmission,
and the cost of a shared pool of blocks. Tests read the steps that the cost model receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from prism.policies import registry
from prism.policies.multiplexing.kv_blocks import STEP_OVERHEAD, KvShape
from prism.policies.placement import Hosted, Placement, Unit
from prism.scheduler.decision_journal import Stepped
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import DegreeSetup, EngineSettings
from prism_sim.costs.model import PromptChunk
from tests.sim.clusters import MIB, LinearCost, cluster, model, request, work

Steps = list[tuple[list[int], int]]


class Recorder(LinearCost):
    """`steps`: prompt tokens of each chunk and size of the batch, of each step with a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Steps = []

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        self.steps.append(([chunk.tokens for chunk in chunks], batch))
        return super().step_s(chunks, batch, context_tokens)


def served(*requests: TraceRequest, kv_mib: int = 47, **engine: object) -> tuple[Records, Steps]:
    """Serves requests by one model on one device, with `kv_mib` of KV memory."""
    cost = Recorder()
    part = DegreeSetup(cost, 4, 64 * 1024, KvShape(1, 2, 128, 2, 16))
    one = model(0, "a", parts={1: part}, weight_bytes=(64 - kv_mib) * MIB)
    plain = EngineSettings(max_running=16, prefill_chunk_tokens=512)
    setup = cluster([one], engine=dataclasses.replace(plain, **engine))  # type: ignore[arg-type]
    records = World(setup, work(setup, requests)).run()
    assert not records.errors
    ordered = sorted(requests, key=lambda one: one.timestamp)
    assert list(records.output_tokens) == [one.output_length for one in ordered]
    return records, cost.steps


def test_a_long_prompt_is_computed_in_chunks() -> None:
    records, steps = served(request(0.0, "a", 1300, 2))
    assert steps == [([512], 0), ([512], 0), ([276], 0)]
    assert records.first_s[0] == pytest.approx(0.13)


def test_a_prompt_that_is_half_done_is_pending_whole_as_agents_reckon() -> None:
    """Agents hear of a prompt at its first token (`agent/state/request_table.py`, `loads`)."""
    setup = cluster([model(0, "a")], engine=EngineSettings(prefill_chunk_tokens=512))
    sent = request(0.0, "a", 1300, 2), request(0.06, "a", 100, 2)
    world = World(setup, work(setup, sent), keep_queues=True)
    world.run()
    (queue,) = world.queues.values()
    steps = [r for r in queue.records if isinstance(r, Stepped) and "1" in r.ids]
    (view,) = steps[0].views or ()
    assert view.pending_prefill_s * view.prefill_tokens_per_s == pytest.approx(1300)


def test_the_end_of_one_prompt_and_the_start_of_the_next_share_a_step() -> None:
    _, steps = served(request(0.0, "a", 700, 2), request(0.01, "a", 400, 2))
    assert steps == [([512], 0), ([188, 324], 0), ([76], 0)]


def test_others_decode_beside_a_chunk_only_where_steps_are_mixed() -> None:
    trace = request(0.0, "a", 100, 200), request(0.5, "a", 1000, 2)
    apart, steps = served(*trace)
    assert [batch for _, batch in steps] == [0, 0, 0]
    mixed, steps = served(*trace, mixed_chunk=True)
    assert [batch for _, batch in steps] == [0, 1, 1]
    # a mixed step takes as long as both, and gives the decoding request its token
    assert mixed.end_s[0] == pytest.approx(apart.end_s[0], abs=1e-9)
    assert mixed.first_s[1] > apart.first_s[1]


def test_the_newest_gives_way_when_memory_ends_and_is_computed_again() -> None:
    """Starts both in 2,048 tokens of KV; at their ends they need 2,398."""
    trace = request(0.0, "a", 800, 400), request(0.1, "a", 800, 400)
    records, steps = served(*trace, kv_mib=2)
    assert records.counts["retractions"] == 1  # it is resumed only when it can run for a while
    assert records.end_s[0] < records.end_s[1]
    again = [chunks for chunks, _ in steps[4:]]
    recomputed = sum(sum(chunks) for chunks in again)
    assert 800 < recomputed < 1200
    # its output is kept: only its KV is computed again
    assert records.first_s[1] < 0.4
    alone, _ = served(trace[0], kv_mib=2)
    assert records.end_s[1] > alone.end_s[0]


def test_who_gave_way_waits_until_it_can_go_on_for_a_while() -> None:
    """Waits although the short request's memory would hold its KV again: the tokens to come would
    not fit, and it would be retracted again."""
    long = request(0.0, "a", 800, 400), request(0.1, "a", 800, 400)
    records, _ = served(*long, request(0.05, "a", 10, 200), kv_mib=2, headroom_tokens=400)
    assert records.counts["retractions"] == 1


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_pool_of_merged_blocks_makes_steps_longer_where_models_share_it(names: str) -> None:
    """Runs SeaLLM §6.4 in a whole simulation: only "a" gets requests, "b" is only resident."""
    policy = dataclasses.replace(
        registry.get("seallm"),
        search=lambda problem: Placement((Unit(("gpu:0",), tuple(map(Hosted, names))),)),
        next_interval=None,
    )
    setup = cluster([model(i, name) for i, name in enumerate(names)], policy="seallm")
    shared = World(setup, work(setup, [request(0.0, "a", 100, 50)]), policy).run()
    own = dataclasses.replace(policy, kv_blocks=None)
    alone = World(setup, work(setup, [request(0.0, "a", 100, 50)]), own).run()
    longer = shared.end_s[0] / alone.end_s[0]
    assert longer == pytest.approx(1 + STEP_OVERHEAD * (len(names) - 1))
