"""Throughput of SGLang on kvcached's elastic pool against SGLang on its own static pool.

    python bench/sglang_throughput.py [--model tiny-llama] [--page 16KiB] [--kv 32MiB] [--batch 16]
        [--pairs 150] [--steps 40] [--prefix-cache] [--control] [--interleaved]
        [--json FILE]

Two engines of `prism.engines.sglang` serve the same endless stream of requests at a constant batch:
whenever a request ends the next one starts. They differ in the pool and the allocator alone. They
run in turn, `--steps` steps each, and which goes first changes with each pair. A ratio is
tokens/s on kvcached over tokens/s on the static pool in one pair; printed are the median over the
pairs and its 95 % interval (order statistics). Target: at least 0.98.

Without `--prefix-cache` a request's blocks are free when it ends, so that pages come and go with
the requests. With it they come and go as a full cache is evicted. `--control` compares the static
pool with itself: what the method sees where there is nothing to see. `--interleaved` gives
kvcached's side the token-interleaved layout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from pairs import median_interval
from sglang_side import Side

from prism.config.units import parse_size
from prism.models.store import default_directory

TARGET = 0.98
Round = dict[str, Any]


class Engine:
    """A side in a process of its own. Only one is told to run at a time."""

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
            raise SystemExit("an engine ended early; what it said is above")
        answer: Round = json.loads(line)
        return answer

    def run(self, steps: int) -> Round:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.communicate(timeout=60)


def throughput_ratio(kvcached: Round, stock: Round, clock: str) -> float:
    """Tokens/s on kvcached over tokens/s on the static pool."""
    return float(kvcached["tokens"] / kvcached[clock] * stock[clock] / stock["tokens"])


def run_pairs(engines: list[Engine], pairs: int, steps: int) -> list[list[Round]]:
    """[kvcached's round, the static pool's] of each pair."""
    done: list[list[Round]] = []
    for index in range(pairs):
        rounds: list[Round] = [{}, {}]
        for side in (0, 1) if index % 2 else (1, 0):
            rounds[side] = engines[side].run(steps)
        done.append(rounds)
        ratio = median(throughput_ratio(*pair, "wall_s") for pair in done)
        progress = f"pair {index + 1} of {pairs}, median ratio so far {ratio:.4f}"
        print(progress, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return done


def summary(done: list[list[Round]]) -> Round:
    """What is printed and written with --json."""
    result: Round = {"pairs": len(done), "target": TARGET}
    for clock in ("wall_s", "cpu_s"):
        ratios = [throughput_ratio(*pair, clock) for pair in done]
        low, high = median_interval(ratios)
        result[f"ratio_{clock}"] = {"median": median(ratios), "low": low, "high": high}
    for name, rounds in zip(("kvcached", "stock"), zip(*done, strict=True), strict=True):
        seconds = sum(r["wall_s"] for r in rounds)
        for what in ("tokens", "maps", "unmaps", "retractions"):
            result[f"{name}_{what}_per_s"] = sum(r[what] for r in rounds) / seconds
    result["same_tokens"] = all(a["checksum"] == b["checksum"] for a, b in done)
    return result


def report(result: Round, control: bool) -> None:
    first = "static pool" if control else "kvcached"
    wall, cpu = result["ratio_wall_s"], result["ratio_cpu_s"]
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
    for name, ratio in (("wall", wall), ("CPU", cpu)):
        interval = f"95 % interval {ratio['low']:.4f} to {ratio['high']:.4f}"
        print(
            f"throughput by {name} time: ratio {ratio['median']:.4f}, {interval}, "
            f"{result['pairs']} pairs (at least {TARGET})"
        )


def sides(options: argparse.Namespace) -> list[Side]:
    model = options.model if "/" in options.model else str(default_directory() / options.model)
    pools = ("stock", "stock") if options.control else ("kvcached", "stock")
    return [
        Side(
            pool=pool,
            model=model,
            kv_bytes=parse_size(options.kv, "--kv"),
            page_bytes=parse_size(options.page, "--page"),
            batch=options.batch,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            prefix_cache=options.prefix_cache,
            arrangement="token_interleaved" if pool == options.interleaved else "per_layer",
        )
        for pool in pools
    ]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama", help="a demo model, or a directory")
    parser.add_argument("--page", default="16KiB", help="bytes of a device page")
    parser.add_argument("--kv", default="32MiB", help="KV memory of either side")
    parser.add_argument("--batch", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean")
    parser.add_argument("--output-tokens", type=int, default=48, help="mean")
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40, help="engine steps in one round")
    parser.add_argument("--warmup", type=int, default=150, help="engine steps before the first")
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
            engine.run(options.warmup)
        result = summary(run_pairs(engines, options.pairs, options.steps))
    finally:
        for engine in engines:
            engine.close()
    report(result, options.control)
    print(f"took {time.monotonic() - begin_s:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, **result}))


if __name__ == "__main__":
    main()
