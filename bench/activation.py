"""Activation of a model on a warm engine, against a cold start of the stock engine.

    python bench/activation.py [--model DIR] [--pairs 3] [--capacity 4GiB] [--page 2MiB]
        [--context 2048] [--neighbour DIR] [--seconds 6] [--rate 500MiB]

Both are timed alternately in one run until the model has generated two greedy tokens, with the
model's files in the page cache. Stock: `sglang.Engine` in a new process, on the same CPU paths,
with weights and KV in torch's memory. Warm: a process that has imported the engine once and has
served this model before, so its weights are in the store. The output has wall-clock time, CPU time
(of the stock engine's processes until their end), the stages of an activation, and its disk reads.
CPU time is more reliable on a busy machine.

With --neighbour (a second model) another process decodes that model meanwhile. The output then has
its time per token before, during and after an activation, which copies at most --rate bytes/s.

Models: `prism-models prepare smollm2-135m tiny-llama` (0.54 GB and 17 MB of float32).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from uuid import uuid4

from pairs import Pairs
from specs import model_folder, spec_of

import kvcached
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.schema.units import format_size, parse_size
from prism.engines.core import EngineContext, EngineCore
from prism.messages.engine import Activated, ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling

DEVICE = "host:0"
PROMPT = [1, 8, 15, 22]
TARGET = 10.0

# Files on the path of the stock engine: a platform with the same native code paths and SGLang's
# own pools, and the stand-ins for imports that fail on a machine without a GPU.
PLATFORM = """
from kvcached.engines.sglang.platform import NativeCpuPlatform
from sglang.srt.platforms.cpu import CpuSRTPlatform

class StockCpuPlatform(CpuSRTPlatform):
    _enum = NativeCpuPlatform._enum
    capabilities = NativeCpuPlatform.capabilities
    get_default_attention_backend = NativeCpuPlatform.get_default_attention_backend
    get_dispatch_key_name = NativeCpuPlatform.get_dispatch_key_name

def activate():
    return "stock_cpu.StockCpuPlatform"
"""
STAND_INS = "from prism.engines.sglang.platform import stubs\nstubs.install()\n"
STOCK = """
import json, sys
import sglang

