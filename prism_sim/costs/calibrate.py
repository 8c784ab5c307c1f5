"""Measurement of a live engine's steps through OpenAI's API, and the fit of a table to them.

Prompts are measured alone, by the time to their single token. Decode steps are measured in batches
of concurrent streams, by the mean time per token while all streams run. Single gaps between tokens
are not used, since tokens reach a busy client in bursts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

import prism
from prism.errors import ConfigError
from prism_replay.live.client import (
    Endpoint,
    Sender,
    Stream,
    StreamEvent,
    connect,
    served_models,
)
from prism_replay.live.prompts import PromptSource
from prism_replay.trace import TraceRequest
from prism_sim.costs.fit import Fitted, MeasuredStep, fit
from prism_sim.costs.grid import Grid, read_grid, write_grid
from prism_sim.costs.table import StepTable

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class CalibrationPlan:
    """Steps to measure."""

    model: str
    # Prompt lengths in tokens. Each is also sent once as warm-up, since an engine's first step of a
    # size takes longer.
    prompts: tuple[int, ...]
    # Batch sizes. Each decodes `output_tokens` after the shortest prompt, and after half of the
    # longest prompt.
    batches: tuple[int, ...]
    output_tokens: int = 32
    # Number of repetitions of each measurement, of which the median is used.
    repeats: int = 3
    source: PromptSource = field(default_factory=PromptSource)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        numbers = (*self.prompts, *self.batches, self.repeats)
        if min(numbers) < 1 or self.output_tokens < 4:
            raise ConfigError("calibration: counts must be > 0, --output-tokens >= 4")

    @property
    def contexts(self) -> tuple[int, int]:
        return min(self.prompts), max(self.prompts) // 2


@dataclass
class TimedStream(Stream):
    """Response with the arrival time of each token."""

    times_s: list[float] = field(default_factory=list)

    def take(self, event: StreamEvent, now_s: float) -> None:
        before = self.ids or self.events
        super().take(event, now_s)
        self.times_s += [now_s] * ((self.ids or self.events) - before)


Observer = Callable[[MeasuredStep], None]


async def measure(
    endpoint: Endpoint, plan: CalibrationPlan, observe: Observer | None = None
) -> list[MeasuredStep]:
    """Measures the steps of a plan. Raises ConfigError: no server, an unknown model, a failed
    request. observe: Called with each measured step."""
    async with connect(endpoint) as http:
        models = await served_models(http)
        if plan.model not in models:
            raise ConfigError(f"model {plan.model!r}: the server offers {', '.join(models)}")
        _check_context(plan, models[plan.model].max_model_len)
        probe = _Probe(Sender(http, plan.timeout_s), plan)
        await probe.streams(1, WARM_UP_TOKENS, WARM_UP_TOKENS)
        steps: list[MeasuredStep] = []
        async for step in probe.steps():
            steps.append(step)
            if observe is not None:
                observe(step)
        return steps


def calibrate(
    endpoint: Endpoint, plan: CalibrationPlan, gpu: str, tp: int, observe: Observer | None = None
) -> tuple[list[MeasuredStep], Fitted]:
    """Measures steps and fits a table, whose `source` has the errors of the fit. Raises
    ConfigError."""
    steps = asyncio.run(measure(endpoint, plan, observe))
    fitted = fit(steps, gpu, plan.model, tp, "")
    sizes = np.abs(fitted.errors)
    source = f"measured in {len(steps)} steps: median error {np.median(sizes):.1%}"
    source += f", worst {np.max(sizes):.1%}"
    return steps, Fitted(msgspec.structs.replace(fitted.table, source=source), fitted.errors)


def save(path: Path, table: StepTable) -> None:
    """Adds the table to the file. Replaces a table of the same (GPU, model, TP). Raises
    ConfigError."""
    key = (table.gpu, table.model, table.tp)
    others = read_grid(path).tables if path.exists() else ()
    kept = [other for other in others if (other.gpu, other.model, other.tp) != key]
    name = "prism-sim calibrate"
    write_grid(
        path,
        Grid(package=name, version=prism.__version__, license="", tables=(*kept, table)),
    )


@dataclass
class _Probe:
    sender: Sender
    plan: CalibrationPlan
    sent: int = 0

    async def steps(self) -> AsyncIterator[MeasuredStep]:
        """Yields all steps of the plan, measured in order."""
        for tokens in self.plan.prompts:
            yield await self.prompt(tokens)
        for batch in self.plan.batches:
            for context in self.plan.contexts:
                yield await self.decode(batch, context)

    async def prompt(self, tokens: int) -> MeasuredStep:
        await self._first_token_s(tokens)
        found = [await self._first_token_s(tokens) for _ in range(self.plan.repeats)]
        return MeasuredStep(True, tokens, 0, float(np.median(found)))

    async def decode(self, batch: int, context: int) -> MeasuredStep:
        output = self.plan.output_tokens
        paces_s: list[float] = []
        for _ in range(self.plan.repeats):
            paces_s += common_paces_s(await self.streams(batch, context, output))
        if not paces_s:
            raise ConfigError(
                f"calibration: {batch} streams of {context}-token prompts never ran together;"
                " raise --output-tokens or remove this batch"
            )
        held = batch * (context + output // 2)
        return MeasuredStep(False, batch, held, float(np.median(paces_s)))

    async def _first_token_s(self, tokens: int) -> float:
        start_s = time.monotonic()
        (stream,) = await self.streams(1, tokens, 1)
        return stream.times_s[0] - start_s

    async def streams(self, batch: int, tokens: int, output: int) -> list[TimedStream]:
        """Sends `batch` concurrent requests, no two with a common prefix. Returns the responses."""
        answers = [TimedStream() for _ in range(batch)]
        await asyncio.gather(*(self._answer(tokens, output, answer) for answer in answers))
        for answer in answers:
            if answer.error or not answer.times_s:
                reason = f"{answer.error or 'no token'} {answer.message}".strip()
                raise ConfigError(f"calibration: a prompt of {tokens} tokens failed: {reason}")
        return answers

    async def _answer(self, tokens: int, output: int, answer: TimedStream) -> None:
        self.sent += 1
        request = TraceRequest(
            timestamp=0, model=self.plan.model, input_length=tokens, output_length=output
        )
        prompt = self.plan.source.prompt(request, self.sent)
        await self.sender.receive(request, prompt, answer)


def common_paces_s(streams: Sequence[TimedStream]) -> list[float]:
    """Returns for each stream the seconds per token while all streams ran. Streams with fewer than
    2 tokens in that time are left out."""
    start_s = max(stream.times_s[0] for stream in streams)
    end_s = min(stream.times_s[-1] for stream in streams)
    inside = [[t for t in stream.times_s if start_s <= t <= end_s] for stream in streams]
    return [
        (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        for times_s in inside
        if len(times_s) > 1 and times_s[-1] > times_s[0]
    ]


def _check_context(plan: CalibrationPlan, context: int | None) -> None:
    needed = max(max(plan.prompts) + 1, plan.contexts[1] + plan.output_tokens)
    if context is not None and needed > context:
        raise ConfigError(
            f"calibration: prompts of {max(plan.prompts)} tokens need a context of {needed},"
            f" and {plan.model} has {context}; use shorter --prompts"
        )
