"""Cost model from a table of measured or computed points, used for all sources.

A step takes host_s + dense(tokens) + prefill attention + decode attention, and prompt_s if it has
prompts. The dense part depends only on the number of tokens in the step. All parts are piecewise
linear, so sums over runs of decode steps have closed forms.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import msgspec

from prism.errors import ConfigError
from prism_sim.costs.model import GpuUsage, PromptChunk, Row, interpolate, place

FAR_TOKENS = float(1 << 20)
CHUNKS_KEPT = 1 << 14


class StepTable(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Points of one (GPU, model, TP), in the format of files. Costs are linear between points, and
    continue with the last slope beyond them."""

    gpu: str
    model: str
    tp: int
    source: str
    dense_tokens: Row
    # dense_s[i]: seconds at dense_tokens[i] tokens.
    dense_s: Row
    # Prefill attention per pair of a new token and a token that it attends to.
    pair_s: float
    prefill_tokens: Row = ()
    prefill_context: Row = ()
    # prefill_s[i][j]: seconds added to the pairs' time at prefill_tokens[i] new tokens after
    # prefill_context[j] tokens. Empty: none.
    prefill_s: tuple[Row, ...] = ()
    # (tokens, pair_s) of each sliding window: pairs there end after as many tokens.
    window_pair_s: tuple[tuple[float, float], ...] = ()
    decode_batch: Row
    decode_context: Row
    # decode_s[i][j]: attention of decode_batch[i] requests of decode_context[j] tokens each.
    decode_s: tuple[Row, ...]
    # Host time per step that does not overlap with the GPU.
    host_s: float = 0.0
    # The same of a step with prompts, in addition.
    prompt_s: float = 0.0
    # Time before a request's first token outside of steps (HTTP, queues), if measured.
    request_s: float = 0.0
    # SM shares, rising to 1, of the two below. Empty: not measured.
    sm_shares: Row = ()
    # sm_prefill[i][j]: factor on the time of a step with prompts, of dense_tokens[i] tokens, with
    # sm_shares[j] of the SMs; sm_decode: on that of a step of decodes only.
    sm_prefill: tuple[Row, ...] = ()
    sm_decode: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        _check_axis(self, "dense_tokens", self.dense_tokens)
        _check_axis(self, "decode_batch", self.decode_batch)
        _check_axis(self, "decode_context", self.decode_context)
        _check_values(self, "dense_s", (self.dense_s,), 1, len(self.dense_tokens))
        _check_values(
            self, "decode_s", self.decode_s, len(self.decode_batch), len(self.decode_context)
        )
        if self.prefill_s:
            _check_axis(self, "prefill_tokens", self.prefill_tokens)
            _check_axis(self, "prefill_context", self.prefill_context)
        if len(self.prefill_s) != len(self.prefill_tokens) or any(
            len(row) != len(self.prefill_context) for row in self.prefill_s
        ):
            raise ConfigError(
                f"{self.name}: prefill_s: must have a row for each of prefill_tokens, with a value"
                " for each of prefill_context"
            )
        windows_s = (value for window in self.window_pair_s for value in window)
        times_s = (self.host_s, self.prompt_s, self.request_s, self.pair_s, *windows_s)
        if self.tp < 1 or not all(0 <= time_s < math.inf for time_s in times_s):
            raise ConfigError(
                f"{self.name}: tp must be > 0; host_s, prompt_s, request_s, pair_s and"
                " window_pair_s >= 0 and finite"
            )
        _check_shares(self)

    @property
    def name(self) -> str:
        return f"cost table {self.model} on {self.gpu} at TP {self.tp}"


