"""`prism-serve up --ray` on two machines: network namespaces with addresses of their own, and a
raylet each. Ray is in an environment of its own (requirements/ray.txt)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import site
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml

from prism.serve.on_ray import portable
from tests.frontend.tiny_model import make_model
from tests.serve.conftest import SERVE, until
from tests.serve.machines import REDIS_URL, ROOT, Machines, await_text, run, started
from tests.strangers import needs_root

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
RAY_PORT = 6399
DEVICE = {"name": "host:0", "capacity": "16MiB", "page": "64KiB", "engines": 2}
ASK = """
import httpx, sys
for _ in range(int(sys.argv[1])):
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 12, "ignore_eos": True}
    url = "http://127.0.0.1:8000/v1/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
"""


@pytest.fixture(scope="module")
def ray_bin() -> Path:
    """The commands of Ray's environment, which finds the packages of this one as well."""
    requirements, venv = ROOT / "requirements" / "ray.txt", ROOT / ".cache" / "ray"
    made = venv / "requirements.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(venv / "bin" / "python", "-m", "pip", "install", "-q", "-r", requirements)
        beside = next(venv.glob("lib/python3*/site-packages")) / "beside.pth"
        beside.write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
        made.write_text(requirements.read_text())
    return venv / "bin"


def write_yaml(folder: Path) -> Path:
    make_model(folder / "a")
    nodes = [{"name": n, "address": where, "devices": [DEVICE]} for n, where in ADDRESSES.items()]
    data = {
        "nodes": nodes,
        "models": [{"name": "a", "path": "a", "replicas": {"min": 2, "max": 2}}],
        "engine": {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
        "redis": REDIS_URL,
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def prism_processes(machines: Machines) -> list[int]:
    found = []
    for pid in [pid for name in ADDRESSES for pid in machines.pids(name)]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "prism.agent" in words or "prism-node-" in words:
            found.append(pid)
    return found


@pytest.mark.long
@needs_root
def test_ray_starts_both_machines_and_nothing_is_left(
    tmp_path: Path, short_dir: Path, ray_bin: Path
) -> None:
    """Ended by Ctrl-C, and by the driver's death. A machine that is lost comes back."""
    path, machines = write_yaml(tmp_path), Machines(*ADDRESSES)
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray |= {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(short_dir)}
    common = ["--num-cpus=2", "--object-store-memory=80000000", "--block"]
    with ExitStack() as stack:
        stack.callback(machines.remove)
        machines.make()
        stack.enter_context(started(machines.redis(tmp_path), tmp_path / "redis.log"))

        def start_ray(name: str) -> None:
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            where += [f"--temp-dir={short_dir}/ray"]
            if name != "a":
                where = [f"--address={ADDRESSES['a']}:{RAY_PORT}"]
            where += [f"--node-ip-address={ADDRESSES[name]}"]
            command = [str(ray_bin / "ray"), "start", *where]
            log = tmp_path / f"ray-{name}.log"
            stack.enter_context(started([*machines.inside(name), *command, *common], log, **ray))
            await_text(log, "block forever", 1, 120)

        for name in ADDRESSES:
            start_ray(name)
        drive = [str(ray_bin / "python"), *SERVE[1:], "--config", str(path)]
        drive += ["--ray", f"{ADDRESSES['a']}:{RAY_PORT}"]
        for number, end in enumerate((signal.SIGINT, signal.SIGKILL)):
            log = tmp_path / f"drive-{number}.log"
            with started(machines.inside("a") + drive, log, **ray) as driver:
                await_text(log, ": ready in ", 2, 240)
                for name in ADDRESSES:
                    run(*machines.inside(name), sys.executable, "-c", ASK, "5")
                if end == signal.SIGKILL:
                    for pid in machines.pids("b"):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await_text(log, "b: the machine is lost", 1, 120)
                    run(*machines.inside("a"), sys.executable, "-c", ASK, "5")
                    start_ray("b")
                    await_text(log, "b: ready in ", 2, 240)
                    run(*machines.inside("b"), sys.executable, "-c", ASK, "5")
                driver.send_signal(end)
                driver.wait(120)
            until(lambda: not prism_processes(machines), "no process is left", 60)
            # Those of the machine that was killed were swept when it came back.
            assert list(short_dir.glob("prism-*")) == []
            assert machines.redis_keys() == "[]\n"


def test_paths_are_those_of_the_files_folder(tmp_path: Path) -> None:
    data = {
        "models": [{"name": "m", "path": "m"}, {"name": "n", "path": "/x/n"}],
        "access": {"keys": "k.yaml"},
        "frontend": {"port": 1, "tls_key": "../key.pem"},
        "engine": {"weight_store": "auto"},
    }
    found = yaml.safe_load(portable(data, tmp_path / "f"))
    assert [m["path"] for m in found["models"]] == [str(tmp_path / "f" / "m"), "/x/n"]
    assert found["access"] == {"keys": str(tmp_path / "f" / "k.yaml")}
    assert found["frontend"] == {"port": 1, "tls_key": str(tmp_path / "key.pem")}
    assert found["engine"] == {"weight_store": "auto"}
    assert json.loads(json.dumps(data))["models"][0]["path"] == "m"