if __name__ == "__main__":
    options, prompt = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    engine = sglang.Engine(**options)
    sampling = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    print("tokens", engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"])
    engine.shutdown()
"""


def write_platform(folder: Path) -> None:
    """Writes the platform that SGLANG_PLATFORM=stock_cpu selects for processes with this path."""
    metadata = folder / "stock_cpu-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stock-cpu\nVersion: 0\n")
    point = "[sglang.srt.platforms]\nstock_cpu = stock_cpu:activate\n"
    (metadata / "entry_points.txt").write_text(point)
    (folder / "stock_cpu.py").write_text(PLATFORM)


@contextmanager
def stock_files() -> Iterator[Path]:
    """Yields a folder on whose path the stock engine finds its platform. Installs nothing."""
    with tempfile.TemporaryDirectory(prefix="stock-") as name:
        folder = Path(name)
        write_platform(folder)
        (folder / "sitecustomize.py").write_text(STAND_INS)
        (folder / "stock.py").write_text(STOCK)
        yield folder


def cold_start(folder: Path, spec: ModelSpec) -> tuple[float, float]:
    """Returns seconds from the start of a new process until the stock engine's second token, and
    the process's CPU seconds.
    """
    options = {
        "model_path": spec.path,
        "device": "cpu",
        "dtype": "float32",
        "context_length": spec.context_length,
        "max_total_tokens": 2 * spec.context_length,
        "page_size": 16,
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "sleep_on_idle": True,
        "skip_server_warmup": True,
        "log_level": "error",
    }
    environment = {
        **os.environ,
        "SGLANG_PLATFORM": "stock_cpu",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(folder / "stock.py"), json.dumps(options), json.dumps(PROMPT)]
    begin_s, used_s = time.monotonic(), children_s()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("tokens"):
                seconds = time.monotonic() - begin_s
                break
        else:
            raise SystemExit(f"the stock engine failed:\n{process.stderr.read()[-3000:]}")
        process.communicate()
    return seconds, children_s() - used_s


def children_s() -> float:
    """Returns CPU seconds of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def warm_engine(config: ClusterConfig, engine_id: str) -> EngineCore:
    from prism.engines.sglang import create

    return create(EngineContext(engine_id, DEVICE, config))


def activation(core: EngineCore, spec: ModelSpec) -> tuple[float, float, Activated]:
    """Returns seconds, CPU seconds of all threads, and the stages."""
    begin_s, used_s = time.monotonic(), time.process_time()
    activated = core.activate(ActivateEngine(spec, max_running=8))
    seconds, cpu_s = time.monotonic() - begin_s, time.process_time() - used_s
    core.deactivate()
    return seconds, cpu_s, activated


def read_bytes() -> int:
    """Returns bytes that this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def compare(config: ClusterConfig, spec: ModelSpec, pairs: int) -> None:
    core = warm_engine(config, "bench")
    activation(core, spec)  # so that the engine has served before
    cold, warm = list[tuple[float, float]](), list[tuple[float, float]]()
    stages = list[dict[str, float]]()
    with stock_files() as folder:
        for _ in range(pairs):
            cold.append(cold_start(folder, spec))
            seconds, cpu_s, activated = activation(core, spec)
            warm.append((seconds, cpu_s))
            stages.append(activated.stages_s)
    activation(core, spec)  # reads code back that the system had dropped from memory
    read_before = read_bytes()
    activation(core, spec)
    print(f"read from disk by one activation: {read_bytes() - read_before} bytes")
    core.close()
    name = f"cold start against activation, {format_size(spec.weight_bytes)}"
    for kind, label in enumerate(("wall time", "CPU time")):
        timed = Pairs([seconds[kind] for seconds in cold], [seconds[kind] for seconds in warm])
        print(timed.line(f"{name}, {label}", f"target {TARGET:g}", "s", 1.0, 1.0))
    for stage in stages[0]:
        print(f"  {stage:10} {median(s[stage] for s in stages) * 1000:9.1f} ms")


# --- a neighbour that decodes -------------------------------------------------------------------


def request(spec: ModelSpec, number: int) -> Request:
    return Request(
        id=f"r{number}",
        model=spec.name,
        prompt_ids=PROMPT,
        sampling=Sampling(max_tokens=200, temperature=0.0, ignore_eos=True),
        arrival_unix_s=time.time(),
        slo_ttft_s=1.0,
        slo_tpot_s=1.0,
        frontend_id="",
    )


def decode_on(config: ClusterConfig, spec: ModelSpec, out_fd: int, streams: int = 4) -> None:
    """Decodes until killed. Writes the monotonic time of every step that returned tokens."""
    core = warm_engine(config, "neighbour")
    core.activate(ActivateEngine(spec, max_running=streams))
    number = 0
    while True:
        if not core.status().running:
            core.submit([request(spec, number + i) for i in range(streams)])
            number += streams
        if core.step().chunks:
            os.write(out_fd, f"{time.monotonic()}\n".encode())


@contextmanager
def neighbour(config: ClusterConfig, spec: ModelSpec) -> Iterator[Callable[[], list[float]]]:
    """Runs a forked process that decodes. Yields a function that returns the times of its steps."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            decode_on(config, spec, writer)
        finally:
            os._exit(1)
    os.close(writer)
    rest = os.read(reader, 1)  # waits until it decodes
    os.set_blocking(reader, False)

    def steps_s() -> list[float]:
        nonlocal rest
        while True:
            try:
                data = os.read(reader, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                raise SystemExit("the neighbour ended")
            rest += data
        return [float(line) for line in rest.split(b"\n")[:-1]]

    try:
        yield steps_s
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reader)


def measure_neighbour(
    config: ClusterConfig, spec: ModelSpec, other: ModelSpec, seconds: float
) -> None:
    with neighbour(config, other) as steps_s:
        core = warm_engine(config, "bench")
        activation(core, spec)
        time.sleep(seconds)
        begin_s = time.monotonic()
        core.activate(ActivateEngine(spec, max_running=8))
        end_s = time.monotonic()
        time.sleep(seconds)
        times_s = steps_s()
        core.close()
    spans = {
        "before": (begin_s - seconds, begin_s),
        "during": (begin_s, end_s),
        "after": (end_s, end_s + seconds),
    }
    medians = {}
    print(f"{other.name} decodes during an activation of {end_s - begin_s:.2f} s:")
    for name, (first_s, last_s) in spans.items():
        gaps = [b - a for a, b in pairwise(times_s) if first_s < b <= last_s]
        if len(gaps) < 2:
            raise SystemExit(f"too few steps {name} the activation; use a larger model")
        medians[name] = median(gaps)
        p95 = quantiles(gaps, n=20)[-1]
        print(f"  {name:7} TPOT {medians[name] * 1000:7.2f} ms median, {p95 * 1000:7.2f} ms p95")
    for name in ("during", "after"):
        print(f"  {name} / before: ratio {medians[name] / medians['before']:.2f}")


# --- set-up -------------------------------------------------------------------------------------


def config_of(capacity: str, page: str, rate: str | None, run_dir: str) -> ClusterConfig:
    capacity_bytes, page_bytes = parse_size(capacity, "--capacity"), parse_size(page, "--page")
    return ClusterConfig(
        namespace=f"bench{uuid4().hex[:10]}",
        run_dir=run_dir,
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(DEVICE, capacity_bytes, page_bytes, 2)],
        models=[],
        engine=EngineConfig(
            static_bytes=1 << 20,
            weight_store=f"{run_dir}/weights",
            load_bytes_per_s=parse_size(rate, "--rate") if rate else None,
        ),
    )


def read_files(spec: ModelSpec) -> None:
    """Reads the model's files into the page cache."""
    for file in Path(spec.path).glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_folder, default="smollm2-135m")
    parser.add_argument("--neighbour", type=model_folder, default=None)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--capacity", default="4GiB")
    parser.add_argument("--page", default="2MiB")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rate", default=None)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spec = spec_of(options.model, options.context)
    read_files(spec)
    from prism.engines.sglang import preload

    preload()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        config = config_of(options.capacity, options.page, options.rate, run_dir)
        try:
            if options.neighbour is not None:
                other = spec_of(options.neighbour, options.context)
                measure_neighbour(config, spec, other, options.seconds)
            compare(config, spec, options.pairs)
        finally:
            kvcached.Device.unlink(config.namespace, DEVICE, force=True)


if __name__ == "__main__":
    main()
