"""CPU time of the serving path, against a pass-through of FastAPI and httpx in the same run.

    python bench/serving.py [--model DIR] [--streams 64] [--tokens 128] [--requests 400]
        [--rounds 3] [--turns 1]

A cluster of one device and one fake engine with steps of 10 ms answers streams that start at once.
The output has CPU seconds of the frontend, the agent and the engine per 1,000 tokens, and, with
answers of one token, per request. The time of the fake engine's model without a worker is measured
separately, in this process.

The same streams go through `PASS_THROUGH`, which forwards the output of `UPSTREAM`, a server
without a model or a tokenizer that makes the same steps. They also go to `UPSTREAM` directly, which
represents an engine's own server. The output has tokens per second and the median time to the first
token of each. With `--turns 12` a stream sends twelve requests, for a quarter to seven quarters of
the tokens, so requests arrive one by one.

Model: `prism-models prepare tiny-llama`, of which only the tokenizer is used. `--streams 256
--tokens 300` is more than both can sustain on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import yaml
from activation import DEVICE, config_of
from msgspec.structs import replace
from specs import model_folder, spec_of

import kvcached
from prism.engines.core import EngineContext
from prism.engines.fake.core import FakeCore
from prism.engines.fake.options import FakeOptions
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Request, Sampling

STEP_MS = 10
CONTEXT_TOKENS = 512
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ROLES = ("frontend", "agent")

PASS_THROUGH = """
import os, sys
import httpx, uvicorn
from contextlib import asynccontextmanager
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

@asynccontextmanager
async def lifespan(app):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=sys.argv[1], timeout=None, limits=limits) as app.client:
        yield

app = FastAPI(lifespan=lifespan)

@app.post("/v1/completions")
async def forward(request: Request):
    body = await request.json()
    upstream = app.client.build_request("POST", "/v1/completions", json=body)
    answer = await app.client.send(upstream, stream=True)

    async def events():
        async for line in answer.aiter_lines():
            if line:
                yield line + "\\n\\n"

    return StreamingResponse(events(), media_type="text/event-stream")

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""

