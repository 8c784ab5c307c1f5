"""Steady load of streaming requests, and an exact model of each stream.

A client's request is a pure function of the seed and its number. The fake engine's tokens are a
pure function of the prompt, so each stream is known beforehand, token by token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any
from urllib.parse import urlsplit

from prism.engines.fake import expected_tokens

# Limit for a stream's end, whatever is killed or stopped.
END_S = 240.0
REFUSED_PAUSE_S = 0.2
PAUSED_S = 0.1
_LINE_BYTES_MAX = 1 << 20
_VOCABULARY = 300  # of tests.frontend.tiny_model
_SHARED_PREFIX = tuple(range(100, 132))


@dataclass(frozen=True)
class Asked:
    """One request. `leaves_after`: the client disconnects after this number of tokens."""

    model: str
    prompt: tuple[int, ...]
    count: int
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()
    leaves_after: int | None = None

    @cached_property
    def expected(self) -> tuple[list[int], str]:
        """Tokens and finish reason of the whole stream. A stop token is its last one."""
        tokens = expected_tokens(self.prompt, self.count)
        for number, token in enumerate(tokens, start=1):
            if token in self.stop_ids:
                return tokens[:number], "stop"
        return tokens, "length"

    def body(self) -> bytes:
        sampling = {"temperature": self.temperature, "seed": 7} if self.temperature else {}
        return json.dumps(
            {
                "model": self.model,
                "prompt": list(self.prompt),
                "max_tokens": self.count,
                "temperature": 0,
                "ignore_eos": True,
                "stop_token_ids": list(self.stop_ids),
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                **sampling,
            }
        ).encode()


def varied(seed: int, models: Sequence[str], number: int) -> Asked:
    """Returns a short or long request, greedy or sampled. Some share a prefix, some have a stop
    token, and some clients disconnect."""
    rng = Random(f"{seed}/{number}")
    prompt = tuple(rng.randrange(1, _VOCABULARY) for _ in range(rng.randint(1, 24)))
    count = rng.choice((1, 20, 60, 200))
    return Asked(
        model=models[number % len(models)],
        prompt=_SHARED_PREFIX + prompt if rng.random() < 0.3 else prompt,
        count=count,
        temperature=rng.choice((0.0, 0.0, 1.0)),
        stop_ids=(rng.randrange(32, 96),) if rng.random() < 0.1 else (),
        leaves_after=rng.randrange(count) if rng.random() < 0.05 else None,
    )


def brief(seed: int, models: Sequence[str], number: int) -> Asked:
    """Returns a request of as little work as possible, for high rates."""
    rng = Random(f"{seed}/{number}")
    prompt = tuple(rng.randrange(1, _VOCABULARY) for _ in range(4))
    return Asked(models[number % len(models)], prompt, 4)


@dataclass(slots=True)
class Stream:
    """Tokens and times that the client received. Times are monotonic; `longest_gap_s` is the
    longest time between two tokens."""

    asked: Asked
    began_s: float
    id: str = ""
    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    message: str = ""  # of the error
    status: int = 0  # of the response
    retry_after_s: int = 0  # 0: the response did not say
    broke: str = ""  # how the connection did
    usage: int | None = None
    ended: bool = False  # with [DONE], or with an error's whole body
    left: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float = 0.0
    longest_gap_s: float = 0.0

    def take(self, event: dict[str, Any], now_s: float) -> None:
        if "error" in event:
            self.error = str(event["error"]["code"])
            self.message = str(event["error"]["message"])
            return
        self.id = event["id"]
        self.usage = (event.get("usage") or {}).get("completion_tokens", self.usage)
        for choice in event["choices"]:
            self.reason = choice["finish_reason"] or self.reason
            self._take_tokens(choice["token_ids"], now_s)

    def _take_tokens(self, ids: list[int], now_s: float) -> None:
        if not ids:
            return
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s
        self.ids += ids


def verdict(stream: Stream) -> str:
    """Returns the outcome of the stream.

    "whole", "named" (ended with an error), "left" (by its client), "cut" (the connection broke),
    "lost" (no end at all) or "wrong" (tokens lost, repeated or changed).
    """
    tokens, reason = stream.asked.expected
    if stream.ids != tokens[: len(stream.ids)]:
        return "wrong"
    if stream.left:
        return "left"
    if stream.error is not None:
        return "named"
    if not stream.ended:
        return "cut" if stream.end_s - stream.began_s < END_S else "lost"
    whole = (stream.ids, stream.reason, stream.usage) == (tokens, reason, len(tokens))
    return "whole" if whole else "wrong"


async def ask(
    url: str, asked: Asked, on_event: Callable[[Stream], None] = lambda _: None
) -> Stream:
    """Sends one request over a separate connection. Records failures in the stream, raises none."""
    stream = Stream(asked, time.monotonic())
    try:
        async with asyncio.timeout(END_S):
            await _exchange(url, stream, on_event)
    except (TimeoutError, OSError, EOFError) as error:
        stream.broke = repr(error)
    stream.end_s = time.monotonic()
    return stream


async def _exchange(url: str, stream: Stream, on_event: Callable[[Stream], None]) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES_MAX)
    try:
        body = stream.asked.body()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status = (await reader.readline()).split()
        stream.status = int(status[1]) if status else 0
        if stream.status == 200:
            await _read_events(reader, stream, on_event)
        elif status:
            await _read_refusal(reader, stream)
    finally:
        writer.close()


async def _read_events(
    reader: asyncio.StreamReader, stream: Stream, on_event: Callable[[Stream], None]
) -> None:
    """Reads events of one line each; skips HTTP's lines between them."""
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            stream.ended = True
            return
        stream.take(json.loads(line.removeprefix(b"data: ")), time.monotonic())
        on_event(stream)
        leaves_after = stream.asked.leaves_after
        if leaves_after is not None and len(stream.ids) > leaves_after:
            stream.left = True
            return


