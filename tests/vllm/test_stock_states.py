"""Stock vLLM servers of models with states, which are in blocks of the same pool as KV."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import pytest

from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair, largest_held, opened_pair, right
from tests.engines.stock import CONTEXT, until
from tests.sglang.models import DELTA_NET, MAMBA, prompts, spec_of
from tests.vllm.servers import BLOCK_TOKENS, VllmServer, without_prefixes

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1800)]

# The gated delta rule, which plain torch computes in float32, and Mamba 2.
DELTA, MAMBA2 = DELTA_NET.name, MAMBA.name
WEIGHTS_BYTES = sum(-(-spec_of(name).weight_bytes // PAGE) * PAGE for name in (DELTA, MAMBA2))
# Of one layer with attention; each of the three others has its state in a separate block.
BLOCK_BYTES = BLOCK_TOKENS * spec_of(DELTA).token_bytes
STATE_BLOCKS = 3
SLAB_BYTES = lcm(BLOCK_BYTES, PAGE)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Servers of both models, of which the second has a prefix cache."""
    servers = {DELTA: without_prefixes, MAMBA2: VllmServer}
    with opened_pair(servers, WEIGHTS_BYTES + (5 << 20)) as made:
        yield made


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 8, 24)


def test_states_come_with_requests_and_go_with_them(pair: Pair) -> None:
    pair.flush()
    most_blocks = CONTEXT // BLOCK_TOKENS + STATE_BLOCKS + 1  # with that of padding
    assert pair.of(DELTA).min_bytes == -(-most_blocks * BLOCK_BYTES // SLAB_BYTES) * SLAB_BYTES
    asked = prompts(DELTA, 1, (450, 450), seed=5)
    with largest_held(pair, DELTA) as held:
        answers = pair.servers[DELTA].answers(asked, 60)
    right(DELTA, asked, answers)
    assert (most_blocks - 1) * BLOCK_BYTES <= held[0] <= pair.of(DELTA).min_bytes
    until(lambda: pair.of(DELTA).committed_bytes == SLAB_BYTES)


def test_a_burst_takes_an_idle_servers_prefixes_and_states(pair: Pair) -> None:
    """Answers from cached prefixes with their states are right, too."""
    pair.flush()
    pair.fill_with_prefixes(MAMBA2)
    before, asked = pair.of(MAMBA2), prompts(DELTA, 12, (200, 230), seed=5)
    with largest_held(pair, DELTA) as held:
        right(DELTA, asked, pair.servers[DELTA].answers(asked, 220))
    after = pair.of(MAMBA2)
    assert held[0] > pair.half_bytes()
    assert after.given_bytes > before.given_bytes
    assert after.evicted_tokens > before.evicted_tokens
    again = prompts(MAMBA2, 8, (400, 450), seed=100)  # some of it has to be computed anew
    right(MAMBA2, again, pair.servers[MAMBA2].answers(again, 8))
