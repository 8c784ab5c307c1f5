"""One engine process: greedy equality with transformers, reuse, residency, cancellation."""

from __future__ import annotations

import msgspec
import pytest

from prism.config.checks.memory_needs import layout_of
from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.requests import Cancel, Sampling
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.conftest import PAGE_BYTES, STATIC_BYTES, kv_committed_bytes, ledger_of
from tests.sglang.models import GPT2, LLAMA, QWEN3, TIE, greedy, largest_gap, prompts, spec_of

pytestmark = pytest.mark.sglang

TOKENS = 64


@pytest.fixture
def active(device: DeviceUnderTest) -> DeviceUnderTest:
    """Returns the shared device with the Llama model active, whatever ran before."""
    device.send(Deactivate())
    device.wait_for(Deactivated)
    device.activate(spec_of(LLAMA), max_running=8)
    return device


def run(device: DeviceUnderTest, model: str, tag: str, max_tokens: int = TOKENS) -> None:
    """Runs 8 concurrent streams; each equals transformers' greedy output."""
    asked = {f"{tag}{i}": p for i, p in enumerate(prompts(model, 8, (5, 150)))}
    device.send(Submit([request(i, model, p, max_tokens) for i, p in asked.items()]))
    streams = device.finish(*asked)
    assert [s.finish_reason for s in streams] == ["length"] * 8
    assert [len(s.token_ids) for s in streams] == [max_tokens] * 8
    gaps = [
        largest_gap(model, p, s.token_ids) for p, s in zip(asked.values(), streams, strict=True)
    ]
    assert max(gaps) < TIE


def test_one_process_serves_architectures_in_turn(device: DeviceUnderTest) -> None:
    for turn, model in enumerate((LLAMA, QWEN3, GPT2, LLAMA)):
        spec = spec_of(model)
        activated = device.activate(spec, max_running=8)
        assert 0 <= activated.static_bytes - spec.weight_bytes - STATIC_BYTES < 2 * PAGE_BYTES
        run(device, model, f"turn{turn}-")
        device.send(Deactivate())
        assert device.wait_for(Deactivated).model == model
        usage = ledger_of(device).usage()
        assert (usage.reserved_bytes, usage.committed_bytes, usage.static_bytes) == (0, 0, 0)
        assert ledger_of(device).resident_bytes() == 0


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_tokens_may_be_interleaved(device: DeviceUnderTest, model: str) -> None:
    """Outputs are the same from finer memory: SGLang's torch-native attention takes the stride."""
    stock = spec_of(model)
    spec = msgspec.structs.replace(
        stock, kv_arrangement="token_interleaved", token_bytes=stock.token_bytes + 256
    )
    activated = device.activate(spec, max_running=8)
    layout = layout_of(spec)
    assert activated.quantum_bytes == layout.quantum_bytes(PAGE_BYTES)
    assert activated.quantum_bytes == activated.quantum_tokens * spec.token_bytes
    run(device, model, f"interleaved-{model}-")
    ledger = ledger_of(device)
    device.trim()
    assert kv_committed_bytes(device) == activated.floor_bytes
    device.send(Deactivate())
    device.wait_for(Deactivated)
    assert ledger.resident_bytes() == 0


def test_only_the_floor_is_resident_until_used_and_after_a_flush(device: DeviceUnderTest) -> None:
    activated = device.activate(spec_of(LLAMA))
    ledger = ledger_of(device)
    weight_bytes = activated.static_bytes - STATIC_BYTES
    assert activated.floor_bytes == activated.quantum_bytes
    assert ledger.usage().committed_bytes == activated.floor_bytes
    assert ledger.resident_bytes() <= activated.floor_bytes + weight_bytes
    assert ledger.usage().reserved_bytes == activated.static_bytes + activated.reserve_bytes
    run(device, LLAMA, "floor-")
    assert ledger.usage().committed_bytes > activated.floor_bytes
    trimmed = device.trim()
    assert trimmed.evicted_tokens > 0
    assert trimmed.returned_bytes > 0
    assert ledger.usage().committed_bytes == activated.floor_bytes
    assert ledger.resident_bytes() <= activated.floor_bytes + weight_bytes


@pytest.mark.quick
def test_prefix_cache_changes_no_token_and_is_reported(active: DeviceUnderTest) -> None:
    [prompt] = prompts(LLAMA, 1, (200, 200), seed=3)
    expected = greedy(LLAMA, prompt, 16)
    for i, cached in ((0, 0), (1, 192)):  # whole blocks, and at least one token computed again
        active.send(Submit([request(f"again{i}", LLAMA, prompt)]))
        [stream] = active.finish(f"again{i}")
        assert stream.token_ids == expected
        assert stream.chunks[0].cached_tokens == cached


