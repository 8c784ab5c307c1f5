"""The row for docs/gpu-results.md, from the results of all steps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from scripts.gpu_check.report import FAILED, PASSED, SKIPPED

FILE = "gpu-check-line.md"
UNKNOWN = "?"


def of(results: list[dict[str, Any]]) -> str:
    """Returns the row of today."""
    steps = {result["name"]: result for result in results}
    return line_of(steps, datetime.now(UTC).date().isoformat())


def line_of(steps: dict[str, dict[str, Any]], date: str) -> str:
    """A row of the table: date, GPU, driver, torch, sources, steps, figures."""
    cells = [
        date,
        at(steps, "facts", "gpu", "name"),
        at(steps, "facts", "nvml", "driver"),
        at(steps, "facts", "torch", "version"),
        at(steps, "facts", "commit") or at(steps, "facts", "sources"),
        counts(steps),
        *(figure(steps) for figure in (page_us, weights, killed, attention, activation)),
    ]
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def at(steps: dict[str, dict[str, Any]], step: str, *names: str) -> Any:
    """A fact, or "?" where the step did not find it."""
    value: Any = steps.get(step, {}).get("facts", {})
    for name in names:
        value = value.get(name, UNKNOWN) if isinstance(value, dict) else UNKNOWN
    return UNKNOWN if value is None else value


def counts(steps: dict[str, dict[str, Any]]) -> str:
    """Steps by their end; those that did not pass by name."""
    parts = []
    for status in (PASSED, FAILED, SKIPPED):
        names = [name for name, step in steps.items() if step["status"] == status]
        shown = f" ({', '.join(names)})" if names and status != PASSED else ""
        parts.append(f"{len(names)} {status}{shown}")
    return ", ".join(parts)


def page_us(steps: dict[str, dict[str, Any]]) -> str:
    """Medians of the calls that one page takes."""
    calls = ("create", "map", "set_access", "unmap", "release")
    found = [at(steps, "probe", "call_us", call, "median") for call in calls]
    return " / ".join(str(value) for value in found)


def weights(steps: dict[str, dict[str, Any]]) -> str:
    """Of the largest size: the pipeline's rate against the link's peak."""
    rates = at(steps, "benches", "weights_gb_per_s")
    if not isinstance(rates, dict) or not rates:
        return UNKNOWN
    largest = list(rates.values())[-1]
    return f"{largest.get('pipeline', UNKNOWN)} of {largest.get('bus', UNKNOWN)}"


def killed(steps: dict[str, dict[str, Any]]) -> Any:
    return at(steps, "models", "killed", "granted_ms_after_death")


def attention(steps: dict[str, dict[str, Any]]) -> Any:
    """Block-interleaved against per layer."""
    found = at(steps, "benches", "attention")
    return next(iter(found.values()))[2] if isinstance(found, dict) and found else UNKNOWN


def activation(steps: dict[str, dict[str, Any]]) -> str:
    """Through SGLang, cold and out of the store: seconds without and of the warm-up; MiB that are
    held after the first and the last eviction."""
    found, warm_up = (at(steps, "engine", name) for name in ("activation_s", "warm_up_s"))
    if not isinstance(found, list) or not isinstance(warm_up, list):
        return UNKNOWN
    seconds = " / ".join(f"{a:.2f} + {w:.2f}" for a, w in zip(found, warm_up, strict=True))
    kept = at(steps, "engine", "kept_bytes")
    held = " / ".join(str(b >> 20) for b in kept) if isinstance(kept, list) else UNKNOWN
    return f"{seconds}; {held} MiB"
