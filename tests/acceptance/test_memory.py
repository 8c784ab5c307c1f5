"""Elastic memory measured from outside: borrowing, contention at the limit, and give-back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvcached
from prism.config.resolved import read_resolved
from prism.models.files import inspect_model
from tests.acceptance.harness import (
    MODELS,
    Answer,
    Cluster,
    async_client,
    cluster_yaml,
    complete,
    complete_all,
    descendants,
    memfd_resident_bytes,
    model_yaml,
    serving,
)
from tests.acceptance.reference import judge, prompts

pytestmark = pytest.mark.sglang

MIB = 1 << 20
PROMPT = 320  # tokens in a prompt of the busy model


def two_models(
    models: Sequence[str], capacity: str, contexts: Sequence[int] = (1024, 1024), **overrides: Any
) -> dict[str, Any]:
    return cluster_yaml(
        [model_yaml(name, context_length=n) for name, n in zip(models, contexts, strict=True)],
        [{"name": "host:0", "capacity": capacity, "page": "64KiB", "engines": 2}],
        **overrides,
    )


class Sampler(threading.Thread):
    """Thread that samples the memory that the OS holds for the device's clients during a test.

    The reading is the library's (every client's memory file, read while no page can change owner),
    taken in this process; `memfd_resident_bytes` may count a moving page twice.
    """

    def __init__(self, cluster: Cluster, period_s: float = 0.25):
        super().__init__(daemon=True)
        self.cluster, self.period_s = cluster, period_s
        config = read_resolved(cluster.run_dir / "cluster.json")
        self.device = kvcached.Device.open("host:0", namespace=config.namespace)
        self.share_bytes = config.engine.static_on("host:0")
        self.resident_bytes: list[int] = []
        self.device_bytes: list[int] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(self.period_s):
            resident = self.device.resident_bytes()
            self.resident_bytes.append(resident)
            active = [c for c in self.device.usage().clients if c.static_bytes]
            self.device_bytes.append(resident + self.share_bytes * len(active))

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.done.set()
        self.join()


def concurrent_tokens(answers: Sequence[Answer], prompt_tokens: int) -> int:
    """Returns the most KV tokens that started, unfinished requests held at once, as clients saw."""
    changes = []
    for answer in answers:
        if not answer.token_times_s:
            continue
        changes.append((answer.token_times_s[0], prompt_tokens))
        changes += [(t, 1) for t in answer.token_times_s]
        changes.append((answer.token_times_s[-1], -prompt_tokens - len(answer.token_times_s)))
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def roomy(models: Sequence[str], policy: str) -> dict[str, Any]:
    engine = {"max_running": 64, "static": "4MiB"}
    return two_models(models, "128MiB", (448, 256), policy=policy, engine=engine)


@pytest.fixture(scope="module")
def elastic(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with serving(roomy(tiny_models, "prism"), tmp_path_factory.mktemp("elastic")) as cluster:
        yield cluster


def busy_tokens(cluster: Cluster, models: Sequence[str]) -> int:
    """Returns the most concurrent tokens of models[0] under more load than the device holds."""
    warm = complete_all(cluster, [(models[1], range(20, 40), 4)])
    assert warm[0].error is None
    lengths = [60 + 5 * (number % 7) for number in range(96)]
    asked = zip(prompts(models[0], 96, (PROMPT, PROMPT)), lengths, strict=True)
    answers = complete_all(cluster, [(models[0], prompt, tokens) for prompt, tokens in asked])
    assert not [a.error for a in answers if a.error]
    assert [len(a.ids) for a in answers] == lengths
    return concurrent_tokens(answers, PROMPT)


@pytest.mark.timeout(900)
def test_a_busy_model_takes_what_an_idle_one_leaves(
    elastic: Cluster, tiny_models: tuple[str, str], tmp_path: Path, record_property: Any
) -> None:
    """Runs at least 1.8 times the tokens of an equal static split.

    The rest to 2 is the idle model's guarantee: room for one request of its full context.
    """
    shared = busy_tokens(elastic, tiny_models)
    with serving(roomy(tiny_models, "static"), tmp_path) as static:
        split = busy_tokens(static, tiny_models)
    record_property("static_tokens", split)
    record_property("elastic_tokens", shared)
    print(f"concurrent tokens: static split {split}, elastic {shared}, ratio {shared / split:.2f}")
    assert shared >= 1.8 * split


def floor_bytes(model: str, page_bytes: int) -> int:
    """Returns the bytes of block 0: one slab of K and of V in each layer.

    SGLang pads batches with writes to block 0, so its pages stay mapped for as long as the model is
    active.
    """
    files = inspect_model(MODELS / model, "path")
    layout = kvcached.Layout(
        num_layers=files.num_layers,
        num_kv_heads=files.pools.num_kv_heads,
        head_dim=files.pools.head_dim,
        dtype="float32",
        block_tokens=16,
    )
    return layout.quantum_bytes(page_bytes)


@pytest.mark.timeout(600)
def test_kv_returns_to_the_floor(elastic: Cluster, tiny_models: tuple[str, str]) -> None:
    """Unmaps all but the padding block's slab once requests end and the prefix cache is flushed."""
    floors = {model: floor_bytes(model, 64 << 10) for model in tiny_models}
    pids = [elastic.process.pid, *descendants(elastic.process.pid)]
    jobs = [(m, p, 48) for m in tiny_models for p in prompts(m, 8, (100, 200))]
    with Sampler(elastic) as sampler:
        answers = complete_all(elastic, jobs)
    assert all(a.error is None for a in answers)
    active = [c for c in sampler.device.usage().clients if c.static_bytes]
    weights = sum(c.static_bytes - sampler.share_bytes for c in active)
    assert max(sampler.resident_bytes) - weights > 4 * sum(floors.values())
    flushed = elastic.operate("flush")
    assert flushed.returncode == 0, flushed.stderr
    elastic.wait_until(lambda: mapped_bytes(elastic) == floors, "KV mapped at its floor", 15)
    resident = memfd_resident_bytes(pids)
    print(
        f"floor {floors}, resident after the flush {resident}, peak {max(sampler.resident_bytes)}"
    )
    assert resident - weights <= sum(floors.values())


