"""Generation of one HTTP request: from tokenized prompts to the text of each choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, structs

from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.rate_limits import RateLimits
from prism.frontend.dispatch.request_log import Event, Mailbox, OpenRequest
from prism.frontend.http import calls
from prism.frontend.http.calls import Call
from prism.frontend.http.error_bodies import GenerationError
from prism.frontend.metrics.request_metrics import Metrics, RequestTimer
from prism.frontend.metrics.tracing import TracedChoice
from prism.frontend.requests.answer_parsing import Parsing
from prism.frontend.text.detokenizer import Detokenizer
from prism.frontend.text.stop_strings import StopMatcher
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.requests import Chunk, Failure, Logprobs, Request

# Events per call to the mailbox: detokenizing them blocks the other requests.
_EVENTS_PER_UPDATE_MAX = 64


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Specification of one HTTP request's generation, with a choice for each of `requests`."""

    id: str
    requests: list[Request]  # for the queue; they differ in prompts and seeds
    asked_model: str  # the model's name in the client's request
    began_s: float  # monotonic time of arrival
    stops: tuple[str, ...] = ()
    show_token_ids: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of likeliest tokens shown with their log probabilities
    # Per prompt: number of choices shown to the client, and number of choices generated.
    shown: tuple[int, int] = (1, 1)
    echoes: tuple[str, ...] = ()  # text shown before each choice's output
    hides_output: bool = False  # show the echo alone
    parsing: Parsing | None = None
    show_slo: bool = False  # report in the usage whether the SLO was met
    embeds: bool = False  # the choices are vectors

    @property
    def model(self) -> str:
        """Name of the model, without its alias or adapter."""
        return self.requests[0].model


