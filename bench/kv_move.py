"""KV of a running request moved to another process: page to page, against through a file; and over
TCP, against computed again.

    python bench/kv_move.py --tokens 1024 --pages 64KiB

The source is another process, on a separate host device. Each way starts when an engine has the
request's block ids, and ends when the KV is in the blocks of the target:

- an offer and its fetch;
- the gathered rows in a file of /dev/shm, mapped and scattered, as
  `prism.engines.kv_moves.kv_file` does it;
- that file sent as agents of two machines do it, encrypted, over the loopback;
- computed again: a forward pass of transformers' Llama with this KV's shape, otherwise as
  SmolLM2-135M.

Times are wall-clock times, because both processes work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import uuid4

import numpy as np
import zmq.asyncio
from msgspec import structs
from pairs import measure

from kvcached import Device, KVCache, Layout
from prism.agent.inbox import CancelInbox
from prism.agent.network.kv_receiver import KvReceiver
from prism.agent.network.kv_sender import KvSender
from prism.agent.network.sockets import PeerLinks
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.endpoints import NodeConfig
from prism.curve import new_secret
from prism.engines.kv_moves import kv_file
from prism.messages.kv import KvPart, KvTaken
from prism.messages.requests import Request, Resume, Sampling
from prism.models.hugging_face import import_transformers

BLOCK_TOKENS = 16


def main() -> None:
    options = parse()
    if options.source:
        serve(options)
        return
    names = ("host:0", "host:1")
    options.namespace = f"bench-{uuid4().hex[:8]}"
    try:
        with TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
            compare(options, folder)
    finally:
        for name in names:
            Device.unlink(options.namespace, name, force=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pages", default="64KiB", choices=["64KiB", "2MiB"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--network-pairs", type=int, default=5)
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--namespace", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace, folder: str) -> None:
    source = start_source(options)
    config = two_machines(options.namespace, folder)
    source.stdin.write(json.dumps([config.cluster_key, *(n.port for n in config.nodes)]) + "\n")
    Agent(config, "host:0@b")
    kv, blocks = fill(options, "host:1", "target", 0.0)

    def ask(command: str) -> str:
        source.stdin.write(command + "\n")
        source.stdin.flush()
        return str(source.stdout.readline().strip())

    def direct() -> None:
        kv.fetch_kv(ask("offer"), blocks)

    def through_a_file() -> None:
        take(kv, blocks, ask(f"file {folder}"))

    def over_tcp() -> None:
        take(kv, blocks, ask(f"send {folder}"))

    for way in (direct, through_a_file, over_tcp):
        way()
        check(kv, blocks)
    pairs = measure(direct, through_a_file, options.pairs, clock=time.perf_counter)
    size_mb = kv.layout.token_bytes * options.tokens / 1e6
    print(f"{options.tokens} tokens, {size_mb:.1f} MB, pages of {options.pages}")
    print(pairs.line("direct against file", "below 1", "ms", 1e-3, 1e-3))
    again = forward(options)
    pairs = measure(over_tcp, again, options.network_pairs, clock=time.perf_counter)
    print(pairs.line("over TCP against computed again", "below 1", "ms", 1e-3, 1e-3))
    sent_s, again_s = (median(seconds) for seconds in (pairs.first_s, pairs.second_s))
    print(f"{size_mb / sent_s:.0f} MB/s sent; {size_mb / again_s:.1f} MB/s of KV computed")
    source.stdin.close()
    source.wait()


def start_source(options: argparse.Namespace) -> Any:
    command = [sys.executable, str(Path(__file__)), "--source", "--namespace", options.namespace]
    command += ["--tokens", str(options.tokens), "--layers", str(options.layers)]
    command += ["--pages", options.pages]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def serve(options: argparse.Namespace) -> None:
    kv, blocks = fill(options, "host:0", "source", 5.0)
    key, *ports = json.loads(sys.stdin.readline())
    agent: Agent | None = None
    for line in sys.stdin:
        command, *folder = line.split()
        answer = kv.offer_kv(blocks).address if command == "offer" else save(kv, blocks, *folder)
        if command == "send":
            config = two_machines(options.namespace, *folder, key, ports)
            agent = agent or Agent(config, "host:0@a")
            answer = agent.send(answer, "host:0@b")
        print(answer, flush=True)


def two_machines(
    namespace: str, folder: str, key: str = "", ports: Sequence[int] = ()
) -> ClusterConfig:
    ports = ports or [free_port(), free_port()]
    addresses = ("127.0.0.1", "127.0.0.2")
    nodes = [
        NodeConfig(name, address, port, 1, 1)
        for name, address, port in zip("ab", addresses, ports, strict=True)
    ]
    devices = [DeviceConfig(f"host:0@{node.name}", 1 << 40, 4096, 1) for node in nodes]
    return ClusterConfig(
        namespace=namespace,
        run_dir=folder,
        redis_url="",
        policy="prism",
        devices=devices,
        models=[],
        nodes=nodes,
        cluster_key=key or new_secret(),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


class Agent:
    """KV sender and receiver of an agent, with an event loop in a thread."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        self._config = structs.replace(config, node=device[-1])
        self._device, self._bound = device, threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        self._bound.wait()

    async def _run(self) -> None:
        config, self._loop = self._config, asyncio.get_running_loop()
        peers = PeerLinks(config)
        self._sender = KvSender(peers, self._device, lambda request: True)
        self._receiver = KvReceiver(peers, Path(config.run_dir) / "there", 1 << 40)
        [_, endpoint] = config.own_cancel_endpoints(self._device)
        nothing = cast("Any", None)
        inbox = CancelInbox(
            zmq.asyncio.Context(),
            [endpoint],
            nothing,
            on_gone=nothing,
            on_kv=self._take,
            secret=config.cluster_key,
        )
        inbox.bind()
        self._bound.set()
        await inbox.run()

    def _take(self, message: KvPart | KvTaken) -> None:
        if isinstance(message, KvPart):
            self._receiver.take(message)
        else:
            self._sender.answered(message)

    def send(self, path: str, target: str) -> str:
        """Sends a file to the target. Returns its path there."""
        sent: Future[Request] = Future()
        resume = Resume([], path, 1)
        request = Request("1", "", [], Sampling(1), 0, 1, 1, "", resume=resume)
        begin = self._sender.begin
        self._loop.call_soon_threadsafe(lambda: begin([request], target, sent.set_result))
        resume = sent.result().resume
        assert resume is not None
        return resume.kv_path


