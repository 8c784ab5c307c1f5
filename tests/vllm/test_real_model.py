"""Two stock servers of a real model share a device that holds less than both would take.

Run by scripts/test --long: five minutes for each pair of engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair, opened_pair
from tests.engines.stock import SGLangServer
from tests.sglang.models import AGAIN, SMOLLM2, spec_of
from tests.vllm.servers import VllmServer

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1800)]

ONE, OTHER = SMOLLM2.name, AGAIN.name
# For the KV of both 6,000 tokens, of which either alone takes more than its half.
ELASTIC_TOKENS = 6000


@pytest.fixture(
    scope="module",
    params=[(VllmServer, VllmServer), (SGLangServer, SGLangServer), (VllmServer, SGLangServer)],
    ids=["vLLM", "SGLang", "vLLM beside SGLang"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    spec = spec_of(ONE)
    need_bytes = 2 * spec.weight_bytes + ELASTIC_TOKENS * spec.token_bytes
    capacity_bytes = -(-need_bytes // PAGE) * PAGE
    classes = dict(zip((ONE, OTHER), request.param, strict=True))
    with opened_pair(classes, capacity_bytes) as made:
        yield made


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 8, 24)


def test_a_burst_takes_an_idle_servers_prefixes_which_come_back(pair: Pair) -> None:
    pair.flush()
    pair.fill_with_prefixes(ONE)
    sharing.burst(pair, ONE, OTHER)


def test_an_engine_that_is_killed_in_mid_load_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """Ends an engine: the last test of the module."""
    pair.flush()
    print(sharing.kill_in_mid_load(pair, ONE, OTHER))
