"""Prism's Table 1 and Figure 7: each metric at its own SLO scale, each system with its
baselines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from lab.papers.prism import prism_sweeps, prism_table1
from lab.papers.prism.prism_setup import Cluster
from lab.papers.prism.prism_sweeps import AWARE, EIGHT_8B, LISTED, orders, tpot_part, with_models
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines
from lab.papers.study.trial import Trial
from prism_sim.scenario.scenario import load


def a_lab(folder: Path) -> Lab:
    return Lab(folder, lambda what: nullcontext(lambda done, total: None), quick=True)


@pytest.mark.parametrize(("style", "part"), [("hyperbolic", 1.1), ("arena-chat", 0.3)])
def test_tpot_has_an_slo_scale_of_its_own(tmp_path: Path, style: str, part: float) -> None:
    """Checks §7.3: 20 and 22 on the Hyperbolic trace, 10 and 3 on Arena-Chat."""
    cluster = with_models(a_lab(tmp_path), "eight", style, EIGHT_8B)
    models = yaml.safe_load(Path(cluster.config).read_text())["models"]
    tpots_ms = [float(model["slo"]["tpot"].removesuffix("ms")) for model in models]
    assert tpot_part(style) == pytest.approx(part)
    assert max(tpots_ms) == pytest.approx(cluster.slo_tpot_ms[1] * part, abs=1e-3)


def test_eight_of_8b_take_five_sixths_of_two_gpus(tmp_path: Path) -> None:
    cluster = with_models(a_lab(tmp_path), "eight", "hyperbolic", EIGHT_8B)
    setup = load(Path(cluster.config)).setup
    weights = sum(model.weight_bytes for model in setup.models)
    assert weights / sum(d.capacity_bytes for d in setup.devices) == pytest.approx(0.83, abs=0.01)


def test_orders_are_judged_with_each_muxserve_and_each_qlm() -> None:
    values = {"prism": 99.0, "muxserve++": 80.0, LISTED: 50.0, "qlm": 20.0, "static": 10.0}
    values[AWARE] = 60.0
    found = orders("x", values, "Table 1", prism_table1.TABLE)
    assert [c.agrees for c in found] == [True, True, True]
    assert [LISTED in c.published for c in found] == [False, True, False]
    assert AWARE in found[2].published


def test_qlm_by_each_of_its_rules() -> None:
    found: Lines = {"qlm": [(2, 20.0), (8, 20.5)], AWARE: [(2, 20.0), (8, 99.5)]}
    said = {c.what: (c.ours, c.agrees) for c in prism_table1._gpus(found)}
    assert said == {
        "GPUs for 99 % TTFT, qlm": ("not up to 8", False),
        f"GPUs for 99 % TTFT, {AWARE}": ("8 GPUs", True),
        "more GPUs do not help, qlm": ("20 % with 2, 20.5 % with 8", True),
        f"more GPUs do not help, {AWARE}": ("20 % with 2, 99.5 % with 8", False),
    }


def test_memory_beside_weights_and_kv_is_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"2GiB": 70.0, "3GiB": None}

    def attained(lab: Lab, trials: Sequence[Trial]) -> list[float | None]:
        return [shares[trial.changes["engine.static"]] for trial in trials]

    monkeypatch.setattr(prism_sweeps, "attained", attained)
    monkeypatch.setattr(Lab, "pick", lambda self, full, quick: full)
    cluster = Cluster("setup.yaml", (1.0, 1.0), (1.0, 1.0))
    with_two = {"prism": 90.0, "static": None}
    found = prism_table1._outside(a_lab(Path()), cluster, {"gpus.count": 2}, with_two)
    assert found["prism"] == [("1GiB", 90.0), ("2GiB", 70.0), ("3GiB", None)]
    said = prism_table1._by_size("prism", dict(found["prism"]))
    assert (said.ours, said.agrees) == ("90 % at 1GiB, 70 % at 2GiB", None)
    assert found["static"][0] == ("1GiB", None)
