"""Chat completion as a list of parts in order, for the APIs that show it so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import chain
from typing import Any, Literal

from prism.frontend.api.openai.chat import ChoiceRenderer
from prism.frontend.requests.idempotency import AnyGeneration
from prism.frontend.requests.replies import Event, run_in_thread_if_slow

Kind = Literal["reasoning", "text", "call"]


class ChatParts(ABC):
    """Parts of an answer and the events that build them, both in the shape of one API. Each part is
    closed before the next one begins."""

    def __init__(self, generation: AnyGeneration) -> None:
        """Creates an empty list. REQUIRES: the generation has started."""
        self.parts: list[Event] = []
        self.finish_reason: str | None = None
        self._generation, self._renderer = generation, ChoiceRenderer(generation, 0)
        self._open: Kind | None = None  # kind of the last part while it is open
        self._pieces: list[str] = []  # of its text, or of a call's arguments
        self._space: list[str] = []  # held back: it belongs to a text if one follows

    @abstractmethod
    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        """Appends a part without text to `parts`. `call`: first delta of a call, else empty."""

    @abstractmethod
    def _delta(self, kind: Kind, text: str) -> Event:
        """Returns the event of a text, or of a call's arguments, that continues the last part."""

    @abstractmethod
    def _end(self, kind: Kind, text: str, cut: bool) -> Iterator[Event]:
        """Completes the last part. `cut`: the answer ends in it and is not complete."""

    def take_whole(self) -> None:
        """Takes the output of a generation that has ended."""
        [choice] = self._generation.choices
        ended = choice.so_far()
        taken = [self.take(delta) for delta in self._renderer.in_order(ended)]
        self.finish_reason = self._renderer.finish_reason(ended)
        for _ in chain(*taken, self._take_end()):
            pass

    async def updates(self) -> AsyncIterator[list[Event]]:
        """Yields the events of each update as it arrives, and then of the end. Raises
        GenerationError."""
        async for update in self._generation.updates():
            delta = await run_in_thread_if_slow(
                partial(self._renderer.delta, update), self._generation.spec, len(update.token_ids)
            )
            yield list(self.take(delta))
            self.finish_reason = self._renderer.finish_reason(update)
        yield list(self._take_end())

    def take(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Yields the events of a delta, or of a whole message as one."""
        if reasoning := delta.get("reasoning_content"):
            yield from self._write("reasoning", reasoning)
        calls = delta.get("tool_calls", [])
        first = next((place for place, call in enumerate(calls) if "id" in call), len(calls))
        # The rest of the open call precedes the text of the same delta.
        for call in calls[:first]:
            yield from self._append("call", call["function"]["arguments"])
        if text := delta.get("content"):
            yield from self._take_text(text)
        for call in calls[first:]:
            yield from self._take_call(call)

    def close(self, cut: bool = False) -> Iterator[Event]:
        """Closes the last part."""
        if self._open is not None:
            kind, self._open = self._open, None
            yield from self._end(kind, "".join(self._pieces), cut)

    def _take_end(self) -> Iterator[Event]:
        """Closes the last part. Adds an empty text if there is none."""
        if not self.parts:
            yield from self._write("text", "".join(self._space))
        yield from self.close(cut=self.finish_reason == "length")

    def _take_text(self, text: str) -> Iterator[Event]:
        """Takes text. Space before and between other parts does not begin a text."""
        self._space.append(text)
        if self._open == "text" or text.strip():
            text, self._space = "".join(self._space), []
            yield from self._write("text", text)

    def _take_call(self, call: dict[str, Any]) -> Iterator[Event]:
        if "id" in call:
            self._space = []
            yield from self._open_part("call", call)
        yield from self._append("call", call["function"]["arguments"])

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._open_part(kind, {})
        yield from self._append(kind, text)

    def _open_part(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open, self._pieces = kind, []
        yield from self._begin(kind, call)

    def _append(self, kind: Kind, text: str) -> Iterator[Event]:
        self._pieces.append(text)
        if text:
            yield self._delta(kind, text)
