"""Records of activations: the trace file, and fingerprints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from prism.agent.engines import trace_file
from prism.agent.engines.activations import Fingerprints
from prism.agent.engines.trace_file import TraceFile
from prism.agent.state.device_state import HostedModel
from prism.messages.engine import Activated
from tests.cluster.conftest import spec

STAGES_S = {"reserve": 0.25, "weights": 0.5, "total": 0.75}
ACTIVATED = Activated("m", 4096, 16, 0, 0, 0, 16, 4, stages_s=STAGES_S)


def events(path: Path) -> list[dict[str, object]]:
    """Returns the events as a viewer reads them: the closing bracket may be missing."""
    loaded: list[dict[str, object]] = json.loads(path.read_text().rstrip(",\n") + "]")
    return loaded


def test_a_trace_has_the_stages_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.trace.json"
    trace = TraceFile(path, "host:0")
    before_us = time.time() * 1e6
    trace.add("host0-e1", ACTIVATED)
    trace.add("host0-e1", ACTIVATED)
    found = events(path)
    assert [e["name"] for e in found] == ["reserve", "weights"] * 2
    assert {(e["ph"], e["pid"], e["tid"]) for e in found} == {("X", "host:0", "host0-e1")}
    first, second = found[:2]
    assert first["dur"] == 250_000
    assert int(str(first["ts"])) + 250_000 == pytest.approx(int(str(second["ts"])), abs=1)
    assert abs(int(str(second["ts"])) + 500_000 - before_us) < 60e6
    assert first["args"] == {"model": "m"}


def test_a_trace_says_what_each_link_brought(tmp_path: Path) -> None:
    links = {"cuda:0": 5, "cuda:1": 3}
    path = tmp_path / "a.trace.json"
    TraceFile(path, "cuda:0").add("e1", msgspec.structs.replace(ACTIVATED, link_bytes=links))
    reserve, weights = events(path)
    assert reserve["args"] == {"model": "m"}
    assert weights["args"] == {"model": "m", "link_bytes": links}


def test_a_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "TRACE_BYTES_MAX", 1000)
    trace = TraceFile(tmp_path / "t", "host:0")
    for _ in range(50):
        trace.add("host0-e1", ACTIVATED)
    assert sorted(p.name for p in tmp_path.iterdir()) in (["t", "t.1"], ["t.1"])
    assert all(p.stat().st_size < 2000 for p in tmp_path.iterdir())
    assert events(tmp_path / "t.1")


def test_a_trace_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TraceFile(tmp_path, "host:0").add("host0-e1", ACTIVATED)
    assert "cannot write" in caplog.text


def test_a_fresh_engine_is_the_reference() -> None:
    known, m = Fingerprints(), HostedModel(spec("m"), 0.0)
    known.learn(m, (1,), is_fresh=True)
    assert known.expected(m, is_fresh=False) == (1,)
    assert known.expected(m, is_fresh=True) == ()
    known.learn(m, (2,), is_fresh=False)
    assert known.expected(m, is_fresh=False) == (1,)
    known.learn(m, (3,), is_fresh=True)
    assert known.expected(m, is_fresh=False) == (3,)


def test_each_number_of_ranks_has_a_reference() -> None:
    """Sums of several ranks are rounded in another way, so that their tokens may differ."""
    known = Fingerprints()
    one, two = HostedModel(spec("m"), 0.0), HostedModel(spec("m"), 0.0, peers=("host:1",))
    known.learn(one, (1,), is_fresh=True)
    assert known.expected(two, is_fresh=False) == ()
    known.learn(two, (2,), is_fresh=True)
    assert known.expected(one, is_fresh=False) == (1,)


def test_graphs_that_were_captured_late_are_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json"
    trace = TraceFile(path, "cuda:0")
    trace.captured("e1", "m", (0.25, 0.5))
    trace.captured("e1", "m", ())
    assert [(e["name"], e["tid"], e["args"]) for e in events(path)] == [
        ("graph captured", "e1", {"model": "m", "seconds": 0.25}),
        ("graph captured", "e1", {"model": "m", "seconds": 0.5}),
    ]
