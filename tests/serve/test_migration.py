"""A model moves to another device in the middle of answers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec

from prism.engines.fake import expected_tokens
from prism.messages import ActionResult, ClusterStatus, ModelReport, OperatorCommand
from prism.serve import operator
from prism.serve.run_dir import find
from tests.serve.conftest import Cluster, serving, until

DEVICES = [
    {"name": name, "capacity": "16MiB", "page": "64KiB", "engines": 1}
    for name in ("host:0", "host:1")
]
ANSWERS, TOKENS, FAKE = 3, 200, '{"decode_step_ms": 40}'


def ask(cluster: Cluster, command: OperatorCommand) -> ActionResult:
    result = operator.ask(find(cluster.run_dir), command, 60.0)
    assert result.ok, result.message
    return result


def places(cluster: Cluster) -> dict[str, ModelReport]:
    """Device -> what it says of model a."""
    text = ask(cluster, OperatorCommand("status")).message
    agents = msgspec.json.decode(text, type=ClusterStatus).agents
    return {a.device: m for a in agents for m in a.models if m.model == "a"}


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    tokens: list[int] = choice["token_ids"]
    return tokens


def test_answers_go_on_at_the_target(tmp_path: Path) -> None:
    """The source is left long before they would have ended there, and no token is lost."""
    settings = {"migrate_running": "move", "interval": "60s"}
    [a] = [{"name": "a", "path": "a"}]
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path, Path(temporary), FAKE, devices=DEVICES, models=[a], scheduler=settings
        ) as cluster,
        ThreadPoolExecutor() as pool,
    ):
        [source] = places(cluster)
        [target] = {"host:0", "host:1"} - {source}

        def post(i: int) -> Future[httpx.Response]:
            options = {"max_tokens": TOKENS, "return_token_ids": True, "ignore_eos": True}
            return pool.submit(cluster.post, "a", prompt=[5, 6, i], **options)

        answers = [post(i) for i in range(ANSWERS)]
        until(lambda: places(cluster)[source].output_tokens_total > ANSWERS, "answers begin")
        ask(cluster, OperatorCommand("activate", "a", target))
        assert not any(answer.done() for answer in answers)
        assert set(places(cluster)) == {target}
        resolved = msgspec.json.decode((cluster.run_dir / "cluster.json").read_bytes())
        assert not Path(f"/dev/shm/{resolved['namespace']}-moves").exists()  # nor was there a file
        for i, answer in enumerate(answers):
            assert tokens_of(answer.result()) == expected_tokens([5, 6, i], TOKENS)
        until(lambda: places(cluster)[target].finished_total == ANSWERS, "the target reports")
        assert places(cluster)[target].output_tokens_total < ANSWERS * TOKENS
