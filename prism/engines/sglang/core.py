"""SGLang as a `prism.engines.core.EngineCore`."""

from __future__ import annotations

import itertools
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kvcached
from prism.config.checks.memory_needs import BLOCK_TOKENS
from prism.engines.core import EngineContext, RequestTotals, ShrinkCall, StepOutput
from prism.engines.gpu_share import GpuShare
from prism.engines.kv_direct import DirectMoves
from prism.engines.model_memory import MemoryPlan, plan
from prism.engines.model_weights import ModelWeights, StoreAccess
from prism.engines.request_checks import failure
from prism.engines.sglang import gpu, grammar_process, host, warm_up
from prism.engines.sglang.active import ActiveModel
from prism.engines.sglang.decode_graphs import DecodeGraphs
from prism.engines.sglang.lora import Adapters
from prism.engines.sglang.memory import EngineMemory
from prism.engines.sglang.scheduler import Emission, InProcessScheduler
from prism.engines.timeline import Timeline
from prism.errors import (
    ActivationError,
    EngineError,
    RankLostError,
    RequestError,
    RequestsFailedError,
    SelfCheckError,
)
from prism.messages.engine import Activated, ActivateEngine, EngineStatus
from prism.messages.gpu import OutsideMemory
from prism.messages.requests import Chunk, Failure, Request
from prism.models.prefill_speed import Speed

log = logging.getLogger("prism.engine")


@dataclass(slots=True)
class _Running:
    request: Request
    sent_tokens: int = 0
    cancelled: bool = False


