"""Step "engine": SGLang serves two models in turn through Prism's adapter.

SGLang is that of the step "unpack", or it is installed. Random bfloat16 models of about a billion
parameters (tiny ones on a small GPU) are activated cold, and again out of the store; each time they
answer without and with decode graphs. Each token is judged by transformers on the same GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.gpu_check.kv import CUDA
from scripts.gpu_check.report import Report, Skip, run_as_step
from scripts.gpu_check.serving.process import helper, model_folder, sizes_and_environment
from scripts.gpu_check.sizes import GIB, MIB, Sizes

FAMILIES = ("llama", "qwen2")
ROUNDS = 2
LIMIT_S = 230.0  # without a runner, which sets it otherwise
JUDGE_S = 20.0  # kept for transformers
SERVED = "engine.json"
# Of the log's warnings, counted: what could not be compiled or captured.
PHRASES = (
    "Failed to load JIT KV-Cache kernel",
    "Forced fused-op backend torch is not implemented by",
    "no further CUDA graphs for this model",
)
# Random logits spread by about 1; a wrong token lies several such spreads below the best one, and
# rounding in bfloat16 moves logits by hundredths.
GAP_MAX = 0.25
SLACK_BYTES = 256 * MIB
GROWTH_MAX_BYTES = 64 * MIB  # once each model was there; kernels are loaded at first


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("engine", __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    folders = [model_folder(report, sizes, env, family) for family in FAMILIES]
    with report.check("served"):
        serve(report, folders, sizes, env)
    with report.check("tokens"):
        if not rounds_of(report.work / SERVED):
            raise Skip("nothing was served")
        report.fact(tokens=judge_tokens(env, report.work / SERVED, folders))


def serve(report: Report, folders: list[Path], sizes: Sizes, env: dict[str, str]) -> None:
    """Both models in turn, twice, by Prism's adapter in a process of its own, judged."""
    file, log = report.work / SERVED, report.work / "engine.log"
    file.unlink(missing_ok=True)
    large = sizes.is_large
    capacity = min(16 * GIB, int(0.8 * sizes.free_bytes) >> 21 << 21)
    command = [
        *(sys.executable, "-m", "tools.engine_check", "--device", CUDA),
        *[word for folder in folders for word in ("--model", str(folder))],
        *("--capacity", f"{capacity >> 20}MiB", "--static", "2GiB", "--json", str(file)),
        *("--context", "1024" if large else "128", "--streams", "4", "--rounds", str(ROUNDS)),
        *("--tokens", "32" if large else "8", "--prompt-tokens", "48" if large else "20"),
    ]
    stock_s = LIMIT_S if large else 4 * LIMIT_S  # small: doubles, which interpret kernels
    limit_s = report.left_s(stock_s) - JUDGE_S
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command, env=env, stdout=output, stderr=output, timeout=limit_s, check=False
            )
    finally:
        text = log.read_text(errors="replace")
        print(text, flush=True)
        report.fact(said={phrase: text.count(phrase) for phrase in PHRASES})
        served = read(file)
        if served.get("rounds"):
            report.fact(**figures(served))
    if done.returncode or not served.get("rounds"):
        said = served.get("error") or text[-300:]
        raise RuntimeError(f"the check ended with {done.returncode}: {said}")
    report.fact(same_from_store=same_from_store(served["rounds"]))
    judge_rounds(served)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def rounds_of(file: Path) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = read(file).get("rounds", [])
    return rounds


def figures(served: dict[str, Any]) -> dict[str, Any]:
    """Of each round what is measured; activations of the first model alone, without the warm-up,
    in which the first one compiles kernels once for all; what is held after the first and the last
    eviction, of what was free before the first activation."""
    texts = ("tokens", "tokens_graphs", "prompts")
    rounds = [{k: v for k, v in r.items() if k not in texts} for r in served["rounds"]]
    stages = [r["stages_s"] for r in rounds if r["model"] == rounds[0]["model"]]
    warm_up_s = [stage.get("warm_up", 0.0) for stage in stages]
    free_bytes = rounds[0]["free_bytes_before"]
    return {
        "imports_s": served.get("imports_s"),
        "activation_s": [s["total"] - w for s, w in zip(stages, warm_up_s, strict=True)],
        "warm_up_s": warm_up_s,
        "captures_s": rounds[0]["captures_s"],
        "kept_bytes": [free_bytes - r["free_bytes_after"] for r in (rounds[0], rounds[-1])],
        "rounds": rounds,
    }


def same_from_store(rounds: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Of each request, how many tokens are the same in a model's second round: rounding may decide
    between near ties."""
    return {
        first["model"]: [
            common(*pair) for pair in zip(first["tokens"], second["tokens"], strict=True)
        ]
        for first, second in zip(rounds, rounds[len(FAMILIES) :], strict=False)
    }


def common(tokens: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def judge_rounds(served: dict[str, Any]) -> None:
    """Raises RuntimeError unless each model came from the store the second time, answered with the
    same first tokens, got decode graphs, and left no memory behind."""
    rounds = served["rounds"]
    if len(rounds) != ROUNDS * len(FAMILIES):
        raise RuntimeError(
            f"{len(rounds)} rounds of {ROUNDS * len(FAMILIES)}: {served.get('error')}"
        )
    same = same_from_store(rounds)
    for second in rounds[len(FAMILIES) :]:
        name = second["model"]
        if not second["from_store"]:
            raise RuntimeError(f"{name}: the second activation did not come from the store")
        if 0 in same[name]:
            raise RuntimeError(f"{name} answers otherwise from the store")
        kept_bytes = second["free_bytes_before"] - second["free_bytes_after"]
        if kept_bytes > SLACK_BYTES:
            raise RuntimeError(f"{name}: {kept_bytes} bytes are not back after its deactivation")
    if bare := [r["model"] for r in rounds if not r["captures_s"]]:
        raise RuntimeError(f"no decode graph was captured for {', '.join(bare)}")
    free_bytes = [r["free_bytes_after"] for r in rounds[len(FAMILIES) - 1 :]]
    if free_bytes[0] - free_bytes[-1] > GROWTH_MAX_BYTES:
        raise RuntimeError(f"less is free after each eviction: {free_bytes} bytes")


def judge_tokens(env: dict[str, str], file: Path, folders: list[Path]) -> dict[str, Any]:
    """How far each token lies below the best one, by transformers over the same sequence."""
    found: dict[str, Any] = helper(env, "engine_models", "judge", str(file), *map(str, folders))
    for name, facts in found.items():
        if not facts["largest_gap"] <= GAP_MAX * facts["spread"]:
            raise RuntimeError(f"{name} does not say what transformers says: {facts}")
    return found


if __name__ == "__main__":
    sys.exit(main())