UPSTREAM = """
import asyncio, json, sys

HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nConnection: close\\r\\n\\r\\n"
choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m"}
EVENT = b"data: " + json.dumps({**event, "choices": [choice]}).encode() + b"\\n\\n"
running = {}
asked = asyncio.Event()

async def answer(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
    if not head.startswith(b"post"):  # a router asks for its health
        end = b"Content-Length: 23\\r\\nConnection: close\\r\\n\\r\\n" b'{"data": [{"id": "m"}]}'
        writer.write(b"HTTP/1.1 200 OK\\r\\n" + end)
        return writer.close()
    length = int(head.split(b"content-length:")[1].split(b"\\r\\n")[0])
    body = json.loads(await reader.readexactly(length))
    writer.write(HEAD)
    running[writer] = body["max_tokens"]
    asked.set()

async def steps(step_s, loop):
    due_s = 0.0
    while True:
        if not running:  # a step begins with the first request, as an engine's does
            asked.clear()
            await asked.wait()
            due_s = loop.time()
        if loop.time() - due_s > step_s:
            due_s = loop.time()
        due_s += step_s
        batch = list(running.items())  # no request joins a running step, as in an engine
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        for writer, left in batch:
            writer.write(EVENT)
            running[writer] = left - 1
            if left == 1:
                del running[writer]
                writer.write(b"data: [DONE]\\n\\n")
                writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await steps(float(sys.argv[2]) / 1000, asyncio.get_running_loop())

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one stream, and seconds to the first and to the last of them."""

    tokens: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one round of streams. Times are medians of its answers, CPU is in seconds."""

    tokens: int
    seconds: float
    first_token_s: float
    token_s: float  # of each further token
    cpu_s: dict[str, float]  # by role


async def stream(url: str, body: bytes) -> Answer:
    place = urlsplit(url)
    began_s, first_s, last_s = time.monotonic(), 0.0, 0.0
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    received = b""
    while part := await reader.read(1 << 16):
        received += part
        if b"data: {" in part:
            last_s = time.monotonic() - began_s
            first_s = first_s or last_s
    writer.close()
    if b" 200 " not in received[:20] or b"[DONE]" not in received:
        sys.exit(f"error: {url} answered {received[:300]!r}")
    return Answer(json.loads(body)["max_tokens"], first_s, last_s)


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """Returns user and system seconds so far, by role."""
    times = {r: Path(f"/proc/{p}/stat").read_text().rpartition(")")[2] for r, p in pids.items()}
    return {role: sum(map(int, text.split()[11:13])) * TICK_S for role, text in times.items()}


def run(url: str, pids: dict[str, int], streams: int, bodies: list[bytes]) -> Run:
    """Sends all bodies, `streams` at a time."""

    async def all_of_them() -> list[Answer]:
        gate = asyncio.Semaphore(streams)

        async def one(body: bytes) -> Answer:
            async with gate:
                return await stream(url, body)

        return list(await asyncio.gather(*map(one, bodies)))

    before, began_s = cpu_s(pids), time.monotonic()
    answers = asyncio.run(all_of_them())
    seconds, after = time.monotonic() - began_s, cpu_s(pids)
    used = {role: after[role] - before[role] for role in pids}
    first_s = median(each.first_s for each in answers)
    token_s = median((a.last_s - a.first_s) / max(1, a.tokens - 1) for a in answers)
    return Run(sum(each.tokens for each in answers), seconds, first_s, token_s, used)


def children(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from children(int(child))


@contextmanager
def process(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


@contextmanager
def cluster(
    model: Path, streams: int, policy: str = "prism", **environment: str
) -> Iterator[tuple[str, dict[str, int]]]:
    """Runs a cluster of the fake engine. Yields its URL, and the pids of its processes."""
    settings = {
        "policy": policy,
        "devices": [{"name": "host:0", "capacity": "256MiB", "page": "64KiB", "engines": 1}],
        "models": [{"name": "m", "path": str(model), "context_length": CONTEXT_TOKENS}],
        "engine": {"adapter": "fake", "static": "1MiB", "max_running": streams},
        "frontend": {"port": 0},
    }
    fake = json.dumps({"decode_step_ms": STEP_MS})
    with served(settings, PRISM_FAKE=fake, **environment) as found:
        yield found


@contextmanager
def served(settings: dict[str, Any], **environment: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Runs a cluster of one model. Yields the same."""
    with TemporaryDirectory(prefix="prism-") as folder:
        file = Path(folder, "prism.yaml")
        file.write_text(yaml.safe_dump(settings))
        serve = str(Path(sys.executable).with_name("prism-serve"))
        with process([serve, "--config", str(file)], TMPDIR=folder, **environment) as server:
            assert server.stdout is not None
            url = next(x.split()[-1] for x in server.stdout if x.startswith("ready in "))
            url = url.removesuffix("/v1")
            yield url, roles(url, server.pid)


def roles(url: str, launcher: int) -> dict[str, int]:
    lines = {p: Path(f"/proc/{p}/cmdline").read_text() for p in children(launcher)}
    pids = {role: p for p, text in lines.items() for role in ROLES if f"prism.{role}" in text}
    with urlopen(f"{url}/status") as answer:
        agents = json.load(answer)["agents"]
    for agent in agents:  # one, if the model is not external
        pids["engine"] = agent["models"][0]["engine_pid"]
    return pids


def await_port(port: int) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        time.sleep(0.1)
    sys.exit("error: the pass-through did not start")


@contextmanager
def pass_through() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Runs the pass-through. Yields its URL, its upstream's, and the pids of both."""
    port = 20_000 + os.getpid() % 10_000
    upstream = [sys.executable, "-c", UPSTREAM, str(port), str(STEP_MS)]
    forward = [sys.executable, "-c", PASS_THROUGH, f"http://127.0.0.1:{port}", str(port + 1)]
    with process(upstream) as engine, process(forward) as running:
        await_port(port + 1)  # the upstream imports fewer modules
        pids = {"pass-through": running.pid, "upstream": engine.pid}
        yield f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port}", pids


