"""The fake engine as a `prism.engines.core.EngineCore`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import msgspec

import kvcached
from prism.engines.core import EngineContext, RequestTotals, ShrinkCall, StepOutput
from prism.engines.fake import leak
from prism.engines.fake.batch import FakeBatch
from prism.engines.fake.memory import FakeMemory
from prism.engines.fake.options import FakeOptions, needs
from prism.engines.fake.weights import FakeWeights
from prism.engines.gpu_share import GpuShare
from prism.engines.timeline import Timeline
from prism.errors import ActivationError, SelfCheckError
from prism.messages.engine import Activated, ActivateEngine, EngineStatus
from prism.messages.requests import Request
from prism.models.prefill_speed import Speeds


class FakeCore:
    """`prism.engines.core.EngineCore` of the fake engine."""

    def __init__(self, context: EngineContext, options: FakeOptions) -> None:
        self._context = context
        self._options = options
        self._device = context.open_device()
        self._client, self._share = GpuShare.open(context, self._device, needs(context.device))
        self._leak(options.leak_idle_bytes)
        self._weights = FakeWeights(self._client, context) if options.load_weights else None
        self._batch: FakeBatch | None = None
        self._served = False
        self._totals = RequestTotals()
        self._speeds: dict[str, Speeds] = {}

    # --- activation and deactivation -------------------------------------------------------

    def activate(self, order: ActivateEngine) -> Activated:
        """Activates a model. Stages: "shrink", "reserve", "weights" (takes activation_s),
        "build"."""
        timeline = Timeline()
        name = order.model.name
        must_fail = {name, "*"} & set(self._options.fail_activation)
        if must_fail and self._options.claim_fault():
            raise ActivationError(f"PRISM_FAKE fails the activation of {name}")
        if name in self._options.fail_reuse and self._served and self._options.claim_fault():
            raise SelfCheckError(f"PRISM_FAKE fails the self-check of {name}")
        share_bytes = self._share.model_bytes()
        try:
            memory = FakeMemory(
                self._client,
                self._device,
                self._context,
                order,
                timeline,
                share_bytes=share_bytes,
            )
        except ActivationError:
            self._share.settle(served=False)
            raise
        self._leak(self._options.leak_bytes)
        timeline.enter("weights")
        if name in self._options.die_in_activation and self._options.claim_fault():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._options.activation_s)
        link_bytes = self._load_weights(memory, order)
        timeline.enter("build")
        self._served = True
        self._batch = FakeBatch(
            order,
            memory,
            self._context.config.engine,
            self._options,
            totals=self._totals,
            speeds=self._speeds.setdefault(name, Speeds()),
            ranks=self._context.ranks.size,
        )
        activated = memory.describe(order, self._batch.max_running)
        activated.stages_s.update(timeline.finish())
        return msgspec.structs.replace(activated, link_bytes=link_bytes)

    def _leak(self, size_bytes: int) -> None:
        if size_bytes and self._options.claim_fault():
            leak.take(self._context.device, size_bytes)

    def _load_weights(self, memory: FakeMemory, order: ActivateEngine) -> dict[str, int]:
        if self._weights is None:
            return {}
        memory.release_weight_lease()
        try:
            return self._weights.load(order.model)
        except ActivationError:
            memory.free()
            self._share.settle(served=False)
            raise

    def deactivate(self) -> None:
        if self._batch is None:
            return
        if self._weights is not None:
            self._weights.free()
        self._batch.memory.free()
        self._share.settle()
        self._batch = None

    def close(self) -> None:
        self.deactivate()
        if self._weights is not None:
            self._weights.close()
        self._client.close()

    def fileno(self) -> int:
        return (self._weights.links if self._weights else self._client).fileno()

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        lent = self._weights.links.answer_requests() if self._weights else False
        return self._client.answer_requests(shrink or self.shrink) is not None or lent

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        return self._batch.memory.shrink(size_bytes) if self._batch else kvcached.Shrunk()

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        if self._batch is not None:
            self._batch.memory.set_limit(kv_limit_bytes)

    # --- requests --------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        assert self._batch is not None
        self._batch.submit(requests)

    def cancel(self, request_ids: Sequence[str]) -> None:
        if self._batch is not None:
            self._batch.cancel(request_ids)

    def pause(self, request_ids: Sequence[str]) -> None:
        if self._batch is not None:
            self._batch.pause(request_ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        if self._batch is not None:
            self._batch.resume(request_ids)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        return self._batch.export(targets) if self._batch else []

    def handing_over(self) -> bool:
        return self._batch is not None and self._batch.memory.kv.open_offers() > 0

    def step(self) -> StepOutput:
        return self._batch.step() if self._batch else StepOutput()

    # --- status ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        totals, usage = self._totals, self._client.usage()
        return EngineStatus(
            engine_id=self._context.engine_id,
            prompt_tokens_total=totals.prompt_tokens,
            output_tokens_total=totals.output_tokens,
            retractions_total=totals.retractions,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
            imported_tokens_total=totals.imported_tokens,
            outside=self._share.report(),
            **(self._batch.figures() if self._batch else {"model": None}),
        )
