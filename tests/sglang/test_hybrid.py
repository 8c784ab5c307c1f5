"""Models with several pools: what windows and states hold, and their answers under pressure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.config.checks.memory_needs import pools_of
from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from tests.engines.harness import DeviceUnderTest, request
from tests.families import VOCAB_SIZE
from tests.sglang import models
from tests.sglang.conftest import PAGE_BYTES, STATIC_BYTES, ledger_of, opened_device
from tests.sglang.models import LONG_GEMMA3, TIE, gap_of, network

pytestmark = pytest.mark.sglang

CHUNK_TOKENS = 32
CONTEXT = 2048
STATES = ("lfm2", "qwen3_next", "granitemoehybrid")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceUnderTest]:
    store = str(tmp_path_factory.mktemp("store"))
    with opened_device(256 << 20, chunk_tokens=CHUNK_TOKENS, weight_store=store) as opened:
        opened.fork()
        yield opened


def path_of(name: str) -> Path:
    return models.path_of(name if name == LONG_GEMMA3.name else f"family-{name}")


@lru_cache
def reference(name: str) -> Any:
    return network(path_of(name))


def spec_of(name: str) -> ModelSpec:
    shape = inspect_model(path_of(name), name, WINDOW_POOLS).shape("float32", None)
    return ModelSpec(name=name, path=str(path_of(name)), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)


def prompt_of(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, VOCAB_SIZE), k=tokens)


def need_bytes(spec: ModelSpec) -> int:
    return sum(pool.need_bytes(PAGE_BYTES) for pool in pools_of(spec, CHUNK_TOKENS))


def leave(device: DeviceUnderTest) -> None:
    """Deactivates the model, and checks that nothing of it remains."""
    device.send(Deactivate())
    device.wait_for(Deactivated)
    usage = ledger_of(device).usage()
    assert (usage.reserved_bytes, ledger_of(device).resident_bytes()) == (0, 0)


def check(name: str, prompt: list[int], tokens: list[int], count: int) -> None:
    assert len(tokens) == count
    assert gap_of(reference(name), prompt, tokens) < TIE


def held_bytes(device: DeviceUnderTest) -> int:
    """Returns the bytes of KV pages."""
    usage = device.client_usage()
    assert usage is not None
    return usage.committed_bytes


def test_a_window_bounds_what_a_long_sequence_holds(device: DeviceUnderTest) -> None:
    """Serves requests of the full context within the memory that windows need, much less than
    all tokens of all layers would take."""
    spec = spec_of(LONG_GEMMA3.name)
    plain = msgspec.structs.replace(spec, window_layers=0, kv_layers=0)
    assert 2.5 * need_bytes(spec) < need_bytes(plain)
    done = device.activate(spec, kv_limit_bytes=need_bytes(spec))
    assert done.reserve_bytes == need_bytes(spec)
    asked = {f"long{i}": prompt_of(CONTEXT - 100, i) for i in range(2)}
    asked["again"] = asked["long1"][:-50]  # after evictions of its beginning
    for name, prompt in asked.items():
        device.send(Submit([request(name, spec.name, prompt, 60)]))
        device.wait_until(lambda name=name: len(device.stream(name).token_ids) > 50)
        assert held_bytes(device) <= need_bytes(spec)
        check(spec.name, prompt, device.finish(name)[0].token_ids, 60)
    leave(device)


def test_requests_beyond_the_memory_wait_and_are_right(device: DeviceUnderTest) -> None:
    spec = spec_of(LONG_GEMMA3.name)
    device.activate(spec, kv_limit_bytes=need_bytes(spec))
    asked = {f"wait{i}": prompt_of(700 + 40 * i, 10 + i) for i in range(5)}
    device.send(Submit([request(name, spec.name, p, 90) for name, p in asked.items()]))
    for stream, prompt in zip(device.finish(*asked), asked.values(), strict=True):
        check(spec.name, prompt, stream.token_ids, 90)
    leave(device)


@pytest.mark.parametrize("name", STATES)
def test_states_come_with_requests_and_go(device: DeviceUnderTest, name: str) -> None:
    spec = spec_of(name)
    device.activate(spec)
    asked = {f"{name}{i}": prompt_of(40 + 30 * i, i) for i in range(6)}
    device.send(Submit([request(each, name, p, 60) for each, p in asked.items()]))
    device.wait_until(lambda: all(len(device.stream(each).token_ids) > 4 for each in asked))
    state = next(p for p in pools_of(spec, CHUNK_TOKENS) if p.name == "state")
    more_bytes = 6 * state.layout.token_bytes // PAGE_BYTES * PAGE_BYTES
    busy_bytes = held_bytes(device)
    for stream, prompt in zip(device.finish(*asked), asked.values(), strict=True):
        check(name, prompt, stream.token_ids, 60)
    device.wait_until(lambda: held_bytes(device) <= busy_bytes - more_bytes)
    leave(device)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", *STATES])
def test_weights_come_from_files_and_then_from_the_store(
    device: DeviceUnderTest, name: str
) -> None:
    """Activates three times. Between two requests, an engine holds its weights and KV's floor."""
    spec, answers, sizes = spec_of(name), [], []
    for turn in range(3):
        done = device.activate(spec)
        assert done.link_bytes or turn == 0
        request_id = f"{name}-turn{turn}"
        device.send(Submit([request(request_id, name, prompt_of(50, 7), 20)]))
        answers.append(device.finish(request_id)[0].token_ids)
        device.trim()
        assert held_bytes(device) == done.floor_bytes
        sizes.append(done.static_bytes)
        leave(device)
    check(name, prompt_of(50, 7), answers[0], 20)
    assert answers == answers[:1] * 3
    assert spec.weight_bytes <= sizes[2] == sizes[1] <= sizes[0]
    assert sizes[0] <= spec.weight_bytes + STATIC_BYTES + 4 * PAGE_BYTES
