"""Figures of a run, judged by their expectations.

    python -m lab.gpu_check.figures

prints the table of docs/gpu-results.md.
"""

from __future__ import annotations

from typing import Any

from lab.gpu_check.expected import BY_NAME, EXPECTED, NOT_JUDGED


def figure(
    step: str, name: str, value: float, reference: float | None, *, judged: bool
) -> dict[str, Any]:
    """Returns a figure in the form of gpu-check.json. Raises KeyError for an unknown figure."""
    expected = BY_NAME[step, name]
    ratio = value / reference if reference else None
    return {
        "value": round(value, 4),
        "unit": expected.unit,
        "reference": None if reference is None else round(reference, 4),
        "ratio": None if ratio is None else round(ratio, 4),
        "expected": expected.bound(),
        "verdict": expected.verdict(value, ratio) if judged else NOT_JUDGED,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Returns a figure on one line."""
    text = f"{name}: {found['value']:g} {found['unit']}".rstrip()
    if found["ratio"] is not None:
        text += f", {found['ratio']:g} of the reference"
    if found["verdict"] != NOT_JUDGED:
        text += f" (expected {found['expected']}: {found['verdict']})"
    return text


def table() -> str:
    """Returns the table of expectations in Markdown."""
    rows = ["| step | figure | what | unit | reference, in the same run | expected | source |"]
    rows.append("|---|---|---|---|---|---|---|")
    for e in EXPECTED:
        cells = (e.step, f"`{e.name}`", e.what, e.unit, e.reference or "none", e.bound(), e.source)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
