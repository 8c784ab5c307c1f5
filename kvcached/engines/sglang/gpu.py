"""What is different on a GPU, in the engine's process."""

from __future__ import annotations

from typing import Any

import torch

from kvcached import Client


def adopt(client: Client, index: int, torch_cap_bytes: int) -> None:
    """Before a model is built: torch works on cuda:`index`, its allocator (activations, workspaces,
    graphs) reserves no more than `torch_cap_bytes`, and freed pages wait for the default stream, on
    which SGLang builds. Idempotent."""
    torch.cuda.set_device(index)
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, torch_cap_bytes / total_bytes), index)
    client.set_streams([torch.cuda.default_stream(index).cuda_stream])


def name_streams(client: Client, index: int, scheduler: Any) -> None:
    """Freed pages wait for every stream that SGLang has: the one that steps run on, the default
    one, and those of its own."""
    runner = scheduler.tp_worker.model_runner
    streams = [torch.cuda.default_stream(index), torch.cuda.current_stream(index)]
    streams += [scheduler.schedule_stream, scheduler.copy_stream, runner.forward_stream]
    client.set_streams(list(dict.fromkeys(stream.cuda_stream for stream in streams)))
