"""The case of ServeGen's clients: drawn again as it was, and simulated by each policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import servegen

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
    *_, copies, one = capsys.readouterr().out.splitlines()
    assert copies == "| 1 | 32 | prism | 100.00 | 0.0 | 47 |"
    assert one == "| 1 | 32 | one-place | 100.00 | 0.0 | 47 |"
