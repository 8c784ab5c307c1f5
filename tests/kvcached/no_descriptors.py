"""Makes every public call with right arguments in a process that has no file descriptor left.

no_descriptors.py NAMESPACE FOLDER prints the calls that raised anything but a KvcachedError.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from kvcached import Device, KvcachedError

from .conftest import CAPACITY, PAGE
from .public_calls import ENDING, World


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
    for name, call in calls:
        try:
            call(call.right)
        except KvcachedError:
            pass
        except Exception as error:  # noqa: BLE001 (the subject of the test)
            print(f"{name} raised {error!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
