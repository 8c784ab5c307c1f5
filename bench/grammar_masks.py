"""Time that an engine's step waits for grammars: separate processes, against XGrammar in the loop.

    python bench/grammar_masks.py [--model tiny-llama] [--outputs 8] [--tokens 48]
        [--forward-ms 5] [--rounds 5]

Outputs of a JSON schema continue with the same random tokens in both variants. With processes a
step sends its tokens, sleeps as long as a GPU would compute, and then takes the masks. In the loop
it accepts each token and fills each mask itself. Both times are those of the engine's thread in a
step, without the sleep.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from pairs import Pairs
from specs import model_folder
from xgrammar import (
    CompiledGrammar,
    GrammarMatcher,
    TokenizerInfo,
    allocate_token_bitmask,
)

from prism.engines.sglang import adapter
from prism.engines.sglang.grammars import grammar_process, vocabulary
from prism.engines.sglang.grammars.grammar_client import GrammarProcesses, Slot
from prism.engines.sglang.grammars.parsers import WHITESPACE_MAX

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 64},
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string", "minLength": 1}},
            "kind": {"enum": ["one", "two", "three"]},
            "count": {"type": "integer"},
        },
        "required": ["name", "text", "tags", "kind", "count"],
        "additionalProperties": False,
    }
)
WAIT_S = 60.0


def main() -> None:
    options = _options()
    adapter.preload()
    server = grammar_process.start()
    tokenizer, ends = vocabulary.load(options.model)
    compiler, info = vocabulary.compiler(tokenizer, len(tokenizer), ends)
    compiled = compiler.compile_json_schema(SCHEMA, max_whitespace_cnt=WHITESPACE_MAX)
    outputs = [list(_tokens(compiled, info, options.tokens, n)) for n in range(options.outputs)]
    processes = GrammarProcesses(server, str(options.model), len(tokenizer))
    masks = torch.empty((options.outputs, -(-len(tokenizer) // 32)), dtype=torch.int32)
    pairs = Pairs([], [])
    for _ in range(options.rounds):
        pairs.first_s.append(_with_processes(processes, outputs, masks, options.forward_ms / 1000))
        pairs.second_s.append(_in_loop(compiled, outputs, masks))
    processes.close()
    steps = options.tokens
    name = f"{options.outputs} outputs, {len(tokenizer)} tokens in the vocabulary"
    print(pairs.line(name, "no target", "ms a step", steps / 1000, steps / 1000))


def _tokens(compiled: CompiledGrammar, info: TokenizerInfo, count: int, seed: int) -> Iterator[int]:
    """Yields tokens of an output that the grammar allows, none of which ends it."""
    draw, matcher = random.Random(seed), GrammarMatcher(compiled)
    mask = allocate_token_bitmask(1, info.vocab_size)
    for _ in range(count):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        bits[matcher.stop_token_ids] = 0
        token = int(draw.choice(np.flatnonzero(bits)))
        matcher.accept_token(token)
        yield token


def _with_processes(
    processes: GrammarProcesses, outputs: list[list[int]], masks: torch.Tensor, sleep_s: float
) -> float:
    slots: list[Slot] = []
    while len(slots) < len(outputs):
        process = processes.get(("json", SCHEMA))
        slot = process.open() if process is not None else None
        slots += [slot] if slot is not None else []
    processes.wait(slots, WAIT_S)
    held_s = 0.0
    for tokens in zip(*outputs, strict=True):
        began_s = time.perf_counter()
        for slot, token in zip(slots, tokens, strict=True):
            slot.feed((token,))
        processes.flush()
        held_s += time.perf_counter() - began_s
        time.sleep(sleep_s)
        began_s = time.perf_counter()
        processes.wait(slots, WAIT_S)
        for row, slot in zip(masks, slots, strict=True):
            row.copy_(slot.mask)
        held_s += time.perf_counter() - began_s
    for slot in slots:
        assert slot.status == 0
        slot.close()
    return held_s


def _in_loop(compiled: CompiledGrammar, outputs: list[list[int]], masks: torch.Tensor) -> float:
    matchers = [GrammarMatcher(compiled) for _ in outputs]
    began_s = time.perf_counter()
    for tokens in zip(*outputs, strict=True):
        for row, (matcher, token) in enumerate(zip(matchers, tokens, strict=True)):
            assert matcher.accept_token(token)
            matcher.fill_next_token_bitmask(masks, row)
    return time.perf_counter() - began_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    parser.add_argument("--outputs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
