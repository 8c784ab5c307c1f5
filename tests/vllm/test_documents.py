"""The shell examples of the adapters' page are run, on ports and a device of their own.

Run by scripts/test --long: vLLM's environment takes minutes to install.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest

from kvcached import Device
from tests.acceptance.harness import ROOT
from tests.engines.stock import until
from tests.ports import free_port
from tests.sglang.models import LLAMA, QWEN3, path_of
from tests.vllm.environment import variables, vllm_python

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1200)]

DOCUMENT = ROOT / "docs" / "kvcached-adapters.md"


def example(heading: str) -> str:
    """The first shell program below a heading."""
    below = DOCUMENT.read_text().partition(f"\n## {heading}\n")[2]
    found = re.search(r"```sh\n(.*?)```", below, re.DOTALL)
    assert found is not None, heading
    return found[1]


def answers(port: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
    except OSError:
        return False
    return True


def is_in(folder: Path, names: dict[str, Path]) -> None:
    """Commands of these names, and no others of ours."""
    folder.mkdir()
    for name, target in names.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {target} -W ignore "$@"\n')
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_the_example_brings_up_two_servers_that_share_the_device(
    tmp_path: Path, engine: str
) -> None:
    code, ports = example(engine), [str(free_port()) for _ in range(2)]
    for port, documented in zip(ports, ("30001", "30002"), strict=True):
        code = code.replace(documented, port)
    # SmolLM2 takes minutes to load on a small machine: a tiny model stands in for it.
    for model, folder in ((LLAMA, "tiny-llama"), (QWEN3, "smollm2-135m")):
        code = code.replace(f".cache/models/{folder}", str(path_of(model)))
    python = vllm_python() if engine == "vLLM" else Path(sys.executable)
    is_in(tmp_path / "bin", {"python": python})
    namespace = f"t{uuid4().hex[:10]}"
    environment = {k: v for k, v in variables().items() if k != "VLLM_SERVER_DEV_MODE"} | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "KVCACHED_NAMESPACE": namespace,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    shell = shutil.which("bash")
    assert shell is not None
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [shell, "-ec", code + "wait -n\n"],
        cwd=tmp_path,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        for port in ports:
            until(lambda port=port: answers(port) or process.poll() is not None, 900)
        assert process.poll() is None, (tmp_path / "log").read_text()[-6000:]
        device = Device.open("host:0", namespace=namespace)
        assert device.capacity_bytes == 2 << 30
        models = {client.name.partition(":")[0] for client in device.usage().clients}
        assert models == {path_of(LLAMA).name, path_of(QWEN3).name}
        device.close()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        until(lambda: not Device.open("host:0", namespace=namespace).usage().clients, 120)
        Device.unlink(namespace, "host:0", force=True)
        log.close()
