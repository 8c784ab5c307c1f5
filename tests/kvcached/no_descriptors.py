"""Makes every public call with right arguments in a process that has no file descriptor left.

no_descriptors.py NAMESPACE FOLDER prints the calls that raised anything but a KvcachedError.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from kvcached import Device

from .conftest import CAPACITY, PAGE
from .public_calls import ENDING, World, other_errors


def main(namespace: str, folder: str) -> None:
    device = Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    world = World(device, Path(folder))
    calls = [(name, call) for name, call in world.calls() if name not in ENDING]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
    try:
        while True:
            os.dup(2)
    except OSError:
        pass
    print(*other_errors(calls), sep="\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
