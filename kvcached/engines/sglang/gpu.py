"""Streams of an engine's process on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from kvcached import Client


def set_streams(client: Client, index: int, scheduler: Any) -> None:
    """Makes freed pages wait for all of SGLang's streams.

    These are the stream that steps run on, the default stream, and SGLang's own streams.
    """
    runner = scheduler.tp_worker.model_runner
    streams = [torch.cuda.default_stream(index), torch.cuda.current_stream(index)]
    streams += [scheduler.schedule_stream, scheduler.copy_stream, runner.forward_stream]
    client.set_streams(list(dict.fromkeys(stream.cuda_stream for stream in streams)))
