"""Malformed messages to every socket of a running cluster: counted, and nothing ends."""

from __future__ import annotations

import random
import re

import httpx
import zmq

from tests.serve.conftest import Cluster, descendants, until

SOCKETS = {"scheduler": "scheduler", "engines-host0": "host:0", "cancel-host0": "host:0"}
SOCKETS["frontend-f0.1"] = "frontend"
ROUTERS = ("scheduler", "engines-host0")
FRAMES = [
    [b""],
    [b"\xc1"],
    [b"a", b"b"],
    [b"\x91" * 200_000],
    [b"\x82\xa4type\xa6Cancel\xabrequest_ids\x91\xa2\xff\xff"],
    [b"\x82\xa4type\xa6Cancel\xa1x" + b"\x91" * 200_000],
    [random.Random(1).randbytes(1000)],
]


def malformed(cluster: Cluster) -> dict[str, float]:
    text = httpx.get(f"{cluster.url}/metrics").text
    found = re.findall(
        r'^prism_malformed_messages_total{.*process="(.*)"} (.*)$', text, re.MULTILINE
    )
    return {process: float(count) for process, count in found}


def test_malformed_messages_are_counted_and_end_nothing(cluster: Cluster) -> None:
    before, counted = set(descendants(cluster.process.pid)), malformed(cluster)
    with zmq.Context() as context:
        for name in SOCKETS:
            with context.socket(zmq.DEALER if name in ROUTERS else zmq.PUSH) as peer:
                peer.connect(f"ipc://{cluster.run_dir}/{name}")
                for frames in FRAMES:
                    peer.send_multipart(frames)
    expected = {process: counted[process] for process in set(SOCKETS.values())}
    for process in SOCKETS.values():
        expected[process] += len(FRAMES)
    until(lambda: malformed(cluster) == expected, "counting")
    assert cluster.post().status_code == 200
    assert cluster.operate("status").returncode == 0
    assert before <= set(descendants(cluster.process.pid))
