"""`prism-sim` as a shell calls it."""

from __future__ import annotations

import json
import sys

import pytest

from prism_sim.cli import sim

CONFIG = """
gpus: {type: h100, count: 2, memory: 40GiB}
models:
  - {name: a, shape: Llama-3.1-8B, slo: {ttft: 400ms, tpot: 40ms}}
  - {name: b, shape: Llama-3.2-1B, count: 3}
generate: {seconds: 60, rate: 4}
"""


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the command; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["prism-sim", *arguments])
    try:
        sim.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def line(timestamp: int, model: str = "a", prompt: int = 1) -> str:
    return json.dumps(
        {"timestamp": timestamp, "model": model, "input_length": prompt, "output_length": 1}
    )
