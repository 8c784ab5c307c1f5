"""SGLang as a `prism.engines.core.EngineCore`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from prism.engines.core import EngineContext, StepOutput
from prism.engines.kv_moves.moves import KVMoves
from prism.engines.model_core import ModelCore
from prism.engines.model_memory import plan
from prism.engines.sglang import host
from prism.engines.sglang.active import ActiveModel
from prism.engines.sglang.decode_graphs import DecodeGraphs
from prism.engines.sglang.grammars import grammar_process
from prism.engines.sglang.lora_adapters import Adapters
from prism.engines.sglang.memory import EngineMemory
from prism.engines.sglang.platform import gpu
from prism.engines.sglang.scheduling import moving, warm_up
from prism.engines.sglang.scheduling.scheduler import Emission
from prism.errors import EngineError, RequestsFailedError
from prism.messages.engine import ActivateEngine
from prism.messages.gpu_memory import OutsideMemory
from prism.messages.requests import Chunk, Failure, Request


@dataclass(slots=True)
class _Running:
    request: Request
    sent_tokens: int = 0
    cancelled: bool = False


class SglangCore(ModelCore[EngineMemory, ActiveModel, _Running]):
    """One engine process, one model at a time. Thread rule: one thread."""

    memory_class = EngineMemory
    plan = staticmethod(plan)

    def __init__(self, context: EngineContext) -> None:
        self._grammars = grammar_process.start()  # while this process is small
        super().__init__(context, gpu.needs(context.device), gpu.weight_key)
        self._broken: EngineError | None = None

    # --- activation and deactivation -------------------------------------------------------

    def _start(self, order: ActivateEngine, memory: EngineMemory) -> ActiveModel:
        engine, device, ranks = self._context.config.engine, self._context.device, memory.ranks
        torch_bytes = self._share.torch_cap_bytes + order.model.besides_weights_bytes
        gpu.adopt(self._client, device, torch_bytes + order.model.derived_bytes)  # while it loads
        scheduler = host.build(order, memory, engine, device)
        gpu.adopt(self._client, device, torch_bytes)
        try:
            scheduler.grammar_manager.serve_from(self._grammars)
            gpu.name_streams(self._client, device, scheduler)
            read, write = moving.read_rows, moving.write_rows
            moves = KVMoves(memory.kv, ranks, self._context.config, read, write)
            graphs = DecodeGraphs(scheduler, ranks.size)
            adapters = Adapters(scheduler, order.model, ranks)
            return ActiveModel(order, memory, scheduler, moves, graphs, adapters)
        except BaseException:
            host.tear_down(scheduler, device)
            raise

    def _warm_up(self, active: ActiveModel) -> tuple[int, ...]:
        stored = active.memory.weights.fingerprint()
        fingerprint = warm_up.run(active.scheduler, active.order, stored)
        if gpu.is_gpu(self._context.device) and not active.order.model.embedding:
            warm_up.sample(active.scheduler, active.order, active.memory.ranks)
        return fingerprint

    def _tear_down(self) -> None:
        device = self._context.device
        active, self._active = self._active, None
        host.tear_down(active.scheduler if active else None, device)
        del active
        host.release_heap(device)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, torch.OutOfMemoryError):
            return _out_of_memory_text(self._context.device, error)
        return super()._reason(error)

    def close(self) -> None:
        super().close()
        self._grammars.close()

    # --- requests --------------------------------------------------------------------------

    def _submit(self, active: ActiveModel, request: Request, rid: str) -> _Running:
        self._totals.imported_tokens += active.submit(request, rid)
        return _Running(request.without_tensors(), request.resumed_tokens)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for rid in self._rids_of(request_ids):
            self._by_rid[rid].cancelled = True
            self._required().scheduler.cancel(rid)

    def _rids_of(self, request_ids: Sequence[str]) -> list[str]:
        return [rid for rid in super()._rids_of(request_ids) if not self._by_rid[rid].cancelled]

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        active = self._active
        if active is None:
            return []
        leaving = [(rid, r.request) for rid, r in self._by_rid.items() if not r.cancelled]
        for rid, _ in leaving:
            del self._by_rid[rid]
        return [active.export(rid, request, targets) for rid, request in leaving]

    def _step(self, active: ActiveModel, output: StepOutput) -> bool:
        if self._broken is not None:
            raise self._broken
        is_idle = active.scheduler.is_idle()
        if not active.graphs.between_steps(is_idle=is_idle) and not is_idle:
            self._computing_step(active, output)
        for emission in active.scheduler.outbox.take():
            self._deliver(emission, output)
        is_idle = active.scheduler.is_idle()
        if is_idle and not gpu.is_gpu(self._context.device):
            active.memory.trim()  # on a GPU, kvcached's thread returns unused pages later
        return self._broken is not None or not is_idle or active.graphs.pending

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
            self._speeds_of(active).steps.add(batch.batch_size(), time.monotonic() - started_s)
        elif batch.forward_mode.is_extend():
            tokens = int(batch.extend_num_tokens or 0)
            self._speeds_of(active).prefill.add(tokens, time.monotonic() - started_s)

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

    def _outside(self) -> OutsideMemory | None:
        return self._share.report(partial(gpu.torch_reserved_bytes, self._context.device))


def _failure(request: Request, emission: Emission) -> Failure:
    code = "invalid_request_error" if emission.refused else "engine_error"
    message = emission.message or "SGLang ended the request"
    return Failure(request.id, request.attempt, code, message, not emission.refused)


def _out_of_memory_text(device: str, error: torch.OutOfMemoryError) -> str:
    """Returns the message for an allocation beyond torch's cap, a part of the engine's lease."""
    first = str(error).partition("\n")[0] or type(error).__name__
    return (
        f"torch ran out of the engine's own memory on {device} ({first}); raise engine.static, or"
        " lower engine.max_running or engine.prefill_chunk_tokens"
    )
