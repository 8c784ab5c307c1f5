"""A model moves to another device in the middle of answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest

from prism.engines.fake import expected_tokens
from prism.messages.agent import ActionResult, ModelReport
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.queueing.server import BundledRedis
from prism.serve import operator
from prism.serve.node.run_dir import find
from tests.acceptance.conftest import prepare
from tests.acceptance.harness import model_yaml
from tests.acceptance.reference import is_greedy
from tests.serve.conftest import Cluster, serving, until
from tests.serve.test_nodes import Node, node, write_nodes

DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 1} for i in range(4)
]
ANSWERS, TOKENS, FAKE = 3, 150, '{"decode_step_ms": 40}'


MODELS = [
    {"name": "a", "path": "a", "tp": 2},
    {"name": "b", "path": "b", "device": "host:0"},
    {"name": "c", "path": "a"},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"migrate_running": "move", "interval": "60s"}
    folder = tmp_path_factory.mktemp("moves")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            folder, Path(temporary), FAKE, devices=DEVICES, models=MODELS, scheduler=settings
        ) as made,
    ):
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def ask(cluster: Cluster, command: OperatorCommand) -> ActionResult:
    result = operator.ask(find(cluster.run_dir), command, 60.0)
    assert result.ok, result.message
    return result


def empty(cluster: Cluster) -> None:
    for model in MODELS:
        ask(cluster, OperatorCommand("evict", str(model["name"])))


def places(cluster: Cluster, model: str) -> dict[str, ModelReport]:
    """Returns device -> report of the model."""
    text = ask(cluster, OperatorCommand("status")).message
    agents = msgspec.json.decode(text, type=ClusterStatus).agents
    return {a.device: m for a in agents for m in a.models if m.model == model}


def output_tokens(cluster: Cluster, model: str) -> int:
    return sum(report.output_tokens_total for report in places(cluster, model).values())


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    tokens: list[int] = choice["token_ids"]
    return tokens


def post(cluster: Cluster, pool: ThreadPoolExecutor, model: str) -> list[Future[httpx.Response]]:
    """Requests long answers and waits until they have begun."""
    options = {"max_tokens": TOKENS, "return_token_ids": True, "ignore_eos": True}
    prompts = [[5, 6, i] for i in range(ANSWERS)]
    answers = [pool.submit(cluster.post, model, prompt=p, **options) for p in prompts]
    until(lambda: output_tokens(cluster, model) > ANSWERS, "answers begin")
    return answers


def check(cluster: Cluster, answers: list[Future[httpx.Response]], model: str, at: str) -> None:
    """Checks that all answers are right and that none was computed on one device alone."""
    for i, answer in enumerate(answers):
        assert tokens_of(answer.result()) == expected_tokens([5, 6, i], TOKENS)
    until(lambda: places(cluster, model)[at].finished_total == ANSWERS, "the target reports")
    assert output_tokens(cluster, model) < ANSWERS * TOKENS


def folders(cluster: Cluster) -> list[Path]:
    """Returns the folders that have held KV in files."""
    return [*Path("/dev/shm").glob(f"{find(cluster.run_dir).namespace}*-moves")]


@contextmanager
def two_machines(
    folder: Path, rate: str, each: dict[str, Any] | None = None, **changes: Any
) -> Iterator[tuple[Node, Node]]:
    """Starts two machines with a model `c`.

    Args:
        rate: rate of their network.
        each: further settings of both.
    """
    scheduler = {"migrate_running": "move", "interval": "60s"}
    both = {"network_rate": rate, **(each or {})}
    with TemporaryDirectory(prefix="prism-") as place, BundledRedis(Path(place), 0) as database:
        wanted = {"models": [{"name": "c", "path": "a"}], "scheduler": scheduler, **changes}
        path = write_nodes(folder, database.url, both, **wanted)
        with node(path, "a", PRISM_FAKE=FAKE) as here, node(path, "b", PRISM_FAKE=FAKE) as there:
            for machine in (here, there):
                until(machine._ready, "ready", 240)
                machine.await_ready()
            yield here, there


def move_to_the_other(here: Node, there: Node) -> str:
    """Moves `c` to the other machine and returns its new device."""
    [source] = places(here, "c")
    target = "host:0@b" if source == "host:0@a" else "host:0@a"
    ask(there, OperatorCommand("activate", "c", target))
    assert set(places(here, "c")) == {target}
    return target


def said(folder: Path) -> str:
    """Returns the logs of both machines' agents and engines."""
    return "".join(path.read_text() for path in folder.glob("*-logs/**/*") if path.is_file())


