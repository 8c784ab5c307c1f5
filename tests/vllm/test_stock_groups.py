"""Stock vLLM servers of a model with windows in some layers, and of one with experts, share a
device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair, largest_held, opened_pair, right
from tests.engines.stock import CONTEXT, until
from tests.sglang.models import GEMMA3_32, MOE, prompts, spec_of
from tests.vllm.servers import BLOCK_TOKENS, without_prefixes

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1800)]

WINDOWS, EXPERTS = GEMMA3_32.name, MOE.name
WEIGHTS_BYTES = sum(-(-spec_of(name).weight_bytes // PAGE) * PAGE for name in (WINDOWS, EXPERTS))
# Layers of Gemma 3 with a window, and the same number without: each has K and V in half a token.
BLOCK_BYTES = BLOCK_TOKENS * 2 * (2 * 2 * 32 * 4)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    servers = dict.fromkeys((WINDOWS, EXPERTS), without_prefixes)
    with opened_pair(servers, WEIGHTS_BYTES + (48 << 20)) as made:
        yield made


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 8, 24)


def test_a_window_bounds_what_a_long_sequence_holds(pair: Pair) -> None:
    """Measures a model half of whose layers keep all tokens. The others keep a window of 32 tokens,
    the 64 of a step and a block."""
    guaranteed_bytes = (CONTEXT // BLOCK_TOKENS + 4 + 1) * BLOCK_BYTES  # with that of padding
    assert pair.of(WINDOWS).min_bytes == -(-guaranteed_bytes // PAGE) * PAGE
    asked = prompts(WINDOWS, 1, (440, 440), seed=5)
    with largest_held(pair, WINDOWS) as held:
        answers = pair.servers[WINDOWS].answers(asked, 60)
    right(WINDOWS, asked, answers)
    assert 14 * BLOCK_BYTES < held[0] <= pair.of(WINDOWS).min_bytes
    until(lambda: pair.of(WINDOWS).committed_bytes == PAGE)
