"""Families of each kind over two ranks: answers of transformers, and each rank's part of memory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.config.checks.adapters import with_layout
from prism.config.checks.memory_needs import pools_of, shard_of
from prism.engines.sglang.platform.supported_models import (
    WHOLE_WEIGHTS,
    WINDOWS,
)
from prism.errors import ActivationError
from prism.messages.engine import Activated, Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest, request
from tests.families import TINY, VOCAB_SIZE
from tests.sglang.conftest import PAGE_BYTES, PEER, config_of, ledger_of, opened_pair
from tests.sglang.models import TIE, family, gap_of, network
from tests.sglang.test_families import PROMPT_TOKENS, logs

pytestmark = pytest.mark.sglang

TOKENS = 12
CHUNK_TOKENS = 64
# Families and their KV heads. Both ranks have the same one where a model has one.
KV_HEADS = {
    "deepseek_v3": 6,
    "minicpm3": 6,
    "gemma3_text": 2,
    "cohere2": 1,
    "gpt_oss": 2,
    "lfm2": 2,
    "qwen3_next": 2,
    "qwen3_5_text": 1,
    "falcon_h1": 2,
    "granitemoehybrid": 2,
    "qwen3_moe": 2,
    "mixtral": 2,
    "gemma3n_text": 2,
    "gemma4_text": 2,
    "gpt2": 6,
    "olmoe": 6,
    "phi": 6,
    "starcoder2": 1,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceUnderTest]:
    """Yields an engine of two ranks with a weight store."""
    store = str(tmp_path_factory.mktemp("store"))
    with opened_pair(64 << 20, CHUNK_TOKENS, weight_store=store) as device:
        yield device


@lru_cache
def spec_of(kind: str) -> ModelSpec:
    settings = TINY[kind] | {"num_key_value_heads": KV_HEADS[kind]}
    path = prepare(family(f"ranks-{kind}", kind, settings), default_directory(), lambda _text: None)
    shape = inspect_model(path, kind, WINDOW_POOLS, WINDOWS, WHOLE_WEIGHTS).shape("float32", None)
    return ModelSpec(name=kind, path=str(path), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)


@lru_cache(maxsize=1)
def reference(kind: str) -> Any:
    return network(Path(spec_of(kind).path))


def ledgers(device: DeviceUnderTest) -> list[kvcached.Device]:
    return [ledger_of(device), kvcached.Device.open(PEER, namespace=device.config.namespace)]


def clients(device: DeviceUnderTest, engine: str = "e0") -> list[kvcached.ClientUsage]:
    """Returns the records of both ranks."""
    found = [client for ledger in ledgers(device) for client in ledger.usage().clients]
    return [client for client in found if client.name in (engine, f"{engine}.1")]


def prompts(name: str, lengths: tuple[int, ...] = PROMPT_TOKENS) -> dict[str, list[int]]:
    rng = random.Random(name)
    return {f"{name}/{i}": rng.choices(range(16, VOCAB_SIZE), k=n) for i, n in enumerate(lengths)}


def ask(
    device: DeviceUnderTest, kind: str, asked: dict[str, list[int]], tokens: int = TOKENS
) -> None:
    """Asserts that the answers of prompts by request are those of transformers."""
    device.send(Submit([request(i, kind, prompt, tokens) for i, prompt in asked.items()]))
    for (name, prompt), stream in zip(asked.items(), device.finish(*asked), strict=True):
        assert len(stream.token_ids) == tokens, (name, stream.failure)
        assert gap_of(reference(kind), prompt, stream.token_ids) < TIE, name


def leave(device: DeviceUnderTest) -> None:
    """Deactivates the model, and asserts that nothing of it remains on either device."""
    device.send(Deactivate())
    device.wait_for(Deactivated)
    for ledger in ledgers(device):
        assert (ledger.usage().reserved_bytes, ledger.resident_bytes()) == (0, 0)


def check_parts(device: DeviceUnderTest, spec: ModelSpec, activated: Activated) -> None:
    """Asserts that both ranks hold what the scheduler counts."""
    part = shard_of(spec, 2)
    assert activated.quantum_bytes / activated.quantum_tokens == part.token_bytes
    needs = (pool.need_bytes(PAGE_BYTES) for pool in pools_of(part, CHUNK_TOKENS))
    assert activated.reserve_bytes == sum(needs)
    mine, theirs = clients(device)
    assert mine.min_bytes == theirs.min_bytes == activated.reserve_bytes
    assert mine.static_bytes == theirs.static_bytes == activated.static_bytes
    assert mine.committed_bytes == theirs.committed_bytes


def test_each_rank_has_the_whole_latent() -> None:
    spec = spec_of("deepseek_v3")
    part = shard_of(spec, 2)
    assert part.token_bytes == spec.token_bytes == 4 * (32 + 8) * 4
    assert part.derived_bytes == spec.derived_bytes // 2
    with pytest.raises(ActivationError, match="its 6 query heads cannot be shared by 4 ranks"):
        shard_of(spec, 4)


def test_policies_count_the_latent_of_each_device(tmp_path: Path) -> None:
    wide = msgspec.structs.replace(spec_of("deepseek_v3"), tp=2, adapter="sglang")
    config = msgspec.structs.replace(config_of(tmp_path, 64 << 20), models=[wide])
    assert with_layout(wide, config, "auto").token_bytes == 2 * wide.token_bytes


def test_ranks_divide_the_heads_of_both_pools() -> None:
    spec = spec_of("gemma3_text")
    full, window = pools_of(shard_of(spec, 2), CHUNK_TOKENS)
    assert full.layout == window.layout == kvcached.Layout(2, 1, 32, dtype="float32")
    odd = msgspec.structs.replace(spec, window_kv_heads=3)
    with pytest.raises(ActivationError, match="its 3 KV heads of layers with a window cannot"):
        shard_of(odd, 2)


def test_ranks_may_have_the_same_kv_head() -> None:
    """Counts the head of the one layer with attention, and its projections, on each rank."""
    spec = spec_of("qwen3_5_text")
    part, head_bytes = shard_of(spec, 2), 2 * 96 * 32 * 4
    assert part.token_bytes == spec.token_bytes == 2 * 32 * 4
    assert spec.kv_head_weight_bytes == head_bytes
    divided_bytes = spec.weight_bytes + head_bytes - spec.whole_weight_bytes
    assert part.weight_bytes == spec.whole_weight_bytes + divided_bytes // 2


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("lfm2", 2 * (96 // 2) * 2),
        ("qwen3_next", 3 * ((2 * 2 * 16 + 4 * 24) // 2 * 3 + 2 * 24 * 16)),
        # B and C of the only group are on each rank.
        ("falcon_h1", 4 * ((192 // 2 + 2 * 16) * 3 + 192 // 2 * 16)),
    ],
)
def test_ranks_divide_states(kind: str, numbers: int) -> None:
    """Counts numbers of convolutions, then of recurrences, in all layers with a state."""
    assert shard_of(spec_of(kind), 2).state_bytes == numbers * 4


@pytest.mark.parametrize("kind", KV_HEADS)
def test_two_ranks_answer_as_transformers(pair: DeviceUnderTest, kind: str) -> None:
    """Activates from files, and again from the store, where each rank has a copy. The engine
    compares the layout of its KV, and its weights, with those that the files give."""
    spec, store = spec_of(kind), Path(pair.config.engine.weight_store) / "entries"
    before = len(list(store.glob("*")))
    for turn in range(2):
        activated = pair.activate(spec)
        assert bool(activated.link_bytes) == bool(turn)
        check_parts(pair, spec, activated)
        ask(pair, kind, prompts(f"{kind}/{turn}"))
        leave(pair)
        assert len(list(store.glob("*"))) == before + 2
    assert f"model {kind}: its weights take" not in logs(pair)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3_text", "qwen3_next"])
def test_one_full_device_queues_the_requests_of_both(pair: DeviceUnderTest, kind: str) -> None:
    """Takes all free memory of one device. Requests wait or are retracted on both ranks alike."""
    pair.activate(spec_of(kind))
    _, peer = ledgers(pair)
    with peer.client("thief") as thief:
        loot = thief.alloc_virtual_tensor(
            free := peer.usage().free_bytes // PAGE_BYTES * PAGE_BYTES
        )
        loot.map(0, free)
        ask(pair, kind, prompts(f"{kind}/full", (160, 140, 120, 100, 80)), 40)
        thief.free_virtual_tensor(loot)
    mine, theirs = clients(pair)
    assert mine.committed_bytes == theirs.committed_bytes
    leave(pair)


def test_what_a_rank_is_asked_for_both_pools_give(pair: DeviceUnderTest) -> None:
    """Evicts the prefix cache of both ranks, and returns pages of the window pool as well."""
    kind = "gemma3_text"
    floor_bytes = pair.activate(spec_of(kind)).floor_bytes
    asked = prompts(f"{kind}/kept", (300, 200, 100))
    ask(pair, kind, asked)
    assert min(client.committed_bytes for client in clients(pair)) > floor_bytes
    ledgers(pair)[1].shrink("e0.1", None, wait_s=10.0)
    deadline_s = time.monotonic() + 20
    while {client.committed_bytes for client in clients(pair)} != {floor_bytes}:
        assert time.monotonic() < deadline_s, clients(pair)
        pair.fresh_status()
    ask(pair, kind, {f"{name}/again": prompt for name, prompt in asked.items()})
    leave(pair)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "lfm2"])
def test_a_dead_rank_ends_the_engine(pair: DeviceUnderTest, kind: str) -> None:
    pair.fork("e1", (PEER,))
    pair.activate(spec_of(kind), "e1")
    [name], [prompt] = zip(*prompts(f"{kind}/dead", (40,)).items(), strict=True)
    pair.send(Submit([request(name, kind, prompt, 400)]), "e1")
    pair.wait_until(lambda: len(pair.stream(name).token_ids) > 3)
    os.kill(clients(pair, "e1")[1].pid, signal.SIGKILL)
    assert pair.exited("e1").status != 0
    deadline_s = time.monotonic() + 20
    while any(ledger.usage().reserved_bytes for ledger in ledgers(pair)):
        for ledger in ledgers(pair):
            ledger.reap()
        assert time.monotonic() < deadline_s
    [failed] = pair.finish(name)
    assert failed.failure is not None
    assert failed.failure.retryable
