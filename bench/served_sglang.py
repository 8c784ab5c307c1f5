"""A model served by prism-serve against the same model served by SGLang's own server, over HTTP.

    python bench/served_sglang.py [--model tiny-llama] [--streams 1,8,32] [--requests 4]
        [--pairs 10]

Both answer the same streamed requests alternately, and the order changes with each pair. Prompts
have 64 to 192 tokens and answers 48 tokens, with that many concurrent streams and `--requests`
consecutive requests in each. Data type, page size, chunks and attention are the same. The output
has medians of tokens per second, time to the first token and time per token of each. It also has
the ratio of tokens per second with its 95 % interval (order statistics), by wall-clock time and by
the CPU time of all processes that handle a request. Target of the first: at least 0.97.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from activation import write_platform
from pairs import median_interval
from serving import Run, children, run, served
from specs import model_folder
from stock_servers import Server, requests

TARGET = 0.97
OUTPUT_TOKENS = 48
Place = tuple[str, dict[str, int]]  # a URL, and the pids of the processes that handle a request


@contextmanager
def ours(options: argparse.Namespace, streams: int) -> Iterator[Place]:
    settings = {
        "devices": [{"name": "host:0", "capacity": "2GiB", "page": "64KiB", "engines": 1}],
        "models": [
            {
                "name": "m",
                "path": str(options.model),
                "context_length": 512,
                "slo": {"ttft": "60s", "tpot": "10s"},  # no request is dropped for being late
            }
        ],
        "engine": {"max_running": streams, "prefill_chunk_tokens": 256},
        "frontend": {"port": 0},
    }
    with served(settings, OMP_NUM_THREADS="1") as found:
        yield found


@contextmanager
def theirs(options: argparse.Namespace, streams: int) -> Iterator[Place]:
    common = {"engine": "sglang", "model": options.model, "tokens": 32_768, "streams": streams}
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        write_platform(Path(folder))
        paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        stock = {"SGLANG_PLATFORM": "stock_cpu", "PYTHONPATH": paths}
        server = Server(stock, argparse.Namespace(**common))
        try:
            server.await_ready()
            pids = (server.pid, *children(server.pid))
            yield server.url, {f"server {number}": pid for number, pid in enumerate(pids)}
        finally:
            server.close()


def bodies(streams: int, count: int, seed: int) -> list[bytes]:
    common = {"model": "m", "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
    asked = requests(argparse.Namespace(streams=streams, requests=count), seed)
    return [json.dumps({**common, "temperature": 0, "prompt": each}).encode() for each in asked]


def compare(places: tuple[Place, Place], streams: int, options: argparse.Namespace) -> None:
    done: list[list[Run]] = []
    for index in range(options.pairs + 1):  # the first pair is a warm-up
        asked = bodies(streams, options.requests, seed=1000 * streams + index)
        order = (0, 1) if index % 2 else (1, 0)
        runs = {side: run(*places[side], streams, asked) for side in order}
        done.append([runs[0], runs[1]])
    del done[0]
    for side, name in enumerate(("prism-serve", "SGLang")):
        found = [pair[side] for pair in done]
        rate = median(each.tokens / each.seconds for each in found)
        first_ms, token_ms = (
            1000 * median(values)
            for values in ([r.first_token_s for r in found], [r.token_s for r in found])
        )
        print(f"{name:12} {rate:7.0f} tokens/s, TTFT {first_ms:6.1f} ms, TPOT {token_ms:5.2f} ms")
    for what, ratios in {
        "tokens per second": [b.seconds / a.seconds for a, b in done],
        "tokens per CPU second": [sum(b.cpu_s.values()) / sum(a.cpu_s.values()) for a, b in done],
    }.items():
        low, high = median_interval(ratios)
        print(f"{what} at {streams}: ratio {median(ratios):.3f}, {low:.3f} to {high:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    parser.add_argument("--streams", default="1,8,32")
    for name, value in (("requests", 4), ("pairs", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    counts = [int(each) for each in options.streams.split(",")]
    with ExitStack() as stack:
        places = (
            stack.enter_context(ours(options, max(counts))),
            stack.enter_context(theirs(options, max(counts))),
        )
        for streams in counts:
            compare(places, streams, options)
    print(f"target of tokens per second: at least {TARGET}")


if __name__ == "__main__":
    main()
