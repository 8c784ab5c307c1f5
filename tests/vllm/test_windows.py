"""Windows and states of vLLM engines: what a long sequence holds, measured by the ledger."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from prism.config.checks.memory_needs import pools_of, step_tokens
from prism.engines.vllm.capabilities import WINDOWS
from prism.messages.engine import Submit
from prism.messages.model_spec import ModelSpec
from tests.engines.harness import DeviceUnderTest, request
from tests.families import VOCAB_SIZE
from tests.sglang import models
from tests.sglang.conftest import PAGE_BYTES, config_of
from tests.sglang.models import LONG_GEMMA3, TIE, gap_of, network
from tests.sglang.test_families import spec_of
from tests.vllm.environment import variables, vllm_python
from tests.vllm.test_families import path_of, spec_on

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CHUNK_TOKENS, MAX_RUNNING = 32, 4
CONTEXT = LONG_GEMMA3.context_length


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceUnderTest]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), 256 << 20, chunk_tokens=CHUNK_TOKENS)
        engine = structs.replace(
            config.engine,
            adapter="vllm",
            python={"vllm": str(vllm_python())},
            max_running=MAX_RUNNING,
        )
        made = DeviceUnderTest("vllm", structs.replace(config, engine=engine), variables())
        made.fork()
        yield made
        made.close()


def need_bytes(spec: ModelSpec) -> int:
    step = step_tokens(spec, CHUNK_TOKENS, MAX_RUNNING)
    return sum(pool.need_bytes(PAGE_BYTES) for pool in pools_of(spec, step))


def prompt_of(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, VOCAB_SIZE), k=tokens)


def test_a_window_bounds_what_long_sequences_hold(device: DeviceUnderTest) -> None:
    """Serves requests of the full context within the memory that windows need, much less than all
    tokens of all layers would take. A request that begins like an earlier one is right too."""
    path = models.path_of(LONG_GEMMA3.name)
    spec = spec_on(device, spec_of(LONG_GEMMA3.name, path, WINDOWS, None))
    reference = network(path)
    sizes = {"kv_layers": 6, "token_bytes": 6 * spec.token_bytes}
    plain = structs.replace(spec, window_layers=0, window_groups=0, **sizes)
    assert (spec.kv_layers, spec.window_groups) == (1, 5)
    assert 2.5 * need_bytes(spec) < need_bytes(plain)
    done = device.activate(spec, kv_limit_bytes=need_bytes(spec), max_running=MAX_RUNNING)
    assert done.reserve_bytes == need_bytes(spec)
    assert (done.window_share, done.window_tokens) == (5, 128)  # 31 and 36 tokens, and a block
    asked = {f"long{i}": prompt_of(CONTEXT - 100, i) for i in range(2)}
    asked["again"] = asked["long1"][:-50]
    for name, prompt in asked.items():
        device.send(Submit([request(name, spec.name, prompt, 60)]))
        device.wait_until(lambda name=name: len(device.stream(name).token_ids) > 50)
        usage = device.client_usage()
        assert usage is not None
        assert usage.committed_bytes <= need_bytes(spec)
        (stream,) = device.finish(name)
        assert gap_of(reference, prompt, stream.token_ids) < TIE
    assert device.fresh_status().retractions_total == 0
    together = {f"wait{i}": prompt_of(700 + 40 * i, 10 + i) for i in range(5)}
    device.send(Submit([request(name, spec.name, p, 90) for name, p in together.items()]))
    for stream, prompt in zip(device.finish(*together), together.values(), strict=True):
        assert gap_of(reference, prompt, stream.token_ids) < TIE
    device.end()


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "qwen3_next"])
def test_states_fit_into_what_is_guaranteed(device: DeviceUnderTest, kind: str) -> None:
    """Serves a request of the full context within the memory that its KV and states need, and then
    more requests than have room for theirs at a time."""
    path = path_of(kind)
    spec, reference = spec_on(device, spec_of(kind, path, WINDOWS, None)), network(path)
    device.fork(kind)
    done = device.activate(spec, kind, kv_limit_bytes=need_bytes(spec), max_running=MAX_RUNNING)
    assert done.reserve_bytes == need_bytes(spec)
    assert done.state_tokens == spec.state_groups * spec.block_tokens > 0

    def held_bytes() -> int:
        usage = device.client_usage(kind)
        assert usage is not None
        return usage.committed_bytes

    floor_bytes = held_bytes()
    prompt = prompt_of(spec.context_length - 70, 1)
    device.send(Submit([request(kind, spec.name, prompt, 60)]), kind)
    device.wait_until(lambda: len(device.stream(kind).token_ids) > 50)
    assert floor_bytes < held_bytes() <= need_bytes(spec)
    (stream,) = device.finish(kind)
    assert gap_of(reference, prompt, stream.token_ids) < TIE
    assert device.fresh_status(kind).retractions_total == 0
    together = {f"{kind}{i}": prompt_of(200 + 40 * i, 10 + i) for i in range(5)}
    device.send(Submit([request(name, spec.name, p, 30) for name, p in together.items()]), kind)
    for stream, prompt in zip(device.finish(*together), together.values(), strict=True):
        assert gap_of(reference, prompt, stream.token_ids) < TIE
    device.wait_until(lambda: held_bytes() == floor_bytes)
    device.end(kind)
