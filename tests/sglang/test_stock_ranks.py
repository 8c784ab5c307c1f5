"""Stock SGLang servers of two ranks share two host devices through the environment alone.

Run by scripts/test --long: four processes import SGLang for themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines import sharing, stock_ranks
from tests.engines.sharing import token_bytes
from tests.engines.stock import SGLangServer
from tests.engines.stock_ranks import MODELS, RanksPair, RanksServer
from tests.sglang.models import LLAMA, QWEN3

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(900)]


class SGLangRanks(RanksServer, SGLangServer):
    def command(self, environment: dict[str, str]) -> list[str]:
        return [*super().command(environment), "--tp-size", "2"]

    def title(self, number: int) -> str:
        return f"sglang::scheduler_TP{number}"


@pytest.fixture(scope="module")
def pair() -> Iterator[RanksPair]:
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        closing(RanksPair(dict.fromkeys(MODELS, SGLangRanks), Path(folder))) as made,
    ):
        yield made


def test_each_rank_holds_half_on_its_device(pair: RanksPair) -> None:
    stock_ranks.each_holds_half(pair)


def test_both_answer_as_transformers_do_at_the_same_time(pair: RanksPair) -> None:
    sharing.both_answer(pair, 8, 24)


@pytest.mark.parametrize(("idle", "busy"), [(LLAMA, QWEN3), (QWEN3, LLAMA)])
def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(
    pair: RanksPair, idle: str, busy: str
) -> None:
    pair.flush()
    pair.fill_with_prefixes(idle)
    sharing.burst(pair, idle, busy)


def test_more_than_both_have_room_for_waits_and_comes_out_right(pair: RanksPair) -> None:
    pair.flush()
    sharing.overload(pair, (150, 250), 80)


def test_a_rank_with_less_memory_makes_all_ranks_wait(pair: RanksPair) -> None:
    pair.flush()
    stock_ranks.less_on_one(pair, LLAMA)


def test_an_engine_of_the_second_device_gets_an_idle_servers_prefixes(pair: RanksPair) -> None:
    pair.flush()
    stock_ranks.asked_on_one(pair, LLAMA)


def test_a_limit_on_one_rank_shrinks_both(pair: RanksPair) -> None:
    sharing.limit(pair, LLAMA, pair.of(LLAMA).min_bytes + 128 * token_bytes(LLAMA))
    assert pair.on_peer(LLAMA).limit_bytes is None


def test_a_server_of_which_a_rank_is_killed_ends_and_leaves_nothing(pair: RanksPair) -> None:
    """Ends a server: the last test of the module."""
    pair.flush()
    stock_ranks.kill_one(pair, LLAMA, QWEN3)
