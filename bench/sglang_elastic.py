"""KV memory of SGLang on kvcached under a load that rises and falls, against a static pool.

    python bench/sglang_elastic.py [--model tiny-llama] [--device host:0] [--page 16KiB]
        [--kv 64MiB] [--phases 1x64,4x96,16x200,64x400,16x300,4x300,1x300] [--prompt-tokens 64]
        [--output-tokens 48] [--longest 0] [--json FILE]

In a phase NxS, N requests are open for S engine steps. Whenever one ends, the next one starts. No
request starts after the last phase. Once the last request has ended, the engine idles until its
memory stays constant.

Each step is followed by a sample of the KV bytes that exist (pages that the ledger has granted,
also those kept ready) and of the bytes that live tokens need. On a GPU some samples also have the
driver's free memory and what torch's allocator holds.

A static pool has to be as large as the peak. The output compares the peak with the need of its
tokens, and the mean over time with the static pool. It ends with the memory of the idle engine, and
the time from the last token until that was reached.

The prefix cache is off, since it keeps the KV of ended requests until other requests need the
memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_side import Asked, Engine, Side, fields_of, parser_of

from prism.config.schema.machines import is_gpu
from prism.config.schema.units import format_size

PHASES = "1x64,4x96,16x200,64x400,16x300,4x300,1x300"
STILL_S = 0.5  # without a change: the idle engine has given back what it gives
IDLE_MAX_S = 10.0
LOOK_S = 0.002
ASK_EVERY = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment, in bytes."""

    seconds: float
    streams: int  # requests that are to run
    needed: int  # by live tokens
    kv: int  # granted by the ledger
    free: int | None = None  # of the driver; None if it was not queried
    torch: int | None = None  # held by torch's allocator; None if it was not queried


class Recorder:
    """Samples of one engine. Only every 8th queries a GPU's driver, because that takes time."""

    def __init__(self, engine: Engine) -> None:
        self.samples: list[Sample] = []
        self._engine = engine
        self._token_bytes = engine.spec.token_bytes
        self._began_s = time.perf_counter()

    def look(self, streams: int, *, ask: bool = False) -> Sample:
        """Adds a sample. `ask` queries the driver in any case."""
        live = sum(asked.live_tokens for asked in self._engine.open.values())
        kv = self._engine.ledger.usage().committed_bytes
        now_s = time.perf_counter() - self._began_s
        found = Sample(now_s, streams, live * self._token_bytes, kv)
        if is_gpu(self._engine.side.device) and (ask or len(self.samples) % ASK_EVERY == 0):
            found = replace(found, **outside())
        self.samples.append(found)
        return found


def outside() -> dict[str, int]:
    """Returns the free memory of this process's GPU, and what torch's allocator holds of it."""
    import torch

    return {"free": torch.cuda.mem_get_info()[0], "torch": torch.cuda.memory_reserved()}


def phases_of(text: str) -> list[tuple[int, int]]:
    """Returns (requests, steps) of each phase. Raises ValueError."""
    return [
        (int(count), int(steps)) for count, _, steps in (p.partition("x") for p in text.split(","))
    ]


def run(engine: Engine, phases: list[tuple[int, int]], recorder: Recorder) -> list[Asked]:
    """Returns the requests in the order of their ends."""
    ended: list[Asked] = []
    for streams, steps in [*phases, (0, sys.maxsize)]:
        for _ in range(steps):
            engine.top_up(streams)
            if not engine.open:
                break
            ended.extend(engine.step().ended.values())
            recorder.look(streams)
    return ended


def idle(recorder: Recorder) -> float:
    """Waits until memory stays constant. Returns the seconds until its last change."""
    began_s = changed_s = time.perf_counter()
    held = recorder.look(0).kv
    while (now_s := time.perf_counter()) - changed_s < STILL_S and now_s - began_s < IDLE_MAX_S:
        time.sleep(LOOK_S)
        if (kv := recorder.look(0).kv) != held:
            held, changed_s = kv, time.perf_counter()
    recorder.look(0, ask=True)
    return changed_s - began_s


def summary(samples: list[Sample], idle_s: float, busy: int) -> dict[str, Any]:
    """Returns figures of the first `busy` samples, and of the idle engine after them."""
    loaded = samples[:busy]
    peak = max(loaded, key=lambda sample: sample.kv)
    return {
        "peak_bytes": peak.kv,
        "needed_peak_bytes": max(sample.needed for sample in loaded),
        "mean_bytes": mean_over_time(loaded, "kv"),
        "needed_mean_bytes": mean_over_time(loaded, "needed"),
        "seconds": loaded[-1].seconds - loaded[0].seconds,
        "idle_s": idle_s,
        "idle_bytes": samples[-1].kv,
    }


def mean_over_time(samples: list[Sample], name: str) -> float:
    """Returns the mean of a field. Each sample counts for the time until the next one."""
    pairs = list(pairwise(samples))
    seconds = sum(b.seconds - a.seconds for a, b in pairs)
    weighted = sum(getattr(a, name) * (b.seconds - a.seconds) for a, b in pairs)
    return float(weighted / seconds) if seconds else float(getattr(samples[-1], name))


def report(found: dict[str, Any]) -> None:
    peak, idle_bytes = found["peak_bytes"], found["idle_bytes"]
    needed = found["needed_peak_bytes"]
    print(
        f"peak {format_size(peak)} of KV, its tokens need {format_size(needed)}:"
        f" ratio {peak / needed:.2f}"
    )
    print(
        f"mean {format_size(int(found['mean_bytes']))} over {found['seconds']:.1f} s, a static pool"
        f" {format_size(peak)}: ratio {found['mean_bytes'] / peak:.2f} (the tokens'"
        f" {found['needed_mean_bytes'] / needed:.2f})"
    )
    print(
        f"idle {format_size(idle_bytes)}, {found['idle_s']:.2f} s after the last token:"
        f" ratio {idle_bytes / peak:.2f}"
    )


def side_of(options: argparse.Namespace) -> Side:
    return Side(
        pool="kvcached",
        batch=max(streams for streams, _ in phases_of(options.phases)),
        prefix_cache=False,
        longest=options.longest,
        **fields_of(options),
    )


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, kv="64MiB")
    parser.add_argument("--phases", default=PHASES, help="requests x engine steps")
    parser.add_argument("--longest", type=int, default=0, help="context; default: what fits all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write samples and tokens here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    engine = Engine(side_of(options))
    try:
        engine.idle()  # what the warm-up left
        recorder = Recorder(engine)
        recorder.look(0)
        ended = run(engine, phases_of(options.phases), recorder)
        busy = len(recorder.samples)
        found = summary(recorder.samples, idle(recorder), busy)
        status = engine.core.status()
    finally:
        engine.close()
    report(found)
    if options.json:
        names = list(asdict(recorder.samples[0]))
        columns = zip(*map(astuple, recorder.samples), strict=True)
        content = {
            **found,
            "samples": dict(zip(names, map(list, columns), strict=True)),
            "busy_samples": busy,
            "quantum_bytes": engine.activated.quantum_bytes,
            "floor_bytes": engine.activated.floor_bytes,
            "capacity_bytes": engine.ledger.capacity_bytes,
            "retractions": status.retractions_total,
            "captures_s": list(status.captures_s),
            "wanted_tokens": [asked.wanted for asked in ended],
            "rounds": [
                {
                    "model": engine.spec.name,
                    "prompts": [asked.prompt for asked in ended],
                    "tokens": [asked.tokens for asked in ended],
                    "tokens_graphs": [],
                }
            ],
        }
        options.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
