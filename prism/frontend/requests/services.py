"""Services of one frontend that all routes use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import UnknownModelError
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.rate_limits import RateLimits
from prism.frontend.dispatch.write_check import WriteCheck
from prism.frontend.http.access import may_use
from prism.frontend.http.errors import UnavailableError
from prism.frontend.metrics.cluster_metrics import ClusterCollector
from prism.frontend.metrics.request_metrics import Metrics
from prism.frontend.requests.generation import Generation, GenerationSpec
from prism.frontend.requests.grammars import GrammarTrials
from prism.frontend.requests.idempotency import (
    AnswerFollower,
    AnyGeneration,
    IdempotencyKey,
    SharedAnswers,
)
from prism.frontend.requests.parsers import AnswerParsers
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.queueing.requests import RequestQueue


@dataclass(slots=True)
class Services:
    """Components of a running frontend, and the number of its open HTTP requests."""

    config: ClusterConfig
    queue: RequestQueue
    dispatcher: Dispatcher
    metrics: Metrics
    cluster: ClusterCollector
    tokenizers: dict[str, ModelTokenizer]
    started_unix_s: int
    unreadable: dict[str, str] = field(default_factory=dict)  # model -> why it cannot be loaded
    draining: bool = False  # shutting down; new requests are rejected
    shared_answers: SharedAnswers = field(init=False)
    rates: RateLimits = field(init=False)
    writes: WriteCheck = field(init=False)
    _grammars: dict[str, GrammarTrials] = field(default_factory=dict)  # by adapter
    _parsers: dict[str, AnswerParsers] = field(default_factory=dict)  # by adapter
    _active: int = 0
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.writes = WriteCheck(self.queue)
        self.rates = RateLimits(self.queue, self.config.frontend.queue_timeout_s)
        self.shared_answers = SharedAnswers(
            self.queue,
            self.dispatcher.frontend_id,
            generate=self._generation,
            enter=self.enter,
            leave=self.leave,
            runs_max=self.config.frontend.max_open_requests,
            queue_timeout_s=self.config.frontend.queue_timeout_s,
        )

    def names(self) -> list[tuple[str, ModelSpec, str]]:
        """Returns (name, model, adapter) for each name that the current request may use: of models,
        aliases and adapters."""
        named = [(n, m, m.adapter_in(n) or "") for m in self.config.models for n in m.names]
        return [(name, m, adapter) for name, m, adapter in named if may_use(m.named(adapter))]

    def model(self, name: str) -> ModelSpec:
        return self.resolve(name)[0]

    def resolve(self, name: str) -> tuple[ModelSpec, str]:
        """Returns the model that `name` refers to, and the name of its adapter or an empty string.
        Raises UnknownModelError, also if the current key may not use it, or UnavailableError."""
        for model in self.config.models:
            adapter = model.adapter_in(name)
            if adapter is not None and may_use(model.named(adapter)):
                self._check_readable(model.name)
                return model, adapter
        names = self.names()
        known = ", ".join(n for n, _, _ in names)
        every = sum(len(m.names) for m in self.config.models)
        hint = "" if len(names) == every else ", or not for this key"
        error = UnknownModelError(
            f"the model {name!r:.200} does not exist{hint}; available models: {known}"
        )
        error.param = "model"
        raise error

    def tokenizer(self, name: str) -> ModelTokenizer:
        """Returns the tokenizer of a model. Raises UnknownModelError if the model was removed after
        the call of `model`."""
        meant = (m.name for m in self.config.models if m.adapter_in(name) is not None)
        model = next(meant, name)
        if model not in self.tokenizers:
            raise UnknownModelError(f"the model {model!r} was removed")
        return self.tokenizers[model]

    def grammars(self, model: ModelSpec) -> GrammarTrials:
        """Returns the grammar trials of the model's adapter."""
        adapter = self.config.adapter_of(model)
        if adapter not in self._grammars:
            self._grammars[adapter] = GrammarTrials(adapter)
        return self._grammars[adapter]

    def parsers(self, model: ModelSpec) -> AnswerParsers:
        """Returns the parsers of the model's adapter."""
        adapter = self.config.adapter_of(model)
        if adapter not in self._parsers:
            self._parsers[adapter] = AnswerParsers(adapter)
        return self._parsers[adapter]

    async def close(self) -> None:
        await self.writes.close()
        for trials in self._grammars.values():
            await trials.close()

    def apply_config(self, config: ClusterConfig, tokenizers: dict[str, ModelTokenizer]) -> None:
        """Applies `config`, with a tokenizer for each readable model. Open requests continue."""
        self.config, self.tokenizers = config, tokenizers
        self.rates.queue_timeout_s = config.frontend.queue_timeout_s
        self.shared_answers.queue_timeout_s = config.frontend.queue_timeout_s
        self.shared_answers.runs_max = config.frontend.max_open_requests
        self.dispatcher.apply_config(config)

    def _check_readable(self, name: str) -> None:
        if reason := self.unreadable.get(name):
            error = UnavailableError(f"{name} cannot be served now: {reason}")
            error.code = "model_unavailable"
            raise error

    def enter(self) -> None:
        """Counts a new request; `leave` must follow. Raises UnavailableError while draining."""
        if self.draining:
            error = UnavailableError("this server is shutting down; try again shortly")
            error.code = "shutting_down"
            raise error
        self._active += 1

    @property
    def busy(self) -> bool:
        return self._active > 0

    def leave(self) -> None:
        self._active -= 1
        self._left.set()

    async def wait_idle(self) -> None:
        """Waits until no request is open."""
        while self._active:
            self._left.clear()
            await self._left.wait()

    def generation(self, spec: GenerationSpec, key: IdempotencyKey | None) -> AnyGeneration:
        """Returns the generation, which is shared between requests with the same `key`."""
        return (
            self._generation(spec)
            if key is None
            else AnswerFollower(self.shared_answers, key, spec)
        )

    def _generation(self, spec: GenerationSpec) -> Generation:
        return Generation(
            spec,
            self.tokenizer(spec.requests[0].model),
            self.dispatcher,
            self.metrics,
            self.rates,
        )


def services(request: Request) -> Services:
    found = request.app.state.services
    assert isinstance(found, Services)
    return found