# The fake engine's prefill makes KV at a rate far below the first and far above the second.
@pytest.mark.long
@pytest.mark.parametrize(("rate", "is_sent"), [("100GB", True), ("1KB", False)])
def test_answers_go_on_at_another_machine(
    tmp_path: Path, pool: ThreadPoolExecutor, rate: str, is_sent: bool
) -> None:
    with two_machines(tmp_path, rate) as (here, there):
        answers = post(here, pool, "c")
        target = move_to_the_other(here, there)
        assert not any(answer.done() for answer in answers)
        check(here, answers, "c", target)
        found = folders(here)
        assert len(found) == (2 if is_sent else 0)
        assert not [file for folder in found for file in folder.iterdir()]
    text = said(tmp_path)
    assert ("its requests' KV is sent" in text) is is_sent
    assert ("its requests' KV is computed again there" in text) is not is_sent
    assert "KV of a request is computed again" not in text


@pytest.mark.long
def test_answers_of_a_copy_go_on_at_another_machines(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """Drains one of two machines that have a copy each."""
    model = {"name": "c", "path": "a", "replicas": {"min": 2, "max": 2}}
    changes = {"models": [model], "scheduler": {"migrate_running": "move", "interval": "1s"}}
    with two_machines(tmp_path, "100GB", **changes) as (here, _there):
        until(lambda: len(places(here, "c")) == 2, "a copy on each")
        answers = post(here, pool, "c")
        until(lambda: all(m.running for m in places(here, "c").values()), "both answer")
        ask(here, OperatorCommand("drain", device="host:0@b"))
        until(lambda: set(places(here, "c")) == {"host:0@a"}, "one copy")
        assert not any(answer.done() for answer in answers)
        check(here, answers, "c", "host:0@a")
    assert "its requests' KV is sent" in said(tmp_path)
    assert "KV of a request is computed again" not in said(tmp_path)


@pytest.mark.long
@pytest.mark.sglang
def test_answers_of_sglang_go_on_at_another_machine(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    prepare("tiny-llama")
    device = {"name": "host:0", "capacity": "256MiB", "page": "64KiB", "engines": 1}
    prompts = [[5, 6, 7 + number] * 8 for number in range(ANSWERS)]
    options = {"max_tokens": 400, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    changes = {
        "engine": {"adapter": "sglang"},
        "models": [{**model_yaml("tiny-llama"), "name": "c"}],
    }
    with two_machines(tmp_path, "100GB", {"devices": [device]}, **changes) as (here, there):
        answers = [pool.submit(here.post, "c", prompt=p, **options) for p in prompts]
        until(lambda: output_tokens(here, "c") > ANSWERS, "answers begin", 120)
        target = move_to_the_other(here, there)
        assert not any(answer.done() for answer in answers)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert is_greedy("tiny-llama", tuple(prompt), tuple(tokens_of(answer.result())))
        until(lambda: places(here, "c")[target].finished_total == ANSWERS, "the target reports")
        assert output_tokens(here, "c") < ANSWERS * 400
        assert [list(folder.iterdir()) for folder in folders(here)] == [[], []]
    assert "its requests' KV is sent" in said(tmp_path)
    assert "KV of a request is computed again" not in said(tmp_path)


def test_answers_go_on_at_the_target(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """Leaves the source long before the answers would have ended there, and loses no token.

    No file is written.
    """
    empty(cluster)
    answers = post(cluster, pool, "c")
    [source] = places(cluster, "c")
    target = "host:3" if source != "host:3" else "host:2"
    ask(cluster, OperatorCommand("activate", "c", target))
    assert not any(answer.done() for answer in answers)
    assert set(places(cluster, "c")) == {target}
    check(cluster, answers, "c", target)
    assert not folders(cluster)


def test_all_ranks_of_a_model_go_elsewhere(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """Moves all ranks because another model needs the device of one.

    Each rank's part of the KV goes to the same rank, and the answers continue.
    """
    empty(cluster)
    answers = post(cluster, pool, "a")
    [(source, before)] = places(cluster, "a").items()
    assert {source, *before.peers} == {"host:0", "host:1"}
    assert cluster.post("b").status_code == 200
    assert not any(answer.done() for answer in answers)
    [(target, after)] = places(cluster, "a").items()
    assert {target, *after.peers} == {"host:2", "host:3"}
    check(cluster, answers, "a", target)
