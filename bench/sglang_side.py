"""One side of `sglang_throughput.py`: an engine that serves a constant batch, some steps at a time.

    python bench/sglang_side.py JSON       the fields of `Side`; started by sglang_throughput.py

Reads a number of steps a line, runs them, and answers with a line of JSON: seconds of the wall and
of the CPU, tokens that came out, calls that changed mappings, and a checksum of the tokens. The
stream of requests depends on the seed alone, so that two sides do the same work.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from specs import spec_of

import kvcached
from prism.config.schema import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.units import Bytes
from prism.engines.core import EngineContext, EngineCore
from prism.messages.engine import ActivateEngine
from prism.messages.models import ModelSpec
from prism.messages.requests import Request, Sampling

DEVICE = "host:0"
VOCABULARY = (16, 500)


@dataclass(frozen=True)
class Side:
    """`pool`: "kvcached" or "stock". Prompts and outputs are uniform up to twice their mean."""

    pool: str
    model: str
    kv_bytes: int
    page_bytes: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    prefix_cache: bool
    seed: int = 1
    arrangement: str = "per_layer"


class Engine:
    """An engine core that always has `batch` requests running and some waiting."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.random = random.Random(side.seed)
        self.unfinished = self.submitted = 0
        longest = 2 * (side.prompt_tokens + side.output_tokens)
        stock = spec_of(Path(side.model), longest)
        self.spec = msgspec.structs.replace(stock, kv_arrangement=side.arrangement)
        self.config = config_of(side, self.spec)
        self.core = make_core(side, self.config, self.spec)

    def top_up(self) -> None:
        """One request waits for every one that runs, so that no step runs short."""
        wanted = 2 * self.side.batch - self.unfinished
        self.core.submit([self._request() for _ in range(wanted)])
        self.unfinished += wanted

    def _request(self) -> Request:
        prompt, output = (
            self.random.randint(max(1, mean // 8), 2 * mean)
            for mean in (self.side.prompt_tokens, self.side.output_tokens)
        )
        self.submitted += 1
        return Request(
            id=f"r{self.submitted}",
            model=self.side.model,
            prompt_ids=[self.random.randrange(*VOCABULARY) for _ in range(prompt)],
            sampling=Sampling(max_tokens=output, temperature=0.0, ignore_eos=True),
            arrival_unix_s=time.time(),
            slo_ttft_s=1.0,
            slo_tpot_s=1.0,
            frontend_id="",
        )

    def run(self, steps: int) -> dict[str, float]:
        """What `steps` steps gave and took."""
        tokens, checksum, before = 0, 0, self.core.status()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.top_up()
            output = self.core.step()
            if output.failures:
                raise SystemExit(output.failures[0].message)
            for chunk in output.chunks:
                tokens += len(chunk.token_ids)
                checksum = zlib.crc32(f"{chunk.request_id}{chunk.token_ids}".encode(), checksum)
                self.unfinished -= chunk.finish_reason is not None
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        after = self.core.status()
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "tokens": tokens,
            "maps": after.maps_total - before.maps_total,
            "unmaps": after.unmaps_total - before.unmaps_total,
            "retractions": after.retractions_total - before.retractions_total,
            "checksum": checksum,
        }

    def close(self) -> None:
        self.core.close()
        kvcached.Device.unlink(self.config.namespace, DEVICE)


def config_of(side: Side, spec: ModelSpec) -> ClusterConfig:
    """A device that has `kv_bytes` left beside the model's weights and the engine's share."""
    static_pages = -(-(spec.weight_bytes + side.page_bytes) // side.page_bytes)
    capacity_bytes = side.kv_bytes + static_pages * side.page_bytes
    return ClusterConfig(
        namespace=f"bench{uuid4().hex[:10]}",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(DEVICE, capacity_bytes, side.page_bytes, 1)],
        models=[],
        engine=EngineConfig(
            max_running=side.batch, static_bytes=Bytes(side.page_bytes), weight_store=""
        ),
    )


def make_core(side: Side, config: ClusterConfig, spec: ModelSpec) -> EngineCore:
    from prism.engines.sglang import create, preload

    preload()
    set_arguments(side)
    if side.pool == "stock":
        use_stock_pool()
    core = create(EngineContext("bench", DEVICE, config))
    core.activate(ActivateEngine(model=spec, max_running=side.batch))
    return core


def set_arguments(side: Side) -> None:
    """SGLang's arguments as the engine sets them, but for the prefix cache and a static pool."""
    from prism.engines.sglang import server_args

    build = server_args.build

    def changed(order: ActivateEngine, plan: Any, *others: Any, **named: Any) -> Any:
        made = build(order, plan, *others, **named)
        made.disable_radix_cache = not side.prefix_cache
        if side.pool == "stock":
            slabs = side.kv_bytes // plan.quantum_bytes
            made.max_total_tokens = slabs * plan.slab_tokens - made.page_size
        return made

    server_args.build = changed


def use_stock_pool() -> None:
    """SGLang's own pool and allocator; everything else of the engine as it is."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvcached.engines.sglang.platform import NativeCpuPlatform

    class StockAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        """What the engine core asks of its allocator beyond SGLang's own methods."""

        def __init__(self, *args: Any, kvcache: Any, **kwargs: Any) -> None:
            if type(kvcache) is not MHATokenToKVPool:
                raise SystemExit(f"SGLang built {type(kvcache).__name__}, not its own pool")
            super().__init__(*args, kvcache=kvcache, **kwargs)

        def return_held_blocks(self) -> None:
            """A static pool has nothing to return."""

        def attainable_tokens(self) -> int:
            return int(self.available_size())

    NativeCpuPlatform.get_kv_pool_cls = lambda self, *, kind: None
    NativeCpuPlatform.get_paged_allocator_cls = lambda self: StockAllocator


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SGLang prints is no answer
    engine = Engine(Side(**json.loads(sys.argv[1])))
    try:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            print(json.dumps(engine.run(int(line))), file=answers)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
