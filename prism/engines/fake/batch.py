"""Continuous batching like that of a real engine, with arithmetic instead of a model.

A sequence computes the KV of its tokens: prefill in chunks, then one token per step. When all are
computed, it produces the next token. If a sequence finds no free block for its next token, the
sequence that was paused last is retracted, then the newest one: it returns to the head of the queue
and keeps its output.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prism.config.schema.cluster_config import EngineConfig
from prism.engines.core import RequestTotals, StepOutput
from prism.engines.fake.memory import BLOCK_TOKENS, FakeMemory
from prism.engines.fake.options import FakeOptions
from prism.engines.fake.token_sampling import reject_unsupported, with_requested_data
from prism.engines.fake.tokens import seed_of, token_at
from prism.engines.request_checks import check_images, failure
from prism.errors import BadRequestError, EngineError
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Chunk, Failure, Request, Resume
from prism.models.prefill_speed import Speeds


class InjectedFault(EngineError):
    """Exception that PRISM_FAKE asks for."""


@dataclass(slots=True, eq=False)
class FakeSequence:
    """State of one request."""

    request: Request
    seed: int
    # Prompt and output.
    tokens: list[int]
    # Number of tokens whose KV is in `blocks`.
    computed: int = 0
    # Number of prompt tokens found in the prefix cache.
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    resume: Resume | None = None

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def to_compute(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def prefill_left(self) -> int:
        return 0 if self.decodes else self.to_compute

    @property
    def decodes(self) -> bool:
        return self.produced > 0 and self.to_compute == 1

    @property
    def blocks_short(self) -> int:
        return -(-len(self.tokens) // BLOCK_TOKENS) - len(self.blocks)


class FakeBatch:
    """Active model: its memory, and the continuous batching of its requests."""

    def __init__(
        self,
        order: ActivateEngine,
        memory: FakeMemory,
        engine: EngineConfig,
        options: FakeOptions,
        *,
        totals: RequestTotals,
        speeds: Speeds,
        ranks: int = 1,
    ) -> None:
        self.memory = memory
        self._options = options
        self._totals = totals
        self._speeds = speeds
        self._speedup = 1 + options.rank_speedup * (ranks - 1)
        self._model = order.model
        self._chunk_tokens = engine.prefill_chunk_tokens
        self.max_running = min(order.max_running, engine.max_running)
        self._waiting: deque[FakeSequence] = deque()
        self._running: list[FakeSequence] = []
        self._paused: list[FakeSequence] = []  # the one paused last is last
        self._rejected: list[Failure] = []
        self._cancelled: list[FakeSequence] = []
        self._due_s = 0.0  # planned end of the last step; 0: nothing runs

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (rejection := _rejection(request, self._model)) is not None:
                self._rejected.append(rejection)
                continue
            self._totals.prompt_tokens += len(request.prompt_ids)
            self._waiting.append(_sequence(request))

    def cancel(self, request_ids: Sequence[str]) -> None:
        ids = set(request_ids)
        sequences = (*self._waiting, *self._running, *self._paused)
        gone = [s for s in sequences if s.request.id in ids]
        for sequence in gone:
            self._drop(sequence)
        self._cancelled += gone

    def pause(self, request_ids: Sequence[str]) -> None:
        ids = set(request_ids)
        named = [s for s in (*self._waiting, *self._running) if s.request.id in ids]
        for sequence in named:
            self._take_out(sequence)
        self._paused += named

    def resume(self, request_ids: Sequence[str]) -> None:
        ids = set(request_ids)
        named = [s for s in self._paused if s.request.id in ids]
        for sequence in named:
            self._take_out(sequence)
        self._running += [s for s in named if s.blocks]
        self._waiting.extendleft(s for s in reversed(named) if not s.blocks)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        sequences = (*self._running, *self._waiting, *self._paused)
        return [self._export(sequence, targets) for sequence in sequences]

    def _export(self, sequence: FakeSequence, targets: Sequence[str] | None) -> Request:
        request, moves = sequence.request, self.memory.moves
        output_ids = sequence.tokens[len(request.prompt_ids) :]
        resume = moves.export(output_ids, sequence.computed, sequence.blocks, targets)
        self._drop(sequence)
        return msgspec.structs.replace(request, resume=resume)

    def step(self) -> StepOutput:
        output = StepOutput(failures=self._rejected)
        self._rejected = []
        output.chunks += [_last_chunk(s, "cancelled") for s in self._cancelled]
        self._cancelled.clear()
        self._admit()
        self._make_room()
        self._compute()
        output.chunks += self._emit()
        output.busy = bool(self._running)
        if not output.busy:
            self._due_s = 0.0
            self.memory.kv.trim()
            self.memory.kv.check_integrity()
        return output

    def figures(self) -> dict[str, Any]:
        """Returns the model's part of EngineStatus."""
        everyone = (*self._waiting, *self._running, *self._paused)
        running = len(self._running) + self._held()
        return {
            **self.memory.figures(busy=bool(self._running)),
            "model": self._model.name,
            "running": running,
            "waiting": len(everyone) - running,
            "pending_prefill_tokens": sum(s.prefill_left for s in everyone),
            **self._speeds.figures(),
        }

    # --- one step --------------------------------------------------------------------------

    def _drop(self, sequence: FakeSequence) -> None:
        """Removes a sequence; its blocks go to the prefix cache."""
        self._take_out(sequence)
        self._release(sequence)

    def _take_out(self, sequence: FakeSequence) -> None:
        """Removes a sequence with its blocks from the batch, the queue or the paused ones."""
        places: tuple[deque[FakeSequence] | list[FakeSequence], ...]
        places = (self._running, self._paused, self._waiting)
        next(place for place in places if sequence in place).remove(sequence)

    def _held(self) -> int:
        """Returns the number of paused sequences that have KV."""
        return sum(bool(s.blocks) for s in self._paused)

    def _release(self, sequence: FakeSequence) -> None:
        self.memory.give(sequence.tokens[: sequence.computed], sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _admit(self) -> None:
        while self._waiting:
            if self._start(self._waiting[0]):
                self._running.append(self._waiting.popleft())
            elif self._running or not self._retract_paused():
                return

    def _start(self, sequence: FakeSequence) -> bool:
        """Gives a sequence of the queue its blocks. Returns False without room for it."""
        if len(self._running) + self._held() >= self.max_running:
            return False
        sequence.blocks = self.memory.take(sequence.tokens)
        sequence.computed = len(sequence.blocks) * BLOCK_TOKENS
        if not self._extend(sequence):
            self._release(sequence)
            return False
        sequence.cached = sequence.cached or sequence.computed
        self._import(sequence)
        return True

    def _import(self, sequence: FakeSequence) -> None:
        """Imports the KV of a request that moved here, except what the prefix cache has."""
        resume, sequence.resume = sequence.resume, None
        if resume is None or (fill := self.memory.moves.importer(resume)) is None:
            return
        start, end = sequence.computed, resume.kv_tokens
        if fill(sequence.blocks, start) and end > start:
            sequence.computed = end
            self._totals.imported_tokens += end - start

    def _extend(self, sequence: FakeSequence) -> bool:
        """Allocates blocks for all tokens of a sequence. Returns False without free blocks; the
        sequence is then unchanged."""
        short = sequence.blocks_short
        blocks = self.memory.alloc(short) if short > 0 else []
        sequence.blocks += blocks or []
        return blocks is not None

    def _make_room(self) -> None:
        for sequence in list(self._running):
            while sequence in self._running and not self._extend(sequence):
                if not self._retract_paused():
                    self._retract(newest := self._running.pop())
                    self._waiting.appendleft(newest)

    def _retract_paused(self) -> bool:
        """Retracts the sequence that was paused last. Returns False if none has KV."""
        for sequence in reversed(self._paused):
            if sequence.blocks:
                self._retract(sequence)
                return True
        return False

    def _retract(self, sequence: FakeSequence) -> None:
        self._release(sequence)
        self._totals.retractions += 1

    def _compute(self) -> None:
        """Computes a chunk of every sequence, and waits as long as a real step would take."""
        started_s = time.monotonic()
        prefilled = tokens = 0
        parts = []
        for sequence in self._running:
            decodes = sequence.decodes
            count = 1 if decodes else min(sequence.to_compute, self._chunk_tokens - prefilled)
            prefilled += 0 if decodes else count
            tokens += count
            start, sequence.computed = sequence.computed, sequence.computed + count
            parts.append((sequence.tokens, sequence.blocks, range(start, sequence.computed)))
        self.memory.write(parts)
        self._pass_time(tokens)
        seconds = time.monotonic() - started_s
        if prefilled and seconds > 0:
            self._speeds.prefill.add(prefilled, seconds)
        elif self._running and not prefilled:
            self._speeds.steps.add(len(self._running), seconds)

    def _pass_time(self, tokens: int) -> None:
        """Waits for the duration of a step, which grows with its tokens of prefill and decode. As
        on a GPU, the process's own work since the last step overlaps with the step: it is deducted
        up to the step's duration."""
        seconds = self._options.decode_step_ms / 1000 if self._running else 0.0
        if self._options.prefill_tokens_per_s:
            seconds += tokens / self._options.prefill_tokens_per_s
        seconds /= self._speedup
        now_s = time.monotonic()
        if now_s - self._due_s > seconds:
            self._due_s = now_s
        self._due_s += seconds
        if seconds:
            time.sleep(self._due_s - now_s)

    def _emit(self) -> list[Chunk]:
        ready = [s for s in self._running if s.to_compute == 0]
        return [self._next_token(sequence) for sequence in ready]

    def _next_token(self, sequence: FakeSequence) -> Chunk:
        request = sequence.request
        first_index = sequence.produced
        token = token_at(sequence.seed, first_index, self._options.vocabulary)
        sequence.tokens.append(token)
        self._totals.output_tokens += 1
        self._inject_fault(request)
        reason = _finish_reason(sequence, token)
        if reason is not None:
            self.memory.check(sequence.tokens[:-1], sequence.blocks)
            self._drop(sequence)
        cached = sequence.cached if first_index == 0 else 0
        chunk = Chunk(request.id, request.attempt, first_index, [token], reason, cached)
        return with_requested_data(chunk, request, self.memory.embedding)

    def _inject_fault(self, request: Request) -> None:
        count, options = self._totals.output_tokens, self._options
        marked = options.die_on_prompt_token in request.prompt_ids
        if (marked or count == options.die_at_token) and options.claim_fault():
            os.kill(os.getpid(), signal.SIGKILL)
        if count == options.raise_at_token and options.claim_fault():
            raise InjectedFault(f"PRISM_FAKE raises at token {count}")


def _sequence(request: Request) -> FakeSequence:
    tokens = list(request.prompt_ids) + (request.resume.output_ids if request.resume else [])
    return FakeSequence(request, seed_of(request.prompt_ids), tokens, resume=request.resume)


def _rejection(request: Request, model: ModelSpec) -> Failure | None:
    """Returns why a request can never run."""
    try:
        check_images(request, model)
    except BadRequestError as error:
        return failure(request, error)
    if (rejection := reject_unsupported(request)) is not None:
        return rejection
    tokens = len(request.prompt_ids) + request.sampling.max_tokens
    excess = tokens - model.context_length
    return _too_long(request, excess) if excess > 0 or not request.prompt_ids else None


def _too_long(request: Request, excess: int) -> Failure:
    text = f"prompt and max_tokens exceed the context by {excess} tokens"
    code = "context_length_exceeded"
    if not request.prompt_ids:
        code, text = "invalid_request_error", "the prompt is empty"
    return Failure(request_id=request.id, attempt=request.attempt, code=code, message=text)


def _last_chunk(sequence: FakeSequence, reason: str) -> Chunk:
    request = sequence.request
    return Chunk(request.id, request.attempt, sequence.produced, [], reason)


def _finish_reason(sequence: FakeSequence, token: int) -> str | None:
    sampling = sequence.request.sampling
    if token in sampling.stop_token_ids and sequence.produced > sampling.min_tokens:
        return "stop"
    return "length" if sequence.produced >= sampling.max_tokens else None