class SglangCore:
    """One engine process, one model at a time.

    Thread rule: one thread. Weights and the static share of a model are held while it is active; KV
    above `reserve_bytes` varies with its requests.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._grammars = grammar_process.start()  # while this process is small
        self._device = context.open_device()
        self._client, self._share = GpuShare.open(context, self._device, gpu.needs(context.device))
        place = context.config.device(context.device)
        # Addresses for the KV space and weights of each active model.
        pages = -(-place.capacity_bytes // place.page_bytes)
        self._client.reserve_addresses(2 * pages * place.page_bytes)
        self._access = StoreAccess.open(context, self._client, gpu.weight_key)
        self._links = self._access.links
        self._active: ActiveModel | None = None
        self._by_rid: dict[str, _Running] = {}
        self._rids = itertools.count()
        self._rejected: list[Failure] = []
        self._totals = RequestTotals()
        self._speeds: dict[str, Speed] = {}
        self._broken: EngineError | None = None

    # --- activation and deactivation -------------------------------------------------------

    def activate(self, order: ActivateEngine) -> Activated:
        """Activates a model. Stages:

        "shrink": other engines free memory.
        "reserve": memory is reserved in the ledger.
        "store": SGLang's configuration, hash of the files, lookup of the stored copy.
        "layout": the model is built on the meta device, its parameters are placed in pages.
        "weights": the weights are loaded.
        "build": KV space and SGLang's scheduler.
        "warm_up": the first tokens.
        "keep": a copy of the weights is stored.
        """
        timeline = Timeline()
        place = self._context.config.device(self._context.device)
        layout = plan(
            order,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            static_bytes=self._share.model_bytes(order.model.lora.size_bytes),
        )
        memory = self._reserve(order, layout, timeline)
        timeline.enter("store")
        scheduler, fingerprint = self._build(order, memory)
        direct = DirectMoves(memory.kv, self._context.ranks, self._context.config)
        graphs = DecodeGraphs(scheduler, self._context.ranks.size)
        adapters = Adapters(scheduler, order.model, self._context.ranks)
        self._active = ActiveModel(order, memory, scheduler, direct, graphs, adapters)
        return Activated(
            model=order.model.name,
            quantum_bytes=layout.quantum_bytes,
            quantum_tokens=layout.slab_tokens,
            floor_bytes=memory.kv.floor_bytes(),
            reserve_bytes=layout.reserve_bytes,
            static_bytes=memory.static_bytes,
            block_tokens=BLOCK_TOKENS,
            max_running=order.max_running,
            stages_s=timeline.finish(),
            fingerprint=fingerprint,
            link_bytes=memory.weights.link_bytes,
        )

    def _reserve(
        self, order: ActivateEngine, layout: MemoryPlan, timeline: Timeline
    ) -> EngineMemory:
        weights = ModelWeights(self._client, self._access, order.model)
        ranks = self._context.ranks
        try:
            return EngineMemory(
                self._client,
                self._device,
                weights,
                order=order,
                plan=layout,
                timeline=timeline,
                ranks=ranks,
            )
        except ActivationError:
            self._share.settle(served=False)
            raise

    def _build(
        self, order: ActivateEngine, memory: EngineMemory
    ) -> tuple[InProcessScheduler, tuple[int, ...]]:
        """Builds the scheduler and warms the model up. Returns it with the model's fingerprint.

        Raises ActivationError for any error of SGLang, since bad files cause errors of every kind.
        """
        scheduler: InProcessScheduler | None = None
        try:
            engine, device = self._context.config.engine, self._context.device
            torch_bytes = self._share.torch_cap_bytes + order.model.lora.size_bytes
            gpu.adopt(self._client, device, torch_bytes)
            scheduler = host.build(order, memory, engine, device)
            scheduler.grammar_manager.serve_from(self._grammars)
            gpu.name_streams(self._client, device, scheduler)
            memory.timeline.enter("warm_up")
            fingerprint = warm_up.run(scheduler, order, memory.weights.fingerprint())
            if gpu.is_gpu(device) and not order.model.embedding:
                warm_up.sample(scheduler, order, memory.ranks)
            memory.timeline.enter("keep")
            memory.weights.save_copy(fingerprint)
            return scheduler, fingerprint
        except RankLostError:
            raise  # not an error of the model: this process ends
        except Exception as error:  # noqa: BLE001
            if isinstance(error, SelfCheckError):
                memory.weights.discard_copy(str(error))
            failure = _activation_error(order, error, device)
            error.__traceback__ = None
        host.tear_down(scheduler, device)
        del scheduler
        host.release_heap(device)
        memory.release()
        self._share.settle(served=False)
        raise failure

    def deactivate(self) -> None:
        active, self._active = self._active, None
        if active is None:
            return
        self._totals.retractions += active.scheduler.retractions_total
        self._by_rid.clear()
        self._rejected.clear()
        memory, device = active.memory, self._context.device
        host.tear_down(active.scheduler, device)
        del active
        host.release_heap(device)
        memory.release()
        self._share.settle()

    def close(self) -> None:
        self.deactivate()
        if self._links is not None:
            self._links.close()
        self._client.close()
        self._grammars.close()

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        if self._active is not None:
            self._active.memory.set_limit(kv_limit_bytes)

    def fileno(self) -> int:
        return (self._links or self._client).fileno()

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        lent = self._links.answer_requests() if self._links is not None else False
        return self._client.answer_requests(shrink or self.shrink) is not None or lent

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        return self._active.shrink(size_bytes) if self._active else kvcached.Shrunk()

    # --- requests --------------------------------------------------------------------------

    def submit(self, requests_: Sequence[Request]) -> None:
        active = self._required()
        for request in requests_:
            rid = f"{next(self._rids)}/"  # with a slash, since SGLang cancels by prefix of the id
            try:
                self._totals.imported_tokens += active.submit(request, rid)
            except RequestError as error:
                self._rejected.append(failure(request, error))
                continue
            self._by_rid[rid] = _Running(
                request, len(request.resume.output_ids) if request.resume else 0
            )
            self._totals.prompt_tokens += len(request.prompt_ids)

    def cancel(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        for rid, running in list(self._by_rid.items()):
            if running.request.id in wanted and not running.cancelled:
                running.cancelled = True
                self._required().scheduler.cancel(rid)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        active, moves_dir = self._active, self._context.config.moves_dir
        if active is None:
            return []
        leaving = [(rid, r.request) for rid, r in self._by_rid.items() if not r.cancelled]
        for rid, _ in leaving:
            del self._by_rid[rid]
        return [active.export(rid, request, targets, moves_dir) for rid, request in leaving]

    def handing_over(self) -> bool:
        return self._active is not None and self._active.memory.kv.open_offers() > 0

    def step(self) -> StepOutput:
        output = StepOutput(failures=self._rejected)
        self._rejected = []
        if self._broken is not None:
            raise self._broken
        active = self._active
        if active is None:
            return output
        is_idle = active.scheduler.is_fully_idle()
        if not active.graphs.between_steps(is_idle=is_idle) and not is_idle:
            self._computing_step(active, output)
        for emission in active.scheduler.outbox.take():
            self._deliver(emission, output)
        is_idle = active.scheduler.is_fully_idle()
        if is_idle and not gpu.is_gpu(self._context.device):
            active.memory.kv.trim()  # on a GPU, kvcached's thread returns unused pages later
        output.busy = self._broken is not None or not is_idle or active.graphs.pending
        return output

    def _computing_step(self, active: ActiveModel, output: StepOutput) -> None:
        """Runs a step. If torch runs out of memory, SGLang's state is unknown. The requests of the
        step then fail, since they would break the next engine too, and this engine ends at its next
        step."""
        try:
            self._measured_step(active)
        except torch.OutOfMemoryError as error:
            text = _out_of_memory_text(self._context.device, error)
            self._broken = RequestsFailedError(text)
            if active.memory.ranks.size > 1:
                self._broken = EngineError(text)
                raise self._broken from error  # the other ranks wait for this one
            for req in active.scheduler.stepping_reqs():
                if (running := self._by_rid.pop(req.rid, None)) is not None:
                    lost = running.request
                    output.failures.append(Failure(lost.id, lost.attempt, "engine_memory", text))

    def _measured_step(self, active: ActiveModel) -> None:
        started_s = time.monotonic()
        batch = active.scheduler.step()
        if batch is None:
            return
        if batch.forward_mode.is_decode():
            active.graphs.decoded()
        elif batch.forward_mode.is_extend():
            speed = self._speeds.setdefault(active.order.model.name, Speed())
            speed.add(int(batch.extend_num_tokens or 0), time.monotonic() - started_s)

    def _deliver(self, emission: Emission, output: StepOutput) -> None:
        running = self._by_rid.get(emission.rid)
        if running is None:
            return
        first_index = running.sent_tokens
        running.sent_tokens += len(emission.token_ids)
        self._totals.output_tokens += len(emission.token_ids)
        if emission.finish is not None:
            del self._by_rid[emission.rid]
        request, finish = running.request, emission.finish
        if finish == "abort":
            finish = "cancelled"
        if finish == "cancelled" and not running.cancelled:
            output.failures.append(_failure(request, emission))
            return
        cached = emission.cached_tokens if first_index == 0 else 0
        output.chunks.append(
            Chunk(
                request.id,
                request.attempt,
                first_index,
                emission.token_ids,
                finish,
                cached,
                emission.logprobs,
                emission.prompt_logprobs,
                emission.embedding,
            )
        )

    # --- status ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        active, totals, usage = self._active, self._totals, self._client.usage()
        retractions = totals.retractions
        figures: dict[str, Any] = {}
        if active is not None:
            self._client.publish_evictable(active.evictable_bytes())
            retractions += active.scheduler.retractions_total
            figures = active.figures()
            figures["running"] = len(self._by_rid) - figures["waiting"]
            figures["kv_mapped_bytes"] = usage.committed_bytes
            speed = self._speeds.get(figures["model"])
            figures["prefill_tokens_per_s"] = speed.tokens_per_s if speed else 0.0
        return EngineStatus(
            engine_id=self._context.engine_id,
            prompt_tokens_total=totals.prompt_tokens,
            output_tokens_total=totals.output_tokens,
            retractions_total=retractions,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
            imported_tokens_total=totals.imported_tokens,
            outside=self._outside(),
            **({"model": None} | figures),
        )

    def _outside(self) -> OutsideMemory | None:
        return self._share.report(partial(gpu.torch_reserved_bytes, self._context.device))

    def _required(self) -> ActiveModel:
        if self._active is None:
            raise RuntimeError("no model is active")
        return self._active


def _failure(request: Request, emission: Emission) -> Failure:
    code = "invalid_request_error" if emission.refused else "engine_error"
    message = emission.message or "SGLang ended the request"
    return Failure(request.id, request.attempt, code, message, not emission.refused)


def _activation_error(order: ActivateEngine, error: Exception, device: str) -> ActivationError:
    """Returns the error with the model's name and the reason. An ActivationError has both."""
    if isinstance(error, ActivationError):
        return type(error)(str(error), error.missing_bytes)
    name = order.model.name
    # Logged as text, since a record with the traceback would keep the model's tensors alive.
    trace = "".join(traceback.format_exception(error))
    log.warning("model %s could not be loaded\n%s", name, trace)
    if isinstance(error, torch.OutOfMemoryError):
        reason = _out_of_memory_text(device, error)
    else:
        reason = f"{type(error).__name__}: {error}"
    return ActivationError(f"model {name} could not be loaded: {reason}")


def _out_of_memory_text(device: str, error: torch.OutOfMemoryError) -> str:
    """Returns the message for an allocation beyond torch's cap, a part of the engine's lease."""
    first = str(error).partition("\n")[0] or type(error).__name__
    return (
        f"torch ran out of the engine's own memory on {device} ({first}); raise engine.static, or"
        " lower engine.max_running or engine.prefill_chunk_tokens"
    )