@pytest.mark.parametrize("prompt_tokens", [2000, 2047])
def test_a_request_may_fill_the_whole_context(active: DeviceUnderTest, prompt_tokens: int) -> None:
    [prompt] = prompts(LLAMA, 1, (prompt_tokens, prompt_tokens))
    name = f"full{prompt_tokens}"
    active.send(Submit([request(name, LLAMA, prompt, 2048 - prompt_tokens)]))
    [stream] = active.finish(name)
    assert stream.finish_reason == "length"
    assert stream.token_ids == greedy(LLAMA, prompt, 2048 - prompt_tokens)


def test_stop_tokens_end_a_request_and_are_its_last_token(active: DeviceUnderTest) -> None:
    [prompt] = prompts(LLAMA, 1, (20, 20))
    expected = greedy(LLAMA, prompt, 32)
    stop = expected[10]
    end = expected.index(stop) + 1
    active.send(Submit([request("stop", LLAMA, prompt, 32, stop_token_ids=(stop,))]))
    [stream] = active.finish("stop")
    assert (stream.token_ids, stream.finish_reason) == (expected[:end], "stop")


def test_requests_that_can_never_run_fail_and_others_go_on(active: DeviceUnderTest) -> None:
    good, *_ = prompts(LLAMA, 1, (20, 20))
    bad = {
        "too-long": request("too-long", LLAMA, good, 2048),
        "empty": request("empty", LLAMA, []),
        "vocabulary": request("vocabulary", LLAMA, [1 << 20]),
    }
    active.send(Submit([*bad.values(), request("good", LLAMA, good)]))
    *failed, served = active.finish(*bad, "good")
    assert [s.failure.code for s in failed if s.failure] == [
        "context_length_exceeded",
        "invalid_request_error",
        "invalid_request_error",
    ]
    assert "by 20" in str(failed[0].failure)
    assert served.token_ids == greedy(LLAMA, good, 16)


def test_cancelling_gives_the_pages_back(active: DeviceUnderTest) -> None:
    floor = kv_committed_bytes(active)
    names = [f"cancel{i}" for i in range(12)]  # 8 run, 4 wait
    asked = [
        request(n, LLAMA, p, 1500)
        for n, p in zip(names, prompts(LLAMA, 12, (100, 200), seed=4), strict=True)
    ]
    active.send(Submit(asked))
    active.wait_until(lambda: len(active.stream("cancel0").token_ids) > 20)
    active.send(Cancel([*names, "unknown"]))
    streams = active.finish(*names)
    assert [s.finish_reason for s in streams] == ["cancelled"] * 12
    assert all(len(s.token_ids) < 1500 for s in streams)
    status = active.settled_status(lambda s: not s.running and not s.waiting)
    assert status.pending_prefill_tokens == 0
    active.trim()
    assert kv_committed_bytes(active) == floor


def test_sampled_streams_repeat_with_their_seed(active: DeviceUnderTest) -> None:
    [prompt] = prompts(LLAMA, 1, (30, 30))
    asked = [
        msgspec.structs.replace(
            request(f"seed{i}", LLAMA, prompt),
            sampling=Sampling(max_tokens=24, temperature=1.5, seed=seed, ignore_eos=True),
        )
        for i, seed in enumerate((7, 7, 8, None, None))
    ]
    active.send(Submit(asked))
    streams = active.finish(*(r.id for r in asked))
    assert [s.finish_reason for s in streams] == ["length"] * 5, streams[0].failure
    first, same, other, free, free2 = (s.token_ids for s in streams)
    assert first == same
    assert len({tuple(t) for t in (first, other, free, free2)}) == 4


def test_status_counts_what_happened(active: DeviceUnderTest) -> None:
    before = active.fresh_status()
    [prompt] = prompts(LLAMA, 1, (100, 100), seed=9)
    active.send(Submit([request("counted", LLAMA, prompt, 20)]))
    active.finish("counted")
    after = active.settled_status(lambda s: not s.running)
    assert after.prompt_tokens_total - before.prompt_tokens_total == 100
    assert after.output_tokens_total - before.output_tokens_total == 20
    assert after.maps_total > before.maps_total
    assert after.prefill_tokens_per_s > 0
    assert after.evictable_tokens == 112  # 119 computed tokens, whole blocks
    assert after.available_tokens == before.available_tokens
    active.settled_status(lambda s: s.kv_mapped_bytes == kv_committed_bytes(active))
