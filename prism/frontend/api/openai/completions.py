"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.api.openai.logprobs import CompletionLogprobs, joined, mean
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.protocol.openai_types import CompletionBody
from prism.frontend.requests.generation import GeneratedChoice, TextUpdate
from prism.frontend.requests.idempotency import AnyGeneration, SharedAnswers, read_key
from prism.frontend.requests.replies import Event, openai_events, reply_stream, reply_whole
from prism.frontend.requests.specs import SpecBuilder
from prism.messages.requests import Logprobs

router = APIRouter(route_class=PlainRoute)
KIND = "text_completion"


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    specs: SpecBuilder = request.app.state.specs
    answers: SharedAnswers = request.app.state.answers
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, CompletionBody)
    key = await read_key(request, body)
    with in_flight.request():
        generation = answers.generation(await specs.completion(body), key)
        if body.stream:
            choices = partial(_Choices, generation)
            events = openai_events(generation, KIND, choices, body.stream_options)
            return await reply_stream(request, generation, events)
        return await reply_whole(request, generation, lambda: _whole(generation))


class _Choices:
    """`ShownChoices` of completions."""

    def __init__(self, generation: AnyGeneration) -> None:
        self.begin: list[Event] = []
        numbers = range(len(generation.choices))
        self._shown = [_Shown(generation, number) for number in numbers]
        self._may_wait = bool(generation.spec.echoes) and generation.spec.logprobs is not None
        self._held: list[TextUpdate] = []

    def show(self, update: TextUpdate) -> list[Event]:
        """Returns the updates that can be shown now, including those held back before."""
        if not self._may_wait:
            return [self._shown[update.choice].delta(update)]
        updates, self._held = [*self._held, update], []
        ready = []
        for each in updates:
            shown = self._shown[each.choice]
            if shown.can_begin():
                ready.append(shown.delta(each))
            else:
                self._held.append(each)
        return ready


class _Shown:
    """Choice as the client sees it, after its prompt if that is echoed."""

    def __init__(self, generation: AnyGeneration, choice: int) -> None:
        self._spec = generation.spec
        self._choice = generation.choices[choice]
        # The first choice of a prompt has the prompt's log probabilities.
        self._first = generation.choices[choice - choice % self._spec.shown[1]]
        self._logprobs = CompletionLogprobs(
            generation.tokenizer, not self._spec.skip_special_tokens
        )
        self._echo = self._spec.echoes[choice] if self._spec.echoes else ""

    def can_begin(self) -> bool:
        """Returns whether the log probabilities of the echoed prompt are available."""
        return not self._echo or bool(self._first.texts)

    def delta(self, update: TextUpdate) -> Event:
        if self._spec.hides_output:
            reason = update.finish_reason and "length"
            update = TextUpdate(update.choice, "", [], reason)
        logprobs = None
        if self._spec.logprobs is not None:
            logprobs = self._with_prompt(update)
        echo, self._echo = self._echo, ""
        choice = {
            "index": update.choice,
            "text": echo + update.text,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }
        if self._spec.show_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    def _with_prompt(self, update: TextUpdate) -> dict[str, Any]:
        before = self._first.prompt_logprobs if self._echo else None
        prompt_ids = self._choice.opened.request.prompt_ids
        prompt = self._logprobs.prompt(prompt_ids, before, self._echo) if before else None
        part = self._logprobs.part(update.token_ids, update.logprobs or Logprobs())
        return joined(prompt, part) if prompt else part


def _whole(generation: AnyGeneration) -> dict[str, Any]:
    ended = [
        _Shown(generation, choice.opened.choice).delta(choice.so_far())
        for choice in _best(generation)
    ]
    choices = [{**choice, "index": index} for index, choice in enumerate(ended)]
    return {**generation.head(KIND), "choices": choices, "usage": generation.usage()}


def _best(generation: AnyGeneration) -> list[GeneratedChoice]:
    """Returns the choices that the client sees: the likeliest of each prompt."""
    shown, made = generation.spec.shown
    if shown == made:
        return generation.choices
    groups = [generation.choices[i : i + made] for i in range(0, len(generation.choices), made)]
    ranked = [sorted(group, key=lambda c: mean(c.logprobs), reverse=True) for group in groups]
    return [choice for group in ranked for choice in group[:shown]]
