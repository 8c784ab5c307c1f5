"""Requests with an Idempotency-Key: a repeated request gets the same answer, computed once.

The first request claims the key in Redis and computes the answer. Repeats at the same frontend
follow its output. Repeats at another frontend wait until the answer is stored in Redis. A claim
ends with its frontend's heartbeat, so the next repeat computes what a dead frontend had not
finished.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec
from fastapi import Request

from prism.errors import QueueUnavailableError, RequestError
from prism.frontend.http import calls
from prism.frontend.http.error_bodies import (
    GenerationError,
    OverloadedError,
    bad_request,
    queue_unavailable,
)
from prism.frontend.http.in_flight import InFlight
from prism.frontend.live_config import LiveConfig
from prism.frontend.protocol.openai_types import RequestBody
from prism.frontend.requests.generation import (
    GeneratedChoice,
    Generation,
    GenerationSpec,
    TextUpdate,
)
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.requests import Chunk, KeptAnswer
from prism.queueing.request_queue import RequestQueue
from prism.tasks import cancel_all

log = logging.getLogger(__name__)

KEPT_S = 600.0
_KEY_CHARS_MAX = 255
_POLL_S = 0.2
_STORE_WAIT_S = 1.0  # longest time that the end of an answer waits to be stored in Redis


class KeyReusedError(RequestError):
    """The key was used with another body."""

    code = "idempotency_key_reused"
    status = 422


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """Hashes of an Idempotency-Key and its request. They depend on the API key, so that equal keys
    of two clients differ. Redis stores neither the clients' keys nor digests of prompts that
    guesses could be compared with."""

    name: str
    fingerprint: str  # of the path and body


async def read_key(request: Request, body: RequestBody) -> IdempotencyKey | None:
    """Returns the request's key, or None if the client sent none. Raises BadRequestError."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    if not 0 < len(given) <= _KEY_CHARS_MAX:
        raise bad_request(f"Idempotency-Key: give 1 to {_KEY_CHARS_MAX} characters")
    call = calls.current.get()
    given = f"{call.key if call else ''}\n{given}"
    secret = blake2b(given.encode(), person=b"fingerprint").digest()
    name = blake2b(given.encode(), digest_size=16).hexdigest()
    # In a thread, since a body may have megabytes.
    return IdempotencyKey(name, await asyncio.to_thread(_fingerprint, request, body, secret))


def _fingerprint(request: Request, body: RequestBody, secret: bytes) -> str:
    parts = body.model_dump_json(), json.dumps(body.image_places), *body.image_urls
    content = "\n".join((request.url.path, *parts))
    return blake2b(content.encode(), key=secret, digest_size=16).hexdigest()


