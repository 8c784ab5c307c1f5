"""What Ray runs on each machine: one `prism-serve`, as a child of a Ray worker.

Nothing here imports Ray, or waits: the driver (`on_ray.py`) asks several times a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcached.trust import distrust
from prism.process import child_environment, keep_private, private_log
from prism.serve.run_dir import LOCK_FILE, lock

_PREFIX = "prism-node-"
_KEY_FILE = "cluster.key"
# Ray kills the children of a worker that ends. So its child only waits for the launcher, which ends
# in order when that child's end of a pipe is closed, whatever closed it.
_WAITER = """
import signal, subprocess, sys
lock_fd = int(sys.argv[1])
launcher = subprocess.Popen(
    sys.argv[2:], stdin=subprocess.PIPE, start_new_session=True, pass_fds=[lock_fd]
)
signal.signal(signal.SIGTERM, lambda number, _: launcher.send_signal(number))
sys.exit(launcher.wait())
"""
_LAUNCHER = """
import os, shutil, signal, sys, threading
from prism.cli.commands import serve
def watch():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
folder = sys.argv.pop(1)
try:
    serve()
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""
# Ray numbers the GPUs of a worker anew; the YAML has nvidia-smi's numbers.
_NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Said:
    """Lines of its console since the last look, and its exit code (None: it runs)."""

    lines: tuple[str, ...]
    code: int | None


class NodePart:
    """A node's `prism-serve`. It ends in order when this process does, however that ends."""

    def __init__(self, yaml: str, key: str, node: str, options: Sequence[str]) -> None:
        """`yaml`: the file, without relative paths and without `cluster_key`. Raises OSError."""
        keep_private()
        self._begun = b""  # a line whose end has not been written yet
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock_fd = lock(folder)
        if self._lock_fd is None:
            raise OSError(f"{folder} was swept while it was made")
        config, key_file = folder / "cluster.yaml", folder / _KEY_FILE
        with private_log(key_file) as out:
            out.write(key.encode())
        config.write_text(f"{yaml}\ncluster_key: {key_file}\n")
        launcher = [sys.executable, "-c", _LAUNCHER, str(folder)]
        launcher += ["--config", str(config), "--node", node, *options]
        command = [sys.executable, "-c", _WAITER, str(self._lock_fd), *launcher]
        environment = {n: v for n, v in child_environment().items() if n not in _NOT_INHERITED}
        with private_log(folder / "console") as out:
            self._console = open(folder / "console", "rb")  # noqa: SIM115 (kept open)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                pass_fds=[self._lock_fd],
            )

    def look(self) -> Said:
        code = self._process.poll()  # before the last lines are read
        self._begun += self._console.read()
        whole, _, rest = self._begun.rpartition(b"\n")
        if code is not None:
            whole, rest = self._begun, b""
        self._begun = rest
        return Said(tuple(whole.decode(errors="replace").splitlines()), code)

    def signal(self, number: int) -> None:
        """SIGTERM ends it in order, a second one at once."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)


def sweep() -> None:
    """Remove what parts of this user left that were killed with their machine: a launcher holds
    its folder's lock, through the waiter, until it has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not distrust(folder) and (folder / LOCK_FILE).is_file():
            lock_fd = lock(folder)
            if lock_fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock_fd)
