"""Paused requests in SGLang's scheduler: all kinds of requests and models, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prism.messages.engine import ActivateEngine, Submit
from prism.messages.engine import PauseRequests as Pause
from prism.messages.engine import ResumeRequests as Unpause
from prism.messages.requests import Grammar, Request
from tests.engines.harness import request
from tests.sglang.adapters import make_adapter
from tests.sglang.conftest import opened_pair, run
from tests.sglang.models import (
    DELTA_NET,
    GEMMA3,
    LLAMA,
    MAMBA,
    MLA,
    TIE,
    greedy,
    largest_gap,
    prompts,
    spec_of,
)
from tests.sglang.test_lora import asked, with_adapters

pytestmark = pytest.mark.sglang

# Prompts of up to three chunks; sampled, penalised, with logarithms of probabilities, constrained.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "penalised": {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "temperature": 0.7,
        "seed": 6,
        "logprobs": 3,
    },
    "told": {"logprobs": 3, "prompt_logprobs": True},
    "biased": {"logit_bias": {20: 3.0}, "min_tokens": 10, "stop_token_ids": (20,)},
    "constrained": {"grammar": Grammar("regex", "(cat|dog){2,40}!")},
}


def requests_of(model: str, kinds: Sequence[str]) -> list[Request]:
    texts = prompts(model, 2 * len(kinds), (5, 180), seed=3)
    return [
        request(f"{kind} {i}", model, text, 24, **KINDS[kind])
        for i, (kind, text) in enumerate(zip([*kinds, *kinds], texts, strict=True))
    ]


def output_of(chunks: Sequence[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def check_same(chunks: Sequence[Any], others: Sequence[Any]) -> None:
    """Checks two outputs that may be cut into chunks in different ways."""
    assert output_of(chunks) == output_of(others)
    assert chunks[-1].finish_reason == others[-1].finish_reason
    told, same = ([c.logprobs for c in part if c.logprobs] for part in (chunks, others))
    assert [ids for part in told for ids in part.top_ids] == [i for p in same for i in p.top_ids]
    values, other_values = ([v for part in parts for v in part.values] for parts in (told, same))
    assert values == pytest.approx(other_values, abs=1e-4)


def drive(
    core: Any, items: Sequence[Request], between: Callable[[int], bool]
) -> dict[str, list[Any]]:
    """Steps until all requests have ended. `between` is called before each step with its number. It
    returns whether only paused requests may be left."""
    core.submit(items)
    chunks: dict[str, list[Any]] = {}
    for step in range(2000):
        may_rest = between(step)
        output = core.step()
        assert output.failures == []
        for chunk in output.chunks:
            chunks.setdefault(chunk.request_id, []).append(chunk)
        if not (output.busy or may_rest):
            break
    core.step()  # SGLang checks that all KV is free
    assert core._active.scheduler.is_fully_idle()
    return chunks


def at_random(core: Any, items: Sequence[Request], seed: int) -> Callable[[int], bool]:
    rng = random.Random(seed)
    names = [item.id for item in items]

    def between(step: int) -> bool:
        if step > 150:
            core.resume(names)
            return False
        core.pause(rng.sample(names, rng.choice((0, 0, 1, 3))))
        core.resume(rng.sample(names, rng.choice((0, 1, 3, len(names)))))
        return True

    return between


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", [LLAMA, GEMMA3.name, MLA.name, DELTA_NET.name, MAMBA.name])
def test_every_kind_of_request_says_the_same(idle: Any, model: str, seed: int) -> None:
    """Pauses requests of models with windows, latents and states, too, between any two steps."""
    idle.activate(ActivateEngine(spec_of(model)))
    items = requests_of(model, list(KINDS) if model == LLAMA else ["greedy", "penalised"])
    whole, _ = run(idle, items)
    again = [msgspec.structs.replace(item, id=f"again {item.id}") for item in items]
    chunks = drive(idle, again, at_random(idle, again, seed))
    for item in items:
        check_same(chunks[f"again {item.id}"], whole[item.id])
    assert idle.status().retractions_total == 0


def test_a_prompt_in_chunks_stands_still_while_another_is_computed(idle: Any) -> None:
    """Pauses a prompt after its first chunk. Another one is computed in chunks meanwhile, in which
    the first is resumed: it continues after that, without computing its first chunk again."""
    idle.activate(ActivateEngine(spec_of(LLAMA)))
    texts = [[30 + i, *text] for i, text in enumerate(prompts(LLAMA, 2, (180, 190)))]
    first, second = (request(f"r{i}", LLAMA, text, 4) for i, text in enumerate(texts))
    scheduler = idle._active.scheduler

    def between(step: int) -> bool:
        chunked = scheduler.chunked_req
        if step == 1:
            assert list(chunked.origin_input_ids) == first.prompt_ids
            idle.pause([first.id])
            assert idle.status().waiting == 1
            idle.submit([second])
        elif step == 3:
            assert list(chunked.origin_input_ids) == second.prompt_ids
            idle.resume([first.id])
        return step < 3

    chunks = drive(idle, [first], between)
    for item in (first, second):
        assert output_of(chunks[item.id]) == greedy(LLAMA, item.prompt_ids, 4)
        assert chunks[item.id][0].cached_tokens == 0
    assert idle.status().retractions_total == 0


def test_only_paused_requests_are_nothing_to_compute(idle: Any) -> None:
    idle.activate(ActivateEngine(spec_of(LLAMA)))
    texts = prompts(LLAMA, 2, (20, 20))
    idle.submit([request(name, LLAMA, texts[i], 24 * i + 3) for i, name in enumerate("sr")])
    idle.step()
    idle.pause(["r"])
    while idle.step().busy:
        pass
    steps = idle._active.scheduler.forward_ct
    assert idle.step().chunks == []
    assert idle._active.scheduler.forward_ct == steps
    assert (idle.status().running, idle.status().waiting) == (1, 0)
    idle.cancel(["r"])
    [chunk] = idle.step().chunks
    assert chunk.finish_reason == "cancelled"
    idle.step()
    assert idle._active.scheduler.is_fully_idle()


def test_a_resumed_request_waits_for_a_slot_of_its_adapter(idle: Any, tmp_path: Path) -> None:
    """Pauses requests with one adapter, and resumes them while others run with another one in the
    only slot, and with the base model: they wait for the slot."""
    adapters = {name: make_adapter(tmp_path / name, LLAMA, seed=i) for i, name in enumerate("ab")}
    idle.activate(ActivateEngine(with_adapters(LLAMA, adapters, slots=1)))
    texts = prompts(LLAMA, 4, (20, 150), seed=8)
    items = [asked(f"r{i}", LLAMA, text, ["a", "a", "b", ""][i]) for i, text in enumerate(texts)]
    whole, _ = run(idle, items)
    again = [msgspec.structs.replace(item, id=f"again {item.id}") for item in items]
    names = [item.id for item in again]

    def between(step: int) -> bool:
        if step == 4:
            idle.pause(names[:2])
            idle.submit(again[2:])
        elif step == 7:
            idle.resume(names[:2])
        elif step == 8:
            idle.pause(names[2:])
        elif step == 14:
            idle.resume(names)
        return step < 14

    chunks = drive(idle, again[:2], between)
    for item in items:
        check_same(chunks[f"again {item.id}"], whole[item.id])


def test_paused_requests_are_retracted_before_running_ones(idle: Any) -> None:
    """Leaves no room for two running requests to grow: the paused one makes it, though it is the
    oldest. It computes its KV again once resumed."""
    idle.activate(ActivateEngine(spec_of(LLAMA, 512)))
    sizes = {"paused": (400, 40), "a": (60, 100), "b": (70, 100)}
    items = [
        request(name, LLAMA, prompts(LLAMA, 1, (prompt, prompt), seed=prompt)[0], tokens)
        for name, (prompt, tokens) in sizes.items()
    ]

    def between(step: int) -> bool:
        if step == 12:
            idle.pause(["paused"])
            idle.set_limit(1)  # raised to one request of full context
            assert idle.status().running == 3
        elif step == 120:
            assert (idle.status().retractions_total, idle.status().waiting) == (1, 1)
            idle.resume(["paused"])
        return step < 120

    chunks = drive(idle, items, between)
    for item in items:
        output = output_of(chunks[item.id])
        assert len(output) == item.sampling.max_tokens
        assert largest_gap(LLAMA, item.prompt_ids, output) < TIE
    assert idle.status().retractions_total == 1


def test_two_ranks_pause_alike() -> None:
    with opened_pair(64 << 20) as device:
        device.activate(spec_of(LLAMA, 512))
        rng = random.Random(4)
        items = [
            request(f"r{i}", LLAMA, text, 24)
            for i, text in enumerate(prompts(LLAMA, 6, (3, 150), seed=9))
        ]
        names = [item.id for item in items]
        device.send(Submit(items))
        for _ in range(12):
            device.send(Pause(rng.sample(names, 3)))
            device.send(Unpause(rng.sample(names, 3)))
            device.fresh_status()
        device.send(Unpause(names))
        outputs = [stream.token_ids for stream in device.finish(*names)]
        assert outputs == [greedy(LLAMA, item.prompt_ids, 24) for item in items]
        assert device.fresh_status().retractions_total == 0
