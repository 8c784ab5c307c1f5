"""vLLM as a `prism.engines.core.EngineCore`.

KV does not move between engines: an exported request keeps its output, and its KV is computed
again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.engine import FinishReason

import kvcached
from prism.engines.core import EngineContext, StepOutput
from prism.engines.model_core import ModelCore
from prism.engines.self_check import WARM_UP_ID, check_answer, warm_up_request
from prism.engines.vllm import host
from prism.engines.vllm.capabilities import needs, weight_key
from prism.engines.vllm.memory import EngineMemory, plan
from prism.engines.vllm.request_conversion import convert, logprobs_of
from prism.engines.vllm.scheduler import PoolScheduler
from prism.engines.weights.model_weights import FINGERPRINT_TOKENS
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Chunk, Failure, Request, Resume, Sampling

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

    def shrink(self, size_bytes: int | None) -> kvcached.Shrunk:
        return self.scheduler.pool.shrink(size_bytes)

    def evictable_bytes(self) -> int:
        return self.scheduler.pool.evictable_bytes_max()

    def figures(self) -> dict[str, Any]:
        scheduler, kv, model = self.scheduler, self.memory.kv, self.order.model
        cached_blocks = int(scheduler.pool.free_block_queue.num_free_blocks)
        return {
            "model": model.name,
            "waiting": len(scheduler.waiting_requests()),
            "available_tokens": (kv.available_blocks() + cached_blocks) * model.block_tokens,
            "free_mapped_tokens": kv.free_mapped_blocks() * model.block_tokens,
            "evictable_tokens": cached_blocks * model.block_tokens,
            "pending_prefill_tokens": scheduler.prefill_left(),
            "static_bytes": self.memory.static_bytes,
        }


class VllmCore(ModelCore[EngineMemory, _Active, _Running]):
    """One engine process, one model at a time. Thread rule: one thread."""

    memory_class = EngineMemory
    plan = staticmethod(plan)

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context, needs(context.device), weight_key)

    # --- activation and deactivation -------------------------------------------------------

    def _start(self, order: ActivateEngine, memory: EngineMemory) -> _Active:
        return _Active(order, memory, host.build(order, memory, self._context.config.engine))

    def _warm_up(self, active: _Active) -> tuple[int, ...]:
        """Returns greedy tokens for a fixed prompt. Raises SelfCheckError for wrong tokens."""
        order = active.order
        vocab_size = active.vllm.vllm_config.model_config.get_vocab_size()
        greedy = Sampling(max_tokens=FINGERPRINT_TOKENS, temperature=0.0, ignore_eos=True)
        request = warm_up_request(order, vocab_size, greedy)
        active.vllm.add_request(
            convert(request, WARM_UP_ID, active.vllm, order.model.context_length)
        )
        tokens: list[int] = []
        for _ in range(_WARM_UP_STEPS_MAX):
            tokens += [token for output in self._computed(active) for token in output.new_token_ids]
        check_answer(order, active.memory.weights.fingerprint(), tuple(tokens), [])
        return tuple(tokens)

    def _tear_down(self) -> None:
        active, self._active = self._active, None
        host.tear_down(active.vllm if active else None)
        del active
        host.release_heap()

    # --- requests --------------------------------------------------------------------------

    def _submit(self, active: _Active, request: Request, rid: str) -> _Running:
        converted = convert(request, rid, active.vllm, active.order.model.context_length)
        active.vllm.add_request(converted)
        return _Running(request, list(request.resume.output_ids) if request.resume else [])

    def cancel(self, request_ids: Sequence[str]) -> None:
        cancelled = [self._drop(rid) for rid in self._rids_of(request_ids)]
        self._ended.chunks += [_chunk(running, [], "cancelled") for running in cancelled]

    def _drop(self, rid: str) -> _Running:
        self._required().vllm.abort_requests([rid])
        return self._by_rid.pop(rid)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        leaving = [self._drop(rid) for rid in list(self._by_rid)]
        return [msgspec.structs.replace(r.request, resume=Resume(r.output_ids)) for r in leaving]

    def _step(self, active: _Active, output: StepOutput) -> bool:
        for made in self._measured(active):
            if (running := self._by_rid.get(made.request_id)) is not None:
                self._deliver(made, running, output)
        is_busy = active.scheduler.has_requests()
        if not is_busy:
            active.memory.kv.trim()
        return is_busy

    def _measured(self, active: _Active) -> list[Any]:
        left, started_s = active.scheduler.prefill_left(), time.monotonic()
        outputs = self._computed(active)
        if (prefilled := left - active.scheduler.prefill_left()) > 0:
            self._speeds_of(active).prefill.add(prefilled, time.monotonic() - started_s)
        elif outputs:
            self._speeds_of(active).steps.add(len(outputs), time.monotonic() - started_s)
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


def _chunk(running: _Running, token_ids: list[int], reason: str | None) -> Chunk:
    request = running.request
    return Chunk(request.id, request.attempt, len(running.output_ids), list(token_ids), reason)
