"""Throughput of SGLang on kvcached's elastic pool against SGLang on its own static pool.

    python bench/sglang_throughput.py [--model tiny-llama] [--page 16KiB] [--kv 32MiB] [--batch 16]
        [--device host:0] [--pairs 150] [--steps 40] [--from-idle] [--first-token 0]
        [--prefix-cache] [--control] [--interleaved] [--json FILE]

Two engines of `prism.engines.sglang` serve the same endless stream of requests at a constant batch.
Whenever a request ends, the next one starts. The engines differ only in the pool and the allocator.
They run in turn for `--steps` steps each, and the order changes with each pair. A ratio is
tokens/s on kvcached over tokens/s on the static pool in one pair. The output has the median over
the pairs and its 95 % interval (order statistics). Target: at least 0.98. In a decode step the
whole batch gets its next token; steps in which pages were mapped are counted separately.

Without `--prefix-cache` a request's blocks are free when it ends, so that pages come and go with
the requests. With it they come and go as a full cache is evicted. `--from-idle` begins each round
on an idle engine, so that KV grows in it. `--first-token N` also times, in turn, a prompt of N
tokens alone on an idle engine. `--control` compares the static pool with itself, as a check of the
method. `--interleaved` gives kvcached's side the token-interleaved layout.

On a GPU (`--device cuda:0 --page 2MiB --kv 4GiB`) both sides use the model's own type and decode
graphs. Both are on the GPU at the same time: twice the weights, the KV and 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from pairs import median_interval
from sglang_side import Side, fields_of, parser_of

TARGET = 0.98
NAMES = ("kvcached", "stock")
Round = dict[str, Any]


class Engine:
    """Side in a separate process. Only one of the two runs at a time."""

    def __init__(self, side: Side) -> None:
        script = Path(__file__).with_name("sglang_side.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(asdict(side))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def answer(self) -> Round:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended early; its output is above")
        answer: Round = json.loads(line)
        return answer

    def run_command(self, command: str, count: int = 0) -> Round:
        """Returns the answer to a command of `sglang_side.py`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {count}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.communicate(timeout=60)


def throughput_ratio(kvcached: Round, stock: Round, clock: str) -> float:
    """Returns tokens/s on kvcached over tokens/s on the static pool."""
    return float(kvcached["tokens"] / kvcached[clock] * stock[clock] / stock["tokens"])


def orders(pairs: int) -> Iterator[tuple[int, int]]:
    """Returns the order of the sides in each pair."""
    return ((0, 1) if index % 2 else (1, 0) for index in range(pairs))


