"""NVIDIA's Multi-Process Service: engines of one GPU compute side by side instead of in turns.

The control daemon is a child of the launcher, with its pipe and log in the run directory, so that
several clusters, and other users' daemons, do not meet. A process is a client if its environment
names the pipe. The environment also limits an engine's share of the SMs (`ForkEngine.sm_percent`):
100 % unless the device's `sm_percent` divides them, as MuxServe does.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from prism.config.machines import is_gpu
from prism.config.schema import ClusterConfig
from prism.errors import ConfigError
from prism.process import child_environment, private_log, wrapped_command

PROGRAM = "nvidia-cuda-mps-control"
FOLDER = "mps"
"""Of the run directory."""
_NAMES = "nvidia-cuda-mps"  # what the kernel keeps of the control's and the server's name
_START_S = 10.0
_STOP_S = 10.0
_LOOK_S = 0.05

log = logging.getLogger("prism.serve")


def wants_mps(config: ClusterConfig) -> bool:
    """Raises ConfigError where it is asked for and cannot be."""
    if not config.engine.mps:
        return False
    if not any(is_gpu(device.name) for device in config.devices):
        raise ConfigError("engine.mps: there is no GPU among the devices; leave it off")
    if shutil.which(PROGRAM) is None:
        raise ConfigError(
            f"engine.mps: there is no {PROGRAM} on the PATH; it comes with NVIDIA's driver, or set"
            " mps: false"
        )
    return True


def end_left_behind(folder: Path) -> None:
    """Kill the servers of a killed launcher's daemon. The daemon dies with the launcher; its
    servers, which hold the GPU, do not. Their name and environment identify them."""
    pipe = _variables(folder)["CUDA_MPS_PIPE_DIRECTORY"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_mps = process.name().startswith(_NAMES)
            if is_mps and process.environ().get("CUDA_MPS_PIPE_DIRECTORY") == pipe:
                log.info("ending process %d, left by a killed cluster's MPS", process.pid)
                process.kill()


def _variables(folder: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


class MpsDaemon:
    """The control daemon, from `with` to the end of the block. `variables` make a process its
    client. Thread rule: the launcher's main thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "control.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        return _variables(self._folder)

    def __enter__(self) -> MpsDaemon:
        """Raises ConfigError when it does not start, with what it said."""
        for path in self.variables.values():
            Path(path).mkdir(mode=0o700, parents=True)
        with private_log(self._log) as said:
            self._process = subprocess.Popen(
                [*wrapped_command(), PROGRAM, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**child_environment(), **self.variables},
                start_new_session=True,
            )
        try:
            self._await_answer()
            self._command("set_default_active_thread_percentage 100")
        except BaseException:
            self._end()
            raise
        log.info("MPS runs, pid %d", self._process.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _await_answer(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while not self._command("get_server_list"):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                said = self._log.read_text(errors="replace").strip() or "it says nothing"
                raise ConfigError(
                    f"engine.mps: {PROGRAM} does not start ({said.splitlines()[-1]});"
                    " another one may hold the GPU in exclusive mode"
                )
            time.sleep(_LOOK_S)

    def _command(self, line: str) -> bool:
        """Whether the daemon took it."""
        try:
            done = subprocess.run(
                [PROGRAM],
                input=f"{line}\n".encode(),
                capture_output=True,
                env={**os.environ, **self.variables},
                timeout=_START_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _end(self) -> None:
        """Ask it to end its servers and itself; then kill what is left of its session."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None and self._command("quit"):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
