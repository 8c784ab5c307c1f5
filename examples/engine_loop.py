"""Engine on kvcached in one file: continuous batching, paging and elastic memory.

A tiny transformer in numpy keeps its KV cache in kvcached's tensors. While a second process holds
most of the device, requests wait or are preempted. After it has exited, the engine grows.
Every answer is compared with the answer of the same model on plain arrays.

    python examples/engine_loop.py [NAMESPACE]
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcached import Device, Layout

Floats = NDArray[np.float32]

LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
HIDDEN, VOCABULARY = LAYOUT.num_kv_heads * LAYOUT.head_dim, 500
PAGE_BYTES, CAPACITY_BYTES, NEIGHBOUR_BYTES = 64 << 10, 4 << 20, 3 << 20


class Memory(Protocol):
    """K and V of one request."""

    def write(self, layer: int, position: int, k: Floats, v: Floats) -> None: ...

    def read(self, layer: int, length: int) -> tuple[Floats, Floats]: ...


class Model:
    """Two layers of attention with random weights and greedy decoding."""

    def __init__(self) -> None:
        draw = np.random.default_rng(7).standard_normal
        self.embedding = draw((VOCABULARY, HIDDEN), dtype=np.float32)
        shape = (LAYOUT.num_layers, 4, HIDDEN, HIDDEN)
        self.weights = draw(shape, dtype=np.float32) / np.float32(HIDDEN**0.5)

    def forward(self, token: int, position: int, memory: Memory) -> int:
        """Writes the token's K and V at `position` and returns the next token."""
        x = self.embedding[token]
        for layer, (wq, wk, wv, wo) in enumerate(self.weights):
            q, k, v = ((x @ w).reshape(LAYOUT.num_kv_heads, -1) for w in (wq, wk, wv))
            memory.write(layer, position, k, v)
            keys, values = memory.read(layer, position + 1)
            scores = np.einsum("hd,thd->ht", q, keys) / np.float32(LAYOUT.head_dim**0.5)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            x = x + np.einsum("ht,thd->hd", weights, values).reshape(-1) @ wo
        return int(np.argmax(self.embedding @ x))


@dataclass(eq=False)
class Request:
    """Request of the engine."""

    tokens: list[int]  # the prompt, then the output
    length: int  # of both
    computed: int = 0  # number of first tokens that have K and V in `blocks`
    blocks: list[int] = field(default_factory=list)


class PagedMemory:
    """View of the engine's KV tensors for one request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.buffers = engine.buffers
        block = LAYOUT.block_tokens
        starts = np.array(request.blocks, dtype=np.int64)[:, None] * block
        self.slots = (starts + np.arange(block)).reshape(-1)  # by position

    def write(self, layer: int, position: int, k: Floats, v: Floats) -> None:
        keys, values = self.buffers[layer]
        keys[self.slots[position]], values[self.slots[position]] = k, v

    def read(self, layer: int, length: int) -> tuple[Floats, Floats]:
        keys, values = self.buffers[layer]
        return keys[self.slots[:length]], values[self.slots[:length]]


class Engine:
    """Scheduler that runs the oldest requests for which there is memory, a token each per step."""

    def __init__(self, device: Device, name: str, max_tokens: int = 1 << 16) -> None:
        self.model = Model()
        self.client = device.client(name)
        self.kv = self.client.alloc_kvcache(LAYOUT, max_tokens)
        self.buffers = [
            (np.from_dlpack(self.kv.k_buffer(layer)), np.from_dlpack(self.kv.v_buffer(layer)))
            for layer in range(LAYOUT.num_layers)
        ]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def step(self) -> None:
        """Computes a token of every running request, then starts waiting ones if there is room."""
        for request in list(self.running):
            if request in self.running and self._grow(request):
                self._compute(request)
        while self.waiting and self._start(self.waiting[0]):
            self.running.append(self.waiting.popleft())

    def _start(self, request: Request) -> bool:
        """Computes the prompt and earlier output. Returns False without room for them."""
        if not self._cover(request):
            return False
        while request.computed < len(request.tokens) - 1:
            self._compute(request)
        return True

    def _grow(self, request: Request) -> bool:
        """Allocates room for one more token and preempts the youngest requests if needed.

        Returns False if `request` itself was preempted.
        """
        while not self._cover(request):
            youngest = self.running.pop()
            self._release(youngest)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is request:
                return False
        return True

    def _cover(self, request: Request) -> bool:
        """Allocates blocks for all tokens so far. Returns False without room, which is normal."""
        missing = -(-len(request.tokens) // LAYOUT.block_tokens) - len(request.blocks)
        if missing > 0:
            ids = self.kv.alloc_kv(missing)
            if ids is None:
                return False
            request.blocks.extend(int(block) for block in ids)
        return True

    def _compute(self, request: Request) -> None:
        position = request.computed
        memory = PagedMemory(self, request)
        following = self.model.forward(request.tokens[position], position, memory)
        request.computed += 1
        if request.computed < len(request.tokens):
            return
        request.tokens.append(following)
        if len(request.tokens) == request.length:
            self.running.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        self.kv.free_kv(np.array(request.blocks, dtype=np.int64))
        request.blocks.clear()


class PlainMemory:
    """K and V without paging, for the comparison."""

    def __init__(self, length: int) -> None:
        shape = (LAYOUT.num_layers, 2, length, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        self.kv = np.zeros(shape, dtype=np.float32)

    def write(self, layer: int, position: int, k: Floats, v: Floats) -> None:
        self.kv[layer, 0, position], self.kv[layer, 1, position] = k, v

    def read(self, layer: int, length: int) -> tuple[Floats, Floats]:
        return self.kv[layer, 0, :length], self.kv[layer, 1, :length]


def expected_tokens(model: Model, prompt: list[int], length: int) -> list[int]:
    """Returns the model's tokens, computed on plain arrays."""
    tokens, memory = list(prompt), PlainMemory(length)
    for position in range(length - 1):
        following = model.forward(tokens[position], position, memory)
        if position == len(tokens) - 1:
            tokens.append(following)
    return tokens