class SharedAnswer:
    """One answer as it is generated, and its followers."""

    def __init__(self, key: IdempotencyKey, spec: GenerationSpec) -> None:
        self.key = key
        self.spec = spec
        self.generation: Generation | None = None  # set once the answer begins
        self.updates: list[TextUpdate] = []
        self.error: RequestError | None = None
        self.ended = False
        self.followers = 0
        self.task: asyncio.Task[None] | None = None
        self.settling: asyncio.Task[None] | None = None  # stores the answer in Redis
        self.changed = asyncio.Event()  # replaced after each change

    def begin(self, generation: Generation) -> None:
        self.generation = generation
        self._notify()

    def show(self, update: TextUpdate) -> None:
        self.updates.append(update)
        self._notify()

    def end(self, error: RequestError | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class AnswerFollower:
    """View of one HTTP request on a SharedAnswer, with the interface of a Generation."""

    def __init__(self, answers: SharedAnswers, key: IdempotencyKey, spec: GenerationSpec) -> None:
        self._answers = answers
        self._key = key
        self._spec: GenerationSpec | None = spec  # released in `start`
        self._run: SharedAnswer | None = None

    async def start(self) -> None:
        """Waits until the answer begins. Raises RequestError."""
        assert self._spec is not None
        self._run = run = self._answers.join(self._key, self._spec)
        self._spec = None
        while run.generation is None:
            if run.error is not None:
                raise run.error
            await run.changed.wait()

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """Yields all output from the beginning. Raises RequestError."""
        assert self._run is not None
        run, seen = self._run, 0
        while True:
            changed = run.changed
            for update in run.updates[seen:]:
                seen += 1
                yield update
            if seen < len(run.updates):
                continue
            if run.error is not None:
                raise run.error
            if run.ended:
                return
            await changed.wait()

    def finish(self, outcome: str | None = None) -> None:
        """Stops following. An answer that has begun is finished without followers, for a client
        that repeats the request."""
        run, self._run = self._run, None
        if run is not None:
            self._answers.unfollow(run)

    @property
    def _generation(self) -> Generation:
        assert self._run is not None
        assert self._run.generation is not None
        return self._run.generation

    @property
    def spec(self) -> GenerationSpec:
        return self._generation.spec

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._generation.tokenizer

    @property
    def choices(self) -> list[GeneratedChoice]:
        return self._generation.choices

    def head(self, kind: str) -> dict[str, Any]:
        return self._generation.head(kind)

    def usage(self) -> dict[str, Any]:
        return self._generation.usage()


AnyGeneration = Generation | AnswerFollower


class SharedAnswers:
    """Shared answers of one frontend. For one event loop."""

    def __init__(
        self,
        live: LiveConfig,
        queue: RequestQueue,
        frontend_id: str,
        in_flight: InFlight,
        generate: Callable[[GenerationSpec], Generation],
    ) -> None:
        self._live = live
        self._queue = queue
        self._id = frontend_id
        self._in_flight = in_flight
        self._generate = generate
        self._runs: dict[str, SharedAnswer] = {}
        self._followers = 0
        self._closing = False

    def generation(self, spec: GenerationSpec, key: IdempotencyKey | None) -> AnyGeneration:
        """Returns the generation, which is shared between requests with the same `key`."""
        return self._generate(spec) if key is None else AnswerFollower(self, key, spec)

    def join(self, key: IdempotencyKey, spec: GenerationSpec) -> SharedAnswer:
        """Returns the answer of this key, which is started if there is none. Raises RequestError.
        `unfollow` must follow."""
        run = self._runs.get(key.name)
        full = self._followers if run is not None else max(self._followers, len(self._runs))
        if full >= self._live.config.frontend.max_open_requests:
            raise OverloadedError("too many requests with an Idempotency-Key; try again later")
        if run is None or run.error is not None:
            failed = run.task if run is not None else None
            run = self._runs[key.name] = SharedAnswer(key, spec)
            run.task = asyncio.create_task(self._answer(run, failed))
        _check(run.key.fingerprint, key)
        run.followers += 1
        self._followers += 1
        return run

    def unfollow(self, run: SharedAnswer) -> None:
        self._followers -= 1
        run.followers -= 1
        if not run.followers and run.generation is None and run.task is not None and not run.ended:
            # Later repeats start another run, which waits for the end of this one.
            run.end(_unfinished())
            run.task.cancel()

    async def close(self) -> None:
        self._closing = True
        await cancel_all(run.task for run in self._runs.values() if run.task is not None)

    async def _answer(self, run: SharedAnswer, failed: asyncio.Task[None] | None) -> None:
        """Computes or replays an answer. `failed`: an earlier run, whose claim must end first."""
        try:
            if failed is not None:
                await asyncio.wait([failed])
            kept = await self._claim(run)
            if kept is None:
                await self._compute(run)
            else:
                self._replay(run, kept)
            run.end()
        except QueueUnavailableError as error:
            run.end(queue_unavailable(error))
        except RequestError as error:
            run.end(error)
        finally:
            run.end(_unfinished())
            try:
                # Errors are not stored: a repeat computes the answer again.
                await (run.settling or self._settle(run.key, None))
            finally:
                if self._runs.get(run.key.name) is run:
                    del self._runs[run.key.name]

    async def _claim(self, run: SharedAnswer) -> KeptAnswer | None:
        """Returns the stored answer, or None if it must be computed here. Raises
        QueueUnavailableError if Redis was unavailable for `frontend.queue_timeout`."""
        until_s = self._queue_deadline_s()
        while True:
            try:
                name, fingerprint = run.key.name, run.key.fingerprint
                found = await self._queue.claim(name, self._id, fingerprint, KEPT_S)
            except QueueUnavailableError:
                if time.monotonic() >= until_s:
                    raise
            else:
                if found is None:
                    return None
                _check(found if isinstance(found, str) else found.fingerprint, run.key)
                if isinstance(found, KeptAnswer):
                    return found
                until_s = self._queue_deadline_s()
            await asyncio.sleep(_POLL_S)

    async def _compute(self, run: SharedAnswer) -> None:
        outcome: str | None = "failed"
        generation = self._generate(run.spec)
        self._in_flight.enter()
        try:
            await generation.start()
            run.begin(generation)
            async for update in generation.updates():
                if all(choice.finish_reason is not None for choice in generation.choices):
                    run.settling = asyncio.create_task(self._settle(run.key, _kept(run)))
                    await asyncio.wait([run.settling], timeout=_STORE_WAIT_S)
                run.show(update)
            outcome = None
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            self._in_flight.leave()
            generation.finish(outcome)

    def _replay(self, run: SharedAnswer, kept: KeptAnswer) -> None:
        requests = [
            msgspec.structs.replace(request, arrival_unix_s=kept.created_unix_s)
            for request in run.spec.requests
        ]
        generation = self._generate(replace(run.spec, id=kept.id, requests=requests))
        run.begin(generation)
        for choice, output in zip(generation.choices, kept.outputs, strict=True):
            run.show(choice.take(output))

    def _queue_deadline_s(self) -> float:
        return time.monotonic() + self._live.config.frontend.queue_timeout_s

    async def _settle(self, key: IdempotencyKey, kept: KeptAnswer | None) -> None:
        until_s = self._queue_deadline_s()
        while True:
            try:
                await self._queue.settle(key.name, self._id, kept, KEPT_S)
            except QueueUnavailableError as error:
                if self._closing or time.monotonic() >= until_s:
                    log.warning("an answer is not kept for its Idempotency-Key: %s", error)
                    return
                await asyncio.sleep(_POLL_S)
            else:
                return


def _unfinished() -> RequestError:
    return GenerationError("internal_error", "the request was not finished; try again")


def _check(fingerprint: str, key: IdempotencyKey) -> None:
    if fingerprint != key.fingerprint:
        raise KeyReusedError(
            "Idempotency-Key: was used with another body in the last"
            f" {KEPT_S / 60:.0f} minutes; send a new key with a new request"
        )


def _kept(run: SharedAnswer) -> KeptAnswer:
    generation = run.generation
    assert generation is not None
    outputs = [_as_chunk(choice) for choice in generation.choices]
    created_unix_s = generation.spec.requests[0].arrival_unix_s
    return KeptAnswer(run.key.fingerprint, generation.spec.id, created_unix_s, outputs)


def _as_chunk(choice: GeneratedChoice) -> Chunk:
    return Chunk(
        request_id="",
        attempt=1,
        first_index=0,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        cached_tokens=choice.cached_tokens,
        logprobs=choice.logprobs,
        prompt_logprobs=choice.prompt_logprobs,
        embedding=choice.embedding,
    )
