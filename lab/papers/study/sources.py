"""Traces for the papers' evaluations: from the user's files, or generated with published means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from prism.errors import ConfigError
from prism_replay import transforms
from prism_replay.formats.reader import read_format
from prism_replay.formats.rows import ReadOptions
from prism_replay.generators.base import generate
from prism_replay.generators.bursty import PRESETS, BurstyConfig, numbered
from prism_replay.lengths import ARENA, SHAREGPT, LengthSource, lengths_of, requests_at
from prism_replay.trace import Trace, TraceRequest, models_of

ARENA_LIKE = replace(
    PRESETS["arena-chat"], models=numbered(27), rate_rps=2.5, groups=9, lengths=ARENA
)
"""Replacement for the sample, with the same number of models and requests per second."""
SERVEGEN_PART = 0.1
"""Fraction of ServeGen's requests to read: its clients send thousands per second."""
STYLES = ("hyperbolic", "arena-chat")
PATTERNS = {
    "arena": "arena_chat*.csv",
    "servegen": "servegen_client_rates*",
    "maf": "*maf*",
    "sharegpt": "*sharegpt*",
}


@dataclass(frozen=True)
class Sources:
    """Sources of traces. The user's files, if present, replace generators.

    arena_chat*.csv is the Chatbot Arena sample that the Prism prototype replays.
    servegen_client_rates*.csv has arrivals for the Hyperbolic style, thinned to the generator's
    rate for comparable loads. *maf*.csv has arrivals for SeaLLM, and *sharegpt*.json lengths.
    """

    folder: Path | None = None
    """Folder of the user's files."""
    shortened: dict[str, None] = field(default_factory=dict, compare=False)
    """Texts on traces that are shorter than a study requested, each once."""

    def find(self, what: str) -> Path | None:
        """Returns the file of one of PATTERNS, or None. Raises ConfigError without the folder."""
        if self.folder is None:
            return None
        if not self.folder.is_dir():
            raise ConfigError(f"--traces {self.folder}: is not a folder")
        return next(iter(sorted(self.folder.glob(PATTERNS[what]))), None)

    def sharegpt(self) -> LengthSource:
        """Returns ShareGPT's lengths, or log-normals with the means that MuxServe reports."""
        path = self.find("sharegpt")
        return SHAREGPT if path is None else lengths_of(read_format(path, "sharegpt"))

    def styled(self, style: str, models: Sequence[str], seconds: float, seed: int) -> Trace:
        """Returns a trace of one of STYLES for `models`, the most popular first, without SLOs.

        It has the style's own rate and the length of `available_s`.
        """
        whole_s = self.available_s(style, len(models), seconds)
        if whole_s < seconds:
            text = f"{style}: the {whole_s:g} s of its sample instead of {seconds:g} s"
            self.shortened[text] = None
            seconds = whole_s
        make = self._hyperbolic if style == "hyperbolic" else self._arena
        return onto(make(len(models), seconds, seed), models)

    def available_s(self, style: str, count: int, seconds: float) -> float:
        """Returns the length of a trace of a style for `count` models, at most `seconds`.

        A shorter Arena sample is used as it is; it is not extended by a generator.
        """
        path = self.find("arena")
        if style == "hyperbolic" or path is None:
            return seconds
        sample = read_format(path, "arena")
        return min(seconds, sample[-1].arrival_s) if _has(sample, count) else seconds

    def _hyperbolic(self, count: int, seconds: float, seed: int) -> Trace:
        config = replace(PRESETS["hyperbolic"], lengths=self.sharegpt())
        path = self.find("servegen")
        if path is None:
            return _generated(config, count, seconds, seed)
        options = ReadOptions(seed=seed, seconds=seconds, thin=SERVEGEN_PART)
        clients = transforms.sample_models(read_format(path, "servegen", options), count, seed)
        inside = transforms.window(clients, 0, seconds)  # the file has windows of ten minutes
        wanted = config.rate_rps * count / len(config.models) * seconds
        return redrawn(transforms.scale_rate(inside, wanted / len(inside), seed), config, seed)

    def _arena(self, count: int, seconds: float, seed: int) -> Trace:
        """Returns the sample that the prototype replays.

        For more models than the sample has, the generator with the sample's lengths.
        """
        path = self.find("arena")
        if path is None:
            return _generated(ARENA_LIKE, count, seconds, seed)
        sample = read_format(path, "arena")
        if _has(sample, count):
            chosen = transforms.sample_models(sample, count, seed)
            whole = seconds >= sample[-1].arrival_s
            return chosen if whole else transforms.window(chosen, 0, seconds)
        config = replace(ARENA_LIKE, lengths=lengths_of(sample))
        return _generated(config, count, seconds, seed)

    def functions(
        self, services: Sequence[str], seconds: float, rate_rps: float, seed: int
    ) -> Trace | None:
        """Returns Azure Functions, mapped round robin to services (SeaLLM §6.1), or None.

        None means that the user has no file. `rate_rps` is the rate of all services together.
        """
        path = self.find("maf")
        if path is None:
            return None
        options = ReadOptions(seed=seed, seconds=seconds, lengths=SHAREGPT)
        trace = read_format(path, "maf", options)
        names = models_of(trace)
        mapping = {name: services[i % len(services)] for i, name in enumerate(names)}
        factor = rate_rps * seconds / len(trace)
        return transforms.scale_rate(transforms.map_models(trace, mapping), factor, seed)

    def described(self) -> str:
        used = [f"{what}: {path.name}" for what in PATTERNS if (path := self.find(what))]
        if used:
            text = "from files, " + ", ".join(used)
            return text + " (of a sample with fewer models than the study, only the lengths)"
        return "generators with the published statistics"


