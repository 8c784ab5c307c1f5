"""Ray actor of a machine, which runs one `prism-serve` as a child of a Ray worker.

Nothing here imports Ray or blocks: the driver (`driver.py`) polls several times a second.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcached.trust import untrusted_reason
from prism.process import child_environment, keep_private, private_log
from prism.serve.node.run_dir import LOCK_FILE, lock

_PREFIX = "prism-node-"
LOCAL_RAY_PREFIX = "prism-ray-"
KEY_FILE, CONFIG_FILE, PID_FILE = "cluster.key", "cluster.yaml", "pid"
_NODE_FILE, _CONSOLE_FILE, _SHOWN_FILE = "node", "console", "shown"
_ASKED_FILE = "asked"  # exists until the launcher reports whether it uses the present file
_LAUNCHER = "prism.cli.node_launcher"
# Ray kills the children of a worker that ends. So its child only waits for the launcher, which has
# its own session. The launcher sees by the closed pipe that its parent has ended.
_WAITER = """
import os, signal, subprocess, sys, time
lock_fd, parent = int(sys.argv[1]), os.getppid()
launcher = subprocess.Popen(
    sys.argv[2:], stdin=subprocess.PIPE, start_new_session=True, pass_fds=[lock_fd]
)
signal.signal(signal.SIGTERM, lambda *_: None)  # Ray's
while launcher.poll() is None and os.getppid() == parent:
    time.sleep(0.1)
sys.exit(launcher.returncode)
"""
# Ray renumbers the GPUs of a worker; the YAML has nvidia-smi's numbers. Engines need no token.
_NOT_INHERITED = re.compile("CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|RAY_.*")
EXIT_UNKNOWN = 1
_RESEND_S = 30.0  # a launcher that is just starting may have missed the signal


@dataclass(frozen=True, slots=True)
class NodeReport:
    """State of a node's launcher."""

    lines: tuple[str, ...]  # lines of its console since the last report
    code: int | None  # exit code; None: it runs
    follows: bool | None = True  # it uses the last file; None: not known yet


