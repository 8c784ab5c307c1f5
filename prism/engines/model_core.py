"""Base of the cores that run a real engine: an activation's order, and what does not depend on the
engine's own classes."""

from __future__ import annotations

import itertools
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import kvcached
from kvcached import WeightKey
from prism.config.checks.memory_needs import GpuNeeds
from prism.engines.core import EngineContext, RequestTotals, ShrinkCall, StepOutput
from prism.engines.gpu_share import GpuShare
from prism.engines.model_memory import MemoryPlan, ModelMemory
from prism.engines.request_checks import check_images, failure
from prism.engines.timeline import Timeline
from prism.engines.weights.model_weights import ModelWeights, StoreAccess
from prism.errors import ActivationError, RankLostError, RequestError, SelfCheckError
from prism.messages.engine import Activated, ActivateEngine, EngineStatus
from prism.messages.gpu_memory import OutsideMemory
from prism.messages.requests import Request
from prism.models.prefill_speed import Speeds

log = logging.getLogger("prism.engine")


class ModelScheduler(Protocol):
    """An engine's scheduler of one model."""

    retractions_total: int

    def pause(self, rids: Sequence[str]) -> None:
        """Takes requests out of the next steps, with their KV."""

    def resume(self, rids: Sequence[str]) -> None:
        """Continues paused requests."""


class RunningLike(Protocol):
    """A running request."""

    @property
    def request(self) -> Request: ...


class ActiveModelLike(Protocol):
    """The active model, with the engine's own objects."""

    @property
    def order(self) -> ActivateEngine: ...

    @property
    def memory(self) -> ModelMemory: ...

    @property
    def scheduler(self) -> ModelScheduler: ...

    def shrink(self, size_bytes: int | None) -> kvcached.Shrunk:
        """Frees memory: spare pages, then pages of the prefix cache."""
        ...

    def evictable_bytes(self) -> int:
        """Returns an upper bound of the bytes that evictions of the prefix cache could free."""
        ...

    def figures(self) -> dict[str, Any]:
        """Returns the model's part of EngineStatus; `waiting` is among it."""
        ...


M = TypeVar("M", bound=ModelMemory)
A = TypeVar("A", bound=ActiveModelLike)
R = TypeVar("R", bound=RunningLike)


