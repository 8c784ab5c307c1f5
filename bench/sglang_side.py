"""Engine of SGLang under a load that a benchmark controls step by step.

    python bench/sglang_side.py JSON       the fields of `Side`; started by sglang_throughput.py

Reads one command per line and answers each with a line of JSON:

    run N           N steps of a constant batch: seconds of the wall and of the CPU, tokens, calls
                    that changed mappings, and the seconds of each step that decoded the full batch
    first N         a request of N prompt tokens alone: seconds until its first token
    idle            cancels what runs; returns once kvcached has given back what it does not keep

The stream of requests depends on the seed alone, so that two sides do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from specs import model_folder, spec_of

import kvcached
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.schema.machines import is_gpu
from prism.config.schema.units import Bytes, parse_size
from prism.engines.core import EngineContext, EngineCore
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling

VOCABULARY = (16, 500)
GPU_STATIC_BYTES = 2 << 30  # the CUDA context, torch's memory, graphs
SETTLE_S = 0.2  # in which kvcached's thread unmaps what came free


@dataclass(frozen=True)
class Side:
    """Engine and load of one side. Prompts and outputs are uniform up to twice their mean."""

    pool: str  # "kvcached" or "stock"
    model: str
    kv_bytes: int
    page_bytes: int
    batch: int
    prompt_tokens: int  # mean
    output_tokens: int  # mean
    prefix_cache: bool
    seed: int = 1
    arrangement: str = "per_layer"
    device: str = "host:0"
    longest: int = 0  # the context; 0: that of the longest request


def parser_of(about: str | None, kv: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of `fields_of`. kv: the default of --kv."""
    parser = argparse.ArgumentParser(description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model", type=model_folder, default="tiny-llama", help="a demo model, or a directory"
    )
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--page", default="16KiB", help="bytes of a device page")
    parser.add_argument("--kv", default=kv, help="KV memory of a side")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean")
    parser.add_argument("--output-tokens", type=int, default=48, help="mean")
    return parser


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `Side` that the options of `parser_of` give."""
    return {
        "model": str(options.model),
        "kv_bytes": parse_size(options.kv, "--kv"),
        "page_bytes": parse_size(options.page, "--page"),
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "device": options.device,
    }


@dataclass(slots=True)
class Asked:
    """Submitted request and its tokens so far."""

    prompt: list[int]
    wanted: int  # tokens
    tokens: list[int] = field(default_factory=list)

    @property
    def live_tokens(self) -> int:
        """Number of tokens with KV: none before the first token, and never the last one."""
        return len(self.prompt) + len(self.tokens) - 1 if self.tokens else 0


@dataclass(slots=True)
class Step:
    """Results of one step, by request."""

    seconds: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: int = 0  # requests whose first token came
    ended: dict[str, Asked] = field(default_factory=dict)
    busy: bool = False

    def is_decode_of(self, batch: int) -> bool:
        """Returns whether `batch` requests got their next token, and none got its first one."""
        return self.first == 0 and len(self.tokens) == batch


class Engine:
    """Engine core and its requests."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.random = random.Random(side.seed)
        self.submitted = 0
        self.open: dict[str, Asked] = {}
        longest = side.longest or 2 * (side.prompt_tokens + side.output_tokens)
        dtype = "auto" if is_gpu(side.device) else "float32"
        stock = spec_of(Path(side.model), longest, dtype)
        self.spec = msgspec.structs.replace(stock, kv_arrangement=side.arrangement)
        self.config = config_of(side, self.spec)
        self.core = make_core(side, self.config)
        try:
            self.activated = self.core.activate(
                ActivateEngine(model=self.spec, max_running=side.batch)
            )
            self.ledger = EngineContext("bench", side.device, self.config).open_device()
            self.warm_up()
        except BaseException:
            self.close()
            raise

    def warm_up(self) -> None:
        """Triggers compilation and graph capture before the measurement.

        Serves batches of every size for which SGLang compiles kernels, and a long prompt. Decode
        graphs are captured in idle steps.
        """
        batch = self.side.batch
        sizes = [1 << power for power in range(batch.bit_length())]
        for size in dict.fromkeys([*sizes, batch]):
            for _ in range(size):
                self.ask(2, 2)
            self.finish()
        self.ask(self.spec.context_length // 2, 2)
        self.finish()

    # --- requests --------------------------------------------------------------------------

    def ask(self, prompt_tokens: int, output_tokens: int) -> None:
        """Submits a request with a random prompt."""
        prompt = [self.random.randrange(*VOCABULARY) for _ in range(prompt_tokens)]
        self.submitted += 1
        request_id = f"r{self.submitted}"
        self.open[request_id] = Asked(prompt, output_tokens)
        request = Request(
            id=request_id,
            model=self.side.model,
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            arrival_unix_s=time.time(),
            slo_ttft_s=1.0,
            slo_tpot_s=1.0,
            frontend_id="",
        )
        self.core.submit([request])

    def top_up(self, wanted: int) -> None:
        """Submits requests until the given number is open."""
        while len(self.open) < wanted:
            prompt, output = (
                self.random.randint(max(1, mean // 8), 2 * mean)
                for mean in (self.side.prompt_tokens, self.side.output_tokens)
            )
            self.ask(prompt, output)

    def step(self) -> Step:
        """Raises SystemExit for a request that failed."""
        began_s = time.perf_counter()
        output = self.core.step()
        found = Step(time.perf_counter() - began_s, busy=output.busy)
        if output.failures:
            raise SystemExit(output.failures[0].message)
        for chunk in output.chunks:
            asked = self.open[chunk.request_id]
            found.first += not asked.tokens
            found.tokens[chunk.request_id] = chunk.token_ids
            asked.tokens.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                found.ended[chunk.request_id] = self.open.pop(chunk.request_id)
        return found

    def finish(self) -> None:
        """Runs steps until no request is left."""
        while self.step().busy:
            pass

    # --- commands --------------------------------------------------------------------------

    def run(self, steps: int) -> dict[str, Any]:
        """Returns results and times of `steps` steps. One more request waits for each that runs, so
        that no batch is smaller."""
        batch, answers = self.side.batch, dict[str, list[int]]()
        decode_s, growth_s = list[float](), list[float]()
        before, maps = self.core.status(), self.maps()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.top_up(2 * batch)
            found = self.step()
            maps, maps_before = self.maps(), maps
            if found.is_decode_of(batch):
                (growth_s if maps > maps_before else decode_s).append(found.seconds)
            for request_id, tokens in found.tokens.items():
                answers.setdefault(request_id, []).extend(tokens)
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        after = self.core.status()
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "tokens": sum(map(len, answers.values())),
            "maps": after.maps_total - before.maps_total,
            "unmaps": after.unmaps_total - before.unmaps_total,
            "retractions": after.retractions_total - before.retractions_total,
            "decode_s": decode_s,
            "growth_s": growth_s,
            "answers": answers,
        }

    def first(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns the seconds until a prompt's first token. REQUIRES: the engine is idle."""
        self.ask(prompt_tokens, 1)
        seconds, answer = 0.0, list[int]()
        while not answer:
            found = self.step()
            seconds += found.seconds
            answer = [token for tokens in found.tokens.values() for token in tokens]
        self.finish()
        return {"first_token_s": seconds, "answer": answer}

    def idle(self) -> dict[str, Any]:
        """Cancels all requests. Returns the bytes that the ledger has granted afterwards."""
        self.core.cancel(list(self.open))
        self.finish()
        time.sleep(SETTLE_S)
        return {"committed_bytes": self.ledger.usage().committed_bytes}

    def maps(self) -> int:
        """Returns the runs of pages mapped so far, by the engine's thread and by kvcached's."""
        return sum(client.maps for client in self.ledger.usage().clients)

    def close(self) -> None:
        self.core.close()
        kvcached.Device.unlink(self.config.namespace, self.side.device)


def config_of(side: Side, spec: ModelSpec) -> ClusterConfig:
    """Returns a cluster of one device, which has `kv_bytes` in addition to the model's weights and
    the engine's share. On a GPU a static pool is a part of that share, which bounds torch's
    allocator."""
    static_bytes = side.page_bytes
    if is_gpu(side.device):
        static_bytes = GPU_STATIC_BYTES + (side.kv_bytes if side.pool == "stock" else 0)
    static_pages = -(-(spec.weight_bytes + static_bytes) // side.page_bytes)
    capacity_bytes = side.kv_bytes + static_pages * side.page_bytes
    return ClusterConfig(
        namespace=f"bench{uuid4().hex[:10]}",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(side.device, capacity_bytes, side.page_bytes, 1)],
        models=[],
        engine=EngineConfig(
            max_running=side.batch, static_bytes=Bytes(static_bytes), weight_store=""
        ),
    )


def make_core(side: Side, config: ClusterConfig) -> EngineCore:
    from prism.engines.sglang import create, preload

    preload(side.device)
    set_arguments(side)
    if side.pool == "stock":
        use_stock_pool()
    return create(EngineContext("bench", side.device, config))


def set_arguments(side: Side) -> None:
    """Changes the arguments that the engine gives SGLang: prefix cache, size of a static pool."""
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
    """Makes the engine use SGLang's own pool and allocator, without other changes."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvcached.engines.sglang.platform import KvcachedPlatform

    class StockAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        """SGLang's allocator with the methods that the engine core calls on kvcached's."""

        def __init__(self, *args: Any, kvcache: Any, **kwargs: Any) -> None:
            if type(kvcache) is not MHATokenToKVPool:
                raise SystemExit(f"SGLang built {type(kvcache).__name__}, not its own pool")
            super().__init__(*args, kvcache=kvcache, **kwargs)

        def return_held_blocks(self) -> None:
            """Does nothing, since a static pool never holds blocks back."""

        def attainable_tokens(self) -> int:
            return int(self.available_size())

    KvcachedPlatform.get_kv_pool_cls = lambda self, *, kind: None
    KvcachedPlatform.get_paged_allocator_cls = lambda self: StockAllocator


def pin_thread() -> None:
    """Binds this thread to a core, the same one for both sides. It bounds a decode step on a GPU,
    and the cores of a virtual machine differed by a quarter."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps SGLang's output out of the answers
    side = Side(**json.loads(sys.argv[1]))
    engine = Engine(side)
    if is_gpu(side.device):
        pin_thread()
    commands = {"run": engine.run, "first": engine.first, "idle": lambda _: engine.idle()}
    try:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            name, count = line.split()
            print(json.dumps(commands[name](int(count))), file=answers)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
