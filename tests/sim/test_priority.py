"""Priorities of a trace's requests: the simulated queue starts them in the live queue's order."""

from __future__ import annotations

from typing import Any

from prism_sim import simulate

SETUP: dict[str, Any] = {
    "gpus": {"type": "h100", "count": 1, "memory": "40GiB"},
    "models": [{"name": "a", "shape": "Llama-3.1-8B"}],
    "slo": {"ttft": "10m", "tpot": "1s"},
    "engine": {"max_running": 1},
}


def row(at_ms: float, priority: int, tokens: int = 2) -> dict[str, Any]:
    lengths = {"input_length": 50, "output_length": tokens}
    return {"timestamp": at_ms, "model": "a", **lengths, "priority": priority}


def test_those_of_higher_priority_start_first() -> None:
    """Sends them while a long request runs, the highest priority last."""
    trace = [row(0, 0, tokens=2000), row(100, -5), row(200, -1), row(300, 0), row(400, 5)]
    found = simulate(SETUP, trace=trace)
    starts = found.requests.sort("started_s")["index"].to_list()
    assert starts == [0, 4, 3, 2, 1]
    plain = simulate(SETUP, trace=[{**each, "priority": 0} for each in trace])
    assert plain.requests.sort("started_s")["index"].to_list() == [0, 1, 2, 3, 4]
