"""Step "engine": SGLang serves two models in turn through Prism's adapter.

SGLang comes from the step "unpack", or is installed. Random bfloat16 models of about a billion
parameters (tiny ones on a small GPU) are activated cold, and later from the store. Each time they
answer without and with decode graphs. transformers judges each token on the same GPU. If the engine
ends with an error, it runs once more without torch.compile. If that works, later steps run without
torch.compile too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lab.gpu_check.driver import Driver
from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.report import Report, Skip, is_quick, run_as_step, stretched
from lab.gpu_check.serving import reference
from lab.gpu_check.serving.process import (
    EAGER,
    NO_DYNAMO,
    ServingError,
    helper,
    log_of,
    model_folders,
    read,
    rounds_file,
    run_check,
    sizes_and_environment,
    store_options,
    whole_pages,
)
from lab.gpu_check.sizes import GIB, MIB, Sizes

NAME = "engine"
LIMIT_S = 230.0  # without a runner, which sets it otherwise
JUDGE_S = 30.0  # kept for transformers: imports, and two models read
RETRY_S = 40.0  # least time of a second try
COMPILE_IS_OFF = "torch.compile is off in this engine"
# Warnings of failed compilation or capture, counted in the log.
PHRASES = (
    "Failed to load JIT KV-Cache kernel",
    "Forced fused-op backend torch is not implemented by",
    "no further CUDA graphs for this model",
    "cannot draw tokens at random",
    COMPILE_IS_OFF,
)
# Random logits spread by about 1; a wrong token lies several such spreads below the best one, and
# rounding in bfloat16 moves logits by hundredths.
GAP_MAX = 0.25
SLACK_BYTES = 256 * MIB
GROWTH_MAX_BYTES = 64 * MIB  # after each model's first round, which loads kernels


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    (report.work / EAGER).unlink(missing_ok=True)
    sizes, env = sizes_and_environment(report)
    folders = model_folders(report, sizes, env, FAMILIES)
    serve(report, folders, sizes, env)
    with report.check("tokens"):
        report.fact(tokens=judge_tokens(env, rounds_file(report, NAME), folders))
    with report.check("figures"):
        served = read(rounds_file(report, NAME))
        first = [found for found in rounds_of(served) if found["model"] == FAMILIES[0]]
        record(report, first, kept_growth(rounds_of(served)))


def serve(report: Report, folders: list[Path], sizes: Sizes, env: dict[str, str]) -> None:
    """Serves both models in turn by Prism's adapter, in a separate process. The check `compiled` is
    of the first try, and `served` of the rounds of the last one."""
    stock_s = stretched(LIMIT_S if sizes.is_large else 4 * LIMIT_S)  # doubles interpret kernels
    options = options_of(folders, sizes) + store_options(report, sizes)
    error: Exception | None = None
    with report.check("compiled"):
        try:
            attempt(report, env, options, report.left_s(stock_s) - stretched(JUDGE_S))
        except ServingError as first:
            error = first
            raise
        if report.facts["said"][COMPILE_IS_OFF]:
            raise RuntimeError(f"it served, but {COMPILE_IS_OFF}: see the log")
    with report.check("served"):
        if error is not None:
            left_s = report.left_s(stock_s) - stretched(JUDGE_S)
            if env.get(NO_DYNAMO) or left_s < stretched(RETRY_S):
                raise error
            attempt(report, {**env, NO_DYNAMO: "1"}, options, left_s)
            (report.work / EAGER).touch()
        judge_rounds(read(rounds_file(report, NAME)), rounds_wanted())


def attempt(report: Report, env: dict[str, str], options: list[str], limit_s: float) -> None:
    """Runs lab.engine_check and reports its rounds. Raises the errors of `run_check`."""
    try:
        run_check(report, env, NAME, options, limit_s)
    finally:
        text, served = log_of(report, NAME), read(rounds_file(report, NAME))
        report.fact(said={phrase: text.count(phrase) for phrase in PHRASES})
        if rounds_of(served):
            report.fact(**figures(served))
            report.fact(same_from_store=same_from_store(served["rounds"]))


def options_of(folders: list[Path], sizes: Sizes) -> list[str]:
    """Returns the sizes of the engine and of its requests."""
    capacity = whole_pages(min(16 * GIB, 0.8 * sizes.free_bytes))
    given = [word for folder in folders for word in ("--model", str(folder))]
    given += ["--capacity", capacity, "--static", "2GiB"]
    given += ["--rounds", str(rounds_wanted())]
    if not sizes.is_large:
        given += ["--context", "128", "--streams", "2"]
        return [*given, "--tokens", "6", "--prompt-tokens", "20"]
    given += ["--context", "1024", "--streams", "4", "--prompt-tokens", "48"]
    return [*given, "--tokens", "16" if is_quick() else "64"]


def rounds_wanted() -> int:
    """Returns the rounds of each model: cold, from the store, and again."""
    return 2 if is_quick() else 3


def rounds_of(served: dict[str, Any]) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = served.get("rounds", [])
    return rounds


def figures(served: dict[str, Any]) -> dict[str, Any]:
    """Returns facts of all rounds.

    activation_s, warm_up_s: of the first model. Its first warm-up compiles all kernels.
    kept_bytes: memory that is held after the first and the last eviction.
    """
    texts = ("tokens", "tokens_graphs", "prompts")
    rounds = [{k: v for k, v in r.items() if k not in texts} for r in served["rounds"]]
    stages = [r["stages_s"] for r in rounds if r["model"] == rounds[0]["model"]]
    free_bytes = rounds[0]["free_bytes_before"]
    return {
        "imports_s": served.get("imports_s"),
        "activation_s": [activation_s(stage) for stage in stages],
        "warm_up_s": [stage.get("warm_up", 0.0) for stage in stages],
        "captures_s": rounds[0]["captures_s"],
        "kept_bytes": [free_bytes - r["free_bytes_after"] for r in (rounds[0], rounds[-1])],
        "rounds": rounds,
    }


def activation_s(stages_s: dict[str, float]) -> float:
    """Returns the seconds of an activation without its warm-up."""
    return stages_s["total"] - stages_s.get("warm_up", 0.0)


def record(report: Report, rounds: list[dict[str, Any]], kept_bytes: int) -> None:
    """Reports figures of a model's rounds, compared with the link's time for its weights."""
    if not rounds:
        raise Skip("nothing was served")
    link_s = reference.link_s(Driver.open(), rounds[0]["weight_bytes"])
    report.fact(link_s=link_s, weight_bytes=rounds[0]["weight_bytes"])
    names = ("activation_cold", "activation_store", "activation_again")
    for name, found in zip(names, rounds, strict=False):
        report.figure(name, activation_s(found["stages_s"]), link_s)
    last = rounds[-1]
    if last["from_store"]:
        report.figure("weights", last["stages_s"]["weights"], link_s)
    report.figure("warm_up", last["stages_s"]["warm_up"])
    report.figure("kept", kept_bytes / MIB)
    if last["tokens_graphs"]:
        report.figure("decode_graphs", decode_ms(last, graphs=True), decode_ms(last, graphs=False))


def decode_ms(found: dict[str, Any], *, graphs: bool) -> float:
    """Returns the mean milliseconds of the decode steps of all streams, after the first token."""
    end = "_graphs" if graphs else ""
    steps = max(len(tokens) for tokens in found[f"tokens{end}"]) - 1
    return 1e3 * float(found[f"seconds{end}"] - found[f"first_token{end}_s"]) / max(1, steps)


def kept_growth(rounds: list[dict[str, Any]]) -> int:
    """Returns the bytes held after the last eviction, less those after each model's first."""
    free_bytes = [r["free_bytes_after"] for r in rounds[len({r["model"] for r in rounds}) - 1 :]]
    return free_bytes[0] - free_bytes[-1] if free_bytes else 0


