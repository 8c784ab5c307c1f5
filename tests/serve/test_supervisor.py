"""Children are started again a bounded number of times, and ended in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prism.errors import ConfigError
from prism.serve.children import Child, ChildSpec, RestartBudget
from prism.serve.supervisor import ClusterFailedError, Supervisor

STEADY = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STEADY}"
POLITE = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""

Make = Callable[..., Child]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Children that run a script; all are dead when the test is over."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[Child] = []

    def build(name: str, script: str, *arguments: str, drain_s: float = 5.0) -> Child:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(script))
        made.append(Child(ChildSpec(name, name, arguments, drain_s), tmp_path))
        return made[-1]

    yield build
    for child in made:
        child.kill()


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def is_up(child: Child) -> bool:
    return child.log.exists() and "up" in child.log.read_text()


def test_the_budget_doubles_its_delays_and_ends() -> None:
    budget = RestartBudget()
    assert [budget.delay_s(t) for t in range(6)] == [0.5, 1, 2, 4, 8, None]
    assert budget.delay_s(61.5) is not None


def test_a_dead_child_is_started_again(make: Make) -> None:
    said: list[str] = []
    child = make("steady", STEADY)
    supervisor = Supervisor([[child]], None, said.append)
    supervisor.start()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: not child.running())
    supervisor.watch(100.0)
    assert said == ["steady ended (signal SIGKILL); starting it again in 0.5 s"]
    supervisor.watch(100.4)
    assert not child.running()
    supervisor.watch(100.6)
    assert child.running()
    assert child.pid != first


def test_one_that_keeps_dying_fails_the_cluster_with_its_log(make: Make) -> None:
    child = make("broken", "raise SystemExit('no such thing')")
    supervisor = Supervisor([[child]], None, lambda _: None)
    supervisor.start()

    def run_out() -> None:
        for second in range(60):
            until(lambda: not child.running())
            supervisor.watch(float(second))

    with pytest.raises(
        ClusterFailedError, match=r"broken keeps ending \(exit code 1\).*\n.*no such"
    ):
        run_out()


def test_a_configuration_error_is_passed_on_at_once(make: Make) -> None:
    script = "import sys; print('error: a: b; do c', file=sys.stderr); sys.exit(2)"
    child = make("wrong", script)
    supervisor = Supervisor([[child]], None, lambda _: None)
    supervisor.start()
    until(lambda: not child.running())
    with pytest.raises(ConfigError, match=r"^a: b; do c$"):
        supervisor.watch(0.0)


def test_groups_end_in_the_reverse_order(make: Make, tmp_path: Path) -> None:
    order = tmp_path / "order"
    groups = [[make(name, POLITE, str(order), name)] for name in ("one", "two", "three")]
    supervisor = Supervisor(groups, None, lambda _: None)
    supervisor.start()
    until(lambda: all(is_up(group[0]) for group in groups))
    supervisor.stop(lambda: False)
    assert order.read_text().split() == ["three", "two", "one"]


@pytest.mark.parametrize(("drain_s", "hurry"), [(0.2, False), (600.0, True)])
def test_one_that_does_not_end_is_killed(make: Make, drain_s: float, hurry: bool) -> None:
    said: list[str] = []
    child = make("stubborn", STUBBORN, drain_s=drain_s)
    supervisor = Supervisor([[child]], None, said.append)
    supervisor.start()
    until(lambda: is_up(child))
    supervisor.stop(lambda: hurry)
    assert not child.running()
    assert said == ["stubborn did not end in time and was killed"]


PARENT = """
import sys, time
from pathlib import Path
from prism.serve.children import Child, ChildSpec
child = Child(ChildSpec("mortal", "mortal", [], 1.0), Path(sys.argv[1]))
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""
MORTAL = "from prism.process import die_with_parent; die_with_parent(); " + STEADY


def test_children_die_with_a_killed_launcher(make: Make, tmp_path: Path) -> None:
    make("mortal", MORTAL)
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: (tmp_path / "mortal.log").read_text() == "up\n")
        parent.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