def neighbour(namespace: str) -> None:
    """Holds most of the device until a line arrives on stdin. Runs in the second process."""
    device = Device.open("host:0", namespace=namespace)
    with device.client("neighbour") as client:
        tensor = client.alloc_virtual_tensor(NEIGHBOUR_BYTES)
        tensor.map(0, NEIGHBOUR_BYTES)
        print("ready", flush=True)
        sys.stdin.readline()
    print("freed", flush=True)


def run_until(engine: Engine, steps: int | None = None) -> int:
    """Runs `steps` steps, or all. Returns the largest number of concurrent requests."""
    most = 0
    while (engine.waiting or engine.running) and steps != 0:
        engine.step()
        most = max(most, len(engine.running))
        steps = None if steps is None else steps - 1
    return most


def serve(device: Device) -> None:
    """Runs twelve requests, the first steps together with the neighbour."""
    command = [sys.executable, __file__, "neighbour", device.namespace]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # the neighbour holds its memory now
        engine = Engine(device, "engine")
        prompts = [[i, 2 * i, 3 * i] * 16 for i in range(1, 13)]
        requests = [Request(list(prompt), length=len(prompt) + 60) for prompt in prompts]
        engine.waiting.extend(requests)
        shared = run_until(engine, steps=40)
        print(f"with the neighbour: {shared} requests at once")
        print(f"preempted so far: {engine.preemptions}")
        process.stdin.write("exit\n")
        process.stdin.flush()
        process.stdout.readline()
        alone = run_until(engine)
        print(f"alone: {alone} requests at once")
    right = sum(
        request.tokens == expected_tokens(engine.model, prompt, request.length)
        for request, prompt in zip(requests, prompts, strict=True)
    )
    print(f"{right} of {len(requests)} answers are correct")
    held = engine.kv.mapped_bytes() - engine.kv.floor_bytes()
    print(f"held when idle: {held} bytes in addition to the padding block")
    engine.client.close()


def main() -> None:
    if sys.argv[1:2] == ["neighbour"]:
        neighbour(sys.argv[2])
        return
    device = Device.open(
        "host:0",
        capacity_bytes=CAPACITY_BYTES,
        page_bytes=PAGE_BYTES,
        namespace=sys.argv[1] if sys.argv[1:] else f"example-{uuid4().hex[:8]}",
    )
    try:
        serve(device)
    finally:
        device.destroy(force=True)


if __name__ == "__main__":
    main()
