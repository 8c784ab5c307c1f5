"""The launcher and MPS, with a program in the place of NVIDIA's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from prism.agent.state.engine_pool import EnginePool
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.errors import ConfigError
from prism.serve.node.mps import MpsDaemon, end_left_behind, wants_mps
from tests.serve.conftest import alive, until

# -f: the daemon, until its pid file goes; else: commands on stdin, noted in commands.log.
PROGRAM = """#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/pid"
if [ "$1" = "-f" ]; then
  [ -z "$FAKE_MPS_BROKEN" ] || { echo "no GPU for you"; exit 1; }
  nvidia-cuda-mps-server 600 & echo $! > "$CUDA_MPS_LOG_DIRECTORY/server"
  echo $$ > "$pid"
  while [ -f "$pid" ]; do sleep 0.02; done
  [ -n "$FAKE_MPS_STUBBORN" ] && sleep 600
  kill $!
  exit 0
fi
[ -f "$pid" ] || exit 1
while read -r line; do
  echo "$line" >> "$CUDA_MPS_LOG_DIRECTORY/commands"
  [ "$line" != quit ] || rm "$pid"
done
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a fake `nvidia-cuda-mps-control` on the PATH."""
    path = tmp_path / "bin" / "nvidia-cuda-mps-control"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    path.chmod(0o755)
    (path.parent / "nvidia-cuda-mps-server").symlink_to(shutil.which("sleep") or "")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def config(name: str = "cuda:0", *, mps: bool = True) -> ClusterConfig:
    return ClusterConfig(
        namespace="t",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(name, 1 << 30, 1 << 21, 2)],
        models=[],
        engine=EngineConfig(mps=mps),
    )


def pid_in(path: Path) -> int:
    return int(path.read_text())


def test_it_runs_for_the_block_and_ends_its_server(tmp_path: Path) -> None:
    folder = tmp_path / "mps"
    with MpsDaemon(folder) as daemon:
        assert daemon.variables["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
        control, server = pid_in(folder / "pipe" / "pid"), pid_in(folder / "log" / "server")
        assert alive(control)
        assert alive(server)
    assert not alive(control)
    until(lambda: not alive(server), "the end of the server")
    commands = (folder / "log" / "commands").read_text().splitlines()
    assert commands[0] == "get_server_list"
    assert commands[-2:] == ["set_default_active_thread_percentage 100", "quit"]


def test_one_that_does_not_quit_is_killed_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS_STUBBORN", "1")
    monkeypatch.setattr("prism.serve.node.mps._STOP_S", 0.1)
    with MpsDaemon(tmp_path / "mps"):
        control = pid_in(tmp_path / "mps" / "pipe" / "pid")
        server = pid_in(tmp_path / "mps" / "log" / "server")
    assert not alive(control)
    until(lambda: not alive(server), "the end of the server")


def test_one_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS_BROKEN", "1")
    with pytest.raises(ConfigError, match=r"engine\.mps: .*no GPU for you"):
        MpsDaemon(tmp_path / "mps").__enter__()


def test_it_dies_with_a_killed_launcher_and_its_server_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from prism.serve.node.mps import MpsDaemon\n"
        "with MpsDaemon(Path(sys.argv[1])): print('up', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mps")]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    control = pid_in(tmp_path / "mps" / "pipe" / "pid")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    until(lambda: not alive(control), "the end of the daemon")
    server = pid_in(tmp_path / "mps" / "log" / "server")
    assert alive(server)
    variables = MpsDaemon(tmp_path / "mps").variables
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, **variables})
    end_left_behind(tmp_path / "other")
    assert alive(server)
    end_left_behind(tmp_path / "mps")
    until(lambda: not alive(server), "the end of the server")
    assert bystander.poll() is None  # a shell from which an operator used the daemon
    bystander.kill()
    bystander.wait()


def test_who_gets_it(program: Path) -> None:
    assert wants_mps(config())
    assert not wants_mps(config(mps=False))
    with pytest.raises(ConfigError, match="needs a GPU among the devices"):
        wants_mps(config("host:0"))
    program.unlink()
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control is not on the PATH"):
        wants_mps(config())


def test_engines_get_their_shares_and_successors_theirs() -> None:
    pool = EnginePool("cuda:0", 3, (20, 30, 30))
    engines = [pool.create(time.monotonic()) for _ in range(3)]
    assert [engine.sm_percent for engine in engines] == [30, 30, 20]
    pool.remove(engines[1].id)
    assert pool.create(0.0).sm_percent == 30
    assert EnginePool("cuda:0", 1).create(0.0).sm_percent == 100


def test_shares_are_kept_in_the_resolved_file() -> None:
    device = DeviceConfig("cuda:0", 1 << 30, 1 << 21, 2, sm_percent=(40, 60))
    sent = msgspec.json.encode(device)
    assert msgspec.json.decode(sent, type=DeviceConfig) == device
