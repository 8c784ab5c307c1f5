"""A model of `tp: auto` in a real cluster of fake engines, whose load triples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from prism.engines.fake import expected_tokens
from prism.messages.agent import ModelReport
from tests.serve.conftest import Cluster, serving, until
from tests.serve.test_migration import DEVICES, places, tokens_of

MODEL = {
    "name": "a",
    "path": "a",
    "tp": "auto",
    "replicas": {"max": 1},
    "slo": {"ttft": "1s", "tpot": "200ms"},
}
# A prompt takes 0.14 s on one device, so three times the load is too much for one, by far. Two are
# twice as fast.
FAKE = '{"decode_step_ms": 40, "prefill_tokens_per_s": 500, "rank_speedup": 1.0}'
PROMPT_TOKENS, TOKENS, LONG_TOKENS = 50, 5, 150
LOAD_RPS = 1.5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = {"migrate_running": "move", "interval": "1s"}
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path, Path(temporary), FAKE, devices=DEVICES, models=[MODEL], scheduler=settings
        ) as made,
    ):
        yield made


class Load:
    """Requests at a rate, and one long answer at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(64)
        self._answers: list[tuple[int, int, Future[httpx.Response]]] = []
        self._long: Future[httpx.Response] | None = None

    def send(self, rate_rps: float) -> None:
        """Sends a request, and a long one if none runs. Waits for the time of the next."""
        self._post(TOKENS)
        if self._long is None or self._long.done():
            self._long = self._post(LONG_TOKENS)
        time.sleep(1 / rate_rps)

    def _post(self, tokens: int) -> Future[httpx.Response]:
        number = len(self._answers)
        prompt = [5, 6, number, *range(7, PROMPT_TOKENS + 4)]
        options = {"max_tokens": tokens, "return_token_ids": True, "ignore_eos": True}
        answer = self._pool.submit(self._cluster.post, "a", prompt=prompt, **options)
        self._answers.append((number, tokens, answer))
        return answer

    def check(self) -> None:
        """Checks that every answer is whole and right."""
        for number, tokens, answer in self._answers:
            prompt = [5, 6, number, *range(7, PROMPT_TOKENS + 4)]
            assert tokens_of(answer.result()) == expected_tokens(prompt, tokens)
        self._pool.shutdown()


def degree(cluster: Cluster) -> int:
    """Returns the degree of the one copy, 0 while there are two."""
    copies = places(cluster, "a").values()
    return 1 + len(next(iter(copies)).peers) if len(copies) == 1 else 0


def only_copy(cluster: Cluster) -> ModelReport:
    [report] = places(cluster, "a").values()
    return report


def test_the_degree_follows_the_load_without_a_failed_request(cluster: Cluster) -> None:
    """Moves running requests too, whose KV two ranks cannot take: it is computed again."""
    load = Load(cluster)
    end_s = time.monotonic() + 25
    while time.monotonic() < end_s:
        load.send(LOAD_RPS)
    assert degree(cluster) == 1
    end_s = time.monotonic() + 60
    while degree(cluster) != 2 and time.monotonic() < end_s:
        load.send(3 * LOAD_RPS)
    until(lambda: degree(cluster) == 2, "two devices serve the model")
    end_s = time.monotonic() + 30
    while only_copy(cluster).step_s == 0 and time.monotonic() < end_s:
        load.send(LOAD_RPS)
    load.check()
    assert only_copy(cluster).step_s > 0
    assert only_copy(cluster).failed_total == 0
    shown = cluster.operate("status").stdout
    assert "requests/s fewer are late with tp 2" in shown + said(cluster)


def said(cluster: Cluster) -> str:
    """Returns the scheduler's log."""
    folder = cluster.log.parent / "logs"
    return "".join(path.read_text() for path in folder.glob("*scheduler*"))
