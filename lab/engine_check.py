"""Serves models in this process, without agent or sockets, and prints times and memory.

    python -m lab.engine_check --model DIR [--model DIR ...] [--device host:0]
        [--capacity 2GiB] [--page 2MiB] [--static SIZE] [--dtype auto] [--context N] [--streams 8]
        [--tokens 64] [--prompt-tokens 64] [--rounds 2] [--cuda-graphs lazy] [--attention NAME]
        [--compare] [--store-in DIR] [--json FILE]

Each round serves all models in turn. A model is activated, from its files the first time and later
from the weight store of this run. It serves `streams` concurrent greedy requests of random token
ids, and again if decode graphs were captured. Then it is flushed and deactivated. The run has a
separate device ledger. `--compare` computes the same tokens with transformers on the CPU.
`--store-in` is the folder for the weight store (default: /dev/shm, if the weights fit twice).
`--json` writes all figures after each round, also if the run fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvcached
from prism.config.checks.kv_cache import KV_CACHE_DTYPES
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.schema.machines import is_gpu
from prism.config.schema.units import Bytes, format_size, parse_size
from prism.engines.core import EngineContext
from prism.engines.sglang.adapter import traits
from prism.errors import ConfigError, PrismError
from prism.messages.engine import Activated, ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling
from prism.models.files import DTYPE_BYTES, inspect_model

_VOCABULARY = (16, 500)


def main(arguments: list[str] | None = None) -> int:
    """Runs the check and returns the exit code: 2 for an invalid model or option, else 0."""
    options = _parser().parse_args(arguments)
    report: dict[str, Any] = {"rounds": [], "error": ""}
    try:
        _run(options, report)
    except (PrismError, kvcached.KvcachedError) as error:
        report["error"] = str(error)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        _write(options, report)
    return 0


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.json is not None:
        partial = options.json.with_suffix(".part")
        partial.write_text(json.dumps(report) + "\n")
        os.replace(partial, options.json)  # the file is complete even if this process is killed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.engine_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--capacity", default="2GiB")
    parser.add_argument("--page", default="2MiB")
    parser.add_argument("--static", help="default: 16MiB on a host device, 2GiB on a GPU")
    parser.add_argument("--dtype", default="auto", help="default: the files' on a GPU, or float32")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="default: as --dtype")
    parser.add_argument("--context", type=int)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cuda-graphs", choices=("lazy", "off"), default="lazy")
    parser.add_argument("--attention", help="SGLang's attention backend on a GPU")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--store-in", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _run(options: argparse.Namespace, report: dict[str, Any]) -> None:
    on_host = options.dtype == "auto" and not is_gpu(options.device)
    dtype = "float32" if on_host else options.dtype
    kv_dtype = KV_CACHE_DTYPES.get(options.kv_cache_dtype)
    specs = [spec_of(path, options.context, dtype, kv_dtype) for path in options.model]
    from prism.engines.sglang import adapter
    from prism.engines.sglang.platform import gpu

    if missing := gpu.lacks(options.device):
        raise ConfigError(missing)
    folder = options.store_in or _fast_folder(specs)
    with tempfile.TemporaryDirectory(prefix="prism-check-", dir=folder) as store:
        config = _config(options, store)
        started_s = time.monotonic()
        adapter.preload(options.device)
        report["imports_s"] = time.monotonic() - started_s
        print(f"imports     {report['imports_s']:8.2f} s")
        context = EngineContext("check", options.device, config)
        run = EngineRun(adapter.create(context), context.open_device(), options)
        try:
            for _ in range(options.rounds):
                for spec in specs:
                    report["rounds"].append(run.serve(spec))
                    _write(options, report)
        finally:
            run.core.close()
            kvcached.Device.unlink(config.namespace, options.device)
    if options.compare:
        _compare(specs, report["rounds"])


def spec_of(
    path: Path,
    context_length: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
) -> ModelSpec:
    """Returns the spec of the model in a directory. Raises ConfigError for invalid files.

    Args:
        dtype: Type of the weights; "auto" for the type of the files.
        kv_dtype: Type of KV (None: the same).
    """
    engines = traits()
    files = inspect_model(path, "--model", engines.window_pools, engines.windows)
    if dtype == "auto":
        dtype = files.stored_dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype: {dtype} is not one of {', '.join(DTYPE_BYTES)}")
    return ModelSpec(
        name=path.name,
        path=str(path),
        **files.shape(dtype, context_length, kv_dtype),
        slo_ttft_s=60.0,
        slo_tpot_s=60.0,
    )


def _fast_folder(specs: list[ModelSpec]) -> str | None:
    """Returns /dev/shm if the weights of all models fit twice, or None for temporary files."""
    memory, need_bytes = "/dev/shm", 2 * sum(spec.weight_bytes for spec in specs)
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need_bytes
    return memory if fits else None


def _config(options: argparse.Namespace, store: str) -> ClusterConfig:
    capacity, page = parse_size(options.capacity, "--capacity"), parse_size(options.page, "--page")
    static = parse_size(options.static, "--static") if options.static else None
    engine = EngineConfig(
        max_running=options.streams,
        static_bytes=None if static is None else Bytes(static),
        weight_store=store,
        cuda_graphs=options.cuda_graphs,
        attention_backend=options.attention,
    )
    return ClusterConfig(
        namespace=f"check{os.getpid()}",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(options.device, capacity, page, 1)],
        models=[],
        engine=engine,
    )


@dataclass(slots=True)
class Answers:
    """Answers to one batch of requests."""

    tokens: list[list[int]] = field(default_factory=list)
    """Token ids of each request, in order."""
    first_token_s: float = 0.0
    """Time to the first token of any request."""
    seconds: float = 0.0
    """Time to the last token."""
    peak_bytes: int = 0
    """Most pages in use: not counting spare ones and unused prefix cache."""


class EngineRun:
    """Run of one engine on one device."""

    def __init__(self, core: Any, device: kvcached.Device, options: argparse.Namespace) -> None:
        self.core = core
        self._device = device
        self._options = options

    def serve(self, spec: ModelSpec) -> dict[str, Any]:
        """Activates a model, runs requests and deactivates it. Returns figures."""
        memory = {"before": self._memory()}
        activated = self.core.activate(ActivateEngine(spec, max_running=self._options.streams))
        memory["activated"] = self._memory()
        _print_activation(spec, activated)
        prompts = _prompts(self._options)
        idle_bytes = self._used_bytes()
        served = self._answers(spec, prompts)
        memory["served"] = self._memory()
        rate = sum(map(len, served.tokens)) / served.seconds
        self._print_serving(served, rate)
        captures_s = list(self.core.status().captures_s)
        with_graphs = self._answers(spec, prompts) if captures_s else Answers()
        self._print_graphs(with_graphs, captures_s)
        print(f"flush       {format_size(self.core.shrink().returned_bytes)} returned")
        started_s = time.monotonic()
        self.core.deactivate()
        deactivate_s = time.monotonic() - started_s
        memory["after"] = self._memory()
        print(f"deactivated {deactivate_s:8.2f} s\n")
        return {
            "model": spec.name,
            "dtype": spec.dtype,
            "weight_bytes": spec.weight_bytes,
            "from_store": bool(activated.link_bytes),
            "stages_s": activated.stages_s,
            "prompts": prompts,
            "tokens": served.tokens,
            "captures_s": captures_s,
            "tokens_graphs": with_graphs.tokens,
            "first_token_graphs_s": with_graphs.first_token_s,
            "seconds_graphs": with_graphs.seconds,
            "first_token_s": served.first_token_s,
            "seconds": served.seconds,
            "tokens_per_s": rate,
            "kv_peak_bytes": served.peak_bytes - idle_bytes,
            "deactivate_s": deactivate_s,
            "free_bytes_before": memory["before"]["free_bytes"],
            "free_bytes_after": memory["after"]["free_bytes"],
            "memory": memory,
        }

    def _memory(self) -> dict[str, int]:
        """Returns the free bytes by the driver, or without NVML by the ledger, and the ledger's
        committed and static bytes."""
        usage, driver = self._device.usage(), self._device.driver_memory()
        static_bytes = sum(client.static_bytes for client in usage.clients)
        free_bytes = usage.free_bytes if driver is None else driver.free_bytes
        return {
            "free_bytes": free_bytes,
            "ledger_free_bytes": usage.free_bytes,
            "committed_bytes": usage.committed_bytes,
            "static_bytes": static_bytes,
        }

    def _used_bytes(self) -> int:
        """Returns the bytes of pages in use by weights and KV."""
        clients = self._device.usage().clients
        return sum(c.committed_bytes - c.spare_bytes - c.evictable_bytes for c in clients)

    def _answers(self, spec: ModelSpec, prompts: list[list[int]]) -> Answers:
        """Runs requests until the engine is idle. Returns their answers."""
        requests = [_request(spec, i, p, self._options) for i, p in enumerate(prompts)]
        self.core.submit(requests)
        served, started_s, busy = Answers([[] for _ in prompts]), time.monotonic(), True
        while busy:
            output = self.core.step()
            served.peak_bytes = max(served.peak_bytes, self._used_bytes())
            for failure in output.failures:
                raise PrismError(f"{failure.request_id}: {failure.message}")
            if output.chunks:
                served.seconds = time.monotonic() - started_s
                served.first_token_s = served.first_token_s or served.seconds
            for chunk in output.chunks:
                served.tokens[int(chunk.request_id[1:])].extend(chunk.token_ids)
            busy = output.busy
        return served

    def _print_serving(self, served: Answers, rate: float) -> None:
        status, count = self.core.status(), sum(map(len, served.tokens))
        print(f"first token {served.first_token_s:8.2f} s")
        print(f"served      {served.seconds:8.2f} s  {count} tokens, {rate:.1f} tok/s,")
        print(f"            prefill {status.prefill_tokens_per_s:.0f} tok/s,")
        print(f"            maps {status.maps_total}, unmaps {status.unmaps_total} so far")

    def _print_graphs(self, served: Answers, captures_s: list[float]) -> None:
        if captures_s:
            print(f"graphs      {sum(captures_s):8.2f} s  {len(captures_s)} captured; with them")
            print(f"            {served.seconds:.2f} s for the same requests")


def _prompts(options: argparse.Namespace) -> list[list[int]]:
    """Returns random token ids, the same in every round."""
    generators = [random.Random(index) for index in range(options.streams)]
    return [[g.randrange(*_VOCABULARY) for _ in range(options.prompt_tokens)] for g in generators]


def _request(
    spec: ModelSpec, index: int, prompt: list[int], options: argparse.Namespace
) -> Request:
    return Request(
        id=f"r{index}",
        model=spec.name,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=options.tokens, temperature=0.0, ignore_eos=True),
        arrival_unix_s=time.time(),
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        frontend_id="",
    )


def _print_activation(spec: ModelSpec, activated: Activated) -> None:
    weights, reserve = format_size(spec.weight_bytes), format_size(activated.reserve_bytes)
    stages = ", ".join(f"{n} {s:.2f}" for n, s in activated.stages_s.items() if n != "total")
    print(f"activated   {activated.stages_s['total']:8.2f} s  {spec.name}, weights {weights},")
    print(f"            {stages} s,")
    print(f"            KV reserve {reserve}, floor {format_size(activated.floor_bytes)},")
    quantum = format_size(activated.quantum_bytes)
    print(f"            grows by {quantum} = {activated.quantum_tokens} tokens")


def _compare(specs: list[ModelSpec], rounds: list[dict[str, Any]]) -> None:
    """Adds "equal" to each round: the number of leading tokens that equal those of transformers.

    Rounding may decide near ties, so a late difference is not necessarily an error.
    """
    from prism.models.hugging_face import import_transformers

    import_transformers()
    for spec in specs:
        own = [item for item in rounds if item["model"] == spec.name]
        expected = _greedy(spec, own[0]["prompts"], len(own[0]["tokens"][0]))
        for item in own:
            item["equal"] = [
                _common_prefix(tokens, reference)
                for tokens, reference in zip(item["tokens"], expected, strict=True)
            ]
            print(f"{spec.name}: {item['equal']} of {len(expected[0])} tokens equal transformers")


def _greedy(spec: ModelSpec, prompts: list[list[int]], count: int) -> list[list[int]]:
    import torch
    import transformers

    dtype = getattr(torch, spec.dtype)
    network = transformers.AutoModelForCausalLM.from_pretrained(spec.path, dtype=dtype).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache, answer = torch.tensor([prompt]), None, list[int]()
            while len(answer) < count:
                result = network(ids, past_key_values=cache, use_cache=True)
                answer.append(int(result.logits[0, -1].argmax()))
                ids, cache = torch.tensor([[answer[-1]]]), result.past_key_values
            answers.append(answer)
    return answers


def _common_prefix(tokens: list[int], reference: list[int]) -> int:
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


if __name__ == "__main__":
    logging.basicConfig()
    logging.getLogger("prism.engine").setLevel(logging.INFO)
    sys.exit(main())