async def _read_refusal(reader: asyncio.StreamReader, stream: Stream) -> None:
    head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    for line in head.lower().splitlines():
        if line.startswith(b"retry-after:"):
            stream.retry_after_s = int(line.partition(b":")[2])
    with suppress(ValueError):  # half a body: the connection broke
        stream.take(json.loads(text), time.monotonic())


class Load:
    """Clients that send one request after another until `stop`. For one event loop.

    answered_s: model -> send time of its latest request that has received a token.
    """

    def __init__(self, url: str, clients: int, make: Callable[[int], Asked]) -> None:
        self.url = url
        self.tally: Counter[str] = Counter()
        self.named: Counter[str] = Counter()
        self.tokens = 0
        self.bad: list[Stream] = []
        self.cuts: list[Stream] = []
        self.paused: set[str] = set()  # ids of whole streams that stood still for a while
        self.answered_s: dict[str, float] = {}
        self._make = make
        self._number = 0
        self._stopped = False
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Starts no more requests; returns when the open ones have ended."""
        self._stopped = True
        await asyncio.gather(*self._tasks)

    @property
    def ended(self) -> int:
        return self.tally.total()

    async def _client(self) -> None:
        while not self._stopped:
            self._number += 1
            stream = await ask(self.url, self._make(self._number), self._heard)
            self._note(stream)
            if stream.first_s is None:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _heard(self, stream: Stream) -> None:
        model = stream.asked.model
        if stream.ids:
            self.answered_s[model] = max(self.answered_s.get(model, 0.0), stream.began_s)

    def _note(self, stream: Stream) -> None:
        said = verdict(stream)
        self.tally[said] += 1
        self.tokens += len(stream.ids)
        if said == "named":
            self.named[f"{stream.error}{' within' if stream.ids else ''}"] += 1
        elif said == "cut":
            self.cuts.append(stream)
        elif said in ("wrong", "lost"):
            self.bad.append(stream)
        elif stream.longest_gap_s > PAUSED_S:
            self.paused.add(stream.id)
