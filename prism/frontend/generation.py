"""One HTTP request's outputs: from tokenised prompts to text, per choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from prism.frontend.detokenizer import Detokenizer
from prism.frontend.dispatcher import Dispatcher
from prism.frontend.errors import GenerationError
from prism.frontend.metrics import Metrics, RequestTimer
from prism.frontend.request_log import Broken, Mailbox, OpenRequest, Restarted, Tokens
from prism.frontend.stop_strings import StopMatcher
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages import ModelSpec, Request, Sampling


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate: one output (choice) per prompt, all with the same parameters.

    `began_s` is the monotonic time of arrival, `arrival_unix_s` the wall clock's.
    """

    id: str
    model: ModelSpec
    prompts: list[list[int]]
    sampling: Sampling
    stops: tuple[str, ...]
    slo_ttft_s: float
    slo_tpot_s: float
    show_token_ids: bool = False
    began_s: float = field(default_factory=time.monotonic)
    arrival_unix_s: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Update:
    """New output of one choice; the update with a finish_reason is its last."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Choice:
    """One output as it grows."""

    def __init__(self, order: Order, tokenizer: ModelTokenizer, opened: OpenRequest) -> None:
        self.opened = opened
        self._order = order
        self._tokenizer = tokenizer
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.reset()

    def reset(self) -> None:
        prompt_ids = self.opened.request.prompt_ids
        self._detokenizer = Detokenizer(self._tokenizer.tokenizer, prompt_ids)
        self._stops = StopMatcher(self._order.stops)
        self.texts: list[str] = []
        self.token_ids: list[int] = []

    def take(self, tokens: Tokens) -> Update:
        """Advance by these tokens, up to a stop string if one completes."""
        self.cached_tokens = tokens.cached_tokens or self.cached_tokens
        text, taken = self._advance(tokens.token_ids, self._shown(tokens))
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif tokens.finish_reason is not None:
            self.finish_reason = tokens.finish_reason
            text += self._end()
        self.texts.append(text)
        return Update(self.opened.choice, text, taken, self.finish_reason)

    def _shown(self, tokens: Tokens) -> int:
        """How many of the ids show text: a token that ended the output does not, even where the
        vocabulary calls it ordinary."""
        ids = tokens.token_ids
        ended = tokens.finish_reason == "stop" and ids
        hide = ended and ids[-1] in self._order.sampling.stop_token_ids
        return len(ids) - bool(hide)

    def _advance(self, token_ids: list[int], shown: int) -> tuple[str, list[int]]:
        """The text, and the ids up to where a stop string completed."""
        pieces: list[str] = []
        for number, token_id in enumerate(token_ids[:shown], start=1):
            pieces.append(self._stops.push(self._detokenizer.push(token_id)))
            if self._stops.stopped:
                token_ids = token_ids[:number]
                break
        self.token_ids += token_ids
        return "".join(pieces), token_ids

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
        order: Order,
        tokenizer: ModelTokenizer,
        dispatcher: Dispatcher,
        metrics: Metrics,
        progress_timeout_s: float,
    ) -> None:
        self.order = order
        self._dispatcher = dispatcher
        self._progress_timeout_s = progress_timeout_s
        self._mailbox: Mailbox = asyncio.Queue()
        self._timer = RequestTimer(
            metrics, order.model.name, order.slo_ttft_s, order.slo_tpot_s, len(order.prompts)
        )
        self.choices = [
            Choice(order, tokenizer, OpenRequest(request, number, self._mailbox))
            for number, request in enumerate(_requests(order, dispatcher))
        ]

    async def start(self) -> None:
        """Raises OverloadedError or QueueUnavailableError; then nothing is left in the queue.
        `finish` must follow in any case."""
        self._timer.begin(self.order.began_s, sum(len(p) for p in self.order.prompts))
        await self._dispatcher.submit([choice.opened for choice in self.choices])

    async def updates(self, visible: bool) -> AsyncIterator[Update]:
        """Output as it comes, until every choice has ended. Raises GenerationError.

        visible: each update goes to the client at once, so its choice can no longer begin anew.
        """
        while any(choice.finish_reason is None for choice in self.choices):
            update = await self._next()
            if update is None:
                continue
            shows = update.text or (self.order.show_token_ids and update.token_ids)
            if visible and shows:
                self.choices[update.choice].opened.visible = True
            yield update

    def finish(self, outcome: str | None = None) -> None:
        """Cancel what still runs; call it once, however the request ended. `outcome` (default:
        "ok" if every choice has ended, else "cancelled") is counted."""
        ended = all(choice.finish_reason is not None for choice in self.choices)
        self._timer.end(outcome or ("ok" if ended else "cancelled"))
        self._dispatcher.cancel([choice.opened.request.id for choice in self.choices])

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(p) for p in self.order.prompts),
            completion_tokens=sum(len(c.token_ids) for c in self.choices),
            cached_tokens=sum(c.cached_tokens for c in self.choices),
        )

    async def _next(self) -> Update | None:
        try:
            async with asyncio.timeout(self._progress_timeout_s):
                event = await self._mailbox.get()
        except TimeoutError as error:
            raise GenerationError(
                "timeout", f"no token for {self._progress_timeout_s:g} s; the request was cancelled"
            ) from error
        choice = self.choices[event.choice]
        if isinstance(event, Broken):
            raise GenerationError(event.code, event.message)
        if isinstance(event, Restarted):
            self._timer.restart(len(choice.token_ids))
            choice.reset()
            return None
        return self._take(choice, event)

    def _take(self, choice: Choice, tokens: Tokens) -> Update | None:
        stale = tokens.attempt != choice.opened.request.attempt
        if stale or choice.finish_reason is not None:
            return None
        update = choice.take(tokens)
        self._timer.tokens(len(update.token_ids))
        if choice.finish_reason is not None:
            self._end_choice(choice, by_engine=tokens.finish_reason is not None)
        return update

    def _end_choice(self, choice: Choice, by_engine: bool) -> None:
        request_id = choice.opened.request.id
        if by_engine:
            self._dispatcher.close_requests([request_id])
        else:
            self._dispatcher.cancel([request_id])


def _requests(order: Order, dispatcher: Dispatcher) -> Sequence[Request]:
    return [
        Request(
            id=f"{order.id}-{number}",
            model=order.model.name,
            prompt_ids=prompt,
            sampling=order.sampling,
            arrival_unix_s=order.arrival_unix_s,
            slo_ttft_s=order.slo_ttft_s,
            slo_tpot_s=order.slo_tpot_s,
            frontend_id=dispatcher.frontend_id,
            reply_to=dispatcher.reply_to,
        )
        for number, prompt in enumerate(order.prompts)
    ]
