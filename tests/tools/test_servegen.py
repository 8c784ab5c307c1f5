"""The case of ServeGen's clients: drawn again as it was, and simulated by each policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import servegen
from prism_replay.trace import TraceRequest

HEAD = "model,client,t_s,rate_rps,iat_cv,dist,p1,p2\n"


def test_a_draw_comes_out_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"m,{client},{start},{0.01 + client / 1000},1.0,G,1.0,{1 / (0.01 + client / 1000)}\n"
        for client in range(60)
        for start in range(0, 3 * 86_400, 600)
    ]
    rates = tmp_path / "rates.csv"
    rates.write_text(HEAD + "".join(rows))
    trace = servegen.drawn(rates, 1, 1200, tmp_path)
    assert trace == servegen.drawn(rates, 1, 1200, tmp_path)
    assert len({request.model for request in trace}) > 40
    assert max(request.timestamp for request in trace) < 1200e3
    asked = ["--gpus", "32", "--seeds", "1", "--policies", "prism,one-place", "--minutes", "10"]
    monkeypatch.setattr("sys.argv", ["servegen", str(rates), *asked])
    servegen.main()
    rows, means = (part.splitlines()[2:] for part in capsys.readouterr().out.split("\n\n"))
    assert rows == [
        "| 1 | 32 | prism | 100.00 | 0.0 | 47 |",
        "| 1 | 32 | one-place | 100.00 | 0.0 | 47 |",
    ]
    assert means[1] == "| 32 | one-place | 100.00 ± 0.00 | +0.00 ± 0.00 |"


def test_differences_are_over_common_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    servegen.print_means({(8, "prism"): [90.0, 80.0], (8, "static"): [88.0, 78.0]}, "prism")
    *_, ours, static = capsys.readouterr().out.splitlines()
    assert ours.startswith("| 8 | prism | 85.00 ± ")
    assert static.endswith("| +2.00 ± 0.00 |")


def test_a_policy_that_refuses_the_gpus_does_not_end_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = servegen.options("table", "Table.")
    asked = parser.parse_args(["--gpus", "1", "--seeds", "1", "--policies", "aegaeon,static"])
    request = TraceRequest(timestamp=0.0, model="m00", input_length=100, output_length=10)
    servegen.print_table(asked, [("Llama-3.1-8B", 1)], lambda *_: [request])
    rows, means = (part.splitlines()[2:] for part in capsys.readouterr().out.split("\n\n"))
    assert "| aegaeon | refused: " in rows[0]
    assert "gpus.count: must be >= 2" in rows[0]
    assert [row.split(" | ")[1] for row in means] == ["static"]
    assert means[0].endswith(" |  |")  # without a difference from the first policy