def mapped_bytes(cluster: Cluster) -> dict[str, int]:
    return {m["model"]: m["kv_mapped_bytes"] for a in cluster.agents() for m in a["models"]}


def contend(seconds: float, models: Sequence[str], directory: Path) -> None:
    """Drives both models against the device's limit; asserts that nothing dies or is cut short."""
    capacity_bytes = 72 * MIB
    full_bytes = 0.85 * capacity_bytes
    config = two_models(models, "72MiB", engine={"max_running": 32, "static": "4MiB"})
    with serving(config, directory) as cluster, Sampler(cluster) as sampler:

        def is_full() -> bool:
            return max(sampler.device_bytes, default=0) > full_bytes

        done = asyncio.run(drive(cluster, models, seconds, is_full))
        agent = cluster.agents()[0]
    assert not judge([job for job, _ in done], [answer for _, answer in done])
    assert agent["engine_restarts_total"] == 0
    assert max(sampler.device_bytes) <= capacity_bytes
    assert max(sampler.device_bytes) > full_bytes, "the device was never full"
    retractions = sum(model["retractions_total"] for model in agent["models"])
    print(f"{len(done)} requests, peak {max(sampler.device_bytes) / MIB:.1f} MiB of 72, ", end="")
    print(f"{retractions} retractions")


async def drive(
    cluster: Cluster, models: Sequence[str], seconds: float, is_full: Callable[[], bool]
) -> list[tuple[tuple[str, tuple[int, ...], int], Answer]]:
    """Runs 24 closed-loop clients a model over a small set of prompts for `seconds`.

    A busy machine gets up to a minute more to fill the device.
    """
    until = time.monotonic() + seconds
    done = []

    async def client(model: str, number: int) -> None:
        choices = prompts(model, 12, (150, 300))
        turn = number
        while time.monotonic() < until + 60 * (not is_full()):
            prompt, tokens = choices[turn % len(choices)], 40 + 20 * (turn % 5)
            answer = await complete(http, model, prompt, tokens)
            done.append(((model, prompt, tokens), answer))
            turn += 7

    async with async_client(cluster) as http:
        await asyncio.gather(*(client(m, n) for m in models for n in range(24)))
    return done


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_contention_for_two_minutes(tiny_models: tuple[str, str], tmp_path: Path) -> None:
    """Repeats tests/sglang/test_contention.py at a larger scale."""
    contend(120, tiny_models, tmp_path)
