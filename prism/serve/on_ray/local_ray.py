"""A Ray cluster of this machine on loopback, for `ray: auto` if there is none. It ends with the
`prism-serve up` that started it.

    python -m prism.serve.on_ray.local_ray FOLDER RAY-START-OPTION...

is the process that runs it. It restarts Ray when it dies. When its standard input is closed, such
as by the death of `prism-serve up`, it ends Ray and removes FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prism.errors import ConfigError
from prism.process import child_environment, private_log, wrapped_command
from prism.serve.node.run_dir import lock
from prism.serve.on_ray.node_actor import LOCAL_RAY_PREFIX, sweep
from prism.serve.on_ray.ray_machines import HOST_DEVICES

_STARTED = "Ray runtime started"
_HOST = "127.0.0.1"
# Ray replaces 127.0.0.1 by another address of the machine if clusters may have several machines.
_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
_OBJECTS_BYTES = 80_000_000  # about Ray's minimum; the store is not used
_POLL_S = 0.1
_RETRY_S = 1.0
_STOP_S = 20.0
_TRIES = 3  # Ray ends if one of its processes needs over 30 s, as on a busy machine


@contextmanager
def local_ray(host_devices: int) -> Iterator[str]:
    """Yields the address of a Ray that runs within the block and has this machine's GPUs. Changes
    this process's environment, which clients of that Ray need, too. Raises ConfigError."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=LOCAL_RAY_PREFIX))
    lock_fd, port = lock(folder), _free_port()
    assert lock_fd is not None
    os.environ.update([_LOOPBACK])
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), *_options(folder, port, host_devices)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,
        pass_fds=[lock_fd],
    )
    os.close(lock_fd)
    assert keeper.stdout is not None
    with keeper:  # closes its standard input and waits for it
        if why := keeper.stdout.readline().decode(errors="replace").strip():
            raise ConfigError(f"ray: none was found, and none could be started here: {why}")
        yield f"{_HOST}:{port}"


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _options(folder: Path, port: int, host_devices: int) -> list[str]:
    """Returns options of `ray start`. Ray makes its own folder readable for all users, so it is
    inside of `folder`, which is private."""
    return [
        f"--node-ip-address={_HOST}",
        f"--port={port}",
        f"--temp-dir={folder / 'r'}",
        f"--object-store-memory={_OBJECTS_BYTES}",
        f"--resources={json.dumps({HOST_DEVICES: host_devices} if host_devices else {})}",
        "--num-cpus=0",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]


# --- the process that runs it -----------------------------------------------------------------


def main() -> None:
    """Prints one line: empty when Ray runs, otherwise why it does not."""
    folder, options, over = Path(sys.argv[1]), sys.argv[2:], threading.Event()
    threading.Thread(target=_set_at_end_of_input, args=(over,), daemon=True).start()
    log, printed, left = folder / "log", False, _TRIES
    try:
        while not over.is_set():
            left -= 1
            with private_log(log) as out:
                ray = _start(options, out.fileno())
            while ray.poll() is None and not over.wait(_POLL_S):
                if not printed and _STARTED in log.read_text():
                    printed = True
                    print(flush=True)
            _end(ray)
            if not printed and not left:
                print(_last_line(log), flush=True)
                return
            over.wait(_RETRY_S)
    finally:
        _remove(folder)


def _set_at_end_of_input(over: threading.Event) -> None:
    sys.stdin.buffer.read()
    over.set()


def _start(options: list[str], out_fd: int) -> subprocess.Popen[bytes]:
    """Starts Ray. `ray start` ends all of Ray with it, also if it is killed."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    return subprocess.Popen(
        [*wrapped_command(), *ray],
        stdin=subprocess.DEVNULL,
        stdout=out_fd,
        stderr=out_fd,
        env=child_environment(),
        start_new_session=True,
    )


def _end(ray: subprocess.Popen[bytes]) -> None:
    ray.terminate()
    try:
        ray.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        ray.kill()
        ray.wait()


def _remove(folder: Path) -> None:
    """Removes the folder, including files that Ray's last processes write meanwhile."""
    until_s = time.monotonic() + _STOP_S
    while folder.exists() and time.monotonic() < until_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "ray start printed nothing")


if __name__ == "__main__":
    main()
