"""NVIDIA's Multi-Process Service, by which engines of a GPU compute at the same time.

The control daemon is a child of the launcher. Its pipe and log are in the run directory, so that
clusters and other users' daemons do not conflict. A process is a client if its environment names
the pipe. The environment also limits an engine's share of the SMs (`ForkEngine.sm_percent`): 100 %
unless the device's `sm_percent` divides them, as MuxServe does.
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

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError
from prism.process import child_environment, private_log, wrapped_command

PROGRAM = "nvidia-cuda-mps-control"
FOLDER = "mps"
"""Folder in the run directory."""
_NAMES = "nvidia-cuda-mps"  # the control's and the server's name, as the kernel truncates them
_START_S = 10.0
_STOP_S = 10.0
_POLL_S = 0.05

log = logging.getLogger("prism.serve")


def wants_mps(config: ClusterConfig) -> bool:
    """Returns True if MPS is configured. Raises ConfigError if it is not possible."""
    if not config.engine.mps:
        return False
    if not any(is_gpu(device.name) for device in config.devices):
        raise ConfigError("engine.mps: needs a GPU among the devices; remove the key")
    if shutil.which(PROGRAM) is None:
        raise ConfigError(
            f"engine.mps: {PROGRAM} is not on the PATH; install it with NVIDIA's driver, or set"
            " mps: false"
        )
    return True


def end_left_behind(folder: Path) -> None:
    """Kills the servers of a killed launcher's daemon. The daemon dies with the launcher. Its
    servers, which hold the GPU, do not. They are identified by name and environment."""
    pipe = _variables(folder)["CUDA_MPS_PIPE_DIRECTORY"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_mps = process.name().startswith(_NAMES)
            if is_mps and process.environ().get("CUDA_MPS_PIPE_DIRECTORY") == pipe:
                log.info("killing process %d of a killed cluster's MPS", process.pid)
                process.kill()


def _variables(folder: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


class MpsDaemon:
    """The control daemon, which runs within a `with` block.

    `variables` make a process its client. Thread rule: the launcher's main thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "control.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        return _variables(self._folder)

    def __enter__(self) -> MpsDaemon:
        """Starts the daemon. Raises ConfigError with its output if it does not start."""
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
            self._stop()
            raise
        log.info("MPS runs with pid %d", self._process.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _await_answer(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while not self._command("get_server_list"):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                said = self._log.read_text(errors="replace").strip() or "no output"
                raise ConfigError(
                    f"engine.mps: {PROGRAM} does not start ({said.splitlines()[-1]});"
                    " another daemon may have the GPU in exclusive mode"
                )
            time.sleep(_POLL_S)

    def _command(self, line: str) -> bool:
        """Sends a command to the daemon. Returns True if it succeeded."""
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

    def _stop(self) -> None:
        """Asks the daemon to end its servers and itself, then kills the rest of its session."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None and self._command("quit"):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
