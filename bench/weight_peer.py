"""A model's weights from another machine's store, over TCP with CURVE on loopback, against its file
on a disk, with a cold page cache.

    python bench/weight_peer.py [--megabytes 256] [--tensors 32] [--pairs 5] [--folder FOLDER]

Both fill an empty store in /dev/shm. A separate process serves the store of the "other machine". On
loopback it shares the cores with the receiver, which is not so with two machines. The disk is that
of `--folder`. The first fill from it reads the file twice: to hash it, and from the page cache to
store its tensors. Times are wall-clock times.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from pairs import measure
from safetensors.numpy import save_file

from kvcached import WeightStore
from kvcached.weights.exchange import Exchange
from prism.agent.network.weight_server import WeightServer
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import NodeConfig
from prism.curve import new_secret
from prism.engines.weights.peer_weights import PeerWeights
from prism.messages.model_spec import ModelSpec

MB = 1 << 20


def save(path: Path, count: int, size_bytes: int) -> None:
    rng = np.random.default_rng(0)
    made = {f"t{i}": rng.integers(0, 256, size_bytes // count, np.uint8) for i in range(count)}
    save_file(made, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Removes the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def spec(path: Path) -> ModelSpec:
    """Returns a specification of which only the name and the files are used."""
    return ModelSpec(
        name="m",
        path=str(path),
        architecture="Stub",
        dtype="float32",
        kv_dtype="float32",
        context_length=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        weight_bytes=1,
        token_bytes=1,
        slo_ttft_s=1.0,
        slo_tpot_s=1.0,
    )


def config_of(node: str, model: ModelSpec, key: str, port: int) -> ClusterConfig:
    """Returns the configuration of one of two machines, between which only weights are sent.

    Rates are not limited, and a slow transfer is not given up.
    """
    ends = [("a", port), ("b", 1)]
    nodes = [
        NodeConfig(n, "127.0.0.1", p, 1, 0, network_bytes_s=1e12, disk_bytes_s=1e6) for n, p in ends
    ]
    return ClusterConfig(
        namespace="bench",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[],
        models=[model],
        nodes=nodes,
        node=node,
        cluster_key=key,
    )


def serve(config: ClusterConfig, store: Path) -> None:
    server = WeightServer(config, Exchange(WeightStore.open(store)))
    server.start()
    time.sleep(3600)


class Bench:
    """A file, the store of the machine that has it, and that of the machine that needs it."""

    def __init__(self, model: ModelSpec, folder: Path, config: ClusterConfig) -> None:
        self._model, self._file = model, Path(model.path) / "model.safetensors"
        self._folder, self._config, self._number = folder, config, 0
        self.renew()

    def renew(self) -> None:
        self._number += 1
        self.store = WeightStore.open(self._folder / f"b{self._number}")
        self._peers = PeerWeights(self.store, self._config)
        forget(self._file)

    def from_peer(self) -> None:
        assert self._peers.fetch(self._model, lambda _: []) == "a"
        assert self.store.counters().disk_bytes == 0

    def from_disk(self) -> None:
        self.store.get_checkpoint(self._model.path).close()

    def clean(self) -> None:
        for path in (self.store.directory / "blobs").iterdir():
            path.unlink()
        for path in self.store.directory.glob("entries/*/t/*"):
            path.unlink()
        self.renew()


def run(options: argparse.Namespace, disk: Path, memory: Path) -> None:
    size_bytes = options.megabytes * MB
    save(disk / "model.safetensors", options.tensors, size_bytes)
    model = spec(disk)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key, first = new_secret(), port - 65  # after those of the scheduler and of frontends
    WeightStore.open(memory / "a").get_checkpoint(disk).close()
    process = multiprocessing.Process(
        target=serve, args=(config_of("a", model, key, first), memory / "a"), daemon=True
    )
    process.start()
    try:
        bench = Bench(model, memory, config_of("b", model, key, first))
        pairs = measure(
            bench.from_peer, bench.from_disk, options.pairs, time.perf_counter, bench.clean
        )
    finally:
        process.kill()
        process.join()
    peer, read = (size_bytes / 1e6 / median(s) for s in (pairs.first_s, pairs.second_s))
    print(
        f"{options.megabytes} MiB in {options.tensors} tensors: peer {peer:.0f} MB/s against disk"
        f" {read:.0f} MB/s: ratio of times {pairs.ratio:.2f} (no target)"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk; default: the temporary one")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        run(options, Path(disk), Path(memory))


if __name__ == "__main__":
    main()
