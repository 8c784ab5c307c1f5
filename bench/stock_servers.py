"""Throughput of a stock server on kvcached against the same server with its own pool.

    python bench/stock_servers.py [--engine sglang] [--model tiny-llama] [--streams 8]
        [--requests 3] [--pairs 30] [--tokens 4096] [--page 64KiB] [--control] [--one-process]

`--engine vllm` uses the environment in `.cache/vllm` that tests/vllm creates. On a CPU stock vLLM
has its scheduler and its worker in two processes, which costs more than kvcached does. With
`--one-process` it has them in one, as on kvcached, so the difference is the cost of elastic memory.

The two servers have the same arguments. One of them has KVCACHED_DEVICE in its environment. They
answer the same requests alternately over HTTP, `--streams` at a time, and the order changes with
each pair. `--tokens` is the size of the KV pool of both. When the prefix cache has filled it, pages
are mapped and unmapped. A ratio is tokens/s on kvcached over tokens/s without it in one pair. The
output has the median and its 95 % interval (order statistics), by wall-clock time and by the CPU
time of all of a server's processes. With `--control` neither uses kvcached. Target: at least 0.97.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import psutil
from activation import write_platform
from pairs import median_interval
from specs import model_folder

import kvcached
from prism.models.files import inspect_model

TARGET = 0.97
PROMPT_TOKENS, OUTPUT_TOKENS = (64, 192), 48


class Server:
    """Stock server. Only `environment` differs between the two."""

    def __init__(self, environment: dict[str, str], options: argparse.Namespace) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{held.getsockname()[1]}"
        self._engine = options.engine
        command = vllm_command(options) if options.engine == "vllm" else sglang_command(options)
        command += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        common = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if options.engine == "vllm":
            common |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": ""}
        # Outside of the checkout, whose packages have no compiled core.
        self._process = subprocess.Popen(command, cwd="/", env=os.environ | common | environment)
        self.pid = self._process.pid

    def await_ready(self) -> None:
        while True:
            if self._process.poll() is not None:
                raise SystemExit("a server ended early; what it said is above")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=60)
            except OSError:
                time.sleep(0.2)
            else:
                return

    def answer(self, asked: list[list[int]], streams: int) -> dict[str, Any]:
        begin_s, begin_cpu_s = time.perf_counter(), self._cpu_s()
        with ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(self._generate, asked))
        return {
            "wall_s": time.perf_counter() - begin_s,
            "cpu_s": self._cpu_s() - begin_cpu_s,
            "answers": answers,
        }

    def _generate(self, prompt: list[int]) -> list[int]:
        if self._engine == "vllm":
            sampling = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
            asked = {"model": "model", "prompt": prompt, "return_token_ids": True, **sampling}
            found: list[int] = self._post("v1/completions", asked)["choices"][0]["token_ids"]
            return found
        sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        found = self._post("generate", {"input_ids": prompt, "sampling_params": sampling})[
            "output_ids"
        ]
        return found

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def _cpu_s(self) -> float:
        parent = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
        return sum(taken.user + taken.system for taken in times)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def sglang_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "kvcached.engines.sglang.launch"]
    command += ["--model-path", str(options.model)]
    command += ["--device", "cpu", "--dtype", "float32", "--page-size", "16"]
    command += ["--context-length", "512", "--chunked-prefill-size", "256"]
    command += ["--max-total-tokens", str(options.tokens)]
    command += ["--max-running-requests", str(options.streams)]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"]
    return [*command, "--log-level", "error"]


def vllm_command(options: argparse.Namespace) -> list[str]:
    python = Path(__file__).parent.parent.resolve() / ".cache" / "vllm" / "bin" / "python"
    token_bytes = inspect_model(options.model, "--model").token_bytes("float32")
    command = [str(python), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model), "--served-model-name", "model", "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-batched-tokens", "256", "--block-size", "32"]
    command += ["--kv-cache-memory-bytes", str(options.tokens * token_bytes), "--enforce-eager"]
    command += ["--max-num-seqs", str(options.streams), "--uvicorn-log-level", "error"]
    return [*command, "--disable-log-stats"]


def requests(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """Returns the prompts of one round, all different."""
    chance = random.Random(seed)
    lengths = [chance.randint(*PROMPT_TOKENS) for _ in range(options.streams * options.requests)]
    return [[chance.randrange(16, 500) for _ in range(length)] for length in lengths]


def run_pairs(servers: list[Server], options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Returns [kvcached's round, the stock pool's] of each pair. The first fills the caches."""
    done: list[list[dict[str, Any]]] = []
    for index in range(options.pairs + 1):
        asked = requests(options, seed=index)
        rounds: list[dict[str, Any]] = [{}, {}]
        for side in (0, 1) if index % 2 else (1, 0):
            rounds[side] = servers[side].answer(asked, options.streams)
        done.append(rounds)
    return done[1:]


def report(done: list[list[dict[str, Any]]]) -> None:
    tokens = sum(len(answer) for answer in done[0][0]["answers"])
    for clock, name in (("wall_s", "wall"), ("cpu_s", "CPU")):
        elastic, stock = (median(pair[side][clock] for pair in done) for side in (0, 1))
        ratios = [pair[1][clock] / pair[0][clock] for pair in done]
        low, high = median_interval(ratios)
        print(
            f"{name:4} {tokens / elastic:8.1f} against {tokens / stock:8.1f} tokens/s: ratio "
            f"{median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f} (target {TARGET})"
        )
    same = sum(pair[0]["answers"] == pair[1]["answers"] for pair in done)
    print(f"{len(done)} pairs, the same tokens in {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    for name, value in (("streams", 8), ("requests", 3), ("pairs", 30), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--page", default="64KiB")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--one-process", action="store_true")
    options = parser.parse_args()
    namespace = f"bench{uuid4().hex[:10]}"
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        write_platform(Path(folder))
        paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        stock = {"SGLANG_PLATFORM": "stock_cpu", "PYTHONPATH": paths}
        if options.engine == "vllm":
            stock = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.one_process else {}
        elastic = {
            "KVCACHED_DEVICE": "host:0",
            "KVCACHED_CAPACITY": "4GiB",
            "KVCACHED_PAGE": options.page,
            "KVCACHED_NAMESPACE": namespace,
        }
        servers = [Server(side, options) for side in (stock if options.control else elastic, stock)]
        try:
            for server in servers:
                server.await_ready()
            report(run_pairs(servers, options))
        finally:
            for server in servers:
                server.close()
            if not options.control:
                kvcached.Device.unlink(namespace, "host:0", force=True)


if __name__ == "__main__":
    main()
