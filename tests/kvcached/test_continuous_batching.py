"""transformers' continuous batching on kvcached blocks: the tokens of plain `generate`, memory that
grows and shrinks, and requests for it by other clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvcached import Client, Device, Layout
from kvcached.errors import InvalidArgumentError
from prism.models.hugging_face import import_transformers
from tests.sglang.models import GEMMA3

from .conftest import PAGE
from .test_transformers import LLAMA, NAMES, answer, dynamic, network, prompts

transformers = import_transformers()

import torch  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import continuous_api  # noqa: E402

from kvcached.engines.transformers import elastic_batching  # noqa: E402

TOKENS, BLOCK = 24, 16
GREEDY = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("batches") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _attention(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that each manager was stopped: a running one changes the model's attention."""
    yield
    for name in NAMES:
        assert network(name).config._attn_implementation == "sdpa"


def sized(blocks: int = 256, **others: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        num_blocks=blocks, page_size=BLOCK, max_batch_tokens=128, **others
    )


def asked(count: int, seed: int = 0, length: int = 30) -> list[list[int]]:
    return [prompts(1, length + 7 * n, seed + n)[0].tolist() for n in range(count)]


def plain(name: str, ids: list[int], tokens: int = TOKENS) -> list[int]:
    told = answer(name, torch.tensor([ids]), dynamic(name), tokens)
    found: list[int] = told[0, len(ids) :].tolist()
    return found


def batched(name: str, ids: list[list[int]], config: Any = None, **others: Any) -> list[list[int]]:
    greedy = GenerationConfig(**GREEDY | others)
    told = network(name).generate_batch(
        ids, generation_config=greedy, continuous_batching_config=config or sized()
    )
    assert not [one.error for one in told.values() if one.error]
    return [one.generated_tokens for one in told.values()]


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Manager:
    """Running manager, as a server has one, and its cache for the test."""

    def __init__(self, **others: Any) -> None:
        self.manager = network(LLAMA).init_continuous_batching(
            generation_config=GenerationConfig(**GREEDY),
            continuous_batching_config=sized(**others),
        )
        self.manager.start()
        until(lambda: self.manager.batch_processor)

    @property
    def cache(self) -> Any:
        return self.manager.batch_processor.cache

    def answers(self, ids: list[list[int]]) -> list[list[int]]:
        names = self.manager.add_requests(ids)
        told: dict[str, list[int]] = {}
        while len(told) < len(ids):
            one = self.manager.get_result(timeout=60)
            assert one is not None
            assert one.error is None
            told[one.request_id] = one.generated_tokens
        return [told[name] for name in names]

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.stop(block=True)
        self.manager.destroy()


@pytest.mark.parametrize("name", [LLAMA, GEMMA3.name])
def test_batches_answer_as_plain_generate_and_leave_nothing(
    device: Device, client: Client, name: str
) -> None:
    ids = asked(8)
    before = device.usage().committed_bytes
    with elastic_batching(client, request_tokens=256):
        told = batched(name, ids)
    assert told == [plain(name, one) for one in ids]
    assert device.usage().committed_bytes == before
    assert client.usage().min_bytes == 0


def test_children_share_their_prompts_blocks(client: Client) -> None:
    (ids,) = asked(1, length=70)
    with elastic_batching(client, request_tokens=256):
        told = batched(LLAMA, [ids], num_return_sequences=3, do_sample=True, top_k=1)
    assert told == [plain(LLAMA, ids)] * 3


def test_memory_comes_with_requests_and_prefixes_go_to_one_who_asks(
    device: Device, client: Client
) -> None:
    with elastic_batching(client, request_tokens=128), Manager() as manager:
        cache = manager.cache
        assert client.usage().committed_bytes == cache.pool.kv.floor_bytes()
        ids = asked(6, length=60)
        told = manager.answers(ids)
        held = client.usage()
        assert held.committed_bytes > 2 * held.min_bytes

        def its_minimum_is_left() -> bool:
            device.request_room(held.committed_bytes)  # of its published evictable memory
            return client.usage().committed_bytes <= held.min_bytes

        until(its_minimum_is_left)
        assert client.usage().evicted_tokens > 0
        assert manager.answers(ids) == told == [plain(LLAMA, one) for one in ids]
        cache.pool.kv.check_integrity()


def test_a_device_that_others_fill_makes_requests_wait_and_comes_out_right(
    device: Device, client: Client
) -> None:
    with elastic_batching(client, request_tokens=256), Manager() as manager:
        with device.client("neighbour") as other:
            layout = Layout(num_layers=1, num_kv_heads=1, head_dim=PAGE // 2 // 16, dtype="int8")
            kv = other.alloc_kvcache(layout, 1 << 20)
            taken = []
            while (ids := kv.alloc_kv(1)) is not None:
                taken.append(ids)
            kv.free_kv(taken.pop())
            many = asked(12, length=90)
            told = manager.answers(many)
            kv.free_kv(np.concatenate(taken))
        assert told == [plain(LLAMA, one) for one in many]
        manager.cache.pool.kv.check_integrity()


def test_what_is_not_served_is_refused_by_name(client: Client) -> None:
    with elastic_batching(client, request_tokens=64):
        cache = continuous_api.PagedAttentionCache
        with pytest.raises(InvalidArgumentError, match="host devices alone"):
            cache(network(LLAMA).config, sized(), device="cuda:0", distributed_helper=Ranks(1))
        with pytest.raises(InvalidArgumentError, match="over 2 ranks is not supported"):
            cache(network(LLAMA).config, sized(), device="cpu", distributed_helper=Ranks(2))
    with pytest.raises(InvalidArgumentError, match="request_tokens"):
        elastic_batching(client, request_tokens=0)


class Ranks:
    def __init__(self, tp_size: int) -> None:
        self.tp_size = tp_size


def test_without_the_context_transformers_is_as_it_was(device: Device, client: Client) -> None:
    with elastic_batching(client, request_tokens=64):
        pass
    ids = asked(2)
    assert batched(LLAMA, ids) == [plain(LLAMA, one) for one in ids]
    assert client.usage().maps == 0
