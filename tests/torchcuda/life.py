"""Life of a model on cuda:0 of the double, in a process with its environment: prints JSON lines.

python -m tests.torchcuda.life RUN_DIR [ATTENTION] [GRAPHS]
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import kvcached
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.core import EngineContext
from prism.engines.sglang import adapter
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Request, Sampling
from tests.sglang.models import LLAMA, QWEN3, greedy, prompts, spec_of

DEVICE = "cuda:0"
MIB = 1 << 20
CAPACITY_BYTES = 2560 * MIB
STATIC_BYTES = 1280 * MIB
TOKENS = 12


def config_of(run_dir: Path, attention: str, graphs: str) -> ClusterConfig:
    return ClusterConfig(
        namespace=f"t{uuid4().hex[:10]}",
        run_dir=str(run_dir),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(DEVICE, CAPACITY_BYTES, 2 * MIB, 2)],
        models=[],
        engine=EngineConfig(
            adapter="sglang",
            static_bytes=STATIC_BYTES,
            max_running=4,
            prefill_chunk_tokens=64,
            weight_store=str(run_dir / "store"),
            cuda_graphs=graphs,
            attention_backend=attention,
        ),
    )


class Life:
    """One engine in this process, with the counts of the driver and of the ledger."""

    def __init__(self, config: ClusterConfig) -> None:
        import torch

        self.torch = torch
        self.ledger = kvcached.Device.open(
            DEVICE,
            capacity_bytes=CAPACITY_BYTES,
            page_bytes=2 * MIB,
            namespace=config.namespace,
        )
        adapter.preload(DEVICE)
        gc.freeze()  # as the fork server does: each model's end collects garbage
        self.say("preloaded", initialised=torch.cuda.is_initialized())
        self.core: Any = adapter.create(EngineContext("e0", DEVICE, config))
        self.say("opened", **self.memory())

    def say(self, stage: str, **facts: Any) -> None:
        print(json.dumps({"stage": stage} | facts), flush=True)

    def memory(self) -> dict[str, Any]:
        """Returns the counts once kvcached's thread has stopped mapping and unmapping."""
        found = self._memory()
        for _ in range(100):
            time.sleep(0.05)
            before, found = found, self._memory()
            if found == before:
                return found
        raise AssertionError("pages come and go without end")

    def _memory(self) -> dict[str, Any]:
        usage = self.ledger.usage()
        static = sum(client.static_bytes for client in usage.clients)
        free, total = self.torch.cuda.mem_get_info(0)
        libcuda = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"])
        libcuda.test_cuda_violations.restype = ctypes.c_uint64
        return {
            "violations": libcuda.test_cuda_violations(),
            "committed": usage.committed_bytes,
            "static": static,
            "driver": total - free,
            "torch": self.torch.cuda.memory_reserved(0),
        }

    def activate(self, name: str) -> None:
        started_s = time.monotonic()
        order = ActivateEngine(model=spec_of(name), max_running=4)
        made = self.core.activate(order)
        took_s = time.monotonic() - started_s
        stages = {stage: round(s, 3) for stage, s in made.stages_s.items()}
        self.say("activated", model=name, took_s=took_s, stages=stages, **self.memory())

    def serve(self, name: str, temperature: float = 0.0) -> None:
        asked = prompts(name, 3, (5, 90))
        unmaps = self.core.status().unmaps_total
        for i, prompt in enumerate(asked):
            self.core.submit([request(name, f"{name}/{temperature}/{i}", prompt, temperature)])
        output = self.run()
        answers = [output[f"{name}/{temperature}/{i}"] for i in range(len(asked))]
        facts: dict[str, Any] = {"lengths": [len(answer) for answer in answers]}
        facts["unmaps"] = self.core.status().unmaps_total - unmaps
        if temperature == 0.0:
            facts["equal"] = [
                greedy(name, p, TOKENS) == a for p, a in zip(asked, answers, strict=False)
            ]
        self.say("served", model=name, temperature=temperature, **facts, **self.memory())

    def run(self) -> dict[str, list[int]]:
        output: dict[str, list[int]] = {}
        for _ in range(1000):
            step = self.core.step()
            assert not step.failures, step.failures
            for chunk in step.chunks:
                output.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if not step.busy:
                return output
        raise AssertionError("it does not end")

    def deactivate(self, name: str) -> None:
        self.core.deactivate()
        self.say("deactivated", model=name, **self.memory())


def request(name: str, rid: str, prompt: list[int], temperature: float) -> Request:
    return Request(
        id=rid,
        model=name,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True),
        arrival_unix_s=0.0,
        slo_ttft_s=2.0,
        slo_tpot_s=0.2,
        frontend_id="",
    )


def main(run_dir: str, attention: str = "torch_native", graphs: str = "off") -> None:
    life = Life(config_of(Path(run_dir), attention, graphs))
    for name in (LLAMA, QWEN3, LLAMA):
        life.activate(name)
        life.serve(name)
        life.serve(name, temperature=0.8)
        life.deactivate(name)
    life.core.close()
    life.say("closed", **life.memory())
    life.ledger.destroy(force=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
