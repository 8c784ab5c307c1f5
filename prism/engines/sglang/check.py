"""Serve one model in this process, without agent or sockets, and print what it costs.

    python -m prism.engines.sglang.check --model DIR [--device host:0] [--capacity 2GiB]
        [--page 2MiB] [--context N] [--streams 8] [--tokens 64] [--prompt-tokens 64] [--rounds 2]

Each round activates the model, runs `streams` greedy requests of random token ids at once,
flushes and deactivates. The device's ledger is this run's own.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import kvcached
from prism.config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.core import EngineContext, EngineCore
from prism.errors import PrismError
from prism.messages import Activate, Activated, EngineStatus, ModelSpec, Request, Sampling
from prism.model_spec import inspect_model
from prism.units import format_size, parse_size

_VOCABULARY = (16, 500)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 and one line when the model or an option is bad."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (PrismError, kvcached.KvcachedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prism.engines.sglang.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--capacity", default="2GiB")
    parser.add_argument("--page", default="2MiB")
    parser.add_argument("--context", type=int)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    return parser


def _run(options: argparse.Namespace) -> None:
    spec = spec_of(options.model, options.context)
    config = _config(options)
    started_s = time.monotonic()
    from prism.engines.sglang import create, preload

    preload()
    print(f"imports     {time.monotonic() - started_s:8.2f} s")
    core = create(EngineContext("check", options.device, config))
    try:
        for _ in range(options.rounds):
            _round(core, spec, options)
    finally:
        core.close()
        kvcached.Device.unlink(config.namespace, options.device)


def spec_of(path: Path, context_length: int | None = None) -> ModelSpec:
    """The model in a directory, to be served in float32. Raises ConfigError for bad files."""
    files = inspect_model(path, "--model")
    return ModelSpec(
        name=path.name,
        path=str(path),
        architecture=files.architecture,
        dtype="float32",
        kv_dtype="float32",
        context_length=min(context_length or files.context_length, files.context_length),
        num_layers=files.num_layers,
        num_kv_heads=files.num_kv_heads,
        head_dim=files.head_dim,
        weight_bytes=files.weight_bytes("float32"),
        token_bytes=files.token_bytes("float32"),
        slo_ttft_s=2.0,
        slo_tpot_s=0.2,
    )


def _config(options: argparse.Namespace) -> ClusterConfig:
    capacity, page = parse_size(options.capacity, "--capacity"), parse_size(options.page, "--page")
    return ClusterConfig(
        namespace=f"check{os.getpid()}",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(options.device, capacity, page, 1)],
        models=[],
        engine=EngineConfig(max_running=options.streams),
    )


def _round(core: EngineCore, spec: ModelSpec, options: argparse.Namespace) -> None:
    activated = core.activate(Activate(model=spec, max_running=options.streams))
    _report_activation(spec, activated)
    core.submit([_request(spec, i, options) for i in range(options.streams)])
    started_s = time.monotonic()
    first_s, tokens = _drain(core)
    seconds = time.monotonic() - started_s
    _report_serving(core.status(), tokens, first_s - started_s, seconds)
    print(f"flush       {format_size(core.shrink().returned_bytes)} returned")
    started_s = time.monotonic()
    core.deactivate()
    print(f"deactivated {time.monotonic() - started_s:8.2f} s\n")


def _request(spec: ModelSpec, index: int, options: argparse.Namespace) -> Request:
    rng = random.Random(index)
    return Request(
        id=f"r{index}",
        model=spec.name,
        prompt_ids=[rng.randrange(*_VOCABULARY) for _ in range(options.prompt_tokens)],
        sampling=Sampling(max_tokens=options.tokens, temperature=0.0, ignore_eos=True),
        arrival_unix_s=time.time(),
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        frontend_id="",
        reply_to="",
    )


def _drain(core: EngineCore) -> tuple[float, int]:
    """Step until idle. Returns when the first token came and how many came in all."""
    first_s, tokens, busy = 0.0, 0, True
    while busy:
        output = core.step()
        for failure in output.failures:
            raise PrismError(f"{failure.request_id}: {failure.message}")
        count = sum(len(chunk.token_ids) for chunk in output.chunks)
        first_s = time.monotonic() if count and not tokens else first_s
        tokens += count
        busy = output.busy
    return first_s, tokens


def _report_activation(spec: ModelSpec, activated: Activated) -> None:
    weights, reserve = format_size(spec.weight_bytes), format_size(activated.reserve_bytes)
    print(f"activated   {activated.stages_s['total']:8.2f} s  {spec.name}, weights {weights},")
    print(f"            KV reserve {reserve}, floor {format_size(activated.floor_bytes)},")
    quantum = format_size(activated.quantum_bytes)
    print(f"            grows by {quantum} = {activated.quantum_tokens} tokens")


def _report_serving(status: EngineStatus, tokens: int, first_s: float, seconds: float) -> None:
    print(f"first token {first_s:8.2f} s")
    print(f"served      {seconds:8.2f} s  {tokens} tokens, {tokens / seconds:.1f} tok/s,")
    print(f"            prefill {status.prefill_tokens_per_s:.0f} tok/s,")
    print(f"            maps {status.maps_total}, unmaps {status.unmaps_total} so far")


if __name__ == "__main__":
    sys.exit(main())