def _has(sample: Trace, count: int) -> bool:
    return count <= len(models_of(sample))


def redrawn(trace: Trace, config: BurstyConfig, seed: int) -> Trace:
    """Returns the trace with new lengths from `config` and unchanged arrivals."""
    made: list[TraceRequest] = []
    for number, model in enumerate(models_of(trace)):
        rng = np.random.default_rng([seed, number])
        moments_s = np.array([r.arrival_s for r in trace if r.model == model])
        made += requests_at(model, moments_s, config.lengths, rng)
    return sorted(made, key=lambda request: request.timestamp)


def _generated(config: BurstyConfig, count: int, seconds: float, seed: int) -> Trace:
    """Returns a generated trace of `count` models, sampled from all ranks of `config`.

    If `count` is larger than the number of its models, it has more models of the same kind. Prism
    §7.5 samples other periods of the same models instead.
    """
    have = len(config.models)
    if count > have:
        names = tuple(f"model-{i}" for i in range(count))
        more = count / have
        config = replace(
            config,
            models=names,
            rate_rps=config.rate_rps * more,
            groups=round(config.groups * more),
        )
    # The generator gives each model a request, so a short trace is cut from a longer one.
    whole_s = max(seconds, 2 * len(config.models) / config.rate_rps)
    trace: Trace = generate(replace(config, seconds=whole_s, seed=seed))
    if count < have:
        trace = transforms.sample_models(trace, count, seed)
    return transforms.window(trace, 0, seconds) if whole_s > seconds else trace


def onto(trace: Trace, models: Sequence[str]) -> Trace:
    """Renames the trace's models to `models`, both most popular first, and removes SLOs.

    If the trace has fewer models, the last of `models` have no requests.
    """
    mapping = dict(zip(models_of(trace), models, strict=False))
    return [without_slo(r, mapping[r.model]) for r in trace]


def without_slo(request: TraceRequest, model: str) -> TraceRequest:
    return msgspec.structs.replace(
        request, model=model, slo_ttft_ms=None, slo_tpot_ms=None, slo_e2e_ms=None
    )