class TableCost:
    """CostModel over a StepTable. Caches the decode line of each batch size."""

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self._per_share = tuple(1 / share for share in reversed(table.sm_shares))
        self._token_compute_s = table.dense_s[-1] / table.dense_tokens[-1]
        self._lines: dict[int, _Line] = {}
        self._chunks_s: dict[PromptChunk, float] = {}
        self._alone_s: dict[PromptChunk, float] = {}

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        if not batch and len(chunks) == 1:
            return self._chunk_s(chunks[0])
        tokens = batch + sum([chunk.tokens for chunk in chunks])
        if not tokens:
            return 0.0
        prefill_s = self._chunks_attention_s(chunks) + (self.table.prompt_s if chunks else 0.0)
        return self._dense_s(tokens) + prefill_s + self._decode_attention_s(batch, context_tokens)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self._chunk_s(PromptChunk(tokens, context_tokens))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        return self._line(batch).at(context_tokens) if batch else 0.0

    def decode_run_s(self, batch: int, context_tokens: int, steps: int) -> float:
        return self._line(batch).run_s(context_tokens, steps) if batch else 0.0

    def decode_steps(self, batch: int, context_tokens: int, seconds: float, limit: int) -> int:
        return self._line(batch).steps_in(context_tokens, seconds, limit) if batch else limit

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        total_s = self.step_s(chunks, batch, context_tokens)
        if total_s <= 0:
            return GpuUsage(0.0, 0.0)
        tokens = batch + sum(chunk.tokens for chunk in chunks)
        compute_s = tokens * self._token_compute_s
        compute_s += self._chunks_attention_s(chunks)
        memory_s = self.table.dense_s[0] + self._decode_attention_s(batch, context_tokens)
        slower = self._slower(tokens, prefill=bool(chunks)) if self._per_share else None
        return GpuUsage(min(1.0, compute_s / total_s), min(1.0, memory_s / total_s), slower)

    def _slower(self, tokens: int, *, prefill: bool) -> tuple[Row, Row]:
        """Returns the measured curve of `GpuUsage.slower` at these tokens, or at the last ones."""
        knots = self.table.dense_tokens
        rows = self.table.sm_prefill if prefill else self.table.sm_decode
        return self._per_share, _blend(knots, rows, min(tokens, knots[-1]))[::-1]

    def _dense_s(self, tokens: int) -> float:
        return self.table.host_s + interpolate(self.table.dense_tokens, self.table.dense_s, tokens)

    def _chunk_s(self, chunk: PromptChunk) -> float:
        """Returns the time of a step of one chunk, cached like the chunks' attention."""
        found = self._alone_s.get(chunk)
        if found is None:
            if len(self._alone_s) >= CHUNKS_KEPT:
                self._alone_s.clear()
            found = 0.0
            if chunk.tokens:
                found = self._dense_s(chunk.tokens) + self.table.prompt_s
                found += self._chunks_attention_s((chunk,))
            self._alone_s[chunk] = found
        return found

    def _chunks_attention_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Returns the attention time of the chunks. Cached, since the same chunks recur often."""
        total_s, kept = 0.0, self._chunks_s
        last_s, last = 0.0, None
        for chunk in chunks:
            if chunk is not last:
                last = chunk
                found = kept.get(chunk)
                if found is None:
                    if len(kept) >= CHUNKS_KEPT:
                        kept.clear()
                    found = kept[chunk] = self._prefill_attention_s(chunk)
                last_s = found
            total_s += last_s
        return total_s

    def _prefill_attention_s(self, chunk: PromptChunk) -> float:
        table = self.table
        pairs = chunk.tokens * (chunk.context_tokens + (chunk.tokens + 1) / 2)
        seconds = table.pair_s * pairs
        for window, pair_s in table.window_pair_s:
            seconds += pair_s * _pairs_within(window, chunk)
        if table.prefill_s:
            seconds += _at(
                table.prefill_tokens,
                table.prefill_context,
                table.prefill_s,
                chunk.tokens,
                chunk.context_tokens,
            )
        return max(0.0, seconds)

    def _decode_attention_s(self, batch: int, context_tokens: int) -> float:
        return self._line(batch).at(context_tokens) - self._dense_s(batch) if batch else 0.0

    def _line(self, batch: int) -> _Line:
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = self._new_line(batch)
        return line

    def _new_line(self, batch: int) -> _Line:
        base_s = self._dense_s(batch)
        knots, seconds = _from_zero(
            self.table.decode_context, _blend(self.table.decode_batch, self.table.decode_s, batch)
        )
        return _Line(
            batch,
            tuple(batch * context for context in knots),
            tuple(base_s + attention_s for attention_s in seconds),
        )


class _Line:
    """Seconds of a decode step of `batch` requests as a function of their total context.

    The function is piecewise linear. The knots start at 0, and the last piece extends beyond them.
    """

    def __init__(self, batch: int, knots: Row, seconds: Row) -> None:
        self._batch = batch
        self._knots = knots
        self._seconds = seconds
        self._slopes = _slopes(knots, seconds)
        self._last = len(self._slopes) - 1

    def at(self, context: float) -> float:
        piece = self._piece(context)
        return self._value(piece, context)

    def run_s(self, context: int, steps: int) -> float:
        piece = self._piece(context)
        if self._stays(piece, context, steps):
            return self._sum_s(piece, context, steps)
        return self._long_run_s(piece, context, steps)

    def _long_run_s(self, piece: int, context: int, steps: int) -> float:
        """Returns the time of a run over several pieces, each summed as by `_sum_s`."""
        batch, knots, last, total_s = self._batch, self._knots, self._last, 0.0
        slopes, seconds = self._slopes, self._seconds
        while piece < last and context + (steps - 1) * batch >= knots[piece + 1]:
            taken = math.ceil((knots[piece + 1] - context) / batch) or 1
            slope = slopes[piece]
            first_s = seconds[piece] + slope * (context - knots[piece])
            total_s += taken * first_s + slope * batch * (taken * (taken - 1) / 2)
            context += taken * batch
            steps -= taken
            piece += 1
            while piece < last and knots[piece + 1] <= context:
                piece += 1
        return total_s + self._sum_s(piece, context, steps)

    def _stays(self, piece: int, context: int, steps: int) -> bool:
        """Returns whether all of the steps are on `piece`."""
        if piece == self._last:
            return True
        return context + (steps - 1) * self._batch < self._knots[piece + 1]

    def steps_in(self, context: int, seconds: float, limit: int) -> int:
        piece, done = self._piece(context), 0
        while not self._stays(piece, context, limit - done):
            on_piece = self._steps_on(piece, context)
            piece_s = self._sum_s(piece, context, on_piece)
            if piece_s > seconds:
                return done + self._most_steps(piece, context, seconds, on_piece)
            seconds -= piece_s
            context += on_piece * self._batch
            done += on_piece
            piece = self._piece(context)
        return done + self._most_steps(piece, context, seconds, limit - done)

    def _piece(self, context: float) -> int:
        piece = bisect_right(self._knots, context) - 1
        return piece if piece < self._last else self._last

    def _value(self, piece: int, context: float) -> float:
        return self._seconds[piece] + self._slopes[piece] * (context - self._knots[piece])

    def _steps_on(self, piece: int, context: int) -> int:
        """Returns the number of steps until the context leaves `piece`. REQUIRES: it is not the
        last piece."""
        return max(1, math.ceil((self._knots[piece + 1] - context) / self._batch))

    def _sum_s(self, piece: int, context: int, steps: int) -> float:
        slope = self._slopes[piece]
        first_s = self._seconds[piece] + slope * (context - self._knots[piece])
        return steps * first_s + slope * self._batch * (steps * (steps - 1) / 2)

    def _most_steps(self, piece: int, context: int, seconds: float, most: int) -> int:
        """Returns the largest n <= most whose sum is at most `seconds`: the root of a quadratic,
        corrected for rounding."""
        slope = self._slopes[piece]
        first_s = self._seconds[piece] + slope * (context - self._knots[piece])
        growth_s = slope * self._batch
        half_s = growth_s / 2
        linear_s = first_s - half_s
        if half_s * seconds > 1e-12 * linear_s * linear_s:
            root = math.sqrt(linear_s * linear_s + 4 * half_s * seconds) - linear_s
            steps = int(root / (2 * half_s))
        else:
            steps = int(seconds / linear_s)
        steps = max(0, min(steps, most))
        # The same expression as in `_sum_s`, to the last bit.
        while steps > 0 and steps * first_s + growth_s * (steps * (steps - 1) / 2) > seconds:
            steps -= 1
        while steps < most and (
            (steps + 1) * first_s + growth_s * ((steps + 1) * steps / 2) <= seconds
        ):
            steps += 1
        return steps


def linear_decode(
    context_s: float, windows_s: Mapping[int, float] = MappingProxyType({}), state_s: float = 0.0
) -> tuple[Row, Row, tuple[Row, ...]]:
    """Returns decode_batch, decode_context and decode_s.

    Args:
        context_s: Time per token of context.
        windows_s: Window -> time per token of context within it.
        state_s: Time per request, whatever its context.
    """
    knots = tuple(sorted({0.0, FAR_TOKENS, *map(float, windows_s)}))

    def one_s(context: float) -> float:
        within_s = sum(min(context, window) * each_s for window, each_s in windows_s.items())
        return context * context_s + within_s + state_s

    rows = tuple(tuple(batch * one_s(context) for context in knots) for batch in (1, 2))
    return (1.0, 2.0), knots, rows


def _pairs_within(window: float, chunk: PromptChunk) -> float:
    """Returns the pairs of a new token and one that it attends to: itself and those before it, as
    many as the window."""
    growing = min(chunk.tokens, max(0.0, window - chunk.context_tokens))
    pairs = growing * (chunk.context_tokens + (growing + 1) / 2)
    return pairs + (chunk.tokens - growing) * window


def with_host(table: StepTable, host_s: float) -> StepTable:
    """Returns the same table with another host time per step."""
    return msgspec.structs.replace(table, host_s=host_s)


def _slopes(knots: Row, values: Row) -> Row:
    if len(knots) == 1:
        return (0.0,)
    points = zip(pairwise(knots), pairwise(values), strict=True)
    return tuple((high - low) / (right - left) for (left, right), (low, high) in points)


def _from_zero(knots: Row, values: Row) -> tuple[Row, Row]:
    """Returns the line with a knot at 0, extrapolated from the first two knots but not below 0."""
    if knots[0] == 0:
        return knots, values
    slope = _slopes(knots, values)[0]
    return (0.0, *knots), (max(0.0, values[0] - slope * knots[0]), *values)


def _blend(knots: Row, rows: tuple[Row, ...], x: float) -> Row:
    """Returns the row at x, interpolated like `interpolate`."""
    if x <= knots[0] or len(knots) == 1:
        return rows[0]
    piece, part = place(knots, x)
    return tuple(a + part * (b - a) for a, b in zip(rows[piece], rows[piece + 1], strict=True))


def _at(knots: Row, columns: Row, rows: tuple[Row, ...], x: float, y: float) -> float:
    """Returns `interpolate` at y of the `_blend` at x, computed only from the columns around y."""
    flat = y <= columns[0] or len(columns) == 1
    column, part = (0, 0.0) if flat else place(columns, y)
    first = x <= knots[0] or len(knots) == 1
    row, along = (0, 0.0) if first else place(knots, x)
    low, high = rows[row], rows[row if first else row + 1]
    left = low[column] + along * (high[column] - low[column])
    if flat:
        return left
    right = low[column + 1] + along * (high[column + 1] - low[column + 1])
    return left + part * (right - left)


def _check_axis(table: StepTable, key: str, axis: Row) -> None:
    rising = all(left < right for left, right in pairwise(axis))
    if not axis or axis[0] < 0 or not 0 < axis[-1] < math.inf or not rising:
        raise ConfigError(f"{table.name}: {key}: must be finite, increasing and >= 0")


def _check_values(
    table: StepTable, key: str, rows: tuple[Row, ...], height: int, width: int
) -> None:
    if len(rows) != height or any(len(row) != width for row in rows):
        raise ConfigError(f"{table.name}: {key}: must have {height} rows of {width} values")
    if any(not 0 <= value < math.inf for row in rows for value in row):
        raise ConfigError(f"{table.name}: {key}: seconds must be >= 0 and finite")
    if any(high < low for row in rows for low, high in pairwise(row)):
        raise ConfigError(f"{table.name}: {key}: more tokens must not take less time")


def _check_shares(table: StepTable) -> None:
    shares, height = table.sm_shares, len(table.dense_tokens)
    if shares:
        _check_axis(table, "sm_shares", shares)
        if shares[0] <= 0 or shares[-1] != 1:
            raise ConfigError(f"{table.name}: sm_shares: must be above 0 and end at 1")
    for key, rows in (("sm_prefill", table.sm_prefill), ("sm_decode", table.sm_decode)):
        if len(rows) != (height if shares else 0) or any(len(row) != len(shares) for row in rows):
            raise ConfigError(
                f"{table.name}: {key}: must have a row for each of dense_tokens, with a factor for"
                " each of sm_shares"
            )
        falling = all(low >= high for row in rows for low, high in pairwise(row))
        if not falling or any(row[-1] != 1 or row[0] == math.inf for row in rows):
            raise ConfigError(f"{table.name}: {key}: factors must be finite, fall, and end at 1")
