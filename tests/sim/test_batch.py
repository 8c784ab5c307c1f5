"""Batches advanced in runs give the same counts as batches advanced step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism_sim.core.request import SimRequest
from prism_sim.core.setup import KvNeed
from prism_sim.engine.batch import Batch

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=8)


def joined(lengths: list[tuple[int, int]], block_tokens: int, **need: float) -> Batch:
    batch = Batch(KvNeed(block_tokens, **need))  # type: ignore[arg-type]
    for index, (prompt, output) in enumerate(lengths):
        request = SimRequest(
            index, 0, 0.0, prompt_tokens=prompt, output_tokens=output, deadline_s=0.0
        )
        request.generated = 1
        batch.join(request)
    return batch


def blocks(lengths: list[tuple[int, int]], step: int, block_tokens: int) -> int:
    return sum(-(-(prompt + step) // block_tokens) for prompt, _ in lengths)


@given(LENGTHS, st.sampled_from([1, 4, 16]), st.data())
def test_new_blocks_are_those_of_each_step(
    lengths: list[tuple[int, int]], block_tokens: int, data: st.DataObject
) -> None:
    batch = joined(lengths, block_tokens)
    longest = batch.steps_to_end()
    first = data.draw(st.integers(0, longest - 1))
    batch.advance(first)
    steps = data.draw(st.integers(1, longest - first))
    grown = blocks(lengths, first + steps, block_tokens) - blocks(lengths, first, block_tokens)
    assert batch.new_blocks(steps) == grown
    assert batch.context_tokens == sum(p for p, _ in lengths) + first * len(lengths)


@given(LENGTHS, st.integers(0, 70), st.sampled_from([0.3, 2.0]), st.integers(0, 9), st.data())
def test_windows_grow_until_they_are_full(
    lengths: list[tuple[int, int]], window: int, share: float, state: int, data: st.DataObject
) -> None:
    need = KvNeed(4, window, share, state)
    batch = joined(lengths, 4, window_tokens=window, window_share=share, state_tokens=state)
    longest = batch.steps_to_end()
    first = data.draw(st.integers(0, longest - 1))
    batch.advance(first)
    steps = data.draw(st.integers(1, longest - first))
    before, after = (
        sum(need.blocks(prompt + step) for prompt, _ in lengths) for step in (first, first + steps)
    )
    assert batch.new_blocks(steps) == after - before
    assert batch.new_blocks(1) <= len(lengths) * need.step_blocks <= len(lengths) * 4


@given(LENGTHS)
def test_members_end_at_their_length(lengths: list[tuple[int, int]]) -> None:
    batch = joined(lengths, 16)
    step = 0
    ended: dict[int, int] = {}
    while batch:
        step += batch.steps_to_end()
        for request in batch.advance(batch.steps_to_end()):
            ended[request.index] = step
            assert request.generated == request.output_tokens
            assert request.kv_tokens == request.prompt_tokens + request.output_tokens - 1
    assert ended == {i: output - 1 for i, (_, output) in enumerate(lengths)}
    assert batch.context_tokens == 0


@given(LENGTHS, st.data())
def test_who_leaves_may_come_back(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    batch = joined(lengths, 4)
    steps = data.draw(st.integers(0, batch.steps_to_end() - 1))
    batch.advance(steps)
    request = batch.newest()
    before = batch.new_blocks(7), batch.context_tokens, batch.steps_to_end()
    batch.leave(request)
    assert request.generated == 1 + steps
    batch.join(request)
    assert (batch.new_blocks(7), batch.context_tokens, batch.steps_to_end()) == before
