"""First tokens of bursts and time between tokens, through a frontend and through routers.

    python bench/routers.py [--model DIR] [--router PYTHON] [--also DIR] [--bursts 256,1000]
        [--paced 64,256] [--rounds 5]

Compares prism-serve, with one frontend and a fake engine with steps of 10 ms, with these:

- nginx (if it is installed) and sglang-router (`--router`: a Python that has it), in front of
  `UPSTREAM`, which makes the same steps;
- the same frontend, with that upstream as the server of an external model;
- that upstream without a router;
- with `--also`, the prism-serve of another checkout.

A router forwards bytes. The frontend tokenises and detokenises, logs open requests, and has a queue
and an agent. All are measured alternately in each round, by `stream_load.py` in a separate process.

A burst has as many connections at once, with 32 tokens each. Paced streams begin over 2 s, with 300
tokens each. The results are medians of the rounds in ms: p50 and p99 of the time from the client's
connect to the first token, and of the time between reads with tokens. CPU seconds are those of the
server per 1,000 tokens, without the upstream's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from serving import (
    STEP_MS,
    UPSTREAM,
    await_port,
    children,
    cluster,
    cpu_s,
    process,
    served,
    with_little_kv,
)
from specs import model_folder

BURST_TOKENS = 32
PACED_TOKENS = 300
PACED_OVER_S = 2.0
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/errors; worker_processes 1;
events {{ worker_connections 8192; multi_accept on; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://127.0.0.1:{upstream}; proxy_buffering off; }}
  }}
}}
"""
Place = tuple[str, dict[str, int]]  # a URL, and the pids of the processes that handle a request


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of one load in ms. `cpu_s` is CPU time for 1,000 tokens."""

    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    cpu_s: float


def loaded(place: Place, streams: int, over_s: float, tokens: int) -> Figures:
    url, pids = place
    program = str(Path(__file__).with_name("stream_load.py"))
    options = ("--streams", str(streams), "--over-s", str(over_s), "--tokens", str(tokens))
    before = cpu_s(pids)
    said = subprocess.run(
        [sys.executable, program, url, *options], check=True, stdout=subprocess.PIPE
    )
    after, found = cpu_s(pids), json.loads(said.stdout)
    used_s = sum(after[role] - before[role] for role in pids)
    if found["events"] > streams * tokens:
        sys.exit(f"error: {url} sent {found['events']} events for {streams * tokens} tokens")
    figures = [1000 * at for what in ("ttft_s", "gap_s") for at in _p50_p99(found[what])]
    return Figures(*figures, 1000 * used_s / (streams * tokens))


def _p50_p99(values: list[float]) -> tuple[float, float]:
    """Returns p50 and p99, or zeros if all tokens of each stream came in one read."""
    if len(values) < 2:
        return 0.0, 0.0
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


@contextmanager
def upstream(port: int) -> Iterator[Place]:
    with process([sys.executable, "-c", UPSTREAM, str(port), str(STEP_MS)]):
        await_port(port)
        yield f"http://127.0.0.1:{port}", {}


@contextmanager
def nginx(port: int, upstream: int) -> Iterator[Place]:
    with TemporaryDirectory(prefix="nginx-") as folder:
        file = Path(folder, "nginx.conf")
        file.write_text(NGINX.format(folder=folder, port=port, upstream=upstream))
        with process(["nginx", "-e", f"{folder}/errors", "-c", str(file)]) as running:
            await_port(port)
            (worker,) = children(running.pid)
            yield f"http://127.0.0.1:{port}", {"nginx": worker}


@contextmanager
def router(python: str, port: int, upstream: int) -> Iterator[Place]:
    """Runs sglang-router. Yields after it has found its worker healthy."""
    urls = ("--worker-urls", f"http://127.0.0.1:{upstream}", "--port", str(port))
    others = ("--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(port + 1))
    limits = ("--max-concurrent-requests", "8192")
    with process([python, "-m", "sglang_router.launch_router", *urls, *others, *limits]) as running:
        await_port(port)
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/readiness"):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", {"sglang-router": running.pid}


@contextmanager
def external(upstream: int) -> Iterator[Place]:
    """Runs prism-serve without engines, in front of the upstream."""
    urls = [f"http://127.0.0.1:{upstream}"]
    models = [{"name": "m", "adapter": "external", "servers": urls}]
    with served({"models": models, "frontend": {"port": 0}}) as (url, pids):
        yield url, {"frontend": pids["frontend"]}


def places(stack: ExitStack, options: argparse.Namespace, most: int) -> dict[str, Place]:
    model = stack.enter_context(with_little_kv(options.model))
    found: dict[str, Place] = {}
    for name, checkout in (("prism-serve", ""), ("the other one", options.also)):
        if checkout is not None:
            url, pids = stack.enter_context(cluster(model, most, PYTHONPATH=checkout))
            found[name] = url, {"frontend": pids["frontend"]}
    port = 20_000 + 4 * (os.getpid() % 2_000)
    alone = stack.enter_context(upstream(port))
    found["external model"] = stack.enter_context(external(port))
    if shutil.which("nginx"):
        found["nginx"] = stack.enter_context(nginx(port + 1, port))
    if options.router:
        found["sglang-router"] = stack.enter_context(router(options.router, port + 2, port))
    return {**found, "upstream alone": alone}


def compare(found: dict[str, Place], what: str, rounds: int, load: tuple[int, float, int]) -> None:
    runs: dict[str, list[Figures]] = {name: [] for name in found}
    for number in range(rounds):
        names = list(found) if number % 2 else list(reversed(found))
        for name in names:
            runs[name].append(loaded(found[name], *load))
    print(what)
    for name, each in runs.items():
        values = {f: median(getattr(run, f) for run in each) for f in Figures.__slots__}
        spread = sorted(run.ttft_p99 for run in each)
        print(
            f"  {name:15} first token p50 {values['ttft_p50']:6.0f} p99 {values['ttft_p99']:6.0f}"
            f" ({spread[0]:.0f} to {spread[-1]:.0f}),"
            f" between tokens p50 {values['gap_p50']:5.1f} p99 {values['gap_p99']:5.1f} ms,"
            f" CPU {values['cpu_s']:.3f} s per 1,000"
        )
    for name in [n for n in ("nginx", "sglang-router") if n in runs]:
        ratios = [
            ours.ttft_p99 / theirs.ttft_p99
            for ours, theirs in zip(runs["prism-serve"], runs[name], strict=True)
        ]
        print(f"  p99 of the first token over that of {name}: ratio {median(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    parser.add_argument("--router", help="a Python that can import sglang_router")
    parser.add_argument("--also", help="another checkout, to compare with")
    parser.add_argument("--bursts", default="256,1000")
    parser.add_argument("--paced", default="64,256")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bursts, paced = (
        [int(each) for each in text.split(",") if each] for text in (options.bursts, options.paced)
    )
    with ExitStack() as stack:
        found = places(stack, options, max(bursts + paced))
        for place in found.values():
            loaded(place, 8, 0.0, 8)
        for count in bursts:
            what = f"burst of {count}"
            compare(found, what, options.rounds, (count, 0.0, BURST_TOKENS))
        for count in paced:
            what = f"{count} paced streams"
            compare(found, what, options.rounds, (count, PACED_OVER_S, PACED_TOKENS))


if __name__ == "__main__":
    main()
