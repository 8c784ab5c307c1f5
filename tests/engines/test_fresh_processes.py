"""Engines of a fork server that must not fork: fresh processes under the same contract."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil

import kvcached
from prism.engines.fake import expected_tokens
from prism.messages.engine import Submit
from prism.messages.forking import EngineExited
from tests.engines.harness import FORK_SERVER, DeviceUnderTest, request
from tests.engines.subjects import fake_subject
from tests.kvcached.compiling import build_libcuda

PEER = "host:1"

# The fake adapter's fork server, whose imports initialise CUDA.
INITIALISING = """
import ctypes, os, sys, time
import prism.engines.fake as adapter
def preload(device):
    time.sleep(0.5)
    ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"]).cuInit(0)
adapter.preload = preload
from prism.engines.processes import forkserver
sys.exit(forkserver.main(sys.argv[1:]))
"""


@contextmanager
def fork_server(program: Sequence[str]) -> Iterator[DeviceUnderTest]:
    """Yields a fork server of two host devices."""
    subject = fake_subject()
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = subject.config(Path(directory), f"t{uuid4().hex[:10]}")
        [first] = config.devices
        pair = [first, msgspec.structs.replace(first, name=PEER)]
        config = msgspec.structs.replace(config, devices=pair)
        environment = subject.environment | {"KVCACHED_LIBCUDA": str(build_libcuda())}
        device = DeviceUnderTest("fake", config, environment, program=program)
        yield device
        device.close()
        kvcached.Device.unlink(config.namespace, PEER)


def serve(device: DeviceUnderTest, name: str) -> None:
    model = fake_subject().models[0]
    if name.endswith("/tp"):
        model = msgspec.structs.replace(model, tp=2)
    engine = name.partition("/")[0]
    device.activate(model, engine)
    item = request(f"{name}/1", model.name, [11, 12, 13], 5)
    device.send(Submit([item]), engine)
    assert device.finish(item.id)[0].token_ids == expected_tokens(item.prompt_ids, 5)


def test_cuda_that_the_imports_initialised_is_never_forked() -> None:
    with fork_server(["-c", INITIALISING]) as device:
        device.fork("e0")
        command = psutil.Process(device.pids["e0"]).cmdline()
        assert command[1:3] == ["-m", "prism.engines.processes.fresh_engine"]
        log = device.fork_server.log_path.read_text()
        assert "the imports initialised CUDA, so engines cannot be forked" in log
        assert device.ready.import_s >= 0.5  # its engines' imports take as long
        serve(device, "e0")
        assert "activated a" in (Path(device.config.run_dir) / "logs" / "e0.log").read_text()
        os.kill(device.pids["e0"], signal.SIGKILL)
        assert device.exited("e0").status == -signal.SIGKILL
        assert device.client_usage("e0") is None


def test_without_cuda_engines_are_forked() -> None:
    with fork_server(FORK_SERVER) as device:
        device.fork("e0")
        assert "prism.engines.processes.forkserver" in psutil.Process(device.pids["e0"]).cmdline()


def test_ranks_are_fresh_processes_too() -> None:
    with fork_server([*FORK_SERVER, "--fresh"]) as device:
        device.fork("e0", peers=(PEER,))
        [rank] = psutil.Process(device.pids["e0"]).children()
        assert "prism.engines.processes.fresh_engine" in rank.cmdline()
        serve(device, "e0/tp")
        device.end("e0")
        assert not rank.is_running()
        device.fork("e1", peers=(PEER,))
        [rank] = psutil.Process(device.pids["e1"]).children()
        rank.kill()
        assert device.exited("e1").status == 1  # rank 0 misses it at its next report


def test_fresh_engines_end_with_their_fork_server() -> None:
    with fork_server([*FORK_SERVER, "--fresh"]) as device:
        device.fork("e0")
        device.fork("e1", peers=(PEER,))
        ranks = psutil.Process(device.pids["e1"]).children()
        processes = [*map(psutil.Process, device.pids.values()), *ranks]
        device.fork_server.end_input()
        exits = {device.fork_server.expect(EngineExited).engine_id for _ in device.pids}
        assert exits == {"e0", "e1"}
        assert psutil.wait_procs(processes, timeout=30)[1] == []
        assert device.fork_server.process.wait(30) == 0
