"""What Ray runs on each machine: one `prism-serve`, as a child of a Ray worker.

Nothing here imports Ray, or waits: the driver (`driver.py`) asks several times a second.
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

from kvcached.trust import distrust
from prism.process import child_environment, keep_private, private_log
from prism.serve.run_dir import LOCK_FILE, lock

_PREFIX = "prism-node-"
LOCAL_RAY_PREFIX = "prism-ray-"
KEY_FILE, CONFIG_FILE, PID_FILE = "cluster.key", "cluster.yaml", "pid"
_NODE_FILE, _CONSOLE_FILE, _SHOWN_FILE = "node", "console", "shown"
_ASKED_FILE = "asked"  # while it is not known whether the launcher follows the present file
_LAUNCHER = "prism.cli.node_launcher"
# Ray ends the children of a worker that ends. So its child only waits for the launcher, which is in
# a session of its own, and which sees by the closed pipe that it is alone.
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
# Ray numbers the GPUs of a worker anew; the YAML has nvidia-smi's numbers. Engines need no token.
_NOT_INHERITED = re.compile("CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|RAY_.*")
EXIT_UNKNOWN = 1
_ASK_AGAIN_S = 30.0  # a launcher that is just starting may not have heard it


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Lines of its console since the last report, its exit code (None: it runs), and whether it
    follows the file that it was given last (None: that is not known yet)."""

    lines: tuple[str, ...]
    code: int | None
    follows: bool | None = True


class NodeActor:
    """A node's `prism-serve`. It outlives this process, for as long as the cluster's lease holds;
    the next actor of the same node and cluster finds it."""

    def __init__(self, yaml: str, key: str, node: str, options: Sequence[str]) -> None:
        """`yaml`: the file, without relative paths and without `cluster_key`. Raises OSError."""
        keep_private()
        sweep()
        self._begun = b""  # a line whose end has not been written yet
        self._process: subprocess.Popen[bytes] | None = None  # None: another actor started it
        self._unsent: list[int] = []
        self._follows: bool | None = True
        self._asked_s = 0.0
        found = _folder_of(key, node)
        self._folder = found or _made(yaml, key, node)
        self._console = open(self._folder / _CONSOLE_FILE, "rb")  # noqa: SIM115 (kept open)
        self._shown = self._console.seek(_number(self._folder / _SHOWN_FILE))
        if found is None:
            self._start(node, options)
        elif (found / _ASKED_FILE).exists() or _config_text(yaml, found) != _read(found):
            self.follow(yaml)

    def _start(self, node: str, options: Sequence[str]) -> None:
        folder, lock_fd = self._folder, lock(self._folder)
        if lock_fd is None:
            raise OSError(f"{folder} was swept while it was made")
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
        os.close(lock_fd)  # the launcher has it

    def poll(self) -> NodeReport:
        self._send()
        code = self._code()  # before the last lines are read
        news = self._console.read()
        self._begun += news
        whole, _, rest = self._begun.rpartition(b"\n")
        if code is not None:
            whole, rest = self._begun, b""
        self._begun = rest
        if code is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # killed, it could not
        elif news:
            self._note_shown(len(news))
        lines = tuple(whole.decode(errors="replace").splitlines())
        self._note_answer(lines)
        return NodeReport(lines, code, self._follows)

    def follow(self, yaml: str) -> None:
        """Have the launcher read another file, with other nodes; `poll` tells whether it does."""
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
        self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self.signal(signal.SIGHUP)

    def _note_answer(self, lines: Sequence[str]) -> None:
        """A reload says one of these (`prism.serve.reload`)."""
        if self._follows is not None:
            return
        for line in lines:
            if line.startswith(("reloaded: ", "reload: ")):
                self._follows = line.startswith("reloaded: ")
                (self._folder / _ASKED_FILE).unlink(missing_ok=True)
        if self._follows is None and time.monotonic() - self._asked_s > _ASK_AGAIN_S:
            self._ask()

    def _note_shown(self, count: int) -> None:
        """For the next actor."""
        self._shown += count
        with suppress(OSError):  # it ends at this moment
            (self._folder / _SHOWN_FILE).write_text(str(self._shown - len(self._begun)))

    def _code(self) -> int | None:
        """What a launcher that another actor started ended with is not known."""
        if self._process is not None:
            return self._process.poll()
        return None if _is_held(self._folder) else EXIT_UNKNOWN

    def signal(self, number: int) -> None:
        """SIGTERM ends it in order, a second one at once; SIGHUP has it read its file again."""
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """A launcher that has just begun has not said yet which process it is."""
        pid = _number(self._folder / PID_FILE)
        while pid and self._unsent and self._code() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, self._unsent.pop(0))


def sweep() -> None:
    """Remove what launchers of this user left that were killed with their machine: each holds its
    folder's lock until it has ended."""
    for folder in _folders():
        lock_fd = lock(folder)
        if lock_fd is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock_fd)


def _folders() -> list[Path]:
    at = Path(tempfile.gettempdir())
    found = [each for prefix in (_PREFIX, LOCAL_RAY_PREFIX) for each in at.glob(f"{prefix}*")]
    return [each for each in found if not distrust(each) and (each / LOCK_FILE).is_file()]


def _folder_of(key: str, node: str) -> Path | None:
    """The folder of this node's launcher, if it runs."""
    for folder in _folders():
        with suppress(OSError):
            whose = (folder / KEY_FILE).read_text(), (folder / _NODE_FILE).read_text()
            if whose == (key, node) and _is_held(folder):
                return folder
    return None


def _made(yaml: str, key: str, node: str) -> Path:
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
    """The file that its launcher reads; empty where that has gone."""
    try:
        return (folder / CONFIG_FILE).read_text()
    except OSError:
        return ""


def _is_held(folder: Path) -> bool:
    try:
        lock_fd = lock(folder)
    except OSError:  # it has gone
        return False
    if lock_fd is not None:
        os.close(lock_fd)
    return lock_fd is None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
