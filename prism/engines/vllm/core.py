"""vLLM as a `prism.engines.core.EngineCore`.

KV does not move between engines: an exported request keeps its output, and its KV is computed
again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.engine import FinishReason

import kvcached
from prism.engines.core import EngineContext, RequestTotals, ShrinkCall, StepOutput
from prism.engines.gpu_share import GpuShare
from prism.engines.model_memory import MemoryPlan
from prism.engines.model_weights import FINGERPRINT_TOKENS, ModelWeights, StoreAccess
from prism.engines.request_checks import failure
from prism.engines.self_check import WARM_UP_ID, check_answer, warm_up_request
from prism.engines.timeline import Timeline
from prism.engines.vllm import host
from prism.engines.vllm.capabilities import needs, weight_key
from prism.engines.vllm.memory import EngineMemory, plan
from prism.engines.vllm.requests import convert, logprobs_of
from prism.engines.vllm.scheduler import PoolScheduler
from prism.errors import ActivationError, RequestError, SelfCheckError
from prism.messages.engine import Activated, ActivateEngine, EngineStatus
from prism.messages.requests import Chunk, Failure, Request, Resume, Sampling
from prism.models.prefill_speed import Speed

_FINISHED = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_WARM_UP_STEPS_MAX = 16


@dataclass(slots=True)
class _Running:
    request: Request
    output_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Active:
    """vLLM's engine core for one model, and the model's memory."""

    order: ActivateEngine
    memory: EngineMemory
    vllm: Any

    @property
    def scheduler(self) -> PoolScheduler:
        scheduler: PoolScheduler = self.vllm.scheduler
        return scheduler


class VllmCore:
    """One engine process, one model at a time. Thread rule: one thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._device = context.open_device()
        self._client, self._share = GpuShare.open(context, self._device, needs(context.device))
        place = context.config.device(context.device)
        # Addresses for the KV space and weights of each active model.
        pages = -(-place.capacity_bytes // place.page_bytes)
        self._client.reserve_addresses(2 * pages * place.page_bytes)
        self._access = StoreAccess.open(context, self._client, weight_key)
        self._links = self._access.links
        self._active: _Active | None = None
        self._by_rid: dict[str, _Running] = {}
        self._rids = itertools.count()
        self._ended = StepOutput()  # ends of requests to report with the next step
        self._totals = RequestTotals()
        self._speeds: dict[str, Speed] = {}

    # --- activation and deactivation -------------------------------------------------------

    def activate(self, order: ActivateEngine) -> Activated:
        """Activates a model. Stages:

        "shrink": other engines free memory.
        "reserve": memory is reserved in the ledger.
        "store": vLLM's configuration, hash of the files, lookup of the stored copy.
        "layout": the model is built on the meta device, its parameters are placed in pages.
        "weights": the weights are loaded.
        "build": KV space and vLLM's scheduler.
        "warm_up": the first tokens.
        "keep": a copy of the weights is stored.
        """
        timeline = Timeline()
        place = self._context.config.device(self._context.device)
        planned = plan(
            order,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            static_bytes=self._share.model_bytes(),
        )
        memory = self._reserve(order, planned, timeline)
        timeline.enter("store")
        fingerprint = self._build(order, memory)
        return Activated(
            model=order.model.name,
            quantum_bytes=planned.quantum_bytes,
            quantum_tokens=planned.slab_tokens,
            floor_bytes=memory.kv.floor_bytes(),
            reserve_bytes=planned.reserve_bytes,
            static_bytes=memory.static_bytes,
            block_tokens=order.model.block_tokens,
            max_running=order.max_running,
            stages_s=timeline.finish(),
            fingerprint=fingerprint,
            link_bytes=memory.weights.link_bytes,
        )

    def _reserve(
        self, order: ActivateEngine, planned: MemoryPlan, timeline: Timeline
    ) -> EngineMemory:
        weights = ModelWeights(self._client, self._access, order.model)
        try:
            return EngineMemory(
                self._client, self._device, weights, order=order, plan=planned, timeline=timeline
            )
        except ActivationError:
            self._share.settle(served=False)
            raise

    def _build(self, order: ActivateEngine, memory: EngineMemory) -> tuple[int, ...]:
        """Builds vLLM and warms the model up. Returns the model's fingerprint.

        Raises ActivationError for any error of vLLM, since bad files cause errors of every kind.
        """
        try:
            vllm = host.build(order, memory, self._context.config.engine)
            self._active = _Active(order, memory, vllm)
            del vllm
            memory.timeline.enter("warm_up")
            fingerprint = self._warm_up(order, memory.weights.fingerprint())
            memory.timeline.enter("keep")
            memory.weights.save_copy(fingerprint)
            return fingerprint
        except Exception as error:  # noqa: BLE001
            if isinstance(error, SelfCheckError):
                memory.weights.discard_copy(str(error))
            problem = _activation_error(order, error)
            error.__traceback__ = None
        self._take_down(memory, served=False)
        raise problem

    def _warm_up(self, order: ActivateEngine, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns greedy tokens for a fixed prompt. Raises SelfCheckError for wrong tokens."""
        active = self._required()
        vocab_size = active.vllm.vllm_config.model_config.get_vocab_size()
        greedy = Sampling(max_tokens=FINGERPRINT_TOKENS, temperature=0.0, ignore_eos=True)
        request = warm_up_request(order, vocab_size, greedy)
        active.vllm.add_request(
            convert(request, WARM_UP_ID, active.vllm, order.model.context_length)
        )
        tokens: list[int] = []
        for _ in range(_WARM_UP_STEPS_MAX):
            tokens += [token for output in self._computed(active) for token in output.new_token_ids]
        check_answer(order, stored, tuple(tokens), [])
        return tuple(tokens)

    def deactivate(self) -> None:
        active = self._active
        if active is None:
            return
        self._totals.retractions += active.scheduler.retractions_total
        self._by_rid.clear()
        self._ended = StepOutput()
        memory = active.memory
        del active
        self._take_down(memory)

    def _take_down(self, memory: EngineMemory, *, served: bool = True) -> None:
        """Tears vLLM down and releases the model's memory. REQUIRES: vLLM is referenced only
        here."""
        active, self._active = self._active, None
        host.tear_down(active.vllm if active else None)
        del active
        host.release_heap()
        memory.release()
        self._share.settle(served=served)

    def close(self) -> None:
        self.deactivate()
        if self._links is not None:
            self._links.close()
        self._client.close()

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        if self._active is not None:
            self._active.memory.set_limit(kv_limit_bytes)

    def fileno(self) -> int:
        return (self._links or self._client).fileno()

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        lent = self._links.answer_requests() if self._links is not None else False
        return self._client.answer_requests(shrink or self.shrink) is not None or lent

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        if self._active is None:
            return kvcached.Shrunk()
        return self._active.scheduler.pool.shrink(size_bytes)

    # --- requests --------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        active = self._required()
        for request in requests:
            rid = str(next(self._rids))
            try:
                converted = convert(request, rid, active.vllm, active.order.model.context_length)
            except RequestError as error:
                self._ended.failures.append(failure(request, error))
                continue
            active.vllm.add_request(converted)
            output_ids = list(request.resume.output_ids) if request.resume else []
            self._by_rid[rid] = _Running(request, output_ids)
            self._totals.prompt_tokens += len(request.prompt_ids)

    def cancel(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        for rid, running in list(self._by_rid.items()):
            if running.request.id in wanted:
                self._drop(rid)
                self._ended.chunks.append(_chunk(running, [], "cancelled"))

    def _drop(self, rid: str) -> _Running:
        self._required().vllm.abort_requests([rid])
        return self._by_rid.pop(rid)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        leaving = [self._drop(rid) for rid in list(self._by_rid)]
        return [msgspec.structs.replace(r.request, resume=Resume(r.output_ids)) for r in leaving]

    def handing_over(self) -> bool:
        return False

    def step(self) -> StepOutput:
        output, self._ended = self._ended, StepOutput()
        active = self._active
        if active is None:
            return output
        for made in self._measured(active):
            if (running := self._by_rid.get(made.request_id)) is not None:
                self._deliver(made, running, output)
        output.busy = active.scheduler.has_requests()
        if not output.busy:
            active.memory.kv.trim()
        return output

    def _measured(self, active: _Active) -> list[Any]:
        left, started_s = active.scheduler.prefill_left(), time.monotonic()
        outputs = self._computed(active)
        if (prefilled := left - active.scheduler.prefill_left()) > 0:
            speed = self._speeds.setdefault(active.order.model.name, Speed())
            speed.add(prefilled, time.monotonic() - started_s)
        return outputs

    def _computed(self, active: _Active) -> list[Any]:
        """Runs one step of vLLM and returns its outputs."""
        outputs, _ = active.vllm.step()
        return list(outputs[0].outputs) if 0 in outputs else []

    def _deliver(self, made: Any, running: _Running, output: StepOutput) -> None:
        reason = made.finish_reason
        if reason is not None:
            del self._by_rid[made.request_id]
        if reason is not None and reason not in _FINISHED:
            request, text = running.request, f"vLLM ended the request: {reason}"
            output.failures.append(
                Failure(request.id, request.attempt, "engine_error", text, retryable=True)
            )
            return
        first = made.prefill_stats
        chunk = _chunk(running, made.new_token_ids, None if reason is None else _FINISHED[reason])
        output.chunks.append(
            msgspec.structs.replace(
                chunk,
                cached_tokens=first.num_cached_tokens if first else 0,
                logprobs=logprobs_of(made.new_logprobs),
                prompt_logprobs=logprobs_of(made.new_prompt_logprobs_tensors),
            )
        )
        running.output_ids += made.new_token_ids
        self._totals.output_tokens += len(made.new_token_ids)

    # --- status ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        totals, usage = self._totals, self._client.usage()
        retractions, figures = totals.retractions, dict[str, Any]()
        if self._active is not None:
            retractions += self._active.scheduler.retractions_total
            figures = self._figures(self._active)
            figures["kv_mapped_bytes"] = usage.committed_bytes
        return EngineStatus(
            engine_id=self._context.engine_id,
            prompt_tokens_total=totals.prompt_tokens,
            output_tokens_total=totals.output_tokens,
            retractions_total=retractions,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
            **({"model": None} | figures),
        )

    def _figures(self, active: _Active) -> dict[str, Any]:
        """Returns the model's part of EngineStatus, and publishes the evictable bytes."""
        scheduler, kv, model = active.scheduler, active.memory.kv, active.order.model
        pool, waiting = scheduler.pool, len(scheduler.waiting_requests())
        self._client.publish_evictable(pool.evictable_bytes_max())
        cached_blocks = int(pool.free_block_queue.num_free_blocks)
        speed = self._speeds.get(model.name)
        return {
            "model": model.name,
            "waiting": waiting,
            "running": len(self._by_rid) - waiting,
            "available_tokens": (kv.available_blocks() + cached_blocks) * model.block_tokens,
            "free_mapped_tokens": kv.free_mapped_blocks() * model.block_tokens,
            "evictable_tokens": cached_blocks * model.block_tokens,
            "pending_prefill_tokens": scheduler.prefill_left(),
            "prefill_tokens_per_s": speed.tokens_per_s if speed else 0.0,
            "static_bytes": active.memory.static_bytes,
        }

    def _required(self) -> _Active:
        if self._active is None:
            raise RuntimeError("no model is active")
        return self._active


def _chunk(running: _Running, token_ids: list[int], reason: str | None) -> Chunk:
    request = running.request
    return Chunk(request.id, request.attempt, len(running.output_ids), list(token_ids), reason)


def _activation_error(order: ActivateEngine, error: Exception) -> ActivationError:
    """Returns the error with the model's name and the reason. An ActivationError has both."""
    if isinstance(error, ActivationError):
        return type(error)(str(error), error.missing_bytes)
    reason = f"{type(error).__name__}: {error}"
    return ActivationError(f"model {order.model.name} could not be loaded: {reason}")
