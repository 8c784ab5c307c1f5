"""Two engines that need more memory than the device has wait and retract; outputs do not change."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from prism.messages.engine import ActivateEngine, ActivationFailed, Submit
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request
from prism.models.tokenizer import END, SPECIAL_TOKENS
from tests.engines.harness import DeviceUnderTest, Stream, request
from tests.sglang.conftest import (
    PAGE_BYTES,
    STATIC_BYTES,
    charged_bytes,
    kv_committed_bytes,
    ledger_of,
    opened_device,
)
from tests.sglang.models import LLAMA, QWEN3, TIE, largest_gap, prompts, spec_of

pytestmark = pytest.mark.sglang

CONTEXT = 256
REQUESTS = 10
END_ID = SPECIAL_TOKENS.index(END)
ENGINES = {"e0": LLAMA, "e1": QWEN3}


def reserve_bytes(spec: ModelSpec) -> int:
    """Returns the KV of one full-context request and the padding block, in whole slabs."""
    row_bytes = spec.token_bytes // (2 * spec.num_layers)
    slab_bytes = PAGE_BYTES
    while slab_bytes % (16 * row_bytes):
        slab_bytes += PAGE_BYTES
    slabs = -(-(CONTEXT + 16) * row_bytes // slab_bytes)
    return slabs * slab_bytes * 2 * spec.num_layers


def capacity_bytes(spare_bytes: int) -> int:
    """Returns room for both models to be active, and `spare_bytes` that both compete for."""
    specs = [spec_of(name, CONTEXT) for name in ENGINES.values()]
    needs = (
        -(-s.weight_bytes // PAGE_BYTES) * PAGE_BYTES + STATIC_BYTES + reserve_bytes(s)
        for s in specs
    )
    return sum(needs) + spare_bytes


@pytest.fixture(scope="module")
def tight() -> Iterator[DeviceUnderTest]:
    """Yields a device with two active engines that share 40 pages in addition to their reserves:
    room for about 5 requests of either."""
    with opened_device(capacity_bytes(40 * PAGE_BYTES), chunk_tokens=16) as device:
        for engine_id, model in ENGINES.items():
            device.fork(engine_id)
            spec = spec_of(model, CONTEXT)
            activated = device.activate(spec, engine_id, max_running=REQUESTS)
            assert activated.reserve_bytes == reserve_bytes(spec)
        yield device


class ResidencyWatch:
    """The largest residency that the OS showed, static memory included, while the block ran."""

    def __init__(self, device: DeviceUnderTest) -> None:
        self._ledger = ledger_of(device)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.largest_bytes = 0

    def __enter__(self) -> ResidencyWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.largest_bytes = max(self.largest_bytes, charged_bytes(self._ledger))


def heedful(asked: Request) -> Request:
    """Ends at an end-of-sequence token: SGLang bets on that and admits more than would fit."""
    sampling = msgspec.structs.replace(asked.sampling, ignore_eos=False)
    return msgspec.structs.replace(asked, sampling=sampling)


def drive(device: DeviceUnderTest, tag: str, length: tuple[int, int]) -> list[Stream]:
    """Submits more than fits to both engines at once; outputs must be the model's own."""
    asked = {
        f"{tag}-{engine}-{i}": (engine, model, prompt, CONTEXT - len(prompt))
        for engine, model in ENGINES.items()
        for i, prompt in enumerate(prompts(model, REQUESTS, length, seed=5))
    }
    for engine in ENGINES:
        mine = [heedful(request(i, m, p, n)) for i, (e, m, p, n) in asked.items() if e == engine]
        device.send(Submit(mine), engine)
    streams = device.finish(*asked, timeout_s=280.0)
    for stream, (_, model, prompt, tokens) in zip(streams, asked.values(), strict=True):
        assert stream.failure is None
        stopped = stream.token_ids[-1] == END_ID
        assert stream.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(stream.token_ids) == tokens
        assert largest_gap(model, prompt, stream.token_ids) < TIE
    return streams


@pytest.mark.parametrize(
    ("length", "retractions"),
    [((20, 60), 1), ((120, 200), 0)],
    ids=["long outputs that must be retracted", "prompts in chunks"],
)
def test_every_request_ends_complete_and_as_without_contention(
    tight: DeviceUnderTest, length: tuple[int, int], retractions: int
) -> None:
    before = {e: tight.fresh_status(e) for e in ENGINES}
    with ResidencyWatch(tight) as watch:
        drive(tight, str(length[0]), length)
    assert watch.largest_bytes <= ledger_of(tight).usage().capacity_bytes
    after = {e: tight.settled_status(lambda s: not s.running, e) for e in ENGINES}
    retracted = sum(after[e].retractions_total - before[e].retractions_total for e in ENGINES)
    assert retracted >= retractions
    for engine in ENGINES:
        tight.trim(engine)
    usage = ledger_of(tight).usage()
    quanta = (2 * spec_of(m).num_layers * PAGE_BYTES for m in ENGINES.values())
    assert kv_committed_bytes(tight) == sum(quanta)  # the padding blocks' slabs, of a page each
    assert usage.reserved_bytes == usage.static_bytes + sum(c.min_bytes for c in usage.clients)


def test_a_third_model_fails_with_the_missing_bytes(tight: DeviceUnderTest) -> None:
    tight.fork("e2")
    spec = spec_of(LLAMA, CONTEXT)
    tight.send(ActivateEngine(model=spec), "e2")
    failed = tight.wait_for(ActivationFailed, "e2")
    free = ledger_of(tight).usage().free_bytes
    need = spec.weight_bytes + STATIC_BYTES + reserve_bytes(spec)
    assert 0 <= failed.missing_bytes - (need - free) < 2 * PAGE_BYTES  # whole pages
    assert ledger_of(tight).usage().free_bytes == free