def run_pairs(engines: list[Engine], pairs: int, steps: int, from_idle: bool) -> list[list[Round]]:
    """Returns [kvcached's round, the static pool's round] of each pair."""
    done: list[list[Round]] = []
    for order in orders(pairs):
        rounds: list[Round] = [{}, {}]
        for side in order:
            rounds[side] = engines[side].run_command("run", steps)
            if from_idle:
                engines[side].run_command("idle")
        done.append(rounds)
        ratio = median(throughput_ratio(*pair, "wall_s") for pair in done)
        progress = f"pair {len(done)} of {pairs}, median ratio so far {ratio:.4f}"
        print(progress, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return done


def first_tokens(engines: list[Engine], pairs: int, prompt_tokens: int) -> list[list[Round]]:
    """Returns [kvcached's answer, the static pool's] to a prompt alone, for each pair. Leaves
    the engines idle."""
    for engine in engines:
        engine.run_command("idle")
        engine.run_command("first", prompt_tokens)  # not timed: it may compile
    done: list[list[Round]] = []
    for order in orders(pairs):
        rounds: list[Round] = [{}, {}]
        for side in order:
            rounds[side] = engines[side].run_command("first", prompt_tokens)
        done.append(rounds)
    return done


def summary(done: list[list[Round]], firsts: list[list[Round]]) -> Round:
    """Returns the figures of all rounds, for the output and --json."""
    result: Round = {"pairs": len(done), "target": TARGET}
    for clock in ("wall_s", "cpu_s"):
        ratios = [throughput_ratio(*pair, clock) for pair in done]
        result[f"ratio_{clock}"] = spread(ratios)
    for index, name in enumerate(NAMES):
        rounds = [pair[index] for pair in done]
        seconds = sum(r["wall_s"] for r in rounds)
        for what in ("tokens", "maps", "unmaps", "retractions"):
            result[f"{name}_{what}_per_s"] = sum(r[what] for r in rounds) / seconds
        result[f"{name}_steps"] = step_figures(rounds)
        result[f"{name}_first_token_ms"] = [1e3 * pair[index]["first_token_s"] for pair in firsts]
    result["ratio_decode"] = spread(
        [mean(decode_of(a)) / mean(decode_of(b)) for a, b in done if decode_of(a) and decode_of(b)]
    )
    result["ratio_first_token"] = spread(
        [a["first_token_s"] / b["first_token_s"] for a, b in firsts]
    )
    result["agreement"] = agreement(done, firsts)
    result["same_tokens"] = all(a["answers"] == b["answers"] for a, b in done)
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median and its interval, {} for no values."""
    if not values:
        return {}
    low, high = median_interval(values)
    return {"median": median(values), "low": low, "high": high}


def decode_of(round_: Round) -> list[float]:
    """Returns the seconds of each decode step of the full batch."""
    return [*round_["decode_s"], *round_["growth_s"]]


def step_figures(rounds: list[Round]) -> dict[str, Any]:
    """Returns milliseconds of decode steps.

    mean_ms: median over the rounds of the mean step. p99_ms: of all steps. growth_p99_ms: of the
    steps in which the engine or kvcached's thread mapped pages. plain_median_ms: of the others.
    """
    means = [mean(decode_of(r)) for r in rounds if decode_of(r)]
    steps_s = sorted(seconds for r in rounds for seconds in decode_of(r))
    plain_s = [seconds for r in rounds for seconds in r["decode_s"]]
    growth_s = sorted(seconds for r in rounds for seconds in r["growth_s"])
    return {
        "steps": len(steps_s),
        "growth_steps": len(growth_s),
        "mean_ms": 1e3 * median(means) if means else None,
        "p99_ms": percentile_ms(steps_s),
        "plain_median_ms": 1e3 * median(plain_s) if plain_s else None,
        "growth_p99_ms": percentile_ms(growth_s),
    }


def percentile_ms(ordered_s: list[float], share: float = 0.99) -> float | None:
    """Returns a percentile of ascending values, None for no values."""
    if not ordered_s:
        return None
    return 1e3 * ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))]


def agreement(done: list[list[Round]], firsts: list[list[Round]]) -> dict[str, int]:
    """Returns how many requests, first tokens and tokens are the same on both sides.

    A request's tokens count up to the first difference, since later ones have another history.
    """
    counts = dict.fromkeys(("requests", "same_requests", "same_first", "tokens", "same_tokens"), 0)
    for first, second in zip(*(answers_of(done, firsts, side) for side in (0, 1)), strict=True):
        same = common(first, second)
        counts["requests"] += 1
        counts["same_requests"] += first == second
        counts["same_first"] += same > 0
        counts["tokens"] += max(len(first), len(second))
        counts["same_tokens"] += same
    return counts


def answers_of(done: list[list[Round]], firsts: list[list[Round]], side: int) -> list[list[int]]:
    """Returns the tokens of each request over all rounds."""
    answers: dict[str, list[int]] = {}
    for pair in done:
        for request_id, tokens in pair[side]["answers"].items():
            answers.setdefault(request_id, []).extend(tokens)
    return [
        *(answers[name] for name in sorted(answers)),
        *(pair[side]["answer"] for pair in firsts),
    ]


def common(tokens: list[int], others: list[int]) -> int:
    """Returns how many tokens are the same, counted from the first."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def report(result: Round, control: bool) -> None:
    first = "static pool" if control else "kvcached"
    print(
        f"{first} {result['kvcached_tokens_per_s']:.1f} tokens/s, "
        f"static pool {result['stock_tokens_per_s']:.1f} tokens/s, "
        f"same tokens: {'yes' if result['same_tokens'] else 'no'}"
    )
    print(
        f"runs of pages mapped {result['kvcached_maps_per_s']:.1f}/s, "
        f"unmapped {result['kvcached_unmaps_per_s']:.1f}/s; "
        f"requests retracted {result['kvcached_retractions_per_s']:.2f}/s"
    )
    for name, key, target in (
        ("throughput by wall time", "ratio_wall_s", f" (at least {TARGET})"),
        ("throughput by CPU time", "ratio_cpu_s", f" (at least {TARGET})"),
        ("seconds of a decode step", "ratio_decode", ""),
        ("seconds to the first token", "ratio_first_token", ""),
    ):
        if ratio := result[key]:
            interval = f"95 % interval {ratio['low']:.4f} to {ratio['high']:.4f}"
            print(f"{name}: ratio {ratio['median']:.4f}, {interval}{target}")
    growth_ms, plain_ms = (
        result["kvcached_steps"][name] for name in ("growth_p99_ms", "plain_median_ms")
    )
    if growth_ms and plain_ms:
        print(f"decode steps that map pages: p99 {growth_ms:.2f} ms; others: median {plain_ms:.2f}")


def sides(options: argparse.Namespace) -> list[Side]:
    pools = ("stock", "stock") if options.control else ("kvcached", "stock")
    return [
        Side(
            pool=pool,
            batch=options.batch,
            prefix_cache=options.prefix_cache,
            arrangement="token_interleaved" if pool == options.interleaved else "per_layer",
            longest=max(
                2 * (options.prompt_tokens + options.output_tokens), options.first_token + 1
            ),
            **fields_of(options),
        )
        for pool in pools
    ]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, kv="32MiB")
    parser.add_argument("--batch", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40, help="engine steps in one round")
    parser.add_argument("--warmup", type=int, default=150, help="engine steps before the first")
    parser.add_argument("--from-idle", action="store_true")
    parser.add_argument("--first-token", type=int, default=0, metavar="N", help="prompt tokens")
    parser.add_argument("--first-pairs", type=int, default=8)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--interleaved", action="store_const", const="kvcached", default="none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    begin_s = time.monotonic()
    engines = [Engine(side) for side in sides(options)]
    try:
        for engine in engines:
            engine.answer()
        for engine in engines:
            engine.run_command("run", options.warmup)
        wants_first, firsts = options.first_token > 0, list[list[Round]]()
        if wants_first:
            firsts = first_tokens(engines, options.first_pairs, options.first_token)
        elif options.from_idle:
            for engine in engines:
                engine.run_command("idle")
        done = run_pairs(engines, options.pairs, options.steps, options.from_idle)
        result = summary(done, firsts)
    finally:
        for engine in engines:
            engine.close()
    report(result, options.control)
    print(f"took {time.monotonic() - begin_s:.0f} s")
    if options.json:
        said = {**vars(options), "json": None, "model": str(options.model)}
        options.json.write_text(json.dumps({"options": said, **result}))


if __name__ == "__main__":
    main()
