"""TCP ports of servers that tests start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a free port on loopback, outside of the range that the kernel gives out.

    Engines take ports of that range while they start, and would take this one before its server
    listens.
    """
    end = int(RANGE.read_text().split()[0])
    while True:
        port = end // 2 + secrets.randbelow(end // 2)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