@contextmanager
def with_little_kv(model: Path) -> Iterator[Path]:
    """Returns a copy of the model whose tokens have little KV, which the fake engine writes."""
    with TemporaryDirectory(prefix="prism-") as folder:
        copy = Path(shutil.copytree(model, Path(folder, "model")))
        config = json.loads((copy / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "num_key_value_heads": 1}
        config["max_position_embeddings"] = CONTEXT_TOKENS
        (copy / "config.json").write_text(json.dumps(config))
        yield copy


def fake_model_s(model: Path, streams: int, tokens: int) -> float:
    """Returns CPU seconds per token of the fake engine's steps, without a worker."""
    spec = spec_of(model, CONTEXT_TOKENS)
    sampling = Sampling(tokens, temperature=0.0, ignore_eos=True)
    asked = [
        Request(f"r{n}", spec.name, [5, 6, 7, n % 200], sampling, time.time(), 1.0, 1.0, "")
        for n in range(streams)
    ]
    with TemporaryDirectory(prefix="prism-") as folder:
        config = config_of("256MiB", "64KiB", None, folder)
        engine = replace(config.engine, adapter="fake", max_running=streams)
        context = EngineContext("e", DEVICE, replace(config, engine=engine))
        core = FakeCore(context, FakeOptions(decode_step_ms=STEP_MS))
        core.activate(ActivateEngine(spec, max_running=streams))
        core.submit(asked)
        began_s = time.process_time()
        while core.step().busy:
            pass
        used_s = time.process_time() - began_s
        core.close()
        kvcached.Device.unlink(config.namespace, DEVICE)
    return used_s / (streams * tokens)


def bodies(count: int, tokens: int, spread: int = 0) -> list[bytes]:
    """Returns request bodies. Their answers differ by up to `spread` tokens."""
    common = {"model": "m", "stream": True, "ignore_eos": True}
    lengths = random.Random(count).choices(range(tokens - spread, tokens + spread + 1), k=count)
    return [
        json.dumps({**common, "max_tokens": length, "prompt": [5, 6, 7, n % 200]}).encode()
        for n, length in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    sizes = {"streams": 64, "tokens": 128, "requests": 400, "rounds": 3, "turns": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(with_little_kv(options.model))
        ours = stack.enter_context(cluster(model, options.streams))
        theirs, upstream, pids = stack.enter_context(pass_through())
        pair = (ours, (theirs, pids))
        alone: tuple[str, dict[str, int]] = (upstream, {})
        for url, pids in pair:
            run(url, pids, 4, bodies(8, 8))
        asked = (*pair, alone)
        rounds = [[measured(*each, options) for each in asked] for _ in range(options.rounds)]
        for url, pids in pair:
            short = run(url, pids, 16, bodies(options.requests, 1))
            per = {role: f"{1000 * s / options.requests:.2f} ms" for role, s in short.cpu_s.items()}
            print(f"per request: {per}; first token {1000 * short.first_token_s:.0f} ms")
        model_s = fake_model_s(model, options.streams, options.tokens)
    report(rounds, model_s)


def report(rounds: list[list[Run]], model_s: float) -> None:
    print(f"the fake model's own steps: {1000 * model_s:.3f} s per 1,000 tokens")
    for name, which, less_s in (
        ("frontend", ("frontend",), 0.0),
        ("agent and engine", ("agent", "engine"), 0.0),
        ("agent and engine without its model", ("agent", "engine"), model_s),
    ):
        ratios = [
            (sum(ours.cpu_s[r] for r in which) - less_s * ours.tokens)
            / max(theirs.cpu_s["pass-through"], TICK_S)
            for ours, theirs, _ in rounds
        ]
        print(f"CPU of {name} over the pass-through's, same tokens: ratio {median(ratios):.2f}")
    rates = [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b, _ in rounds]
    print(f"tokens per second over the pass-through's: ratio {median(rates):.2f}")
    names = ("prism-serve", "the pass-through", "its upstream alone")
    first_ms = {
        name: 1000 * median(runs[number].first_token_s for runs in rounds)
        for number, name in enumerate(names)
    }
    print("first token:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in first_ms.items()))


def measured(url: str, pids: dict[str, int], options: argparse.Namespace) -> Run:
    spread = options.tokens * 3 // 4 if options.turns > 1 else 0
    asked = bodies(options.streams * options.turns, options.tokens, spread)
    result = run(url, pids, options.streams, asked)
    per = {role: f"{1000 * s / result.tokens:.3f} s" for role, s in result.cpu_s.items()}
    rate, first_ms = result.tokens / result.seconds, 1000 * result.first_token_s
    print(f"per 1,000 tokens: {per}; {rate:.0f} tokens/s; first token {first_ms:.0f} ms")
    return result


if __name__ == "__main__":
    main()
