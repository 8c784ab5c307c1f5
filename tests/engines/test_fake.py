"""The fake engine's own promises: its faults, its options, and its memory under random load."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from prism.engines.fake import FakeOptions, expected_tokens
from prism.errors import ConfigError
from prism.messages.engine import ActivateEngine, ActivationFailed, Submit
from prism.messages.forking import EngineExited, ForkEngine
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import fake_subject

pytestmark = pytest.mark.quick

Start = Callable[..., DeviceUnderTest]
PROMPT = [11, 12, 13]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a device whose engines have the given faults, with one engine `e0`."""
    devices: list[DeviceUnderTest] = []
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:

        def launch(**options: Any) -> DeviceUnderTest:
            config = fake_subject().config(Path(directory), f"t{uuid4().hex[:10]}")
            devices.append(DeviceUnderTest("fake", config, {"PRISM_FAKE": json.dumps(options)}))
            return devices[-1]

        yield launch
        for device in devices:
            device.close()


def submit(device: DeviceUnderTest, engine: str = "e0", max_tokens: int = 20) -> None:
    model = fake_subject().models[0]
    device.activate(model, engine)
    device.send(Submit([request(f"{engine}/r", model.name, PROMPT, max_tokens)]), engine)


def test_tokens_are_a_function_of_prompt_and_position() -> None:
    assert expected_tokens(PROMPT, 30)[:10] == expected_tokens(PROMPT, 10)
    assert expected_tokens(PROMPT, 30) != expected_tokens([13, 12, 11], 30)
    assert set(expected_tokens(PROMPT, 500, (5, 9))) == {5, 6, 7, 8}


def test_it_dies_at_a_token_once(start: Start, tmp_path: Path) -> None:
    device = start(die_at_token=6, once_file=str(tmp_path / "died"))
    device.fork("e0")
    submit(device)
    assert device.exited("e0").status == -9
    assert len(device.stream("e0/r").token_ids) <= 5
    device.fork("e1")
    submit(device, "e1")
    assert device.finish("e1/r")[0].token_ids == expected_tokens(PROMPT, 20)


def test_an_exception_in_a_step_fails_its_requests_and_ends_the_process(start: Start) -> None:
    device = start(raise_at_token=6)
    device.fork("e0")
    submit(device)
    (stream,) = device.finish("e0/r")
    assert stream.failure is not None
    assert (stream.failure.code, stream.failure.retryable) == ("engine_error", True)
    assert "token 6" in stream.failure.message
    assert device.exited("e0").status == 1
    assert "InjectedFault" in device.engine_log("e0")
    assert device.memory.usage().clients == ()


def test_an_activation_fails_on_request(start: Start) -> None:
    device = start(fail_activation=["b"])
    device.fork("e0")
    good, bad = fake_subject().models
    device.send(ActivateEngine(model=bad))
    failed = device.wait_for(ActivationFailed)
    assert (failed.model, failed.missing_bytes) == (bad.name, 0)
    device.activate(good)


def test_a_slow_activation_takes_its_time(start: Start) -> None:
    device = start(activation_s=0.2)
    device.fork("e0")
    assert device.activate(fake_subject().models[0]).stages_s["total"] >= 0.2


@pytest.mark.parametrize("text", ['{"decode_ms": 1}', '{"activation_s": "long"}', "nonsense"])
def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PRISM_FAKE", text)
    with pytest.raises(ConfigError, match="PRISM_FAKE"):
        FakeOptions.from_environment()


def test_an_engine_that_cannot_start_is_reported(start: Start) -> None:
    device = start(no_such_option=1)
    device.fork_server.write_line(msgspec.json.encode(ForkEngine(engine_id="e0")))
    device.fork_server.read()
    assert device.fork_server.expect(EngineExited).status == 1
    assert "no_such_option" in device.engine_log("e0")


def test_an_unknown_adapter_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prism.engines.processes.forkserver", "--adapter", "none"]
    command += ["--config", str(tmp_path / "none.json"), "--device", "host:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "'none'" in done.stderr
