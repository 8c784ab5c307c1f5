"""The runner of scripts/gpu-check beside steps that hang, crash, lie, flood or leave children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_check.__main__ import saw_gpu, short
from tests.kvcached.compiling import ROOT

HEAD = """
import os, signal, subprocess, sys, time
from scripts.gpu_check.report import Skip, run_as_step
def main(body):
    sys.exit(run_as_step({name!r}, "a step", body))
"""
STEPS = {
    "good": """
def body(report):
    with report.check("sum"):
        report.fact(sum=1 + 1)
main(body)
""",
    "hangs": """
def body(report):
    report.fact(before=1)
    with report.check("first"):
        pass
    with report.check("second"):
        time.sleep(1000)
main(body)
""",
    "deaf": """
def body(report):
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
main(body)
""",
    "crashes": """
def body(report):
    report.fact(before=2)
    os.kill(os.getpid(), signal.SIGSEGV)
main(body)
""",
    "garbage": """
sys.stdout.buffer.write(bytes(range(256)) * 100)
os.write(1, b'{"name": "garbage", "status": "passed"}')
options = sys.argv[sys.argv.index("--result") + 1]
open(options, "wb").write(b"\\xff\\x00 no JSON")
""",
    "liar": """
import json
result = sys.argv[sys.argv.index("--result") + 1]
open(result, "w").write(json.dumps({"status": "passed", "facts": 7, "checks": []}))
sys.exit(9)
""",
    "list_writer": """
open(sys.argv[sys.argv.index("--result") + 1], "w").write("[1, 2]")
""",
    "idle": """
main(lambda report: report.fact(nothing=0))
""",
    "skips": """
def body(report):
    with report.check("one"):
        raise Skip("no such thing here")
main(body)
""",
    "half": """
def body(report):
    with report.check("one"):
        raise Skip("not here")
    with report.check("two"):
        raise RuntimeError("this is wrong")
    with report.check("three"):
        pass
main(body)
""",
    "where": """
def body(report):
    with report.check("there"):
        report.fact(beside=os.listdir("."), left_s=report.left_s(1))
main(body)
""",
    "children": """
def body(report):
    with report.check("leaves"):
        code = "import time; time.sleep(1000)"
        same = subprocess.Popen([sys.executable, "-c", code])
        away = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        report.fact(pids=[same.pid, away.pid])
main(body)
""",
}
PROGRAM = """
import json, sys
from pathlib import Path
from scripts.gpu_check import runner
from scripts.gpu_check.__main__ import run_steps
from scripts.gpu_check.runner import Places, Step
names, out, limit_s, budget_s = sys.argv[1].split(","), Path(sys.argv[2]), *map(float, sys.argv[3:])
runner.adopt_orphans()
places = Places(out, out / "work")
places.work.mkdir(parents=True, exist_ok=True)
run_steps([Step(name, limit_s, "", f"step_{name}") for name in names], places, budget_s)
"""


def command(tmp_path: Path, names: str, limit_s: float, budget_s: float) -> dict[str, Any]:
    """Arguments for subprocess: a runner over these steps."""
    for name in names.split(","):
        (tmp_path / f"step_{name}.py").write_text(HEAD.format(name=name) + STEPS[name])
    return {
        "args": [sys.executable, "-c", PROGRAM, names, str(tmp_path), str(limit_s), str(budget_s)],
        "env": {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        "cwd": ROOT,
    }


def results_of(
    tmp_path: Path, names: str, *, limit_s: float = 60, budget_s: float = 600
) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        **command(tmp_path, names, limit_s, budget_s), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert json.loads((tmp_path / "gpu-check.json").read_text())["steps"] == lines
    assert [line["name"] for line in lines] == names.split(",")
    return {line["name"]: line for line in lines}


def is_gone(pid: int) -> bool:
    """Dead, or dead and not yet waited for by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_steps_that_fail_never_stop_the_next(tmp_path: Path) -> None:
    found = results_of(tmp_path, "crashes,garbage,liar,list_writer,idle,half,skips,good")
    status = {name: result["status"] for name, result in found.items()}
    assert status == dict.fromkeys(found, "failed") | {"skips": "skipped", "good": "passed"}
    assert "killed by signal 11" in found["crashes"]["reason"]
    assert found["crashes"]["facts"] == {"before": 2}
    assert "ended with status 0, without its result" in found["garbage"]["reason"]
    assert "ended with status 9, wrongly" in found["liar"]["reason"]
    assert (found["liar"]["facts"], found["liar"]["checks"]) == ({}, {})
    assert "checked nothing" in found["idle"]["reason"]
    assert "this is wrong" in found["half"]["reason"]
    assert found["half"]["checks"]["three"] == "passed"
    assert "no such thing here" in found["skips"]["reason"]
    assert found["good"]["facts"] == {"sum": 2}


