"""What turns Prism's Figure 7: each change is made to the systems it is of, and said by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from prism.studies import prism_rate_causes
from prism.studies.lab import Lab
from prism.studies.prism_rate_causes import engine_starts, less_memory
from prism.studies.prism_setup import Cluster
from prism.studies.trial import Trial

CLUSTER = Cluster("setup.yaml", "", 1, (1.0, 1.0), (1.0, 1.0))


@dataclass
class Echo:
    """Whose outcomes are the trials themselves."""

    trials: list[Trial] = field(default_factory=list)

    def pick(self, full: Any, quick: Any) -> Any:
        return full

    def run(self, trials: Sequence[Trial], what: str) -> list[Trial]:
        self.trials += trials
        return list(trials)


def test_tpot_on_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {("static", 8.0): 100.0, ("static", 32.0): 80.0}

    def attainment(trial: Trial, metric: str) -> float:
        assert metric == "tpot"
        return shares.get((trial.changes["policy"], trial.changes["rate_scale"]), 99.0)

    monkeypatch.setattr(prism_rate_causes, "attainment", attainment)
    lab = Echo()
    found = less_memory(cast(Lab, lab), CLUSTER, "x", {"slo_scale": 20.0}, ["static", "muxserve++"])
    assert [c.verdict for c in found] == ["names the cause", "is not the cause"]
    assert found[0].ours == "100.0 % at rate scale 8, 80.0 % at 32"
    assert {t.changes["gpus.memory"] for t in lab.trials} == {prism_rate_causes.TIGHT}


@pytest.mark.parametrize(
    ("qlm", "verdicts"), [(40.0, ["in its direction", "names the cause"]), (85.0, [])]
)
def test_who_starts_an_engine(
    monkeypatch: pytest.MonkeyPatch, qlm: float, verdicts: list[str]
) -> None:
    """Asked only where ServerlessLLM is before QLM: of TTFT here, not of TPOT."""

    def attainment(trial: Trial, metric: str) -> float:
        starts = trial.changes["policy"] == "serverlessllm"
        assert ("activation.layout" in trial.changes) is starts
        return 50.0 if starts else 60.0

    monkeypatch.setattr(prism_rate_causes, "attainment", attainment)
    shares = {"ttft": {"qlm": qlm, "serverlessllm": 80.0}, "tpot": {"qlm": 99.0}}
    swept = ({"slo_scale": 20.0}, (8.0, 16.0))
    lab = Echo()
    found = engine_starts(cast(Lab, lab), CLUSTER, "x", swept, shares)
    assert [c.verdict for c in found] == verdicts
    assert all(c.what.startswith("ablation: x: mean TTFT") for c in found)
    assert len(lab.trials) == (4 if verdicts else 0)
