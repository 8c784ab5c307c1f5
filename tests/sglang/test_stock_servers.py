"""Two stock SGLang servers share a host device through the environment alone."""

from __future__ import annotations

import contextlib
import re
import tempfile
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from kvcached import ClientUsage, Device
from tests.engines import sharing
from tests.engines.sharing import right
from tests.engines.stock import Server, SGLangServer, until
from tests.sglang.models import LLAMA, MLA, QWEN3, greedy, prompts, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PAGE = 64 << 10
MODELS = (LLAMA, QWEN3)
# KV of one request of the whole context and the padding block, in slabs of 128 tokens.
REQUEST_BYTES = {name: 5 * 128 * spec_of(name).token_bytes for name in MODELS}
ELASTIC_BYTES = 12 << 20  # for both together, beside what is guaranteed


def weights_bytes(name: str) -> int:
    return spec_of(name).weight_bytes


CAPACITY = -(-(sum(map(weights_bytes, MODELS)) + (1 << 20)) // PAGE) * PAGE
CAPACITY += sum(REQUEST_BYTES.values()) + ELASTIC_BYTES


class Pair:
    """Both servers, and the device as anybody else sees it."""

    def __init__(self, folder: Path) -> None:
        self.namespace = f"t{uuid4().hex[:10]}"
        self.servers: dict[str, Server] = {
            name: SGLangServer(name, folder, **self.said()) for name in MODELS
        }
        for server in self.servers.values():
            server.await_ready()
        self.device = Device.open("host:0", namespace=self.namespace)

    def said(self, **others: str) -> dict[str, str]:
        """The variables of every server, without their prefix."""
        size, page = str(CAPACITY), str(PAGE)
        return {
            "DEVICE": "host:0",
            "CAPACITY": size,
            "PAGE": page,
            "NAMESPACE": self.namespace,
            **others,
        }

    def of(self, model: str) -> ClientUsage:
        name = self.servers[model].name
        (found,) = [c for c in self.device.usage().clients if c.name == name]
        return found

    def flush(self) -> None:
        for server in self.servers.values():
            server.flush()
        until(lambda: all(self.of(name).committed_bytes <= floor_bytes(name) for name in MODELS))

    def close(self) -> None:
        for server in self.servers.values():
            server.end()
        Device.unlink(self.namespace, "host:0", force=True)


def floor_bytes(model: str) -> int:
    """The slab of the padding block."""
    return 128 * spec_of(model).token_bytes


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        made = Pair(Path(folder))
        try:
            yield made
        finally:
            made.close()


def test_kv_is_virtual_at_the_start(pair: Pair) -> None:
    for model in MODELS:
        usage = pair.of(model)
        assert usage.committed_bytes == floor_bytes(model)
        assert usage.min_bytes == REQUEST_BYTES[model]
        assert usage.static_bytes >= weights_bytes(model)
    assert sum(pair.of(model).static_bytes for model in MODELS) < CAPACITY - ELASTIC_BYTES


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    asked = {model: prompts(model, 8, (20, 120), seed=2) for model in MODELS}
    with ThreadPoolExecutor(len(MODELS)) as pool:
        jobs = {m: pool.submit(pair.servers[m].answers, asked[m], 24) for m in MODELS}
    for model, job in jobs.items():
        right(model, asked[model], job.result())
    (first, *_), (told, *_) = asked[LLAMA], jobs[LLAMA].result()
    assert told == greedy(LLAMA, first, 24)


def test_memory_comes_with_requests_and_goes_with_the_cache(pair: Pair) -> None:
    pair.flush()
    pair.servers[LLAMA].answers(prompts(LLAMA, 4, (200, 300), seed=3), 8)
    used = pair.of(LLAMA)
    assert used.committed_bytes > 4 * floor_bytes(LLAMA)
    until(lambda: pair.of(LLAMA).evictable_bytes > 0)
    assert pair.of(QWEN3).committed_bytes == floor_bytes(QWEN3)
    pair.flush()


def fill_with_prefixes(pair: Pair, model: str) -> None:
    """Until the model's prefix cache has nearly all that the two can share."""
    seed = 100
    while pair.device.usage().free_bytes > 2 * floor_bytes(model):
        pair.servers[model].answers(prompts(model, 4, (400, 450), seed), 2)
        seed += 1


@pytest.mark.parametrize(
    ("idle", "busy"),
    [(LLAMA, QWEN3), pytest.param(QWEN3, LLAMA, marks=pytest.mark.long)],
)
def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(
    pair: Pair, idle: str, busy: str
) -> None:
    pair.flush()
    fill_with_prefixes(pair, idle)
    sharing.burst(pair, idle, busy, CAPACITY)


def test_a_limit_from_outside_shrinks_an_idle_server_and_it_serves_on(pair: Pair) -> None:
    pair.flush()
    fill_with_prefixes(pair, LLAMA)
    limit_bytes = REQUEST_BYTES[LLAMA] + 2 * floor_bytes(LLAMA)
    pair.device.set_limit(pair.servers[LLAMA].name, limit_bytes)
    until(lambda: pair.of(LLAMA).committed_bytes <= limit_bytes)
    asked = prompts(LLAMA, 5, (100, 300), seed=6)
    right(LLAMA, asked, pair.servers[LLAMA].answers(asked, 40))
    assert pair.of(LLAMA).committed_bytes <= limit_bytes
    pair.device.set_limit(pair.servers[LLAMA].name, None)
    right(LLAMA, asked, pair.servers[LLAMA].answers(asked, 40))
    assert pair.of(LLAMA).committed_bytes > limit_bytes


def test_more_than_both_have_room_for_waits_and_comes_out_right(pair: Pair) -> None:
    pair.flush()
    sharing.overload(pair, (150, 250), 80, CAPACITY)


def test_requests_that_are_cancelled_free_their_blocks_once(pair: Pair) -> None:
    pair.flush()
    asked = prompts(LLAMA, 1, (200, 300), seed=31)
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": asked[0], "sampling_params": sampling}
    sharing.cancel(pair.servers[LLAMA], "/generate", body, 8)
    until(lambda: flushed(pair))  # refused while requests run
    right(LLAMA, asked, pair.servers[LLAMA].answers(asked, 24))


def flushed(pair: Pair) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):
        pair.servers[LLAMA].flush()
    return pair.of(LLAMA).committed_bytes == floor_bytes(LLAMA)


