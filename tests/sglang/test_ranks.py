"""SGLang over two ranks on two devices: the tokens of one, each rank with half of the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import kvcached
from prism.messages.engine import Activated, Deactivate, Deactivated, Export, Exported, Submit
from prism.messages.requests import Grammar
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.conftest import PAGE_BYTES, PEER, STATIC_BYTES, opened_pair
from tests.sglang.models import LLAMA, TIE, greedy, largest_gap, path_of, prompts, spec_of
from tests.sglang.slow_grammars import SLOW

pytestmark = pytest.mark.sglang

CONTEXT = 512


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceUnderTest, Activated]]:
    """Yields one engine of two ranks that serves a model, with its weights in a store."""
    moves, store = {"kv_offer_s": 60.0, "kv_fetch_s": 60.0}, str(tmp_path_factory.mktemp("store"))
    with opened_pair(64 << 20, weight_store=store, **moves) as device:
        yield device, device.activate(spec_of(LLAMA, CONTEXT))


def peer_of(device: DeviceUnderTest) -> kvcached.Device:
    return kvcached.Device.open(PEER, namespace=device.config.namespace)


def peer_usage(device: DeviceUnderTest) -> kvcached.ClientUsage:
    [usage] = [c for c in peer_of(device).usage().clients if c.name == "e0.1"]
    return usage


def entries(store: Path) -> dict[str, int]:
    """Returns the stored copies and their inodes, which change if a copy is made again."""
    return {path.name: path.stat().st_ino for path in (store / "entries").iterdir()}


def test_two_ranks_answer_as_one(pair: tuple[DeviceUnderTest, Activated]) -> None:
    device, _ = pair
    asked = {f"r{i}": prompt for i, prompt in enumerate(prompts(LLAMA, 4, (3, 90)))}
    device.send(Submit([request(i, LLAMA, prompt, 24) for i, prompt in asked.items()]))
    streams = device.finish(*asked)
    outputs = [stream.token_ids for stream in streams]
    assert outputs == [greedy(LLAMA, prompt, 24) for prompt in asked.values()]


def test_grammars_are_matched_for_both(pair: tuple[DeviceUnderTest, Activated]) -> None:
    """Matches grammars on rank 0; both ranks end the same requests in the same step."""
    device, _ = pair
    [prompt] = prompts(LLAMA, 1, (20, 20))
    letter = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json")).token_to_id("a")
    regex, broken = Grammar("regex", "(cat|dog){2,4}!"), Grammar("regex", "(a")
    slow = {"grammar": SLOW["ten-rules"], "logit_bias": {letter: 100.0}}
    made = [
        request("word", LLAMA, prompt, 100, grammar=regex, ignore_eos=False),
        request("drawn", LLAMA, prompt, 100, grammar=regex, temperature=1.0, ignore_eos=False),
        request("broken", LLAMA, prompt, 100, grammar=broken),
        request("slow", LLAMA, prompt, 200, **slow),
        request("plain", LLAMA, prompt, 24),
    ]
    device.send(Submit(made))
    word, drawn, refused, ended, plain = device.finish(*(item.id for item in made))
    tokenizer = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json"))
    for stream in (word, drawn):
        text = tokenizer.decode(stream.token_ids)
        assert re.fullmatch(regex.text, text), text
    assert refused.failure is not None
    assert refused.failure.code == "invalid_request_error"
    assert ended.failure is not None
    assert "CPU time" in ended.failure.message
    assert plain.token_ids == greedy(LLAMA, prompt, 24)


def test_each_rank_holds_half(pair: tuple[DeviceUnderTest, Activated]) -> None:
    device, activated = pair
    spec, own = spec_of(LLAMA, CONTEXT), device.client_usage()
    assert own is not None
    assert own.static_bytes == peer_usage(device).static_bytes == activated.static_bytes
    weights = activated.static_bytes - STATIC_BYTES
    assert spec.weight_bytes / 2 <= weights < spec.weight_bytes * 0.55
    assert activated.quantum_bytes / activated.quantum_tokens == spec.token_bytes / 2


def test_the_shards_come_out_of_the_store_the_second_time(
    pair: tuple[DeviceUnderTest, Activated],
) -> None:
    """Keeps one copy per rank; the self-check fails with the other rank's copy."""
    device, first = pair
    device.send(Deactivate())
    device.wait_for(Deactivated)
    assert device.memory.usage().reserved_bytes == peer_of(device).usage().reserved_bytes == 0
    store = Path(device.config.engine.weight_store)
    kept = entries(store)
    assert len(kept) == 2
    device.activate(spec_of(LLAMA, CONTEXT), fingerprint=first.fingerprint)
    assert entries(store) == kept
    [prompt] = prompts(LLAMA, 1, (40, 40), seed=9)
    device.send(Submit([request("again", LLAMA, prompt, 8)]))
    [stream] = device.finish("again")
    assert stream.token_ids == greedy(LLAMA, prompt, 8)


def test_one_full_device_queues_the_requests_of_both(
    pair: tuple[DeviceUnderTest, Activated],
) -> None:
    """Takes all free memory of the peer: SGLang retracts on both ranks alike, no request is
    lost."""
    device, _ = pair
    peer = peer_of(device)
    asked = {f"full{i}": prompt for i, prompt in enumerate(prompts(LLAMA, 5, (120, 160), seed=3))}
    with peer.client("thief") as thief:
        free_bytes = peer.usage().free_bytes // PAGE_BYTES * PAGE_BYTES
        loot = thief.alloc_virtual_tensor(free_bytes)
        loot.map(0, free_bytes)
        device.send(Submit([request(i, LLAMA, prompt, 40) for i, prompt in asked.items()]))
        streams = device.finish(*asked)
        thief.free_virtual_tensor(loot)
    for prompt, stream in zip(asked.values(), streams, strict=True):
        assert stream.finish_reason == "length"
        assert largest_gap(LLAMA, prompt, stream.token_ids) < TIE
    assert device.client_usage().committed_bytes == peer_usage(device).committed_bytes


def test_requests_move_rank_by_rank(pair: tuple[DeviceUnderTest, Activated]) -> None:
    """Moves requests to another engine on the same devices, with the KV of both ranks. Outputs are
    the model's own, and the first engine's memory is freed."""
    device, _ = pair
    device.fork("e1", (PEER,))
    device.activate(spec_of(LLAMA, CONTEXT), "e1")
    asked = {f"move{i}": prompt for i, prompt in enumerate(prompts(LLAMA, 2, (40, 90), seed=5))}
    device.send(Submit([request(i, LLAMA, prompt, 60) for i, prompt in asked.items()]))
    device.wait_until(lambda: all(len(device.stream(i).token_ids) > 4 for i in asked))
    device.send(Export((device.memory.name, PEER)))
    moved = device.wait_for(Exported).requests
    assert {len(r.resume.kv_offers) for r in moved if r.resume} == {2}
    device.send(Deactivate())
    device.send(Submit(moved), "e1")
    device.wait_for(Deactivated)
    outputs = [stream.token_ids for stream in device.finish(*asked)]
    assert outputs == [greedy(LLAMA, prompt, 60) for prompt in asked.values()]
    came = device.settled_status(lambda s: s.running == 0, "e1").imported_tokens_total
    assert came >= sum(len(r.prompt_ids) // 16 * 16 for r in moved) > 0
    assert device.client_usage().committed_bytes == peer_usage(device).committed_bytes == 0
    device.end("e1")