class NodeActor:
    """A node's `prism-serve`, which outlives this process while the cluster's lease is held. The
    next actor of the same node and cluster finds it."""

    def __init__(self, yaml: str, key: str, node: str, options: Sequence[str]) -> None:
        """Raises OSError. `yaml` is the file, without relative paths and without `cluster_key`."""
        keep_private()
        sweep()
        self._partial_line = b""  # beginning of a line that is not complete yet
        self._process: subprocess.Popen[bytes] | None = None  # None: another actor started it
        self._unsent: list[int] = []
        self._follows: bool | None = True
        self._sent_s = 0.0
        found = _find_folder(key, node)
        self._folder = found or _create_folder(yaml, key, node)
        self._console = open(self._folder / _CONSOLE_FILE, "rb")  # noqa: SIM115 (kept open)
        self._shown_bytes = self._console.seek(_number(self._folder / _SHOWN_FILE))
        if found is None:
            self._start(node, options)
        elif (found / _ASKED_FILE).exists() or _config_text(yaml, found) != _read(found):
            self.follow(yaml)

    def _start(self, node: str, options: Sequence[str]) -> None:
        folder, lock_fd = self._folder, lock(self._folder)
        if lock_fd is None:
            raise OSError(f"{folder} was removed while it was created")
        launcher = [sys.executable, "-m", _LAUNCHER, str(folder)]
        launcher += ["--config", str(folder / CONFIG_FILE), "--node", node, *options]
        environment = {
            name: value
            for name, value in child_environment().items()
            if not _NOT_INHERITED.fullmatch(name)
        }
        with private_log(folder / _CONSOLE_FILE) as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WAITER, str(lock_fd), *launcher],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                pass_fds=[lock_fd],
            )
        os.close(lock_fd)  # the launcher has inherited it

    def poll(self) -> NodeReport:
        """Returns the state since the last call."""
        self._send_signals()
        code = self._code()  # before the last lines are read
        new_bytes = self._console.read()
        self._partial_line += new_bytes
        whole, _, rest = self._partial_line.rpartition(b"\n")
        if code is not None:
            whole, rest = self._partial_line, b""
        self._partial_line = rest
        if code is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed launcher did not
        elif new_bytes:
            self._store_shown(len(new_bytes))
        lines = tuple(whole.decode(errors="replace").splitlines())
        self._check_reload(lines)
        return NodeReport(lines, code, self._follows)

    def follow(self, yaml: str) -> None:
        """Gives the launcher another file with other nodes. `poll` reports whether it uses it."""
        self._follows, text = None, _config_text(yaml, self._folder)
        partial = self._folder / f"{CONFIG_FILE}.partial"
        try:
            (self._folder / _ASKED_FILE).touch()
            with private_log(partial) as out:
                out.truncate(0)
                out.write(text.encode())
            partial.replace(self._folder / CONFIG_FILE)
        except OSError:
            self._follows = False
            return
        self._send_reload()

    def _send_reload(self) -> None:
        self._sent_s = time.monotonic()
        self.signal(signal.SIGHUP)

    def _check_reload(self, lines: Sequence[str]) -> None:
        """Looks for the result of a reload (`prism.serve.reload_command`) in the lines."""
        if self._follows is not None:
            return
        for line in lines:
            if line.startswith(("reloaded: ", "reload: ")):
                self._follows = line.startswith("reloaded: ")
                (self._folder / _ASKED_FILE).unlink(missing_ok=True)
        if self._follows is None and time.monotonic() - self._sent_s > _RESEND_S:
            self._send_reload()

    def _store_shown(self, count: int) -> None:
        """Stores the position in the console for the next actor."""
        self._shown_bytes += count
        with suppress(OSError):  # the launcher is removing the folder
            (self._folder / _SHOWN_FILE).write_text(
                str(self._shown_bytes - len(self._partial_line))
            )

    def _code(self) -> int | None:
        """Returns the launcher's exit code, or None while it runs. The code is unknown if another
        actor started it."""
        if self._process is not None:
            return self._process.poll()
        return None if _is_held(self._folder) else EXIT_UNKNOWN

    def signal(self, number: int) -> None:
        """Sends a signal: SIGTERM ends the launcher in order, a second one at once, SIGHUP reloads
        its file."""
        self._unsent.append(number)
        self._send_signals()

    def _send_signals(self) -> None:
        """Sends the signals when the launcher has written its pid."""
        pid = _number(self._folder / PID_FILE)
        while pid and self._unsent and self._code() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, self._unsent.pop(0))


def sweep() -> None:
    """Removes folders of this user's launchers that were killed with their machine. A launcher
    holds its folder's lock until it ends."""
    for folder in _folders():
        lock_fd = lock(folder)
        if lock_fd is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock_fd)


def _folders() -> list[Path]:
    at = Path(tempfile.gettempdir())
    found = [each for prefix in (_PREFIX, LOCAL_RAY_PREFIX) for each in at.glob(f"{prefix}*")]
    return [each for each in found if not untrusted_reason(each) and (each / LOCK_FILE).is_file()]


def _find_folder(key: str, node: str) -> Path | None:
    """Returns the folder of this node's running launcher."""
    for folder in _folders():
        with suppress(OSError):
            owner = (folder / KEY_FILE).read_text(), (folder / _NODE_FILE).read_text()
            if owner == (key, node) and _is_held(folder):
                return folder
    return None


def _create_folder(yaml: str, key: str, node: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    for name, text in (
        (KEY_FILE, key),
        (_NODE_FILE, node),
        (CONFIG_FILE, _config_text(yaml, folder)),
        (_CONSOLE_FILE, ""),
    ):
        with private_log(folder / name) as out:
            out.write(text.encode())
    return folder


def _config_text(yaml: str, folder: Path) -> str:
    return f"{yaml}\ncluster_key: {folder / KEY_FILE}\n"


def _read(folder: Path) -> str:
    """Returns the file that the launcher reads. Empty if it was removed."""
    try:
        return (folder / CONFIG_FILE).read_text()
    except OSError:
        return ""


def _is_held(folder: Path) -> bool:
    try:
        lock_fd = lock(folder)
    except OSError:  # it was removed
        return False
    if lock_fd is not None:
        os.close(lock_fd)
    return lock_fd is None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
