"""Behaviour of every engine process and its fork server when processes end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from prism.engines.processes.forkserver import ENDED_LOGS_MAX, EngineLogs
from prism.messages.engine import Submit
from prism.messages.forking import EngineExited
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Subject


@pytest.fixture
def own_device(subject: Subject) -> Iterator[DeviceUnderTest]:
    """Yields a fork server that the test may end."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = subject.config(Path(directory), f"t{uuid4().hex[:10]}")
        device = DeviceUnderTest(subject.adapter, config, subject.environment)
        yield device
        device.close()


def start_long_requests(device: DeviceUnderTest, engine: str, subject: Subject) -> list[str]:
    """Activates the first model, and returns once its requests are being answered."""
    model = subject.models[0]
    device.activate(model, engine)
    prompts = subject.prompts(4, seed=3)
    requests = [request(f"{engine}/{i}", model.name, p, 300) for i, p in enumerate(prompts)]
    device.send(Submit(requests), engine)
    device.wait_until(lambda: device.stream(requests[0].id).chunks)
    return [r.id for r in requests]


def wait_gone(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


def test_processes_load_no_numpy_before_they_set_its_threads() -> None:
    code = "import sys, prism.engines.processes.forkserver as _; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_killed_engine_is_reported_and_its_memory_comes_back(
    device: DeviceUnderTest, engine: str, second_engine: str, subject: Subject
) -> None:
    free_bytes = device.memory.usage().free_bytes
    start_long_requests(device, engine, subject)
    assert device.memory.resident_bytes() > 0
    os.kill(device.pids[engine], signal.SIGKILL)
    assert device.exited(engine).status == -signal.SIGKILL
    assert device.client_usage(engine) is None
    assert device.memory.usage().free_bytes == free_bytes
    assert device.memory.resident_bytes() == 0

    model = subject.models[0]
    device.activate(model, second_engine)
    item = request("after-the-kill", model.name, [11, 12, 13], 5)
    device.send(Submit([item]), second_engine)
    assert len(device.finish(item.id)[0].token_ids) == 5


def test_sigterm_ends_an_engine_in_order(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    start_long_requests(device, engine, subject)
    os.kill(device.pids[engine], signal.SIGTERM)
    assert device.exited(engine).status == 0
    assert device.client_usage(engine) is None


def test_sigterm_ends_an_idle_engine_at_once(device: DeviceUnderTest, engine: str) -> None:
    os.kill(device.pids[engine], signal.SIGTERM)
    assert device.exited(engine).status == 0


def test_an_engine_id_can_be_used_again(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    device.end(engine)
    device.fork(engine)
    device.activate(subject.models[1], engine)


def test_engine_logs_are_private_and_stdout_does_not_leak(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    """Relies on the harness, which decodes every line of the fork server's stdout."""
    device.activate(subject.models[0], engine)
    path = Path(device.config.run_dir) / "logs" / f"{engine}.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"activated {subject.models[0].name}" in path.read_text()


def test_engines_that_end_fill_no_disk_with_logs(device: DeviceUnderTest) -> None:
    names = [f"brief-{number}" for number in range(ENDED_LOGS_MAX + 2)]
    for name in names:
        device.fork(name)
        device.end(name)
    logs = {path.stem for path in (Path(device.config.run_dir) / "logs").glob("brief-*")}
    assert logs == set(names[2:])


def test_what_a_removed_log_held_before_it_was_emptied_is_removed_with_it(tmp_path: Path) -> None:
    logs = EngineLogs(tmp_path)
    names = [f"e{number}" for number in range(ENDED_LOGS_MAX + 2)]
    for name in names:
        for path in (logs.path(name), tmp_path / f"{name}.log.1"):
            path.write_text(name)
        logs.ended(name)
    kept = {f"{name}.log{old}" for name in names[2:] for old in ("", ".1")}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"{}",
        b'{"type": "ForkEngine"}',
        b'{"type": "ForkEngine", "engine_id": "../escape"}',
        b'{"type": "ForkEngine", "engine_id": ""}',
        b'{"type": "Other", "engine_id": "x"}',
        b'{"type": "ForkEngine", "engine_id": "\xff\xfe"}',
    ],
)
def test_bad_orders_are_dropped(device: DeviceUnderTest, line: bytes) -> None:
    device.fork_server.write_line(line)
    engine = f"after-{abs(hash(line))}"
    device.fork(engine)
    device.end(engine)
    assert "dropped" in device.fork_server.log_path.read_text()


def test_the_end_of_stdin_ends_everything(own_device: DeviceUnderTest, subject: Subject) -> None:
    own_device.fork("busy")
    own_device.fork("idle")
    start_long_requests(own_device, "busy", subject)
    pids = list(own_device.pids.values())
    own_device.fork_server.end_input()
    exits = {own_device.fork_server.expect(EngineExited).engine_id for _ in pids}
    assert exits == {"busy", "idle"}
    assert own_device.fork_server.read() is None
    assert own_device.fork_server.process.wait(30) == 0
    wait_gone(pids)
    assert own_device.memory.usage().clients == ()
    assert own_device.memory.usage().free_bytes == subject.capacity_bytes


def test_sigterm_ends_the_fork_server_and_its_engines(
    own_device: DeviceUnderTest, subject: Subject
) -> None:
    own_device.fork("e0")
    own_device.fork_server.process.terminate()
    assert own_device.exited("e0").status == 0
    assert own_device.fork_server.process.wait(30) == 0


def test_engines_die_with_a_killed_fork_server(
    own_device: DeviceUnderTest, subject: Subject
) -> None:
    own_device.fork("e0")
    start_long_requests(own_device, "e0", subject)
    own_device.fork_server.process.kill()
    own_device.fork_server.process.wait(30)
    wait_gone(list(own_device.pids.values()))
    assert own_device.memory.usage().free_bytes == subject.capacity_bytes


def test_an_engine_that_ignores_sigterm_is_killed(
    own_device: DeviceUnderTest, subject: Subject
) -> None:
    """Stops the process, which then cannot handle SIGTERM."""
    own_device.fork("e0")
    os.kill(own_device.pids["e0"], signal.SIGSTOP)
    own_device.fork_server.end_input()
    assert own_device.exited("e0").status == -signal.SIGKILL
    assert own_device.fork_server.process.wait(30) == 0
