"""Best fit (fullest slab first) against first fit (lowest slab first) on random request lifetimes.

    python bench/kv_fit.py [--requests 20000] [--live 64] [--seed 1] [--slab-blocks 128]

Requests of random lengths allocate their blocks gradually and end after random times. The same
trace runs through kvcached itself and through a model with either rule. mapped / needed is averaged
over the steps, and slab growths are counted. kvcached differs from the model of its rule only in
ties.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from devices import bench_client

from kvcached import KVCache, Layout

PAGE_BYTES = 64 << 10


@dataclass
class Model:
    """Slabs as counts of free blocks. A slab without a live block is unmapped at once."""

    slab_blocks: int
    best_fit: bool
    free: dict[int, int] = field(default_factory=dict)
    owner: dict[int, list[int]] = field(default_factory=dict)  # request -> slab of each block
    growths: int = 0

    def alloc(self, request: int, blocks: int) -> None:
        missing = blocks - sum(self.free.values())
        for _ in range(-(-max(0, missing) // self.slab_blocks)):
            slab = next(n for n in range(len(self.free) + 1) if n not in self.free)
            self.free[slab] = self.slab_blocks
            self.growths += 1
        for _ in range(blocks):
            slab = min(
                (slab for slab, free in self.free.items() if free),
                key=lambda slab: (self.free[slab] if self.best_fit else 0, slab),
            )
            self.free[slab] -= 1
            self.owner.setdefault(request, []).append(slab)

    def end(self, request: int) -> None:
        for slab in self.owner.pop(request, []):
            self.free[slab] += 1
            if self.free[slab] == self.slab_blocks:
                del self.free[slab]

    def ratio(self) -> float:
        live = sum(map(len, self.owner.values()))
        return len(self.free) / -(-live // self.slab_blocks) if live else 1.0


@dataclass
class Real:
    """The same interface on a KV cache."""

    kv: KVCache
    owner: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def alloc(self, request: int, blocks: int) -> None:
        ids = self.kv.alloc_kv(blocks)
        if ids is None:
            raise SystemExit("the device is too small for this trace")
        self.owner.setdefault(request, []).append(ids)

    def end(self, request: int) -> None:
        if request in self.owner:
            self.kv.free_kv(np.concatenate(self.owner.pop(request)))

    def ratio(self) -> float:
        return self.kv.fragmentation().ratio


def trace(requests: int, live: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yields (request, blocks to allocate, or 0 when it ends). Lengths have a long tail.

    The load varies between `live` requests and an eighth of that, so memory could be released in
    between.
    """
    draw = random.Random(seed)
    wants: dict[int, int] = {}
    arrived = 0
    while arrived < requests or wants:
        bound = live if arrived // (4 * live) % 2 == 0 else max(1, live // 8)
        if arrived < requests and len(wants) < bound:
            wants[arrived] = min(400, int(draw.lognormvariate(3, 1)))
            yield arrived, 1 + wants[arrived] // 2  # the prompt
            arrived += 1
            continue
        request = draw.choice(list(wants))
        wants[request] -= 8
        if wants[request] > 0:
            yield request, 1
        else:
            del wants[request]
            yield request, 0


def run(subject: Model | Real, options: argparse.Namespace) -> float:
    """Returns the mean of mapped / needed over the steps."""
    ratios = []
    for request, blocks in trace(options.requests, options.live, options.seed):
        if blocks:
            subject.alloc(request, blocks)
        else:
            subject.end(request)
        ratios.append(subject.ratio())
    return mean(ratios)


def measure_real(options: argparse.Namespace) -> tuple[float, int]:
    """Returns the mean ratio and the slab growths of kvcached."""
    layout = Layout(1, 1, PAGE_BYTES // options.slab_blocks // 2, dtype="float16", block_tokens=1)
    with bench_client(PAGE_BYTES) as client:
        kv = client.alloc_kvcache(layout, 1000 * options.slab_blocks, reserved_blocks=0)
        ratio = run(Real(kv), options)
        return ratio, kv.counters().pages_mapped // layout.num_buffers


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--live", type=int, default=64, help="requests at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slab-blocks", type=int, default=128, help="a power of two")
    options = parser.parse_args(arguments)
    first, best = Model(options.slab_blocks, False), Model(options.slab_blocks, True)
    first_ratio, best_ratio = run(first, options), run(best, options)
    real_ratio, real_growths = measure_real(options)
    for name, ratio, growths in (
        ("first fit, model", first_ratio, first.growths),
        ("best fit, model", best_ratio, best.growths),
        ("kvcached", real_ratio, real_growths),
    ):
        print(f"{name:20} mapped / needed {ratio:.4f}, {growths} slab growths")
    print(f"waste of kvcached against first fit: ratio {(real_ratio - 1) / (first_ratio - 1):.3f}")


if __name__ == "__main__":
    main()
