"""Causes of a difference in the order of admission, on hand-made queues."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from lab.parity.admission import compare_order
from lab.parity.causes import Causes, Moments
from lab.parity.console import print_parity
from lab.parity.parity_results import CLASSES, Compared, ParityResults
from prism.policies import registry
from prism.policies.data import EngineView
from prism.scheduler.decision_journal import Queued, Stepped
from prism.scheduler.local_scheduler import Limits
from tests.tools.parity.worlds import queued, run, stepped

World = list[Queued | Stepped]


def urgent(request: int, prompt_tokens: int = 100, deadline_s: float = 1.95) -> Queued:
    """Returns a request with one second of prefill at 100 tokens/s."""
    record = queued(request, 0.0, deadline_s=deadline_s)
    return msgspec.structs.replace(record, prompt_tokens=prompt_tokens)


def starts(time_s: float, *requests: int, speed: float = 100.0) -> Stepped:
    """Returns a step with one free slot."""
    view = EngineView("a", 1000, 3, 4, 16, speed, 0.0)
    return msgspec.structs.replace(stepped(time_s, *requests), views=(view,))


def kinds(live: World, simulated: World) -> list[str]:
    ours, theirs = Moments({"host:0": live}), Moments({"host:0": simulated})
    runs = run(*live), run(*simulated)
    causes = Causes(registry.get("prism"), Limits(), ours, theirs, runs[0])
    return [difference.kind for difference in compare_order(*runs, causes).differences]


TWO: World = [urgent(0), queued(1, 0.1)]


@pytest.mark.parametrize(
    ("simulated", "kind"),
    [
        (starts(0.9, 0), "moment of the choice"),
        (starts(1.0, 0, speed=200.0), "prefill speeds"),
        (starts(0.99, 0, speed=105.0), "moment and speeds"),
        # so much earlier that it is another choice
        (starts(-0.5, 0), "lateness"),
    ],
)
def test_the_live_scheduler_is_asked_again(simulated: Stepped, kind: str) -> None:
    live = [*TWO, starts(1.0, 1), starts(2.0, 0)]
    assert kinds(live, [*TWO, simulated, starts(2.0, 1)]) == [kind]


def test_consequences_are_separated_from_a_difference() -> None:
    """Attributes a difference to an earlier one until the queue has been empty.

    With the same moments and speeds, the live scheduler would not choose like the simulated one,
    because the earlier choices differed.
    """
    more = [queued(2, 0.2, deadline_s=150.0), queued(3, 0.3, deadline_s=160.0)]
    live = [*TWO, *more, starts(1.0, 1), starts(2.0, 2), starts(3.0, 3), starts(4.0, 0)]
    other = [*TWO, *more, starts(0.9, 0), starts(2.0, 3), starts(3.0, 2), starts(4.0, 1)]
    assert kinds(live, other)[:2] == ["moment of the choice", "follows another difference"]
    first: World = [urgent(0), queued(1, 0.1), starts(1.0, 1), starts(2.0, 0)]
    again: World = [queued(2, 3.0), queued(3, 3.1)]
    live = [*first, *again, starts(4.0, 2), starts(5.0, 3)]
    other = [*first[:2], starts(0.9, 0), starts(2.0, 1), *again, starts(4.0, 3), starts(5.0, 2)]
    assert kinds(live, other) == ["moment of the choice", "time estimates"]


def test_without_inputs_there_are_no_moments() -> None:
    assert Moments({"host:0": [*TWO, stepped(1.0, 1)]}).at("host:0", len(TWO)) is None


def test_the_terminal_explains_each_class_and_how_many_are_equal_together() -> None:
    live: World = [*TWO, starts(1.0, 1), starts(2.0, 0)]
    simulated: World = [*TWO, starts(0.9, 0), starts(2.0, 1)]
    order = compare_order(run(*live), run(*simulated))
    results = ParityResults(
        trace="t",
        policy="prism",
        requests=2,
        failed_live=0,
        failed_simulated=0,
        lead_s=0.0,
        cores=None,
        costs={},
        checks=[],
        compared={"placement": Compared(3, []), "admission order": order, "turns": order},
        figures=[],
        samples=[],
    )
    console = Console(width=200, record=True)
    print_parity(console, results)
    shown = console.export_text()
    (row,) = (line for line in shown.splitlines() if "placement and admission order" in line)
    assert "4" in row
    assert "75.0 %" in row
    assert "lateness" in shown
    assert CLASSES["lateness"] in shown
