"""Process 1 of a separate pid namespace, as a container's first process is.

pid_namespace.py COMMAND NAMESPACE prints "ready" and its pid outside, or "refused". It acts when a
line comes on stdin. `hold` keeps the lock of the ledger from then on until the next line, and
`wait` reads the ledger.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

from kvcached import Device, segment_path

CLONE_NEWPID = 0x20000000
LOCK_OFFSET = 88  # offsetof(LedgerSegment, lock): the word, then the number of the last opening


def segment_of(namespace: str) -> mmap.mmap:
    with segment_path("host:0", namespace).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def lock_word(segment: mmap.mmap) -> int:
    (word,) = struct.unpack_from("<I", segment, LOCK_OFFSET)
    return int(word)


def act(command: str, namespace: str, pid_outside: str) -> None:
    device = Device.open("host:0", namespace=namespace)
    segment = segment_of(namespace)
    (number,) = struct.unpack_from("<I", segment, LOCK_OFFSET + 4)
    print("ready", pid_outside, flush=True)
    sys.stdin.readline()
    if command == "wait":
        device.usage()
        return
    struct.pack_into("<I", segment, LOCK_OFFSET, number)
    print("holding as", os.getpid(), flush=True)
    sys.stdin.readline()
    struct.pack_into("<I", segment, LOCK_OFFSET, 0)


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        print("refused", flush=True)
        return
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        act(*sys.argv[1:], os.read(told, 64).decode())
        return
    os.write(tell, str(child).encode())
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
