"""A campaign of ambiguous grammars on one engine: neighbours keep their tokens."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from prism.messages.engine import Submit
from prism.messages.requests import EngineOutput, Grammar
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.models import LLAMA, path_of, prompts, spec_of
from tests.sglang.slow_grammars import random_slow

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1800)]

GRAMMARS, AT_ONCE, TOKENS = 200, 4, 200
CALM_TOKENS = 600


def neighbours(name: str) -> list[Any]:
    [prompt] = prompts(LLAMA, 1, (20, 20), seed=5)
    word = Grammar("regex", "[a-z ]*")
    return [
        request(f"{name}-plain", LLAMA, prompt, CALM_TOKENS),
        request(f"{name}-word", LLAMA, prompt, CALM_TOKENS, grammar=word),
    ]


def test_neighbours_of_slow_grammars_keep_their_tokens(
    device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints a neighbour's longest time between two tokens, alone and together with slow
    grammars."""
    device.activate(spec_of(LLAMA), max_running=8)
    letter = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json")).token_to_id("a")
    [prompt] = prompts(LLAMA, 1, (20, 20), seed=3)
    came_s: dict[str, list[float]] = {}
    record = device._record

    def timed(output: EngineOutput) -> None:
        for chunk in output.chunks:
            came_s.setdefault(chunk.request_id, []).append(time.monotonic())
        record(output)

    monkeypatch.setattr(device, "_record", timed)
    device.send(Submit(neighbours("alone")))
    alone = [stream.token_ids for stream in device.finish("alone-plain", "alone-word")]
    ends: Counter[str] = Counter()
    todo, running, turn = list(range(GRAMMARS)), set[str](), 0
    while todo or running:
        if not any(f"{turn}-{kind}" in running for kind in ("plain", "word")):
            turn += 1
            running |= {item.id for item in neighbours(str(turn))}
            device.send(Submit(neighbours(str(turn))))
        while todo and sum(i.startswith("slow") for i in running) < AT_ONCE:
            seed = todo.pop()
            slow: dict[str, Any] = {"grammar": random_slow(seed), "logit_bias": {letter: 100.0}}
            device.send(Submit([request(f"slow-{seed}", LLAMA, prompt, TOKENS, **slow)]))
            running.add(f"slow-{seed}")
        before = set(running)
        device.finish_one(running)
        for ended in (i for i in before - running if i.startswith("slow")):
            failure = device.stream(ended).failure
            ends[failure.code if failure else str(device.stream(ended).finish_reason)] += 1
    for each in range(1, turn + 1):
        got = [device.stream(f"{each}-{kind}").token_ids for kind in ("plain", "word")]
        assert got == alone
    assert set(ends) <= {"invalid_request_error", "length", "stop", "engine_error"}
    assert not device.fresh_status().running
    longest = {
        who: max(max(b - a for a, b in pairwise(times)) for i, times in came_s.items() if is_of(i))
        for who, is_of in {
            "alone": lambda i: i.startswith("alone"),
            "beside": lambda i: i.endswith(("-plain", "-word")) and not i.startswith("alone"),
        }.items()
    }
    gaps = ", ".join(f"{who} {gap_s:.3f} s" for who, gap_s in longest.items())
    with capsys.disabled():
        print(f"\n{GRAMMARS} grammars: {dict(ends)}; longest gap of a neighbour: {gaps}")