@pytest.mark.long  # each server imports SGLang for itself
@pytest.mark.parametrize(
    ("model", "arguments", "said", "message"),
    [
        (LLAMA, (), {"STATIC": "1GiB"}, "takes 1 GiB beside its KV, and host:0 has .* for it: "),
        (
            LLAMA,
            (),
            {"STATIC": "64KiB", "MINIMUM": "1GiB"},
            "KVCACHED_MINIMUM takes 1 GiB, and host:0 has .* for it: stop",
        ),
        (LLAMA, (), {"CAPACITY": "1GiB"}, "KVCACHED_CAPACITY and KVCACHED_PAGE are the same"),
        (LLAMA, ("--tp-size", "2"), {}, "tp_size 2 is not served on kvcached: leave it out"),
        (LLAMA, ("--page-size", "1"), {}, "page_size 1 is not served on kvcached: leave it out"),
        (
            LLAMA,
            ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
            {},
            "speculative_algorithm 'NGRAM' is not served on kvcached: leave it out",
        ),
        (MLA.name, (), {"STATIC": "64KiB"}, "latent attention .MLA. is not served on kvcached"),
    ],
    ids=["weights", "minimum", "capacity", "ranks", "blocks", "guesses", "latent"],
)
def test_a_server_that_cannot_come_up_says_why_and_disturbs_nobody(  # noqa: PLR0917
    pair: Pair,
    tmp_path: Path,
    model: str,
    arguments: tuple[str, ...],
    said: dict[str, str],
    message: str,
) -> None:
    pair.flush()
    before = [client.name for client in pair.device.usage().clients]
    server = SGLangServer(model, tmp_path, *arguments, **pair.said(**said))
    try:
        until(server.ended, 600)
    finally:
        server.end()
    assert re.search(message, server.log()), server.log()
    # A server may end before the engine that it has killed.
    until(lambda: [client.name for client in pair.device.usage().clients] == before)
    asked = prompts(QWEN3, 2, (50, 100), seed=9)
    right(QWEN3, asked, pair.servers[QWEN3].answers(asked, 8))


def test_a_server_that_is_killed_in_mid_load_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """The last of the module: it ends a server."""
    pair.flush()
    taken_s = sharing.kill_in_mid_load(pair, LLAMA, QWEN3, CAPACITY)
    print(f"the other had the room after {taken_s:.3f} s")
    until(lambda: [c.name for c in pair.device.usage().clients] == [pair.servers[QWEN3].name])
    usage = pair.device.usage()
    assert usage.reserved_bytes == usage.clients[0].static_bytes + max(
        usage.clients[0].reserved_bytes, usage.clients[0].min_bytes
    )
