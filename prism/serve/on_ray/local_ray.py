"""A Ray of this machine alone, on loopback, where `ray: auto` finds none. It lives as long as the
`prism-serve up` that needs it.

    python -m prism.serve.on_ray.local_ray FOLDER RAY-START-OPTION...

is the process that has it: it starts Ray again where it dies, and ends it, and removes FOLDER, when
its standard input is closed, as by the death of `prism-serve up`.
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
from prism.serve.on_ray.machines import HOST_DEVICES
from prism.serve.on_ray.node_actor import LOCAL_RAY_PREFIX, sweep
from prism.serve.run_dir import lock

_STARTED = "Ray runtime started"
_HOST = "127.0.0.1"
# Ray takes 127.0.0.1 for the machine's other address where clusters of several may be.
_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
_OBJECTS_BYTES = 80_000_000  # about the least that Ray allows; nothing is kept there
_POLL_S = 0.1
_AGAIN_S = 1.0
_STOP_S = 20.0
_TRIES = 3  # Ray ends where one of its parts took over 30 s, as on a busy machine


@contextmanager
def local_ray(host_devices: int) -> Iterator[str]:
    """The address of a Ray that runs within the block, and has this machine's GPUs. Changes this
    process's environment: what talks to that Ray needs it, too. Raises ConfigError."""
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
    with keeper:  # its standard input is closed, and it is waited for
        if why := keeper.stdout.readline().decode(errors="replace").strip():
            raise ConfigError(f"ray: none was found, and none could be started here: {why}")
        yield f"{_HOST}:{port}"


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _options(folder: Path, port: int, host_devices: int) -> list[str]:
    """Of `ray start`. It makes its own folder readable for everybody: that one lies in `folder`."""
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


# --- the process that has it ------------------------------------------------------------------


def main() -> None:
    """Prints one line when Ray runs, an empty one, or why it does not."""
    folder, options, over = Path(sys.argv[1]), sys.argv[2:], threading.Event()
    threading.Thread(target=_set_at_end_of_input, args=(over,), daemon=True).start()
    log, said, left = folder / "log", False, _TRIES
    try:
        while not over.is_set():
            left -= 1
            with private_log(log) as out:
                ray = _started(options, out.fileno())
            while ray.poll() is None and not over.wait(_POLL_S):
                if not said and _STARTED in log.read_text():
                    said = True
                    print(flush=True)
            _end(ray)
            if not said and not left:
                print(_last_line(log), flush=True)
                return
            over.wait(_AGAIN_S)
    finally:
        _remove(folder)


def _set_at_end_of_input(over: threading.Event) -> None:
    sys.stdin.buffer.read()
    over.set()


def _started(options: list[str], out_fd: int) -> subprocess.Popen[bytes]:
    """`ray start` takes all of Ray with it, also where it is killed."""
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
    """What Ray's last processes write meanwhile as well."""
    until_s = time.monotonic() + _STOP_S
    while folder.exists() and time.monotonic() < until_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "ray start said nothing")


if __name__ == "__main__":
    main()
