"""Stock vLLM servers share a host device with each other and with SGLang, by variables alone.

Run by scripts/test --long: their environment takes minutes to install.
"""

from __future__ import annotations

import re
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair, opened_pair, right, token_bytes
from tests.engines.stock import CONTEXT, Server, SGLangServer, until
from tests.sglang.models import (
    LLAMA,
    QWEN3,
    TIE,
    gap_of,
    network,
    path_of,
    prompts,
    spec_of,
    towards_zero,
)
from tests.vllm.servers import BLOCK_TOKENS, VllmServer

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1800)]

MODELS = (LLAMA, QWEN3)
# For the KV of both 30 MiB, of which either alone takes more than its half.
CAPACITY = (-(-sum(spec_of(name).weight_bytes for name in MODELS) // PAGE) + 1) * PAGE + (30 << 20)
ASKED = 8
LOOKUP = '"prompt_lookup_max": 2, "prompt_lookup_min": 1'
NGRAM = f'{{"method": "ngram", "num_speculative_tokens": 3, {LOOKUP}}}'
DRAFT = '{"model": "MODEL", "num_speculative_tokens": 3}'
LMCACHE = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'


@pytest.fixture(scope="module", params=[VllmServer, SGLangServer])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened_pair({LLAMA: VllmServer, QWEN3: request.param}, CAPACITY) as made:
        yield made


def test_kv_is_virtual_at_the_start(pair: Pair) -> None:
    usage, block_bytes = pair.of(LLAMA), BLOCK_TOKENS * token_bytes(LLAMA)
    assert usage.committed_bytes == block_bytes  # that of padding
    assert usage.min_bytes == (CONTEXT // BLOCK_TOKENS + 1) * block_bytes
    assert usage.static_bytes >= spec_of(LLAMA).weight_bytes


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, ASKED, 24)


def test_memory_comes_with_requests_and_goes_with_the_cache(pair: Pair) -> None:
    pair.flush()
    pair.servers[LLAMA].answers(prompts(LLAMA, 4, (200, 300), seed=3), 8)
    assert pair.of(LLAMA).committed_bytes > 4 * 192 * token_bytes(LLAMA)
    until(lambda: pair.of(LLAMA).evictable_bytes > 0)
    pair.flush()


@pytest.mark.parametrize(("idle", "busy"), [(LLAMA, QWEN3), (QWEN3, LLAMA)])
def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(
    pair: Pair, idle: str, busy: str
) -> None:
    pair.flush()
    pair.fill_with_prefixes(idle)
    sharing.burst(pair, idle, busy)


def test_a_limit_from_outside_shrinks_an_idle_server_and_it_serves_on(pair: Pair) -> None:
    sharing.limit(pair, LLAMA, pair.of(LLAMA).min_bytes + 256 * token_bytes(LLAMA))


def test_more_than_both_have_room_for_waits_and_comes_out_right(pair: Pair) -> None:
    pair.flush()
    sharing.overload(pair, (250, 350), 120)


def test_requests_that_are_cancelled_free_their_blocks_once(pair: Pair) -> None:
    pair.flush()
    asked = prompts(LLAMA, 1, (200, 300), seed=31)
    body = {"model": LLAMA, "prompt": asked[0], "max_tokens": 200, "ignore_eos": True}
    sharing.cancel(pair.servers[LLAMA], "/v1/completions", body, 8)
    pair.flush()
    right(LLAMA, asked, pair.servers[LLAMA].answers(asked, 24))


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
        (LLAMA, (), {"CAPACTY": "1GiB"}, "KVCACHED_CAPACTY is not a known variable"),
        (LLAMA, ("--pipeline-parallel-size", "2"), {}, "-size .2. is not .*each stage has KV of"),
        (
            LLAMA,
            ("--data-parallel-size", "2"),
            {},
            "-size .2. is not .*one server for each replica",
        ),
        (LLAMA, ("--speculative-config", DRAFT), {}, "'draft_model'. is not .*not have a pool for"),
        (
            LLAMA,
            ("--kv-transfer-config", LMCACHE),
            {},
            "-config .* is not .*connectors register KV",
        ),
        (LLAMA, ("--kv-offloading-size", "1"), {}, "-size .1.0. is not .*it copies blocks while"),
    ],
    ids=[
        "weights",
        "minimum",
        "capacity",
        "variable",
        "stages",
        "replicas",
        "drafts",
        "transfer",
        "offloading",
    ],
)
def test_a_server_that_cannot_come_up_says_why_and_disturbs_nobody(  # noqa: PLR0917
    pair: Pair,
    tmp_path: Path,
    model: str,
    arguments: tuple[str, ...],
    said: dict[str, str],
    message: str,
) -> None:
    if isinstance(pair.servers[QWEN3], SGLangServer):
        pytest.skip("done with two vLLM servers")
    pair.flush()
    arguments = tuple(each.replace("MODEL", str(path_of(model))) for each in arguments)
    server = VllmServer(model, tmp_path, *arguments, **pair.said(**said))
    sharing.cannot_come_up(pair, server, message)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_a_server_keeps_kv_in_fp8(tmp_path: Path, name: str, dtype: str) -> None:
    """Compares with KV rounded towards zero, as vLLM's kernel for CPUs does it."""

    def started(model: str, folder: Path, **said: str) -> VllmServer:
        return VllmServer(model, folder, "--kv-cache-dtype", name, **said)

    pair = Pair({LLAMA: started}, tmp_path, 64 << 20)
    try:
        request_bytes = (CONTEXT + BLOCK_TOKENS) * token_bytes(LLAMA) // 4  # of float32
        assert pair.of(LLAMA).min_bytes == -(-request_bytes // PAGE) * PAGE
        asked, reference = prompts(LLAMA, 6, (7, 200), seed=5), network(path_of(LLAMA))
        for prompt, answer in zip(asked, pair.servers[LLAMA].answers(asked, 16), strict=True):
            assert gap_of(reference, prompt, answer, towards_zero(dtype)) < TIE
        pair.flush()
    finally:
        pair.close()


def revive(pair: Pair) -> None:
    """Starts the killed server of LLAMA again."""
    pair.servers[LLAMA].end()
    server = VllmServer(LLAMA, Path(tempfile.mkdtemp(prefix="prism-")), **pair.said())
    pair.servers[LLAMA] = server
    server.await_ready()
    pair.names[LLAMA] = server.name


def test_an_engine_that_is_killed_in_mid_load_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """Ends a server, like the tests after this one."""
    pair.flush()
    print(sharing.kill_in_mid_load(pair, LLAMA, QWEN3))
    sharing.leaves_nothing(pair, QWEN3)


def test_an_engine_whose_server_is_killed_leaves_nothing(pair: Pair) -> None:
    revive(pair)
    pair.fill_with_prefixes(LLAMA)
    server = pair.servers[LLAMA].engine().parent()
    assert server is not None
    server.send_signal(signal.SIGKILL)
    sharing.leaves_nothing(pair, QWEN3)
    asked = prompts(QWEN3, 12, (440, 470), seed=8)
    right(QWEN3, asked, pair.servers[QWEN3].answers(asked, 20))


def test_a_server_that_guesses_tokens_answers_as_transformers_do(tmp_path: Path) -> None:
    """Makes vLLM guess after each token that it has seen before; some guesses are right."""

    def started(model: str, folder: Path, **said: str) -> VllmServer:
        return VllmServer(model, folder, "--speculative-config", NGRAM, **said)

    pair = Pair({LLAMA: started}, tmp_path, CAPACITY)
    try:
        # Answers to one repeated token repeat themselves as well.
        asked = [*prompts(LLAMA, ASKED, (20, 120), seed=2), *([n] * 60 for n in range(5, 13))]
        right(LLAMA, asked, pair.servers[LLAMA].answers(asked, 100))
        drafted, accepted = (guesses(pair.servers[LLAMA], kind) for kind in ("draft", "accepted"))
        assert 0 < accepted < drafted
        pair.flush()
    finally:
        pair.close()


def guesses(server: Server, kind: str) -> float:
    """Returns vLLM's counter of guessed tokens."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        found = re.search(
            rf"vllm:spec_decode_num_{kind}_tokens_total{{.*}} (.*)", answer.read().decode()
        )
    assert found is not None
    return float(found[1])


def test_without_the_variable_vllm_is_as_it_was(tmp_path: Path) -> None:
    """Runs scheduler and KV in two processes: with the adapter they are in one."""
    server = VllmServer(LLAMA, tmp_path, "--kv-cache-memory-bytes", str(16 << 20))
    try:
        server.await_ready()
        asked = prompts(LLAMA, ASKED, (20, 120), seed=2)
        right(LLAMA, asked, server.answers(asked, 24))
        assert any("Worker" in one.cmdline()[0] for one in server.children())
        assert "kvcached" not in server.log()
    finally:
        server.end()
