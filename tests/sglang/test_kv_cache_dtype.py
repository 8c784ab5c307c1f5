"""KV caches of another type than the model: answers, memory, cached prefixes and moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.config.checks.memory_needs import pools_of
from prism.messages.engine import Deactivate, Deactivated, Export, Exported, Submit
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from tests.engines.harness import DEVICE, DeviceUnderTest, request
from tests.sglang import models
from tests.sglang.conftest import PAGE_BYTES, opened_device
from tests.sglang.models import TIE, gap_of, nearest, network, prompts

pytestmark = pytest.mark.sglang

TOKENS, CHUNK_TOKENS = 24, 64
E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
# One pool, windows in another pool, sinks and experts, states, latents.
KINDS = ("llama", "gemma3_text", "cohere2", "gpt_oss", "qwen3_next", "deepseek_v2")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceUnderTest]:
    """Yields a device with two engines and a weight store."""
    store = str(tmp_path_factory.mktemp("store"))
    with opened_device(256 << 20, CHUNK_TOKENS, store) as device:
        device.fork("e0")
        device.fork("e1")
        yield device


def spec_of(kind: str, kv_dtype: str) -> ModelSpec:
    path = models.path_of(f"family-{kind}")
    shape = inspect_model(path, kind, WINDOW_POOLS).shape("float32", None, kv_dtype)
    return ModelSpec(name=kind, path=str(path), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)


@lru_cache
def reference(kind: str) -> Any:
    return network(models.path_of(f"family-{kind}"))


def check(kind: str, dtype: str, prompt: list[int], tokens: list[int]) -> None:
    """Checks that the tokens are those of transformers with rounded KV."""
    assert len(tokens) == TOKENS
    assert gap_of(reference(kind), prompt, tokens, nearest(dtype)) < TIE


def ask(device: DeviceUnderTest, kind: str, name: str, prompt: list[int]) -> Any:
    device.send(Submit([request(name, kind, prompt, TOKENS)]))
    return device.finish(name)[0]


def leave(device: DeviceUnderTest, *engines: str) -> None:
    for engine in engines:
        device.send(Deactivate(), engine)
        device.wait_for(Deactivated, engine)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_rounded_kv(two: DeviceUnderTest, kind: str, dtype: str) -> None:
    """Asks twice. The second answer begins with the KV of the first, except with states."""
    spec = spec_of(kind, dtype)
    two.activate(spec)
    for index, prompt in enumerate(prompts(f"family-{kind}", 3, (40, 150))):
        first, again = (ask(two, kind, f"{kind} {dtype} {index} {n}", prompt) for n in "12")
        check(kind, dtype, prompt, first.token_ids)
        assert again.token_ids == first.token_ids
        assert spec.state_bytes or again.chunks[0].cached_tokens >= len(prompt) // 16 * 16 - 16
    leave(two, "e0")


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_show_the_type(two: DeviceUnderTest, kind: str) -> None:
    """Fails for tests above that any type would pass: some answer differs from plain KV's."""
    asked = prompts(f"family-{kind}", 12, (40, 150), seed=2)
    found = []
    for dtype in ("float32", E4M3):
        two.activate(spec_of(kind, dtype))
        found.append([ask(two, kind, f"{kind} {dtype} {p[:9]}", p).token_ids for p in asked])
        leave(two, "e0")
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_requests_take_half_of_the_memory(two: DeviceUnderTest, kind: str) -> None:
    """Compares the ledger's pages of running requests in FP8 and in 16 bits, and what is reserved
    for one with the layouts. Pages of a layer are half as many, rounded up."""
    held, asked = {}, prompts(f"family-{kind}", 16, (450, 450))
    for dtype in (E4M3, E5M2, BF16):
        spec = spec_of(kind, dtype)
        pools = pools_of(spec, CHUNK_TOKENS)
        done = two.activate(spec)
        assert done.reserve_bytes == sum(pool.need_bytes(PAGE_BYTES) for pool in pools)
        names = [f"{kind} {dtype} half {i}" for i in range(len(asked))]
        orders = [request(n, kind, p, TOKENS) for n, p in zip(names, asked, strict=True)]
        two.send(Submit(orders))
        two.wait_until(lambda names=names: all(two.stream(name).token_ids for name in names))
        usage = two.client_usage()
        assert usage is not None
        held[dtype] = usage.committed_bytes
        two.finish(*names)
        leave(two, "e0")
    print(kind, held)
    assert held[E4M3] == held[E5M2]
    assert held[E4M3] / held[BF16] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("way", ["direct", "file"])
def test_requests_move_with_their_kv(two: DeviceUnderTest, kind: str, way: str) -> None:
    for engine in ("e0", "e1"):
        two.activate(spec_of(kind, E4M3), engine)
    asked = {f"{kind} {way} {i}": p for i, p in enumerate(prompts(f"family-{kind}", 3, (40, 90)))}
    two.send(Submit([request(name, kind, p, TOKENS) for name, p in asked.items()]), "e0")
    two.wait_until(lambda: all(len(two.stream(name).token_ids) > 4 for name in asked))
    two.send(Export((DEVICE,) if way == "direct" else ()), "e0")
    moved = two.wait_for(Exported, "e0").requests
    assert all(item.resume and item.resume.kv_tokens for item in moved)
    before = two.settled_status(lambda _: True, "e1").imported_tokens_total
    two.send(Submit(moved), "e1")
    for stream, prompt in zip(two.finish(*asked), asked.values(), strict=True):
        check(kind, E4M3, prompt, stream.token_ids)
    two.settled_status(lambda s: s.imported_tokens_total > before, "e1")
    leave(two, "e0", "e1")
