"""SGLang behind Prism's engine interface (see `prism.engines.core.EngineCore`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

import kvcached
from prism.engines.core import EngineContext, ShrinkCall, StepOutput
from prism.engines.kv_direct import DirectMoves
from prism.engines.links import LoadLinks
from prism.engines.sglang import gpu, host, moving, requests, warm_up
from prism.engines.sglang.memory import EngineMemory, plan
from prism.engines.sglang.radix_pages import RadixPages
from prism.engines.sglang.scheduler import Emission, InProcessScheduler
from prism.engines.sglang.weights import ModelWeights, StoreAccess
from prism.engines.timeline import Timeline
from prism.errors import ActivationError, RankLostError, RequestError, SelfCheckError
from prism.messages import Activate, Activated, Chunk, EngineStatus, Failure, Request
from prism.model_memory import BLOCK_TOKENS
from prism.prefill_speed import Speed
from prism.weight_store import open_store


@dataclass(slots=True)
class _Running:
    request: Request
    sent_tokens: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    imported_tokens: int = 0


@dataclass(slots=True)
class _Active:
    """The model being served."""

    order: Activate
    memory: EngineMemory
    scheduler: InProcessScheduler
    direct: DirectMoves


class SglangCore:
    """One engine process, one model at a time.

    Thread rule: one thread. Memory of a model: weights and the static share are held for as
    long as it is active; KV beyond `reserve_bytes` comes and goes with its requests.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._device = context.open_device()
        self._client = self._device.client(context.engine_id)
        place = context.config.device(context.device)
        # KV space and weights of one model after another are laid out in these addresses.
        self._client.reserve_addresses(2 * _whole(place.capacity_bytes, place.page_bytes))
        self._access = store_access(context, self._client)
        self._links = self._access.links
        self._active: _Active | None = None
        self._by_rid: dict[str, _Running] = {}
        self._rids = itertools.count()
        self._rejected: list[Failure] = []
        self._totals = _Totals()
        self._speeds: dict[str, Speed] = {}

    # --- the model's life ------------------------------------------------------------------

    def activate(self, order: Activate) -> Activated:
        """Stages: "shrink" (others make room), "reserve" (it in the ledger), "store" (SGLang's
        configuration, the files' hash, the stored copy), "layout" (the model on the meta device,
        its parameters in pages), "weights", "build" (KV space, SGLang's scheduler), "warm_up",
        "keep" (into the store)."""
        timeline = Timeline()
        place = self._context.config.device(self._context.device)
        layout = plan(
            order,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            static_bytes=self._context.config.engine.static_bytes,
        )
        weights = ModelWeights(self._client, self._access, order.model)
        memory = EngineMemory(
            self._client,
            self._device,
            weights,
            order=order,
            plan=layout,
            timeline=timeline,
            ranks=self._context.ranks,
        )
        timeline.enter("store")
        scheduler, fingerprint = self._build(order, memory)
        direct = DirectMoves(memory.kv, self._context.ranks, self._context.config.engine)
        self._active = _Active(order, memory, scheduler, direct)
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

    def _build(
        self, order: Activate, memory: EngineMemory
    ) -> tuple[InProcessScheduler, tuple[int, ...]]:
        """SGLang raises errors of every kind for bad files; all mean that this model cannot run."""
        scheduler: InProcessScheduler | None = None
        try:
            engine, device = self._context.config.engine, self._context.device
            gpu.adopt(self._client, device, engine.static_bytes)
            scheduler = host.build(order, memory, engine.prefill_chunk_tokens, device)
            memory.timeline.enter("warm_up")
            fingerprint = warm_up.run(scheduler, order, memory.weights.fingerprint())
            memory.timeline.enter("keep")
            memory.weights.save_copy(fingerprint)
            return scheduler, fingerprint
        except RankLostError:
            raise  # not the model's fault: this process ends
        except Exception as error:  # noqa: BLE001
            if isinstance(error, SelfCheckError):
                memory.weights.discard_copy(str(error))
            failure = _failure(order, error)
            error.__traceback__ = None
        host.tear_down(scheduler)
        del scheduler
        host.release_heap()
        memory.release()
        raise failure

    def deactivate(self) -> None:
        active, self._active = self._active, None
        if active is None:
            return
        self._totals.retractions += active.scheduler.retractions_total
        self._by_rid.clear()
        self._rejected.clear()
        memory = active.memory
        host.tear_down(active.scheduler)
        del active
        host.release_heap()
        memory.release()

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
        """Give memory back: spare pages, then pages of the radix cache, chosen by page or, with
        other ranks, by age."""
        if self._active is None:
            return kvcached.Shrunk()
        scheduler = self._active.scheduler
        memory, tree = self._active.memory, scheduler.tree_cache
        allocator = scheduler.token_to_kv_pool_allocator
        if memory.ranks.size > 1:
            return memory.rank_kv().shrink(size_bytes, partial(allocator.evict_cache, tree))
        return memory.kv.shrink(size_bytes, RadixPages(tree, allocator))

    # --- requests --------------------------------------------------------------------------

    def submit(self, requests_: Sequence[Request]) -> None:
        active = self._required()
        for request in requests_:
            rid = f"{next(self._rids)}/"  # the slash: SGLang cancels by prefix of the id
            try:
                converted = requests.convert(
                    request,
                    rid,
                    context_length=active.order.model.context_length,
                    vocab_size=active.scheduler.model_config.vocab_size,
                )
            except RequestError as error:
                self._rejected.append(requests.failure(request, error))
                continue
            resume = request.resume
            self._by_rid[rid] = _Running(request, len(resume.output_ids) if resume else 0)
            self._totals.prompt_tokens += len(request.prompt_ids)
            active.scheduler.process_input_requests([converted])
            req = active.scheduler.find(rid) if resume else None
            if resume is not None and req is not None:
                self._totals.imported_tokens += moving.join(active, req, resume)

    def cancel(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        for rid, running in list(self._by_rid.items()):
            if running.request.id in wanted and not running.cancelled:
                running.cancelled = True
                self._required().scheduler.cancel(rid)

    def export(self, targets: Sequence[str] = ()) -> list[Request]:
        """Other ranks have the rest of the KV: it goes from rank to rank, or is computed again."""
        if self._active is None:
            return []
        running = [(rid, r) for rid, r in self._by_rid.items() if not r.cancelled]
        return [self._take_out(self._active, rid, r.request, targets) for rid, r in running]

    def _take_out(
        self, active: _Active, rid: str, request: Request, targets: Sequence[str]
    ) -> Request:
        folder = self._context.config.moves_dir if active.memory.ranks.size == 1 else ""
        req = active.scheduler.find(rid)
        if req is not None:
            resume = moving.leave(active, req, targets, folder)
            request = msgspec.structs.replace(request, resume=resume)
        active.scheduler.cancel(rid)
        del self._by_rid[rid]
        return request

    def handing_over(self) -> bool:
        return self._active is not None and self._active.memory.kv.open_offers() > 0

    def step(self) -> StepOutput:
        output = StepOutput(failures=self._rejected)
        self._rejected = []
        if self._active is None:
            return output
        scheduler = self._active.scheduler
        if not scheduler.is_fully_idle():
            self._measured_step(self._active)
        for emission in scheduler.outbox.take():
            self._deliver(emission, output)
        output.busy = not scheduler.is_fully_idle()
        if not output.busy:
            self._active.memory.kv.trim()
        return output

    def _measured_step(self, active: _Active) -> None:
        started_s = time.monotonic()
        batch = active.scheduler.step()
        if batch is not None and batch.forward_mode.is_extend():
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
            message = emission.message or "SGLang ended the request"
            failure = Failure(request.id, request.attempt, "engine_error", message, True)
            output.failures.append(failure)
            return
        cached = emission.cached_tokens if first_index == 0 else 0
        output.chunks.append(
            Chunk(request.id, request.attempt, first_index, emission.token_ids, finish, cached)
        )

    # --- status ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        active = self._active
        if active is None:
            return self._idle_status()
        scheduler, kv = active.scheduler, active.memory.kv
        allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        evictable = int(tree.evictable_size())
        speed = self._speeds.get(active.order.model.name)
        usage = self._client.usage()
        self._publish_evictable(active, evictable, usage.committed_bytes)
        waiting = scheduler.waiting_reqs()
        return EngineStatus(
            engine_id=self._context.engine_id,
            model=active.order.model.name,
            running=len(self._by_rid) - len(waiting),
            waiting=len(waiting),
            available_tokens=allocator.attainable_tokens() + evictable,
            free_mapped_tokens=kv.free_mapped_blocks() * BLOCK_TOKENS,
            evictable_tokens=evictable,
            pending_prefill_tokens=sum(scheduler.prefill_left(req) for req in waiting),
            prefill_tokens_per_s=speed.tokens_per_s if speed else 0.0,
            kv_mapped_bytes=usage.committed_bytes,
            static_bytes=active.memory.static_bytes,
            prompt_tokens_total=self._totals.prompt_tokens,
            output_tokens_total=self._totals.output_tokens,
            retractions_total=self._totals.retractions + scheduler.retractions_total,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
            imported_tokens_total=self._totals.imported_tokens,
        )

    def _publish_evictable(self, active: _Active, tokens: int, committed_bytes: int) -> None:
        """An upper bound: which pages the cache shares with requests is looked at when it
        matters."""
        bound_bytes = committed_bytes - active.memory.kv.floor_bytes()
        size_bytes = tokens * active.memory.plan.layout.token_bytes
        self._client.publish_evictable(max(0, min(size_bytes, bound_bytes)))

    def _idle_status(self) -> EngineStatus:
        usage = self._client.usage()
        return EngineStatus(
            engine_id=self._context.engine_id,
            model=None,
            prompt_tokens_total=self._totals.prompt_tokens,
            output_tokens_total=self._totals.output_tokens,
            retractions_total=self._totals.retractions,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
        )

    def _required(self) -> _Active:
        if self._active is None:
            raise RuntimeError("no model is active")
        return self._active


def store_access(context: EngineContext, client: kvcached.Client) -> StoreAccess:
    """The machine's weight store as `engine.weight_store` says, and the ways from it to the
    client's memory."""
    config, ranks = context.config, context.ranks
    store = open_store(config)
    links = LoadLinks(context, client) if store is not None else None
    return StoreAccess(store, links, ranks.rank, ranks.size, context.device)


def _whole(size_bytes: int, page_bytes: int) -> int:
    return -(-size_bytes // page_bytes) * page_bytes


def _failure(order: Activate, error: Exception) -> ActivationError:
    """Ours say what is wrong already."""
    if isinstance(error, ActivationError):
        return type(error)(str(error), error.missing_bytes)
    reason = f"{type(error).__name__}: {error}"
    return ActivationError(f"model {order.model.name} could not be loaded: {reason}")
