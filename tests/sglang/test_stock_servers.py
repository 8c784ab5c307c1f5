"""Two stock SGLang servers share a host device through the environment alone."""

from __future__ import annotations

import contextlib
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from prism.config.checks.memory_needs import pools_of
from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair, opened_pair, right, token_bytes
from tests.engines.stock import SGLangServer, until
from tests.sglang.models import (
    LLAMA,
    LONG_GEMMA3,
    MLA,
    QWEN3,
    TIE,
    gap_of,
    nearest,
    network,
    path_of,
    prompts,
    spec_of,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

MODELS = (LLAMA, QWEN3)
FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# KV of one request of the whole context and the padding block, in slabs of 128 tokens.
REQUEST_BYTES = {name: 5 * 128 * spec_of(name).token_bytes for name in MODELS}
ELASTIC_BYTES = 12 << 20  # for both together, in addition to the guaranteed


def weights_bytes(name: str) -> int:
    return spec_of(name).weight_bytes


CAPACITY = -(-(sum(map(weights_bytes, MODELS)) + (1 << 20)) // PAGE) * PAGE
CAPACITY += sum(REQUEST_BYTES.values()) + ELASTIC_BYTES


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with opened_pair(dict.fromkeys(MODELS, SGLangServer), CAPACITY) as made:
        yield made


def test_kv_is_virtual_at_the_start(pair: Pair) -> None:
    for model in MODELS:
        usage = pair.of(model)
        assert usage.committed_bytes == 128 * token_bytes(model)
        assert usage.min_bytes == REQUEST_BYTES[model]
        assert usage.static_bytes >= weights_bytes(model)
    assert sum(pair.of(model).static_bytes for model in MODELS) < CAPACITY - ELASTIC_BYTES


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 8, 24)


def test_memory_comes_with_requests_and_goes_with_the_cache(pair: Pair) -> None:
    pair.flush()
    pair.servers[LLAMA].answers(prompts(LLAMA, 4, (200, 300), seed=3), 8)
    used = pair.of(LLAMA)
    assert used.committed_bytes > 4 * 128 * token_bytes(LLAMA)
    until(lambda: pair.of(LLAMA).evictable_bytes > 0)
    assert pair.of(QWEN3).committed_bytes == 128 * token_bytes(QWEN3)
    pair.flush()


def test_an_idle_server_sleeps(pair: Pair) -> None:
    """Waits in its loop for messages from clients or other engines."""
    pair.flush()
    engine = pair.servers[LLAMA].engine()
    until(lambda: cpu_s(engine, 2.0) < 0.2)


def cpu_s(process: psutil.Process, over_s: float) -> float:
    """Returns the CPU seconds that the process takes in `over_s`."""
    before = process.cpu_times()
    time.sleep(over_s)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


@pytest.mark.parametrize(
    ("idle", "busy"),
    [(LLAMA, QWEN3), pytest.param(QWEN3, LLAMA, marks=pytest.mark.long)],
)
def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(
    pair: Pair, idle: str, busy: str
) -> None:
    pair.flush()
    pair.fill_with_prefixes(idle)
    sharing.burst(pair, idle, busy)


def test_a_limit_from_outside_shrinks_an_idle_server_and_it_serves_on(pair: Pair) -> None:
    sharing.limit(pair, LLAMA, REQUEST_BYTES[LLAMA] + 2 * 128 * token_bytes(LLAMA))


def test_more_than_both_have_room_for_waits_and_comes_out_right(pair: Pair) -> None:
    pair.flush()
    sharing.overload(pair, (150, 250), 80)


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
    return pair.of(LLAMA).committed_bytes == 128 * token_bytes(LLAMA)


def test_a_server_of_latent_attention_answers_as_transformers_do(tmp_path: Path) -> None:
    pair = Pair({MLA.name: SGLangServer}, tmp_path, 64 << 20)
    try:
        asked = prompts(MLA.name, 6, (7, 200), seed=5)
        right(MLA.name, asked, pair.servers[MLA.name].answers(asked, 16))
        assert pair.of(MLA.name).committed_bytes % spec_of(MLA.name).token_bytes == 0
        pair.flush()
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        pytest.param("cohere2", (), marks=pytest.mark.long),
        ("ernie4_5_moe", ()),
        pytest.param("gemma3_text", (), marks=pytest.mark.long),
        ("gemma3n_text", ()),
        pytest.param("gemma4_text", (), marks=pytest.mark.long),
        ("gpt_oss", ("--attention-backend", "triton")),
        pytest.param("hunyuan_v1_dense", (), marks=pytest.mark.long),
        ("lfm2", ()),
        ("llama4_text", ()),
        pytest.param("mistral", (), marks=pytest.mark.long),
        pytest.param("nemotron_h", (), marks=pytest.mark.long),
        ("qwen3_next", ()),
    ],
)
def test_a_server_of_another_family_answers_as_transformers_do(
    tmp_path: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    """Asks twice: the second time for prefixes that are in its cache."""
    model = f"family-{kind}"

    def started(model: str, folder: Path, **said: str) -> SGLangServer:
        return SGLangServer(model, folder, *arguments, **said)

    pair = Pair({model: started}, tmp_path, 64 << 20)
    try:
        asked = prompts(model, 6, (7, 200), seed=5)
        for _ in range(2):
            right(model, asked, pair.servers[model].answers(asked, 16))
        pair.flush()
        assert pair.of(model).committed_bytes < 4 << 20
    finally:
        pair.close()


@pytest.mark.parametrize("arguments", [(), ("--disable-radix-cache",)], ids=["cached", "plain"])
def test_a_window_bounds_what_a_long_sequence_holds(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Serves requests of the full context within the memory that windows need, much less than
    all tokens of all layers would take."""
    model, spec = LONG_GEMMA3.name, spec_of(LONG_GEMMA3.name)
    need_bytes = sum(pool.need_bytes(PAGE) for pool in pools_of(spec, 64))
    [plain] = pools_of(msgspec.structs.replace(spec, window_layers=0, kv_layers=0), 64)
    assert 2.5 * need_bytes < plain.need_bytes(PAGE)

    def started(model: str, folder: Path, **said: str) -> SGLangServer:
        length = ("--context-length", str(spec.context_length))
        return SGLangServer(model, folder, *length, *arguments, **said, LIMIT=str(need_bytes))

    pair = Pair({model: started}, tmp_path, 64 << 20)
    try:
        assert pair.of(model).min_bytes == need_bytes
        asked = prompts(model, 2, (1900, 1900), seed=5)
        asked.append(asked[1][:-50])  # after evictions of its beginning
        for prompt in asked:
            right(model, [prompt], [pair.servers[model].generate(prompt, 100)])
            assert pair.of(model).committed_bytes <= need_bytes
    finally:
        pair.close()


@pytest.mark.parametrize(("name", "dtype"), FP8.items())
def test_a_server_keeps_kv_in_fp8(tmp_path: Path, name: str, dtype: str) -> None:
    def started(model: str, folder: Path, **said: str) -> SGLangServer:
        return SGLangServer(model, folder, "--kv-cache-dtype", name, **said)

    pair = Pair({LLAMA: started}, tmp_path, 64 << 20)
    try:
        # Slabs of FP8 and of float32 have the same size, and FP8's have four times the tokens.
        assert pair.of(LLAMA).committed_bytes == 128 * token_bytes(LLAMA)
        assert pair.of(LLAMA).min_bytes == 2 * 128 * token_bytes(LLAMA)
        asked, reference = prompts(LLAMA, 6, (7, 200), seed=5), network(path_of(LLAMA))
        for prompt, answer in zip(asked, pair.servers[LLAMA].answers(asked, 16), strict=True):
            assert gap_of(reference, prompt, answer, nearest(dtype)) < TIE
        pair.flush()
    finally:
        pair.close()


@pytest.mark.long  # each server imports SGLang for itself
@pytest.mark.parametrize(
    ("model", "arguments", "said", "message"),
    [
        (LLAMA, (), {"STATIC": "1GiB"}, "needs 1 GiB in addition to its KV, but host:0 has "),
        (
            LLAMA,
            (),
            {"STATIC": "64KiB", "MINIMUM": "1GiB"},
            "KVCACHED_MINIMUM needs 1 GiB, but host:0 has .* available: stop",
        ),
        (LLAMA, (), {"CAPACITY": "1GiB"}, "set KVCACHED_CAPACITY and KVCACHED_PAGE to the same"),
        (LLAMA, ("--page-size", "1"), {}, "page_size 1 is not supported on kvcached: leave it out"),
        (LLAMA, ("--kv-cache-dtype", "mxfp8"), {}, "kv_cache_dtype 'mxfp8' is not supported on"),
        (
            LLAMA,
            ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
            {},
            "speculative_algorithm 'NGRAM' is not supported on kvcached .*not have a pool for",
        ),
    ],
    ids=["weights", "minimum", "capacity", "blocks", "mxfp8", "guesses"],
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
    server = SGLangServer(model, tmp_path, *arguments, **pair.said(**said))
    sharing.cannot_come_up(pair, server, message)


def test_a_server_that_is_killed_in_mid_load_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """Ends a server: the last test of the module."""
    pair.flush()
    print(sharing.kill_in_mid_load(pair, LLAMA, QWEN3))
    sharing.leaves_nothing(pair, QWEN3)