def test_a_step_that_hangs_is_killed_and_keeps_its_facts(tmp_path: Path) -> None:
    found = results_of(tmp_path, "hangs,deaf,good", limit_s=4)
    assert found["hangs"]["status"] == found["deaf"]["status"] == "failed"
    assert "not done after 4 s" in found["hangs"]["reason"]
    assert found["hangs"]["facts"] == {"before": 1}
    assert found["hangs"]["checks"] == {"first": "passed"}
    assert found["good"]["status"] == "passed"
    assert "in body" in (tmp_path / "gpu-check.log").read_text()  # every thread's stack


def test_a_step_runs_beside_no_module_and_knows_its_time(tmp_path: Path) -> None:
    facts = results_of(tmp_path, "good,where", limit_s=40)["where"]["facts"]
    assert facts["beside"] == []
    assert 1 < facts["left_s"] <= 40


def test_a_short_line_tells_how_a_step_ended() -> None:
    result = {"name": "probe", "status": "failed", "seconds": 1.5, "reason": "two\nlines " * 100}
    line = short(result)
    assert line.split()[:6] == ["probe", "failed", "1.50", "s", "two", "lines"]
    assert (len(line) < 350, "\n" in line) == (True, False)


def test_a_gpu_was_seen_whatever_else_is_missing() -> None:
    found = {"name": "facts", "status": "failed", "checks": {"driver": "passed", "torch": "failed"}}
    assert saw_gpu([found])
    assert not saw_gpu([found | {"checks": {"driver": "failed: none"}}])
    assert not saw_gpu([])


def test_no_child_outlives_its_step(tmp_path: Path) -> None:
    found = results_of(tmp_path, "children,good")
    assert found["children"]["status"] == "passed"
    assert [is_gone(pid) for pid in found["children"]["facts"]["pids"]] == [True, True]
    assert found["good"]["status"] == "passed"


def test_the_budget_cuts_a_step_and_skips_those_after_it(tmp_path: Path) -> None:
    found = results_of(tmp_path, "hangs,good", limit_s=60, budget_s=15)
    assert found["hangs"]["status"] == "failed"
    assert found["hangs"]["seconds"] < 20
    assert found["good"]["status"] == "skipped"
    assert "time for all steps is used up" in found["good"]["reason"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_stopped_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    arguments = command(tmp_path, "hangs", 60, 600)
    with subprocess.Popen(**arguments, stdout=subprocess.DEVNULL) as running:
        result = tmp_path / "work/results/hangs.json"
        deadline_s = time.monotonic() + 60
        while not result.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(how)
        running.wait(60)
    assert len(children) == 1
    deadline_s = time.monotonic() + 60
    while not is_gone(int(children[0])) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert is_gone(int(children[0]))


def test_bad_options_are_refused_by_name() -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "scripts/gpu-check"), *options]
        env = {**os.environ, "PYTHON": sys.executable}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    done = run("--steps", "facts,nonsense")
    assert (done.returncode, "no step nonsense" in done.stderr) == (2, True)
    done = run("--wheels", "/nowhere")
    assert (done.returncode, "no folder /nowhere" in done.stderr) == (2, True)
    done = run("--time-factor", "0")
    assert (done.returncode, "--time-factor" in done.stderr) == (2, True)