def same_from_store(rounds: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Returns how many first tokens of each request are the same in all of a model's rounds.
    Rounding may decide between near ties."""
    return {
        name: [min(counts) for counts in zip(*_common_tokens(rounds, name), strict=True)]
        for name in dict.fromkeys(found["model"] for found in rounds)
        if sum(found["model"] == name for found in rounds) > 1
    }


def _common_tokens(rounds: list[dict[str, Any]], name: str) -> list[list[int]]:
    """Returns how many first tokens of each request are as in the first round, by later round."""
    first, *later = [found["tokens"] for found in rounds if found["model"] == name]
    return [[common(*pair) for pair in zip(first, tokens, strict=True)] for tokens in later]


def common(tokens: list[int], others: list[int]) -> int:
    """Returns how many tokens are the same, counted from the first."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def judge_rounds(served: dict[str, Any], rounds_of_each: int, models: int = len(FAMILIES)) -> None:
    """Raises RuntimeError unless each model came from the store after its first round, gave the
    same first tokens, got decode graphs, and freed its memory."""
    rounds = rounds_of(served)
    if len(rounds) != rounds_of_each * models:
        wanted = rounds_of_each * models
        raise RuntimeError(f"{len(rounds)} rounds of {wanted}: {served.get('error')}")
    same = same_from_store(rounds)
    for later in rounds[models:]:
        name = later["model"]
        if not later["from_store"]:
            raise RuntimeError(f"{name}: a later activation did not come from the store")
        if 0 in same[name]:
            raise RuntimeError(f"{name}: a request has another first token from the store")
        kept_bytes = later["free_bytes_before"] - later["free_bytes_after"]
        if kept_bytes > SLACK_BYTES:
            raise RuntimeError(f"{name}: {kept_bytes} bytes are not back after its deactivation")
    if bare := [r["model"] for r in rounds if not r["captures_s"]]:
        raise RuntimeError(f"no decode graph was captured for {', '.join(bare)}")
    if kept_growth(rounds) > GROWTH_MAX_BYTES:
        raise RuntimeError(f"less is free after each eviction: {kept_growth(rounds)} bytes")


def judge_tokens(
    env: dict[str, str], file: Path, folders: list[Path], gap_max: float = GAP_MAX
) -> dict[str, Any]:
    """Returns how far each model's tokens are from the best ones of transformers. Raises
    RuntimeError for a wrong token."""
    if not rounds_of(read(file)):
        raise Skip("nothing was served")
    found: dict[str, Any] = helper(env, "engine_models", "judge", str(file), *map(str, folders))
    for name, facts in found.items():
        if not facts["largest_gap"] <= gap_max * facts["spread"]:
            raise RuntimeError(f"{name}: tokens are wrong by transformers: {facts}")
    return found


if __name__ == "__main__":
    sys.exit(main())
