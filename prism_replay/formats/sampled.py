"""Readers of Azure Functions and ShareGPT. Missing times and lengths are drawn with a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prism.errors import TraceError
from prism_replay.formats.rows import (
    ReadOptions,
    Row,
    check_request_count,
    converted,
    numbered_rows,
    poisson_times_s,
    starting_at_zero,
)
from prism_replay.lengths import requests_at
from prism_replay.trace import TraceRequest, numbered_lines

MINUTES_OF_DAY = 1440
BYTES_PER_TOKEN = 4
"""Typical for English text and recent tokenizers."""
USERS, ASSISTANTS = ("human", "user"), ("gpt", "chatgpt", "bing", "bard", "assistant")


def read_maf(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Reads Azure Functions, with a model for each function. Raises TraceError.

    The file has the counts per minute of 2019 (HashOwner, HashApp, HashFunction, Trigger, 1 to
    1440; times are drawn within the minute) or the invocations of 2021 (app, func, end_timestamp,
    duration). Lengths are drawn from options.lengths. Only the window [start_s, start_s + seconds)
    is read.
    """
    arrivals_s: dict[str, list[float]] = {}
    size = 0
    rng = np.random.default_rng([options.seed, 5])
    for where, row in numbered_rows(path):
        read = _minutes if "HashFunction" in row else _invocation
        name, times_s = converted(partial(read, row, options, rng), where)
        arrivals_s.setdefault(name, []).extend(times_s)
        check_request_count(size := size + len(times_s), path)
    trace: list[TraceRequest] = []
    for number, (name, found_s) in enumerate(arrivals_s.items()):
        own = np.random.default_rng([options.seed, 6, number])
        trace += requests_at(name, np.sort(found_s), options.lengths, own)
    return starting_at_zero(path, trace)


def read_sharegpt(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Reads the first question and answer of ShareGPT conversations, at Poisson times.

    The question's text is the prompt. Tokens are counted as 4 bytes of text. Raises TraceError.
    """
    times_s = poisson_times_s(options)
    trace = [
        TraceRequest(
            timestamp=round(next(times_s) * 1000, 3),
            model=path.name.partition(".")[0],
            input_length=tokens_of(question),
            output_length=tokens_of(answer),
            prompt=question,
        )
        for question, answer in _exchanges(path)
    ]
    return starting_at_zero(path, trace)


def tokens_of(text: str) -> int:
    return max(1, math.ceil(len(text.encode()) / BYTES_PER_TOKEN))


def _minutes(row: Row, options: ReadOptions, rng: np.random.Generator) -> tuple[str, list[float]]:
    times_s: list[float] = []
    first = int(options.start_s // 60)
    last = min(MINUTES_OF_DAY, math.ceil((options.start_s + options.seconds) / 60))
    for minute in range(first, last):
        count = int(row[str(minute + 1)])
        if count < 0:
            raise ValueError(f"minute {minute + 1}: {count} invocations")
        if count:
            kept = int(rng.binomial(count, options.thin))
            times_s += (60 * (minute + rng.random(kept))).tolist()
    return row["HashFunction"][:12], times_s


def _invocation(
    row: Row, options: ReadOptions, rng: np.random.Generator
) -> tuple[str, list[float]]:
    start_s = float(row["end_timestamp"]) - float(row["duration"])
    if not math.isfinite(start_s):
        raise ValueError(f"the time is {start_s}")
    inside = options.start_s <= start_s < options.start_s + options.seconds
    kept = inside and (options.thin >= 1 or rng.random() < options.thin)
    return row["func"][:12], [max(0.0, start_s)] if kept else []


def _exchanges(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the first question and answer of every conversation that has both."""
    content = b"\n".join(line for _, line in numbered_lines(path))
    try:
        conversations = msgspec.json.decode(content, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{path}: is not ShareGPT's JSON, a list of conversations: {error}"
        ) from error
    for number, conversation in enumerate(conversations, 1):
        messages = conversation.get("conversations") or conversation.get("conversation") or []
        try:
            first = [(message["from"], message["value"]) for message in messages[:3]]
        except (KeyError, TypeError) as error:
            raise TraceError(
                f"{path}: conversation {number}: a message does not have `from` or `value`"
            ) from error
        yield from _first_exchange(first)


def _first_exchange(messages: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for (sender, question), (replier, answer) in pairwise(messages):
        if sender in USERS and replier in ASSISTANTS and question and answer:
            yield question, answer
            return
