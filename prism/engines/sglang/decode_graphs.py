"""CUDA graphs of decode steps, captured after a model has begun to decode.

SGLang captures all batch sizes while it is built, which would delay every activation. Here a model
is activated without graphs, and its steps are launched kernel by kernel. Graphs are captured later,
one batch size at a time between two steps, so that a new request waits for one capture at most. The
largest size is first, after a few steps: smaller batches may use its graph with padding, and all
other graphs share its memory. On an H200, a step of 32 requests took 36 ms kernel by kernel and 5
with a graph (1.1 billion parameters), and a capture 0.12 s.

A graph holds addresses. Those of weights, KV and SGLang's buffers are constant until the model's
deactivation, even if pages are mapped and unmapped, so graphs are valid until then.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from typing import Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils.capture_mode import (
    _set_capture_attention_variant,
    model_capture_mode,
)

# Decode steps after which a busy engine captures its first graph, and each later one. An idle one
# does not wait.
FIRST_CAPTURE_STEPS = 8
BUSY_STEPS_PER_CAPTURE = 64

log = logging.getLogger("prism.engine")


class LazyGraphRunner(DecodeCudaGraphRunner):  # type: ignore[misc]
    """SGLang's runner of decode steps with graphs that are captured on demand."""

    # Batch sizes that have a graph, ascending.
    capture_bs: list[int]
    # Batch sizes to be captured, ascending; the next one is the last.
    pending: list[int]

    def capture(self) -> None:
        """Prepares captures, at the end of SGLang's constructor, without capturing anything."""
        self.warmup()
        # Without this, SGLang imports another model's kernels to check for speculative decoding.
        self._metadata_prep_fork_resolved = True
        self.pending, self.capture_bs = sorted(self.capture_bs), []

    def can_run_graph(self, forward_batch: Any) -> bool:
        return bool(self.capture_bs) and bool(super().can_run_graph(forward_batch))

    def capture_next(self) -> int:
        """Captures the largest pending batch size and returns it. Raises SGLang's errors; the size
        is then neither pending nor captured. REQUIRES: nothing runs."""
        ready, size = self.capture_bs, self.pending.pop()
        self.capture_bs = [size]
        gc.disable()  # no tensor may be freed during a capture
        try:
            with torch.no_grad(), model_capture_mode():
                super().capture()
            ready = sorted([*ready, size])
        finally:
            gc.enable()
            self.capture_bs = ready
        return size

    def drop(self) -> None:
        """Removes all graphs. REQUIRES: nothing runs."""
        self.pending, self.capture_bs = [], []
        self.backend.cleanup()


class DecodeGraphs:
    """Schedule of captures. Thread rule: the engine's thread. All ranks see the same steps, so all
    capture at the same time, as a capture requires."""

    def __init__(self, scheduler: Any, ranks: int = 1) -> None:
        self._ranks = ranks
        self._runner = _runner_of(scheduler)
        self._decoded = False
        self._steps = 0  # decode steps since the last capture
        self.captures_s: list[float] = []  # duration of each capture, in order

    @property
    def pending(self) -> bool:
        """True if an idle engine should be stepped to capture a graph."""
        return self._decoded and self._runner is not None and bool(self._runner.pending)

    def decoded(self) -> None:
        """Records a decode step."""
        self._decoded = True
        self._steps += 1

    def between_steps(self, *, is_idle: bool) -> bool:
        """Captures a graph if one is due. Returns whether it did."""
        due_steps = BUSY_STEPS_PER_CAPTURE if self.captures_s else FIRST_CAPTURE_STEPS
        if not self.pending or not (is_idle or self._steps >= due_steps):
            return False
        self._steps = 0
        self._capture()
        return True

    def _capture(self) -> None:
        """Captures a graph. If that fails, the engine captures no further ones.

        With several ranks the error is raised, since the other ranks wait in their captures.
        """
        runner, started_s = self._runner, time.monotonic()
        assert runner is not None
        try:
            size = runner.capture_next()
        except Exception as error:  # any error: graphs are optional
            if self._ranks > 1:
                raise
            _set_capture_attention_variant(None)
            runner.pending.clear()
            log.warning(
                "no further CUDA graphs for this model: %s; if memory is short, raise engine.static"
                " or set engine.cuda_graphs: off\n%s",
                error,
                traceback.format_exc(),
            )
            return
        seconds = time.monotonic() - started_s
        self.captures_s.append(seconds)
        log.info("captured the decode graph of batch size %d in %.3f s", size, seconds)


def drop(scheduler: Any) -> None:
    """Removes a model's graphs, which hold memory of the driver and of torch."""
    runner = _runner_of(scheduler)
    if runner is not None:
        runner.drop()


def _runner_of(scheduler: Any) -> LazyGraphRunner | None:
    """Returns the runner of decode graphs, None on a host device or without graphs."""
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    return runner if isinstance(runner, LazyGraphRunner) else None