class ModelCore(ABC, Generic[M, A, R]):
    """One engine process, one model at a time: M is its memory, A the active model, R a running
    request.

    Weights and the static share of a model are held while it is active; KV above `reserve_bytes`
    varies with its requests. Thread rule: one thread.
    """

    # Class of a model's memory, and its plan, with keyword arguments as of `model_memory.plan`.
    memory_class: ClassVar[Callable[..., Any]]
    plan: ClassVar[Callable[..., MemoryPlan]]

    def __init__(
        self, context: EngineContext, needs: GpuNeeds, weight_key: Callable[..., WeightKey]
    ) -> None:
        self._context = context
        self._device = context.open_device()
        self._client, self._share = GpuShare.open(context, self._device, needs)
        place = context.config.device(context.device)
        # Addresses for the KV space and weights of each active model.
        pages = -(-place.capacity_bytes // place.page_bytes)
        self._client.reserve_addresses(2 * pages * place.page_bytes)
        self._access = StoreAccess.open(context, self._client, weight_key)
        self._links = self._access.links
        self._active: A | None = None
        self._by_rid: dict[str, R] = {}
        self._rids = itertools.count()
        self._ended = StepOutput()  # ends of requests to report with the next step
        self._totals = RequestTotals()
        self._speeds: dict[str, Speeds] = {}

    # --- of the engine ---------------------------------------------------------------------

    @abstractmethod
    def _start(self, order: ActivateEngine, memory: M) -> A:
        """Loads the model and lays out its KV space. Raises any error of the engine for bad
        files."""

    @abstractmethod
    def _warm_up(self, active: A) -> tuple[int, ...]:
        """Computes the first tokens. Returns the model's fingerprint."""

    @abstractmethod
    def _submit(self, active: A, request: Request, rid: str) -> R:
        """Queues a request under an engine-local id. Raises RequestError if it can never run."""

    @abstractmethod
    def _step(self, active: A, output: StepOutput) -> bool:
        """Runs a step that adds to `output`. Returns whether there is more to compute."""

    @abstractmethod
    def _tear_down(self) -> None:
        """Removes the engine from this process, with `_active` or what an error left of it, and
        returns freed memory to the system. Idempotent."""

    def _reason(self, error: Exception) -> str:
        """Returns why a model could not be loaded."""
        return f"{type(error).__name__}: {error}"

    def _outside(self) -> OutsideMemory | None:
        """Returns the memory that this process holds outside of kvcached, None on a host device."""
        return None

    # --- activation and deactivation -------------------------------------------------------

    def activate(self, order: ActivateEngine) -> Activated:
        """Activates a model. Stages:

        "shrink": other engines free memory.
        "reserve": memory is reserved in the ledger.
        "store": the engine's configuration, hash of the files, lookup of the stored copy.
        "layout": the model is built on the meta device, its parameters are placed in pages.
        "weights": the weights are loaded.
        "build": KV space and the engine's scheduler.
        "warm_up": the first tokens.
        "keep": a copy of the weights is stored.
        """
        timeline = Timeline()
        memory = self._reserve(order, timeline)
        timeline.enter("store")
        fingerprint = self._build(order, memory)
        planned = memory.plan
        return Activated(
            model=order.model.name,
            floor_bytes=memory.floor_bytes,
            reserve_bytes=planned.reserve_bytes,
            static_bytes=memory.static_bytes,
            block_tokens=planned.layout.block_tokens,
            max_running=order.max_running,
            stages_s=timeline.finish(),
            fingerprint=fingerprint,
            link_bytes=memory.weights.link_bytes,
            **planned.kv_need(),
        )

    def _reserve(self, order: ActivateEngine, timeline: Timeline) -> M:
        place = self._context.config.device(self._context.device)
        planned = self.plan(
            order,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            static_bytes=self._share.model_bytes(order.model.besides_weights_bytes),
            chunk_tokens=self._context.config.engine.prefill_chunk_tokens,
        )
        weights = ModelWeights(self._client, self._access, order.model)
        try:
            memory: M = self.memory_class(
                self._client,
                self._device,
                weights,
                order=order,
                plan=planned,
                timeline=timeline,
                ranks=self._context.ranks,
            )
            return memory
        except ActivationError:
            self._share.settle(served=False)
            raise

    def _build(self, order: ActivateEngine, memory: M) -> tuple[int, ...]:
        """Builds the engine and warms the model up. Returns the model's fingerprint.

        Raises ActivationError for any error of the engine, since bad files cause errors of every
        kind.
        """
        try:
            self._active = self._start(order, memory)
            memory.timeline.enter("warm_up")
            fingerprint = self._warm_up(self._active)
            memory.timeline.enter("keep")
            memory.weights.save_copy(fingerprint)
            return fingerprint
        except RankLostError:
            raise  # not an error of the model: this process ends
        except Exception as error:  # noqa: BLE001
            if isinstance(error, SelfCheckError):
                memory.weights.discard_copy(str(error))
            failed = _activation_error(order, error, self._reason)
            error.__traceback__ = None
        self._take_down(memory, served=False)
        raise failed

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

    def _take_down(self, memory: ModelMemory, *, served: bool = True) -> None:
        """Tears the engine down and releases the model's memory. REQUIRES: the engine's objects are
        referenced only by `_active`."""
        self._tear_down()
        memory.release()
        self._share.settle(served=served)

    def close(self) -> None:
        self.deactivate()
        if self._links is not None:
            self._links.close()
        self._client.close()

    # --- requests --------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        active = self._required()
        for request in requests:
            rid = f"{next(self._rids)}/"  # no prefix of another id: an engine may cancel by prefix
            try:
                check_images(request, active.order.model)
                self._by_rid[rid] = self._submit(active, request, rid)
                self._totals.prompt_tokens += len(request.prompt_ids)
            except RequestError as error:
                self._ended.failures.append(failure(request, error))

    def pause(self, request_ids: Sequence[str]) -> None:
        if self._active is not None:
            self._active.scheduler.pause(self._rids_of(request_ids))

    def resume(self, request_ids: Sequence[str]) -> None:
        if self._active is not None:
            self._active.scheduler.resume(self._rids_of(request_ids))

    def _rids_of(self, request_ids: Sequence[str]) -> list[str]:
        """Returns the engine-local ids of open requests that are not cancelled."""
        wanted = set(request_ids)
        return [rid for rid, running in self._by_rid.items() if running.request.id in wanted]

    def handing_over(self) -> bool:
        return self._active is not None and self._active.memory.kv.open_offers() > 0

    def step(self) -> StepOutput:
        output, self._ended = self._ended, StepOutput()
        if self._active is not None:
            output.busy = self._step(self._active, output)
        return output

    # --- memory ----------------------------------------------------------------------------

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

    # --- status ----------------------------------------------------------------------------

    def _speeds_of(self, active: A) -> Speeds:
        return self._speeds.setdefault(active.order.model.name, Speeds())

    def status(self) -> EngineStatus:
        active, totals, usage = self._active, self._totals, self._client.usage()
        retractions = totals.retractions
        figures: dict[str, Any] = {"model": None}
        if active is not None:
            self._client.publish_evictable(active.evictable_bytes())
            retractions += active.scheduler.retractions_total
            figures = active.figures()
            figures["running"] = len(self._by_rid) - figures["waiting"]
            figures["kv_mapped_bytes"] = usage.committed_bytes
            figures |= self._speeds_of(active).figures()
        return EngineStatus(
            engine_id=self._context.engine_id,
            prompt_tokens_total=totals.prompt_tokens,
            output_tokens_total=totals.output_tokens,
            retractions_total=retractions,
            maps_total=usage.maps,
            unmaps_total=usage.unmaps,
            imported_tokens_total=totals.imported_tokens,
            outside=self._outside(),
            **figures,
        )

    def _required(self) -> A:
        if self._active is None:
            raise RuntimeError("no model is active")
        return self._active


def _activation_error(
    order: ActivateEngine, error: Exception, reason: Callable[[Exception], str]
) -> ActivationError:
    """Returns the error with the model's name and the reason. An ActivationError has both."""
    if isinstance(error, ActivationError):
        return type(error)(str(error), error.missing_bytes)
    name = order.model.name
    # Logged as text, since a record with the traceback would keep the model's tensors alive.
    trace = "".join(traceback.format_exception(error))
    log.warning("model %s could not be loaded\n%s", name, trace)
    return ActivationError(f"model {name} could not be loaded: {reason(error)}")
