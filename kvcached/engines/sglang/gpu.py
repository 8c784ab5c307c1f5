"""Setup of an engine's process on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from kvcached import Client


def adopt(client: Client, index: int, torch_cap_bytes: int) -> None:
    """Prepares torch for a model on cuda:`index`, before it is built. Idempotent.

    torch's allocator (activations, workspaces, graphs) reserves at most `torch_cap_bytes`. Freed
    pages wait for the default stream, on which SGLang builds.
    """
    torch.cuda.set_device(index)
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, torch_cap_bytes / total_bytes), index)
    client.set_streams([torch.cuda.default_stream(index).cuda_stream])


def set_streams(client: Client, index: int, scheduler: Any) -> None:
    """Makes freed pages wait for all of SGLang's streams.

    These are the stream that steps run on, the default stream, and SGLang's own streams.
    """
    runner = scheduler.tp_worker.model_runner
    streams = [torch.cuda.default_stream(index), torch.cuda.current_stream(index)]
    streams += [scheduler.schedule_stream, scheduler.copy_stream, runner.forward_stream]
    client.set_streams(list(dict.fromkeys(stream.cuda_stream for stream in streams)))
