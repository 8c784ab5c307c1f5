"""Grows KV past the free memory at activation, and prints JSON lines as life.py does.

The engine runs under MPS, where kernels may read any token of the pool.

python -m tests.torchcuda.growth RUN_DIR
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from msgspec.structs import replace

from tests.sglang.models import LLAMA
from tests.torchcuda.life import DEVICE, MIB, Life, config_of

FREE_BYTES = 192 * MIB  # while another process has the rest
HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
print("held", flush=True)
sys.stdin.read()
"""


def main(run_dir: str) -> None:
    config = config_of(Path(run_dir), "torch_native", "off")
    life = Life(replace(config, engine=replace(config.engine, mps=True)))
    used_bytes = life.memory()["driver"]
    total_bytes = torch.cuda.mem_get_info(0)[1]
    context_bytes = used_bytes  # the other process has one as well
    held_bytes = (total_bytes - used_bytes - context_bytes - FREE_BYTES) // (2 * MIB) * (2 * MIB)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(held_bytes)], **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        life.say("crowded", free=torch.cuda.mem_get_info(0)[0])
        life.activate(LLAMA)
        stray(life)
        life.serve(LLAMA)
        holder.communicate(b"")
    grow(life)
    life.serve(LLAMA)
    life.deactivate(LLAMA)
    life.core.close()
    life.ledger.destroy(force=True)


def stray(life: Life) -> None:
    """Reads the pool's last token, which no request has yet, as a wrong block table would."""
    allocator = life.core._active.scheduler.token_to_kv_pool_allocator
    keys = allocator.get_kvcache().k_buffer[0]
    life.say("strayed", value=keys[allocator.size].abs().max().item())


def grow(life: Life) -> None:
    """Allocates more KV than was free with SGLang's allocator, and writes the last token."""
    active = life.core._active
    allocator = active.scheduler.token_to_kv_pool_allocator
    wanted = 2 * FREE_BYTES // active.order.model.token_bytes
    ids = allocator.alloc(wanted // allocator.page_size * allocator.page_size)
    life.say("grown", pool=allocator.size, planned=active.memory.plan.pool_tokens, got=len(ids))
    keys = allocator.get_kvcache().k_buffer[0]
    last = int(ids.max().item())
    keys[last].fill_(3.0)
    life.say("written", last=last, value=keys[last].mean().item(), **life.memory())
    allocator.free(ids)
    torch.cuda.synchronize(DEVICE)


if __name__ == "__main__":
    main(*sys.argv[1:])
