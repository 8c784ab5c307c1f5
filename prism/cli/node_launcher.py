"""`prism-serve` as Ray's part of a machine: `python -m prism.cli.node_launcher FOLDER OPTIONS`.

FOLDER is its own, and goes with it. The YAML in it names Redis and the key's file.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import yaml

from prism.cli.commands import serve
from prism.serve.on_ray.cluster_lease import followed
from prism.serve.on_ray.node_actor import CONFIG_FILE, KEY_FILE, PID_FILE


def main() -> None:
    folder = Path(sys.argv.pop(1))
    # Who knows this process may ask for a reload before it can take one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        (folder / PID_FILE).write_text(str(os.getpid()))
        url = yaml.safe_load((folder / CONFIG_FILE).read_text()).get("redis")
        key = (folder / KEY_FILE).read_text()
        # Without a URL the file is refused.
        with followed(url, key, sys.stdin.fileno()) if url else nullcontext():
            serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
