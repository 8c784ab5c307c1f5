"""Latent attention: KV moves to another engine, weights come from the store, caches are reused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.messages.engine import Deactivate, Deactivated, Export, Exported, Submit
from tests.engines.harness import DEVICE, DeviceUnderTest, request
from tests.sglang.conftest import ledger_of, opened_device
from tests.sglang.models import MLA, PLAIN_MLA, greedy, prompts, spec_of

pytestmark = pytest.mark.sglang

TOKENS = 40


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceUnderTest]:
    """Yields a device with two engines and a weight store."""
    store = tmp_path_factory.mktemp("store")
    with opened_device(256 << 20, weight_store=str(store)) as device:
        device.fork("e0")
        device.fork("e1")
        yield device


def leave(device: DeviceUnderTest, engine: str) -> None:
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)


@pytest.mark.parametrize("way", ["direct", "file"])
def test_requests_move_with_their_latents(two: DeviceUnderTest, way: str) -> None:
    asked = {f"{way}{i}": p for i, p in enumerate(prompts(MLA.name, 3, (20, 60), seed=11))}
    for engine in ("e0", "e1"):
        two.activate(spec_of(MLA.name), engine)
    two.send(Submit([request(name, MLA.name, p, TOKENS) for name, p in asked.items()]), "e0")
    two.wait_until(lambda: all(len(two.stream(name).token_ids) > 4 for name in asked))
    two.send(Export((DEVICE,) if way == "direct" else ()), "e0")
    moved = two.wait_for(Exported, "e0").requests
    assert all(item.resume and item.resume.kv_tokens for item in moved)
    two.send(Submit(moved), "e1")
    for stream, prompt in zip(two.finish(*asked), asked.values(), strict=True):
        assert stream.token_ids == greedy(MLA.name, prompt, TOKENS)
    assert two.settled_status(lambda s: s.imported_tokens_total, "e1").imported_tokens_total > 0
    for engine in ("e0", "e1"):
        leave(two, engine)


def test_a_second_activation_and_a_cached_prefix_change_nothing(two: DeviceUnderTest) -> None:
    [prompt] = prompts(MLA.name, 1, (100, 100), seed=3)
    expected = greedy(MLA.name, prompt, 8)
    for turn in range(2):
        two.activate(spec_of(MLA.name), "e0")
        for name in (f"first{turn}", f"again{turn}"):
            two.send(Submit([request(name, MLA.name, prompt, 8)]), "e0")
            [stream] = two.finish(name)
            assert stream.token_ids == expected
        leave(two, "e0")
        usage = ledger_of(two).usage()
        assert (usage.reserved_bytes, ledger_of(two).resident_bytes()) == (0, 0)


def test_positions_without_yarn(two: DeviceUnderTest) -> None:
    """Serves a DeepSeek-V3 whose positions are not scaled, which SGLang does not load on a CPU."""
    [prompt] = prompts(PLAIN_MLA.name, 1, (100, 100), seed=3)
    two.activate(spec_of(PLAIN_MLA.name), "e0")
    two.send(Submit([request("plain", PLAIN_MLA.name, prompt, 8)]), "e0")
    assert two.finish("plain")[0].token_ids == greedy(PLAIN_MLA.name, prompt, 8)
    leave(two, "e0")


def test_files_are_removed(two: DeviceUnderTest) -> None:
    folder = Path(two.config.moves_dir)
    assert not folder.exists() or not list(folder.iterdir())