def forward(options: argparse.Namespace) -> Callable[[], object]:
    import torch

    transformers = import_transformers()

    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    model = transformers.LlamaForCausalLM(shape).eval()
    tokens = torch.randint(0, 49_152, (1, options.tokens))

    def compute() -> object:
        with torch.inference_mode():
            return model(tokens, use_cache=True, logits_to_keep=1)

    return compute


def fill(
    options: argparse.Namespace, name: str, role: str, value: float
) -> tuple[KVCache, np.ndarray]:
    """Returns a cache with the request's blocks in random order, all written."""
    layout = Layout(
        num_layers=options.layers,
        num_kv_heads=3,
        head_dim=64,
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
    )
    page_bytes = (64 << 10) if options.pages == "64KiB" else (2 << 20)
    needed = layout.need_bytes(options.tokens * 2, page_bytes)
    device = Device.open(
        name, capacity_bytes=needed * 2, page_bytes=page_bytes, namespace=options.namespace
    )
    kv = device.client(role).alloc_kvcache(layout, options.tokens * 4)
    ids = kv.alloc_kv(options.tokens // BLOCK_TOKENS)
    assert ids is not None
    ids = np.random.default_rng(1).permutation(ids)
    for buffer in buffers(kv):
        buffer[slots_of(ids)] = value
    return kv, ids


def buffers(kv: KVCache) -> list[np.ndarray]:
    return [np.from_dlpack(kv.buffer(part.layer, part.name)) for part in kv.layout.parts]


def slots_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def save(kv: KVCache, ids: np.ndarray, folder: str) -> str:
    slots, views = slots_of(ids), buffers(kv)
    return kv_file.save(folder, (view[slots] for view in views), len(views))


def take(kv: KVCache, ids: np.ndarray, path: str) -> None:
    slots, views = slots_of(ids), buffers(kv)
    shape = views[0].shape[1:]
    token_bytes = int(np.prod(shape)) * views[0].itemsize
    rows = kv_file.take(path, len(views), len(slots), token_bytes)
    assert rows is not None
    for view, row in zip(views, rows, strict=True):
        view[slots] = row.view(view.dtype).reshape(-1, *shape)


def check(kv: KVCache, ids: np.ndarray) -> None:
    for buffer in buffers(kv):
        rows = buffer[slots_of(ids)]
        if not (rows == 5.0).all():
            raise SystemExit("the KV that came is not the KV that left")
        buffer[slots_of(ids)] = 0.0


if __name__ == "__main__":
    main()
