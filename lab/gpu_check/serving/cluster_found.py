"""Sizes of the step "cluster", and its checks and figures.

These are derived from the file of the load alone, which may be incomplete.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.report import Report, Skip, is_quick, on_doubles
from lab.gpu_check.serving.engine import common
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES, Sizes

RATES = {"llama": "llama_tokens_per_s", "qwen2": "qwen2_tokens_per_s"}
SHARES = {"llama": "llama_kv_share", "qwen2": "qwen2_kv_share"}
OTHER_PHASES = ("undisturbed", "kill")
PERCENTILES = {"ttft_p50": 50, "ttft_p99": 99}
SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.1
Figure = tuple[str, float, float | None]  # name, value, reference


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at once."""

    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.streams * (self.prompt_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the step on a GPU of some size."""

    page_bytes: int
    context_length: int
    static_bytes: int
    burst: Burst
    kill: Burst
    alternate_s: float
    settle_s: float

    @classmethod
    def of(cls, sizes: Sizes) -> Scale:
        """Returns the sizes for a machine. Pages on doubles are small, so that a tiny model takes
        several slabs."""
        if sizes.is_large and is_quick():
            bursts = Burst(32, 1024, 96), Burst(8, 256, 96)
            return cls(PAGE_BYTES, 2048, 3 * GIB, *bursts, 6.0, 1.5)
        if sizes.is_large:
            bursts = Burst(32, 1024, 192), Burst(8, 256, 256)
            return cls(PAGE_BYTES, 2048, 3 * GIB, *bursts, 40.0, 8.0)
        page_bytes = 4096 if on_doubles() else PAGE_BYTES
        return cls(page_bytes, 64, 1728 * MIB, Burst(8, 32, 8), Burst(2, 24, 16), 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights and KV of a model, from its files."""

    weight_bytes: int
    layers: int
    token_bytes: int  # in each of the K and V buffers of a layer

    @classmethod
    def of(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        token_bytes = 2 * head_dim * config["num_key_value_heads"]
        return cls(weights, config["num_hidden_layers"], token_bytes)

    def kv_bytes(self, tokens: int, page_bytes: int) -> int:
        """Returns the bytes of the slabs for some tokens. A slab has one page for each buffer."""
        slabs = math.ceil(tokens / (page_bytes // self.token_bytes))
        return slabs * 2 * self.layers * page_bytes


def judge(
    report: Report, found: dict[str, Any], burst: Burst, kill: Burst, *, fills_pages: bool
) -> None:
    """Reports checks and figures of the load.

    fills_pages: a burst takes more than the smallest number of pages.
    """
    if not found:
        return
    with report.check("bursts"):
        report.fact(bursts=[summary(each) for each in found["bursts"]])
        report.fact(graphs=found.get("graphs"), kv_series=found.get("series"))
        for name, value, compared in burst_figures(found["bursts"]):
            report.figure(name, value, compared)
        answered(found["bursts"], burst)
        undisturbed(found.get("after_bursts"))
    with report.check("memory_moves"):
        report.fact(kv_peaks=found["peaks"], kv_given_bytes=found["given_bytes"])
        report.fact(kv_capacity_bytes=found["kv_capacity_bytes"])
        used_bytes, held_bytes = (peaks(found, kind) for kind in ("used_bytes", "held_bytes"))
        for name, bytes_ in held_bytes.items():
            report.figure(SHARES[name], bytes_ / found["kv_capacity_bytes"])
        capacity_mib = found["kv_capacity_bytes"] / MIB
        if used_bytes:
            report.figure("kv_peaks", sum(used_bytes.values()) / MIB, capacity_mib)
        if not fills_pages:
            raise Skip("tiny models do not fill pages of this size")
        moved(found, used_bytes, held_bytes)
    with report.check("kill"):
        if "kill" not in found:
            raise RuntimeError("no engine was killed: the load ended before")
        report.fact(kill=death_facts(found))
        for name, value, compared in death_figures(found):
            report.figure(name, value, compared)
        survived(found, kill)


def summary(burst: dict[str, Any]) -> dict[str, Any]:
    answers = burst["answers"]
    ttfts_s = [a["ttft_s"] for a in answers if a["ttft_s"] is not None]
    return {
        "phase": burst["phase"],
        "model": burst["model"],
        "seconds": burst["seconds"],
        "tokens_per_s": round(rate([burst]), 1),
        "ttft_s": [percentile(ttfts_s, 50), percentile(ttfts_s, 99)] if ttfts_s else None,
        "errors": sorted({a["error"] for a in answers if a["error"]}),
    }


def rate(bursts: list[dict[str, Any]]) -> float:
    """Returns the output tokens per second of all bursts together."""
    seconds = sum(burst["seconds"] for burst in bursts)
    tokens = sum(answer["tokens"] for burst in bursts for answer in burst["answers"])
    return float(tokens / seconds) if seconds else 0.0


def percentile(values: list[float], share: float) -> float:
    """Returns the smallest value that `share` percent of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def burst_figures(bursts: list[dict[str, Any]]) -> list[Figure]:
    """Returns figures of the bursts in turn, with those of a model alone as references."""
    turns = [burst for burst in bursts if burst["phase"] == "turn"]
    alone = [burst for burst in bursts if burst["phase"] == "alone"]
    if not turns or not alone:
        return []
    figures: list[Figure] = []
    for family in FAMILIES:
        mine, reference_ = ([b for b in each if b["model"] == family] for each in (turns, alone))
        if mine and reference_:
            figures.append((RATES[family], rate(mine), rate(reference_)))
    ttfts_s, alone_s = ttfts(turns), ttfts(alone)
    if ttfts_s and alone_s:
        for name, share in PERCENTILES.items():
            figures.append((name, percentile(ttfts_s, share), percentile(alone_s, share)))
    figures.append(("attainment", attainment(turns), attainment(alone)))
    return figures


def ttfts(bursts: list[dict[str, Any]]) -> list[float]:
    found = (answer["ttft_s"] for burst in bursts for answer in burst["answers"])
    return [ttft_s for ttft_s in found if ttft_s is not None]


def attainment(bursts: list[dict[str, Any]]) -> float:
    """Returns the share of requests that met both SLOs of the YAML."""
    answers = [answer for burst in bursts for answer in burst["answers"]]
    met: list[bool] = [
        answer["error"] is None
        and answer["ttft_s"] is not None
        and answer["ttft_s"] <= SLO_TTFT_S
        and (answer["tpot_s"] or 0.0) <= SLO_TPOT_S
        for answer in answers
    ]
    return sum(met) / len(met)


def answered(bursts: list[dict[str, Any]], size: Burst) -> None:
    """Raises RuntimeError unless both models had bursts in turn, and every answer is complete."""
    if missing := set(FAMILIES) - {b["model"] for b in bursts if b["phase"] == "turn"}:
        raise RuntimeError(f"no burst in turn of {', '.join(sorted(missing))}")
    for burst in bursts:
        where = f"{burst['phase']} {burst['model']}"
        if len(burst["answers"]) != size.streams:
            raise RuntimeError(f"{where}: {len(burst['answers'])} answers of {size.streams}")
        for answer in burst["answers"]:
            whole(answer, size.output_tokens, where)


def whole(answer: dict[str, Any], tokens: int, where: str) -> None:
    """Raises RuntimeError unless an answer has all its tokens."""
    found = answer["tokens"], answer["finish_reason"], answer["error"]
    if found != (tokens, "length", None):
        raise RuntimeError(f"{where}: a stream has {found[0]} of {tokens} tokens, {found[1:]}")


def undisturbed(agent: dict[str, Any] | None) -> None:
    """Raises RuntimeError if an engine was replaced before one was killed."""
    if agent is None:
        raise RuntimeError("the bursts did not end")
    if agent["engine_restarts_total"]:
        raise RuntimeError(
            f"{agent['engine_restarts_total']} engines were replaced: {agent['gpu']}"
        )


def peaks(found: dict[str, Any], kind: str) -> dict[str, int]:
    """Returns the most bytes of each model over all bursts."""
    bursts = [models for phase, models in found["peaks"].items() if phase not in OTHER_PHASES]
    return {
        family: max(models[family][kind] for models in bursts if family in models)
        for family in FAMILIES
        if any(family in models for models in bursts)
    }


def moved(found: dict[str, Any], used_bytes: dict[str, int], held_bytes: dict[str, int]) -> None:
    """Raises RuntimeError unless both models' peaks together exceed the KV capacity, and neither
    does alone."""
    capacity_bytes, total_bytes = found["kv_capacity_bytes"], sum(used_bytes.values())
    if set(used_bytes) != set(FAMILIES):
        raise RuntimeError(f"the samples lack KV of a model: {used_bytes}")
    if total_bytes <= capacity_bytes:
        raise RuntimeError(f"both fit: {used_bytes} bytes at most, {capacity_bytes} of capacity")
    if max(held_bytes.values()) > capacity_bytes:
        raise RuntimeError(f"more than the capacity of {capacity_bytes} is held: {held_bytes}")
    if not all(found["given_bytes"].get(family) for family in FAMILIES):
        raise RuntimeError(f"a model gave no memory to the other: {found['given_bytes']}")


def death_facts(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the kill. Token ids are replaced by how many are undisturbed."""
    kill = found["kill"]
    kept = ("victim", "pid", "held_bytes", "is_named", "ledger_s", "driver_s")
    streams = [stream for each in kill["streams"].values() for stream in each]
    gaps_s = {
        name: round(max(map(longest_gap_s, each)), 3) for name, each in kill["streams"].items()
    }
    after = found.get("after_death", {})
    stages = {report["model"]: report["stages_s"] for report in after.get("models", ())}
    return {
        **{name: kill.get(name) for name in kept},
        "tokens_at_kill": kill["tokens_at_kill"],
        "equal_tokens": [common(s["token_ids"], s["undisturbed_ids"] or []) for s in streams],
        "longest_gap_s": gaps_s,
        "activation_s": stages.get(kill["victim"]),
    }


def longest_gap_s(stream: dict[str, Any]) -> float:
    times_s = stream["times_s"]
    return max((b - a for a, b in pairwise(times_s)), default=0.0)


def resumed_s(stream: dict[str, Any]) -> float | None:
    """Returns when a stream resumed: the end of its longest pause after the kill, which is at 0.
    Tokens that were on their way at the kill come before that pause."""
    times_s = stream["times_s"]
    pauses = [(b - a, b) for a, b in pairwise(times_s) if b > 0]
    return max(pauses)[1] if pauses else None


def death_figures(found: dict[str, Any]) -> list[Figure]:
    """Returns figures of the kill, without that of the driver."""
    kill = found["kill"]
    figures: list[Figure] = []
    if kill.get("ledger_s") is not None:
        figures.append(("killed_ledger", kill["ledger_s"], kill["driver_s"]))
    resumed = [resumed_s(stream) for stream in kill["streams"][kill["victim"]]]
    if first := [seconds for seconds in resumed if seconds is not None]:
        figures.append(("first_token", min(first), activated_s(found, kill["victim"])))
    return figures


def activated_s(found: dict[str, Any], model: str) -> float:
    """Returns the seconds of a model's first activation, without the start of the engine."""
    stages_s = found["activations"][model]
    return float(stages_s["total"] - stages_s.get("engine", 0.0))


def survived(found: dict[str, Any], size: Burst) -> None:
    """Raises RuntimeError unless the streams are complete and the memory is back."""
    kill = found["kill"]
    for family in FAMILIES:
        streams = kill["streams"].get(family, [])
        if len(streams) != size.streams:
            raise RuntimeError(f"{family}: {len(streams)} streams of {size.streams}")
        for stream in streams:
            whole(stream, size.output_tokens, f"under the kill, {family}")
    if min(kill["tokens_at_kill"]) >= size.output_tokens:
        raise RuntimeError("the streams had ended when the engine was killed")
    if kill.get("ledger_s") is None:
        raise RuntimeError("the ledger still counts the memory of the dead engine")
    if kill["is_named"] and kill["driver_s"] is None:
        raise RuntimeError("the driver still names the dead engine")
    after = found.get("after_death")
    if after is None or after["engine_restarts_total"] != 1:
        raise RuntimeError(f"not exactly one engine was replaced after the kill: {after}")
