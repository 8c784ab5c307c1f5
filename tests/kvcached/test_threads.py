"""Several caches of one process, each on its own thread."""

from __future__ import annotations

import subprocess
import sys

from .conftest import PAGE

FIRST_CALLS = """
import sys, threading
import kvcached
device = kvcached.Device.open(
    "host:0", capacity_bytes=1 << 26, page_bytes={page}, namespace={namespace!r})
sys.setswitchinterval(1e-5)
layout = kvcached.Layout(num_layers=1, num_kv_heads=1, head_dim=64)
start, done = threading.Barrier(4), []

def work(number):
    with device.client(f"client-{{number}}") as client:
        kv = client.alloc_kvcache(layout, 1 << 12)
        start.wait()
        kv.free_kv(kv.alloc_kv(8))
        done.append(number)

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
device.destroy()
print(len(done))
"""


def test_first_calls_of_several_threads_do_not_wait_for_each_other(namespace: str) -> None:
    """Covers the first call's import of numpy, which releases the interpreter's lock meanwhile."""
    code = FIRST_CALLS.format(page=PAGE, namespace=namespace)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
