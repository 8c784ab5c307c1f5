"""The fake's prefix cache and batching against a model of them, for thousands of random steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcached
from prism.engines.core import EngineContext, StepOutput
from prism.engines.fake import FakeOptions, expected_tokens
from prism.engines.fake.core import FakeCore
from prism.engines.fake.prefix_cache import BlockCache
from prism.messages.engine import ActivateEngine
from tests.engines.harness import DEVICE, request
from tests.engines.subjects import fake_subject

pytestmark = pytest.mark.quick

BLOCK = 2
SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=30)


class CountedBlocks:
    """Memory that knows which blocks are out, so that a leak or a double free shows."""

    def __init__(self) -> None:
        self.out: set[int] = set()
        self._next = 0

    def alloc(self, count: int) -> list[int]:
        blocks = list(range(self._next, self._next + count))
        self._next += count
        self.out |= set(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert self.out >= set(blocks)
        self.out -= set(blocks)


@settings(deadline=None)
@given(SEQUENCES, st.integers(0, 2**32))
def test_prefix_cache_keeps_what_it_promises(sequences: list[list[int]], seed: int) -> None:
    """Holds sequences concurrently; `take` always returns blocks with exactly the requested
    prefix."""
    rng = random.Random(seed)
    memory, cache = CountedBlocks(), BlockCache(BLOCK)
    content: dict[int, tuple[int, ...]] = {}
    live: list[tuple[list[int], list[int]]] = []
    for tokens in sequences:
        blocks = cache.take(tokens)
        for index, block in enumerate(blocks):
            assert content[block] == tuple(tokens[: (index + 1) * BLOCK])
        fresh = memory.alloc(-(-len(tokens) // BLOCK) - len(blocks))
        for index, block in enumerate(fresh, len(blocks)):
            content[block] = tuple(tokens[: (index + 1) * BLOCK])
        live.append((tokens, blocks + fresh))
        if rng.random() < 0.6:
            memory.free(cache.give(*live.pop(rng.randrange(len(live)))))
        if rng.random() < 0.3:
            memory.free(cache.evict(rng.randrange(4)))
        assert all(set(held) <= memory.out for _, held in live)
    for item in live:
        memory.free(cache.give(*item))
    memory.free(cache.evict(cache.idle_blocks))
    assert memory.out == set()
    assert cache.take(sequences[0]) == []


@pytest.fixture
def core(tmp_path: Path, namespace: str) -> Iterator[FakeCore]:
    """Yields room for the weights, the reserve and little more, so that sequences are retracted."""
    subject = fake_subject()
    subject.capacity_bytes = (2 << 20) + (5 << 18)
    config = subject.config(tmp_path, namespace)
    core = FakeCore(EngineContext("e0", DEVICE, config), FakeOptions())
    yield core
    core.close()
    device = kvcached.Device.open(DEVICE, namespace=namespace)
    assert device.usage().reserved_bytes == 0
    device.destroy()


class Log:
    """Outputs so far, whose chunks must be contiguous and without failures."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def add(self, output: StepOutput) -> None:
        assert output.failures == []
        for chunk in output.chunks:
            assert chunk.request_id not in self.ended
            tokens = self.tokens.setdefault(chunk.request_id, [])
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
            if chunk.finish_reason:
                self.ended[chunk.request_id] = chunk.finish_reason


@pytest.mark.parametrize("seed", range(3))
def test_random_load_with_retractions(core: FakeCore, seed: int) -> None:
    rng = random.Random(seed)
    model = fake_subject().models[0]
    activated = core.activate(ActivateEngine(model=model))
    log, requests = Log(), {}
    shared = [rng.randrange(1000) for _ in range(100)]
    for number in range(2500):
        if rng.random() < 0.05:
            prompt = shared[: rng.randrange(100)] + [rng.randrange(9) for _ in range(60)]
            item = request(f"r{number}", model.name, prompt, rng.randrange(1, 250))
            requests[item.id] = item
            core.submit([item])
        if rng.random() < 0.01 and requests:
            core.cancel([rng.choice(list(requests))])
        if rng.random() < 0.01:
            core.shrink(rng.choice([None, 1, 1 << 18]))
        log.add(core.step())
        assert core.status().kv_mapped_bytes <= (1 << 20) + (5 << 18)
    steps = 0
    while set(log.ended) != set(requests):
        log.add(core.step())
        steps += 1
        assert steps < 20_000
    for item in requests.values():
        expected = expected_tokens(item.prompt_ids, item.sampling.max_tokens)
        got = log.tokens[item.id]
        assert got == expected[: len(got)]
        assert log.ended[item.id] == "cancelled" or got == expected
    status = core.status()
    assert status.retractions_total > 0
    assert (status.running, status.waiting, status.pending_prefill_tokens) == (0, 0, 0)
    core.shrink()
    assert core.status().kv_mapped_bytes == activated.floor_bytes
    core.deactivate()
