"""One fork server per adapter and module; one fresh engine per test."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engines.harness import DeviceUnderTest
from tests.engines.subjects import Subject, fake_subject, sglang_subject, vllm_subject

SUBJECTS = {"fake": fake_subject, "sglang": sglang_subject, "vllm": vllm_subject}
# Marks of tests with real engines. vLLM's environment takes minutes to install.
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "sglang": (pytest.mark.sglang,),
    "vllm": (pytest.mark.long, pytest.mark.timeout(1800)),
}
_numbers = itertools.count()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in SUBJECTS],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


@pytest.fixture(scope="module")
def device(subject: Subject) -> Iterator[DeviceUnderTest]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = subject.config(Path(directory), f"t{uuid4().hex[:10]}")
        device = DeviceUnderTest(subject.adapter, config, subject.environment)
        yield device
        device.close()


@pytest.fixture
def engine(device: DeviceUnderTest) -> Iterator[str]:
    """Yields a fresh engine; ends it after the test unless the test did."""
    engine_id = f"e{next(_numbers)}"
    device.fork(engine_id)
    yield engine_id
    if engine_id in device.pids:
        device.end(engine_id)


@pytest.fixture
def second_engine(device: DeviceUnderTest) -> Iterator[str]:
    engine_id = f"e{next(_numbers)}"
    device.fork(engine_id)
    yield engine_id
    if engine_id in device.pids:
        device.end(engine_id)