class TextUpdate(Struct, frozen=True):
    """New text of one choice. The last update of a choice has a finish_reason."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Logprobs | None = None


def merge_chunks(events: list[Event]) -> list[Event]:
    """Returns the events with the chunks of each choice merged up to its failure, followed by the
    failures. Events are unchanged if one has log probabilities, which take the most time to
    show."""
    if len(events) == 1:
        return events
    joined: dict[int, Chunk] = {}
    failed: dict[int, Failure] = {}
    for number, event in events:
        if number in failed:
            continue
        if isinstance(event, Failure):
            failed[number] = event
        elif event.logprobs or event.prompt_logprobs:
            return events
        elif before := joined.get(number):
            joined[number] = structs.replace(
                event,
                first_index=before.first_index,
                token_ids=before.token_ids + event.token_ids,
                cached_tokens=before.cached_tokens or event.cached_tokens,
            )
        else:
            joined[number] = event
    return [*joined.items(), *failed.items()]


class GeneratedChoice:
    """Output of one choice: converts the tokens of an OpenRequest to text."""

    def __init__(
        self, spec: GenerationSpec, tokenizer: ModelTokenizer, opened: OpenRequest
    ) -> None:
        self.opened = opened
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.embedding = b""
        self._detokenizer = Detokenizer(
            tokenizer.tokenizer, opened.request.prompt_ids, spec.skip_special_tokens
        )
        self._stops = StopMatcher(spec.stops)
        self.texts: list[str] = []
        self.token_ids: list[int] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    def take(self, chunk: Chunk) -> TextUpdate:
        """Appends the tokens of a chunk, up to a completed stop string."""
        self.cached_tokens = chunk.cached_tokens or self.cached_tokens
        self.embedding = chunk.embedding
        text, taken = self._advance(chunk)
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            text += self._end()
        self.texts.append(text)
        logprobs = None
        if chunk.logprobs or chunk.prompt_logprobs:
            logprobs = self._take_logprobs(chunk, len(taken))
        return TextUpdate(self.opened.choice, text, taken, self.finish_reason, logprobs)

    def so_far(self) -> TextUpdate:
        """Returns all output in one update."""
        text = "".join(self.texts)
        choice, reason = self.opened.choice, self.finish_reason
        return TextUpdate(choice, text, self.token_ids, reason, self.logprobs)

    def _take_logprobs(self, chunk: Chunk, tokens: int) -> Logprobs | None:
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        if chunk.logprobs is None:
            return None
        taken = chunk.logprobs.part(0, tokens)
        self.logprobs = self.logprobs or Logprobs()
        self.logprobs.extend(taken)
        return taken

    def _shown(self, chunk: Chunk) -> int:
        """Returns the number of ids that are shown as text: all but the stop token, which the
        vocabulary may not mark as special."""
        ids = chunk.token_ids
        if chunk.finish_reason != "stop" or not ids:
            return len(ids)
        return len(ids) - (ids[-1] in self.opened.request.sampling.stop_token_ids)

    def _advance(self, chunk: Chunk) -> tuple[str, list[int]]:
        """Returns the new text, and the ids up to a completed stop string."""
        text, ids, stops = "", chunk.token_ids, self._stops
        for number, token_id in enumerate(ids[: self._shown(chunk)], start=1):
            piece = self._detokenizer.push(token_id)
            text += stops.push(piece) if stops.wanted else piece
            if stops.stopped:
                ids = ids[:number]
                break
        self.token_ids += ids
        return text, ids

    def _end(self) -> str:
        rest = self._stops.push(self._detokenizer.flush())
        if self._stops.stopped:
            self.finish_reason = "stop"
            return rest
        return rest + self._stops.flush()


class Generation:
    """Generation of one HTTP request. Call `start`, iterate `updates`, and always call `finish`."""

    def __init__(
        self,
        spec: GenerationSpec,
        tokenizer: ModelTokenizer,
        dispatcher: Dispatcher,
        metrics: Metrics,
        rates: RateLimits,
    ) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self._dispatcher = dispatcher
        self._mailbox = Mailbox()
        self._metrics, self._rates = metrics, rates
        self._call = calls.current.get() or Call("")
        first = spec.requests[0]
        self._timer = RequestTimer(
            metrics, first.model, first.slo_ttft_s, first.slo_tpot_s, len(spec.requests)
        )
        self.choices = [
            GeneratedChoice(spec, tokenizer, OpenRequest(request, number, self._mailbox))
            for number, request in enumerate(spec.requests)
        ]

    async def start(self) -> None:
        """Enqueues the requests. Raises OverloadedError or QueueUnavailableError, and then leaves
        nothing in the queue. `finish` must follow in any case."""
        self._timer.begin(self.spec.began_s, self._call.traceparent)
        self._call.generation, self._call.model = self.spec.id, self.spec.model
        prompt_tokens = self._prompt_tokens()
        await self._rates.begin(self._call.api_key, prompt_tokens)
        try:
            opened = [choice.opened for choice in self.choices]
            await self._dispatcher.submit(opened, retried=self._call.retried)
        except BaseException:
            self._rates.give_back(self._call.api_key, prompt_tokens)
            raise
        self._call.prompt_tokens = prompt_tokens
        self._timer.submitted(prompt_tokens)

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """Yields output as it arrives, until every choice has ended. An update has several tokens
        if the client or this process was slow to take the last one. Raises GenerationError."""
        left = len(self.choices)
        while left:
            for number, event in merge_chunks(await self._mailbox.take(_EVENTS_PER_UPDATE_MAX)):
                choice = self.choices[number]
                if choice.finish_reason is not None:
                    continue
                if isinstance(event, Failure):
                    raise GenerationError(event.code, event.message)
                update = self._take(choice, event)
                left -= update.finish_reason is not None
                yield update

    def finish(self, outcome: str | None = None) -> None:
        """Cancels the requests that still run, and counts `outcome` (by default "ok" if every
        choice has ended, else "cancelled"). Call once, however the request ended."""
        ended = all(choice.finish_reason is not None for choice in self.choices)
        traced = [TracedChoice(each.opened.request, each.opened.started) for each in self.choices]
        self._timer.end(outcome or ("ok" if ended else "cancelled"), traced)
        self._rates.end(self._call.api_key, self._call.output_tokens)
        self._metrics.count_key_usage(self._call)
        self._dispatcher.cancel([choice.opened.request.id for choice in self.choices])

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of each OpenAI object that answers this HTTP request."""
        spec = self.spec
        created = int(spec.requests[0].arrival_unix_s)
        return {"id": spec.id, "object": kind, "created": created, "model": spec.asked_model}

    def usage(self) -> dict[str, Any]:
        """Returns the token counts so far in OpenAI's shape, with the SLO if `show_slo`."""
        prompt_tokens = self._prompt_tokens()
        made = sum(len(choice.token_ids) for choice in self.choices)
        completion_tokens = 0 if self.spec.hides_output else made
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }
        return {**usage, "slo": self._slo()} if self.spec.show_slo else usage

    def _slo(self) -> dict[str, Any] | None:
        """Returns the SLO attainment as `prism_slo_total` counts it, or None if nothing was
        computed because a kept answer was replayed."""
        latencies, first = self._timer.latencies(), self.spec.requests[0]
        if latencies is None:
            return None
        return {
            "queue_s": self._queue_s(first.arrival_unix_s),
            "ttft": _slo_result(latencies.ttft_s, first.slo_ttft_s),
            "tpot": _slo_result(latencies.tpot_s, first.slo_tpot_s),
        }

    def _queue_s(self, arrival_unix_s: float) -> float | None:
        """Returns the time until an engine had the last choice, or None if the `Started` of a
        choice was lost."""
        starts = [choice.opened.started for choice in self.choices]
        known = [started.unix_s for started in starts if started is not None]
        if len(known) < len(starts):
            return None
        return round(max(0.0, max(known) - arrival_unix_s), 6)

    def _prompt_tokens(self) -> int:
        """Returns the number of prompt tokens; a prompt with several choices counts once."""
        made = self.spec.shown[1]
        return sum(len(request.prompt_ids) for request in self.spec.requests[::made])

    def _cached_tokens(self) -> int:
        """Returns the number of prompt tokens that were cached before the first choice of each
        prompt. The other choices reuse the KV cache of the first."""
        made, cached = self.spec.shown[1], [choice.cached_tokens for choice in self.choices]
        return sum(min(cached[first : first + made]) for first in range(0, len(cached), made))

    def _take(self, choice: GeneratedChoice, chunk: Chunk) -> TextUpdate:
        update = choice.take(chunk)
        if choice.embedding:
            self._timer.vector_received()
        self._timer.tokens(len(update.token_ids))
        self._call.output_tokens += len(update.token_ids)
        if choice.finish_reason is not None:
            self._end_choice(choice, by_engine=chunk.finish_reason is not None)
        return update

    def _end_choice(self, choice: GeneratedChoice, by_engine: bool) -> None:
        request_id = choice.opened.request.id
        if by_engine:
            self._dispatcher.close_requests([request_id])
        else:
            self._dispatcher.cancel([request_id])


def _slo_result(actual_s: float | None, target_s: float) -> dict[str, Any] | None:
    if actual_s is None:
        return None
    shown_s = round(actual_s, 6)
    return {"actual_s": shown_s, "target_s": target_s, "met": actual_s <= target_s}
