"""Step "fp8": a model with FP8 weights is activated from files, from the store, and with FP8 KV.

The weights of the first model of the step "engine" are quantised to float8_e4m3fn, with a scale for
each matrix, as checkpoints have them. SGLang repacks them for its kernels at the first activation.
transformers judges the tokens by the same weights in bfloat16. The same requests take less memory
with KV in FP8 (e4m3).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lab.gpu_check.kv import CUDA, torch_or_skip
from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.report import Report, Skip, run_as_step, stretched
from lab.gpu_check.serving import engine, hybrid, shard
from lab.gpu_check.serving.process import (
    helper,
    model_folder,
    read,
    rounds_file,
    run_check,
    run_folder,
    sizes_and_environment,
    store_options,
)
from lab.gpu_check.sizes import MIB, Sizes

NAME, KV, KV_DTYPE = "fp8", "fp8_kv", "fp8_e4m3"
LIMIT_S = 170.0  # without a runner, which sets it otherwise
JUDGE_S = 35.0  # kept for transformers
# Kernels quantise activations too, which moves logits more than rounding in bfloat16. A wrong token
# lies several spreads below the best one.
GAP_MAX = 1.0
_MATRICES = "_proj.weight"


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    env |= hybrid.page_variables()
    source = model_folder(report, sizes, env, FAMILIES[0])
    parent = run_folder(report, sizes) / NAME
    folder = parent / source.name  # a folder is named after its family
    try:
        with report.check("written"):
            report.fact(written=helper(env, "float8", str(source), str(folder)))
        serve(report, sizes, env, folder)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def serve(report: Report, sizes: Sizes, env: dict[str, str], folder: Path) -> None:
    """Serves the model with KV in bfloat16 and in FP8, and compares both."""
    options = hybrid.options_of([folder], sizes) + store_options(report, sizes)
    files = {name: rounds_file(report, name) for name in (NAME, KV)}
    for done, (name, file) in enumerate(files.items()):
        more = ["--kv-cache-dtype", KV_DTYPE] if name == KV else []
        with report.check(f"served_{name}"):
            share_s = report.left_s(stretched(LIMIT_S)) / (len(files) - done)
            run_check(report, env, name, options + more, share_s - stretched(JUDGE_S) / 2)
            report.fact(**{name: engine.figures(read(file))})
            engine.judge_rounds(read(file), rounds_of_each=2, models=1)
    with report.check("figures"):
        record(report, *(engine.rounds_of(read(file)) for file in files.values()))
    for name, file in files.items():
        with report.check(f"tokens_{name}"):
            found = engine.judge_tokens(env, file, [folder], GAP_MAX)
            report.fact(**{f"tokens_{name}": found})


def record(report: Report, rounds: list[dict[str, Any]], kv_rounds: list[dict[str, Any]]) -> None:
    """Reports what the weights take, how long a copy from the store takes against files, and what
    the KV of the same requests takes."""
    if not rounds or not kv_rounds:
        raise Skip("nothing was served")
    written = report.facts["written"]
    report.figure("weights", rounds[-1]["weight_bytes"] / MIB, written["plain_bytes"] / MIB)
    cold, *later = [engine.activation_s(found["stages_s"]) for found in rounds]
    report.figure("activation_store", min(later), cold)
    small, plain = (found[-1]["kv_peak_bytes"] / MIB for found in (kv_rounds, rounds))
    report.figure("kv", small, plain)


# --- in a separate process -------------------------------------------------------------------


def write(source: Path, folder: Path) -> dict[str, Any]:
    """Writes the model in `source` with FP8 weights. Returns the bytes of both, and seconds."""
    torch = torch_or_skip()
    from safetensors.torch import load_file, save_file

    began_s = time.monotonic()
    plain = load_file(source / shard.NAME, device=CUDA)
    tensors = dict[str, Any]()
    for name, tensor in plain.items():
        tensors |= quantized(torch, name, tensor) if name.endswith(_MATRICES) else {name: tensor}
    skip = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(source, folder, ignore=skip)
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / shard.NAME, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": NAME, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return {
        "plain_bytes": sum(tensor.nbytes for tensor in plain.values()),
        "bytes": sum(tensor.nbytes for tensor in on_cpu.values()),
        "write_s": round(time.monotonic() - began_s, 1),
    }


def quantized(torch: Any, name: str, weight: Any) -> dict[str, Any]:
    """Returns a matrix in float8, and its scale."""
    scale = weight.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
    small = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: small, f"{name}_scale": scale}


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        print(json.dumps(write(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        sys.exit(main())
