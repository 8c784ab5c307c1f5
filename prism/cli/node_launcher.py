"""`prism-serve` on a machine of Ray: `python -m prism.cli.node_launcher FOLDER OPTIONS`.

FOLDER belongs to this process, and is removed when it ends. It has the YAML and the key's file.
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
from prism.serve.on_ray.cluster_lease import ends_with_lease
from prism.serve.on_ray.node_actor import CONFIG_FILE, KEY_FILE, PID_FILE


def main() -> None:
    folder = Path(sys.argv.pop(1))
    # The node's actor may ask for a reload before this process can handle it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        (folder / PID_FILE).write_text(str(os.getpid()))
        url = yaml.safe_load((folder / CONFIG_FILE).read_text()).get("redis")
        key = (folder / KEY_FILE).read_text()
        # A file without a URL is rejected by `serve`.
        with ends_with_lease(url, key, sys.stdin.fileno()) if url else nullcontext():
            serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
