"""CUDA graphs of decode steps, captured after a model has begun to answer.

SGLang captures every batch size while it is built, which would be a part of every activation. Here
a model comes up without graphs and its steps are launched kernel by kernel. Graphs follow, one
batch size at a time, between two steps: a request that arrives waits for one capture at most. The
largest comes first, since a smaller batch may use its graph, padded, and since the memory of its
graph is then used by all others.

A graph holds addresses. Those of weights, KV and SGLang's buffers stay where they are until the
model leaves the engine, whatever pages come and go below them, so that is how long graphs last.
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

# An engine that is never idle captures one graph after so many steps.
PATIENCE_STEPS = 64

log = logging.getLogger("prism.engine")


class LazyGraphRunner(DecodeCudaGraphRunner):  # type: ignore[misc]
    """SGLang's runner of decode steps, whose graphs are captured on demand.

    `capture_bs` are the batch sizes that have a graph, ascending; `pending` those that still have
    none, the next one last.
    """

    capture_bs: list[int]
    pending: list[int]

    def capture(self) -> None:
        """Prepares captures, at the end of SGLang's constructor, without capturing anything."""
        self.warmup()
        # To find that no speculative draft is served, SGLang would import another model's kernels.
        self._metadata_prep_fork_resolved = True
        self.pending, self.capture_bs = sorted(self.capture_bs), []

    def can_run_graph(self, forward_batch: Any) -> bool:
        return bool(self.capture_bs) and bool(super().can_run_graph(forward_batch))

    def capture_next(self) -> int:
        """Captures the largest pending batch size and returns it. Raises the errors of SGLang; the
        size is then neither pending nor captured. REQUIRES: nothing runs."""
        ready, size = self.capture_bs, self.pending.pop()
        self.capture_bs = [size]
        gc.disable()  # no tensor may be freed in the middle of a capture
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
    """Decides when to capture. Thread rule: the engine's thread. With several ranks, all see the
    same steps and requests, so all capture at the same time, as a capture requires."""

    def __init__(self, scheduler: Any, ranks: int = 1) -> None:
        self._ranks = ranks
        self._runner = _runner_of(scheduler)
        self._answered = False
        self._steps = 0
        self.captures_s: list[float] = []  # of each graph, in order

    @property
    def pending(self) -> bool:
        """True if an idle engine should be stepped to capture a graph."""
        return self._answered and self._runner is not None and bool(self._runner.pending)

    def answered(self) -> None:
        """Records that a request got its whole answer."""
        self._answered = True

    def between_steps(self, *, is_idle: bool) -> bool:
        """Captures a graph if it is time for one. Returns whether it was."""
        self._steps += 1
        if not self.pending or not (is_idle or self._steps > PATIENCE_STEPS):
            return False
        self._steps = 0
        self._capture()
        return True

    def _capture(self) -> None:
        """Captures a graph. If that fails, the engine captures no further ones.

        With several ranks it raises the error, since the other ranks wait in their captures.
        """
        runner, started_s = self._runner, time.monotonic()
        assert runner is not None
        try:
            size = runner.capture_next()
        except Exception as error:  # of any kind: graphs are optional
            if self._ranks > 1:
                raise
            _set_capture_attention_variant(None)
            runner.pending.clear()
            log.warning(
                "no further CUDA graphs for this model: %s; if memory is short raise engine.static,"
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
