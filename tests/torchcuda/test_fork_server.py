"""Fork server of a GPU: it imports SGLang without initialising CUDA, and its forked engines use
one GPU or two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import kvcached
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    Submit,
)
from tests.engines.harness import DeviceUnderTest, request
from tests.kvcached.compiling import restart_libnvml
from tests.sglang.models import LLAMA, greedy, prompts, spec_of
from tests.torchcuda import MIB, ROOT, cuda_environment
from tests.torchcuda.life import DEVICE, TOKENS, config_of

pytestmark = pytest.mark.sglang

PEER = "cuda:1"
GPU_BYTES = 3072 * MIB
# Memory of another process on the second GPU, which has 20 % less that is free.
HOLD = """
import sys, torch
held = torch.empty(600 << 20, dtype=torch.uint8, device="cuda:1")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    made = cuda_environment(bytes=GPU_BYTES)
    with pytest.MonkeyPatch.context() as here:
        for name in ("KVCACHED_LIBCUDA", "KVCACHED_LIBNVML", "KVCACHED_TEST_CUDA_BYTES"):
            here.setenv(name, made[name])
        restart_libnvml()
        yield made


@pytest.fixture(scope="module")
def gpu(env: dict[str, str]) -> Iterator[DeviceUnderTest]:
    """Yields a fork server on a node of two GPUs."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), "torch_native", "off")
        [first] = config.devices
        places = [first, msgspec.structs.replace(first, name=PEER)]
        # MPS: a stray read must not end the other clients of a GPU.
        # Two ranks leave room for NCCL.
        engine = msgspec.structs.replace(config.engine, mps=True, static_bytes=1536 * MIB)
        config = msgspec.structs.replace(config, devices=places, engine=engine)
        device = DeviceUnderTest("sglang", config, env, DEVICE)
        yield device
        device.close()
        for name in (DEVICE, PEER):
            kvcached.Device.unlink(config.namespace, name)


def serve(gpu: DeviceUnderTest, engine_id: str) -> None:
    prompt = prompts(LLAMA, 1, (20, 20))[0]
    gpu.send(ActivateEngine(model=spec_of(LLAMA), max_running=4), engine_id)
    answer = gpu.wait_for((Activated, ActivationFailed), engine_id, timeout_s=200.0)
    assert isinstance(answer, Activated), (answer, gpu._logs())
    gpu.send(Submit([request(engine_id, LLAMA, prompt, TOKENS)]), engine_id)
    [stream] = gpu.finish(engine_id, timeout_s=200.0)
    assert stream.token_ids == greedy(LLAMA, prompt, TOKENS)


def driver_bytes(gpu: DeviceUnderTest) -> int:
    found = gpu.memory.driver_memory()
    assert found is not None
    return found.used_bytes


def test_a_forked_engine_serves_on_the_gpu(gpu: DeviceUnderTest) -> None:
    gpu.fork("e0")
    log = gpu.fork_server.log_path.read_text()
    assert "initialised CUDA" not in log, log
    idle_bytes = driver_bytes(gpu)
    serve(gpu, "e0")
    assert driver_bytes(gpu) > idle_bytes
    gpu.send(Deactivate(), "e0")
    gpu.wait_for(Deactivated, "e0")
    assert gpu.memory.usage().committed_bytes == 0
    assert driver_bytes(gpu) <= idle_bytes + 2 * MIB
    gpu.end("e0")
    until(lambda: driver_bytes(gpu) == 0)  # a process's memory is freed after its end


def test_a_killed_engines_memory_returns(gpu: DeviceUnderTest) -> None:
    gpu.fork("e1")
    serve(gpu, "e1")
    assert driver_bytes(gpu) > 0
    os.kill(gpu.pids["e1"], signal.SIGKILL)
    assert gpu.exited("e1").status == -signal.SIGKILL
    until(lambda: driver_bytes(gpu) == 0)
    until(lambda: gpu.memory.usage().reserved_bytes == 0)


def test_two_unequal_gpus_serve_one_model(gpu: DeviceUnderTest, env: dict[str, str]) -> None:
    """Serves although SGLang itself refuses GPUs with a tenth of difference in free memory."""
    with somebody_on_the_peer(env):
        gpu.fork("e2", peers=(PEER,))
        serve(gpu, "e2")
        peer = kvcached.Device.open(PEER, namespace=gpu.config.namespace)
        assert peer.usage().committed_bytes == gpu.memory.usage().committed_bytes > 0
        gpu.send(Deactivate(), "e2")
        gpu.wait_for(Deactivated, "e2")
        assert peer.usage().committed_bytes == gpu.memory.usage().committed_bytes == 0
        gpu.end("e2")
    until(lambda: driver_bytes(gpu) == 0)


@contextmanager
def somebody_on_the_peer(env: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.communicate(b"")


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
