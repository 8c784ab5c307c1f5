"""One HTTP request's outputs: from tokenised prompts to text, per choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, structs

from prism.frontend import calls
from prism.frontend.access import Rates
from prism.frontend.calls import Call
from prism.frontend.detokenizer import Detokenizer
from prism.frontend.dispatcher import Dispatcher
from prism.frontend.errors import GenerationError
from prism.frontend.metrics import Metrics, RequestTimer
from prism.frontend.parsers import Parsing
from prism.frontend.request_log import Event, Mailbox, OpenRequest
from prism.frontend.stop_strings import StopMatcher
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.requests import Chunk, Failure, Logprobs, Request

# Engine steps that one update may hold: turning them into text holds up the other requests.
_TOGETHER_MAX = 64


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What to generate for one HTTP request: a choice for each of `requests`.

    The requests differ in their prompts and seeds. They go to the queue; the other fields stay in
    the frontend, which turns tokens into text.
    """

    id: str
    requests: list[Request]
    stops: tuple[str, ...]
    show_token_ids: bool
    began_s: float  # monotonic time of arrival
    asked_model: str  # what the client calls it
    skip_special_tokens: bool = True
    logprobs: int | None = None  # the client sees those of so many of the likeliest tokens
    # Of each prompt: choices that the client sees, and choices that are made.
    shown: tuple[int, int] = (1, 1)
    echoes: tuple[str, ...] = ()  # text before each choice's own
    hides_output: bool = False  # only what is before it is shown
    parsing: Parsing | None = None
    show_slo: bool = False  # the usage says whether its SLO was met
    embeds: bool = False  # its choices are vectors


class TextUpdate(Struct, frozen=True):
    """New text of one choice, for the client. An update with a finish_reason is its last."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Logprobs | None = None


def together(events: list[Event]) -> list[Event]:
    """The chunks of each choice as one, up to its failure; then failures. Those with log
    probabilities, which take the most time to show, stay apart."""
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
    """One choice as it grows: tokens of an OpenRequest in, text out."""

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
        """The one that ended it."""
        return self._stops.found

    def take(self, chunk: Chunk) -> TextUpdate:
        """Advance by these tokens, up to a stop string if one completes."""
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
        """All its output in one update."""
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
        """How many of the ids show text: a token that ended the output does not, even where the
        vocabulary calls it ordinary."""
        ids = chunk.token_ids
        if chunk.finish_reason != "stop" or not ids:
            return len(ids)
        return len(ids) - (ids[-1] in self.opened.request.sampling.stop_token_ids)

    def _advance(self, chunk: Chunk) -> tuple[str, list[int]]:
        """The text, and the ids up to where a stop string completed."""
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
    """`start` it, iterate `updates`, and always `finish` it: that cancels what still runs."""

    def __init__(
        self,
        spec: GenerationSpec,
        tokenizer: ModelTokenizer,
        dispatcher: Dispatcher,
        metrics: Metrics,
        rates: Rates,
    ) -> None:
        self.spec = spec
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
        """Raises OverloadedError or QueueUnavailableError; then nothing is left in the queue.
        `finish` must follow in any case."""
        self._timer.begin(self.spec.began_s, self._call.traceparent)
        self._call.generation, self._call.model = self.spec.id, self.spec.requests[0].model
        prompt_tokens = self._prompt_tokens()
        await self._rates.begin(self._call.api_key, prompt_tokens)
        try:
            await self._dispatcher.submit([choice.opened for choice in self.choices])
        except BaseException:
            self._rates.give_back(self._call.api_key, prompt_tokens)
            raise
        self._call.prompt_tokens = prompt_tokens
        self._timer.submitted(prompt_tokens)

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """Output as it comes, until every choice has ended; several tokens in one update where the
        client, or this process, was slow to take the last one. Raises GenerationError."""
        left = len(self.choices)
        while left:
            for number, event in together(await self._mailbox.take(_TOGETHER_MAX)):
                choice = self.choices[number]
                if choice.finish_reason is not None:
                    continue
                if isinstance(event, Failure):
                    raise GenerationError(event.code, event.message)
                update = self._take(choice, event)
                left -= update.finish_reason is not None
                yield update

    def finish(self, outcome: str | None = None) -> None:
        """Cancel what still runs; call it once, however the request ended. `outcome` (default:
        "ok" if every choice has ended, else "cancelled") is counted."""
        ended = all(choice.finish_reason is not None for choice in self.choices)
        opened = [choice.opened for choice in self.choices]
        self._timer.end(outcome or ("ok" if ended else "cancelled"), opened)
        self._rates.end(self._call.api_key, self._call.output_tokens)
        self._metrics.of_key(self._call)
        self._dispatcher.cancel([choice.opened.request.id for choice in self.choices])

    def head(self, kind: str) -> dict[str, Any]:
        """What each answer to this HTTP request begins with, in OpenAI's words."""
        spec = self.spec
        created = int(spec.requests[0].arrival_unix_s)
        return {"id": spec.id, "object": kind, "created": created, "model": spec.asked_model}

    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's words, and how its SLO was met where that is wanted."""
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
        """As `prism_slo_total` counts it. None: nothing was computed, the answer is a repeat."""
        latencies, first = self._timer.latencies(), self.spec.requests[0]
        if latencies is None:
            return None
        return {
            "queue_s": self._queue_s(first.arrival_unix_s),
            "ttft": _judged(latencies.ttft_s, first.slo_ttft_s),
            "tpot": _judged(latencies.tpot_s, first.slo_tpot_s),
        }

    def _queue_s(self, arrival_unix_s: float) -> float | None:
        """Until an engine had the last of its choices. None: an agent's word of it was lost."""
        starts = [choice.opened.started for choice in self.choices]
        known = [started.unix_s for started in starts if started is not None]
        if len(known) < len(starts):
            return None
        return round(max(0.0, max(known) - arrival_unix_s), 6)

    def _prompt_tokens(self) -> int:
        """A prompt counts once, however many choices are made of it."""
        made = self.spec.shown[1]
        return sum(len(request.prompt_ids) for request in self.spec.requests[::made])

    def _cached_tokens(self) -> int:
        """Of each prompt what was there before its first choice, whose KV the others found."""
        made, cached = self.spec.shown[1], [choice.cached_tokens for choice in self.choices]
        return sum(min(cached[first : first + made]) for first in range(0, len(cached), made))

    def _take(self, choice: GeneratedChoice, chunk: Chunk) -> TextUpdate:
        update = choice.take(chunk)
        if choice.embedding:
            self._timer.answered()
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


def _judged(actual_s: float | None, target_s: float) -> dict[str, Any] | None:
    if actual_s is None:
        return None
    shown_s = round(actual_s, 6)
    return {"actual_s": shown_s, "target_s": target_s, "met": actual_s <= target_s}
