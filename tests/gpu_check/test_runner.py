"""Runner of scripts/gpu-check with steps that hang, crash, lie, flood or leave children."""

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

from lab.gpu_check.__main__ import saw_gpu, short
from lab.gpu_check.processes import descendants, is_alive
from tests.kvcached.compiling import ROOT

HEAD = """
import os, signal, subprocess, sys, time
from lab.gpu_check.report import Skip, run_as_step
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
        report.fact(modules=os.listdir("."), left_s=report.left_s(1))
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
MEET = """
def body(report):
    with report.check("met"):
        mine, other = {names}
        report.work.joinpath(mine).touch()
        deadline_s = time.monotonic() + 30
        while not report.work.joinpath(other).exists():
            assert time.monotonic() < deadline_s, "the other step did not run at the same time"
            time.sleep(0.01)
main(body)
"""
STEPS["long"] = STEPS["background"] = STEPS["good"]
STEPS["background_slow"] = STEPS["good"].replace("report.fact", "time.sleep(4); report.fact")
STEPS["waits"] = MEET.format(names=("a", "b"))
STEPS["background_waits"] = MEET.format(names=("b", "a"))
PROGRAM = """
import sys
from pathlib import Path
from lab.gpu_check import runner
from lab.gpu_check.__main__ import Run
from lab.gpu_check.plan import Step
from lab.gpu_check.runner import Places
names, out, limit_s, budget_s = sys.argv[1].split(","), Path(sys.argv[2]), *map(float, sys.argv[3:])
runner.adopt_orphans()
places = Places(out, out / "work")
places.work.mkdir(parents=True, exist_ok=True)
steps = [
    Step(
        name,
        f"step_{name}",
        limit_s,
        100.0 if name == "long" else 3.0,
        "",
        in_background=name.startswith("background"),
    )
    for name in names
]
run = Run(places, budget_s, set())
run.all(steps)
run.conclude()
"""


def command(tmp_path: Path, names: str, limit_s: float, budget_s: float) -> dict[str, Any]:
    """Returns arguments for subprocess, which run these steps."""
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
    results = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]
    assert [result["name"] for result in results] == names.split(",")
    last = done.stdout.splitlines()[-len(results) :]
    assert [line.split()[:2] for line in last] == [[r["name"], r["status"]] for r in results]
    return {result["name"]: result for result in results}


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


def test_a_step_runs_in_an_empty_folder_and_knows_its_time(tmp_path: Path) -> None:
    facts = results_of(tmp_path, "good,where", limit_s=40)["where"]["facts"]
    assert facts["modules"] == []
    assert 1 < facts["left_s"] <= 40


def test_a_short_line_says_how_a_step_ended() -> None:
    result = {"name": "probe", "status": "failed", "seconds": 1.5, "reason": "two\nlines " * 100}
    line = short(result)
    assert line.split()[:6] == ["probe", "failed", "1.50", "s", "two", "lines"]
    assert (len(line) < 350, "\n" in line) == (True, False)


def test_a_gpu_was_seen_whatever_else_is_missing() -> None:
    found = {"name": "facts", "status": "failed", "checks": {"driver": "passed", "torch": "failed"}}
    assert saw_gpu([found])
    assert not saw_gpu([found | {"checks": {"driver": "failed: none"}}])
    assert not saw_gpu([])


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in descendants(os.getpid())
        assert is_alive(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process.pid)
    assert not is_alive(process.pid)


def test_no_child_outlives_its_step(tmp_path: Path) -> None:
    found = results_of(tmp_path, "children,good")
    assert found["children"]["status"] == "passed"
    assert [is_alive(pid) for pid in found["children"]["facts"]["pids"]] == [False, False]
    assert found["good"]["status"] == "passed"


def test_the_budget_cuts_a_step_and_skips_those_after_it(tmp_path: Path) -> None:
    found = results_of(tmp_path, "hangs,good", limit_s=60, budget_s=15)
    assert found["hangs"]["status"] == "failed"
    assert found["hangs"]["seconds"] < 20
    assert found["good"]["status"] == "skipped"
    assert found["good"]["reason"].startswith("left out: it needs 3 s, and ")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_stopped_keeps_what_was_found(tmp_path: Path, how: signal.Signals) -> None:
    """Leaves no process: neither steps, in the background or not, nor the driver's client."""
    arguments = command(tmp_path, "good,background,hangs", 60, 600)
    with subprocess.Popen(**arguments, stdout=subprocess.DEVNULL) as running:
        report = tmp_path / "gpu-check.json"
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if report.exists() and "unfinished" in report.read_text():
                break
            time.sleep(0.05)
        pids = descendants(running.pid)
        running.send_signal(how)
        running.wait(60)
    good, background, hangs = json.loads(report.read_text())["steps"]
    assert (good["status"], background["status"]) == ("passed", "passed")
    assert (hangs["facts"], hangs["checks"]) == ({"before": 1}, {"first": "passed"})
    if how == signal.SIGTERM:
        assert (hangs["status"], hangs["reason"]) == ("failed", "cut off by SIGTERM")
    else:
        assert hangs["status"] == "unfinished"
    assert pids
    deadline_s = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_a_step_in_the_background_runs_with_the_others(tmp_path: Path) -> None:
    found = results_of(tmp_path, "waits,background_waits")
    assert [result["status"] for result in found.values()] == ["passed", "passed"]


def test_a_background_step_outlives_the_end_of_another(tmp_path: Path) -> None:
    """Ends every process that a step leaves, and no other."""
    found = results_of(tmp_path, "children,good,background_slow")
    assert found["background_slow"]["status"] == "passed", found["background_slow"]["reason"]


def test_a_budget_that_no_step_fits_is_named(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts/gpu-check"), "--budget", "2", "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no step fits --budget 2; give 5 or more" in done.stdout
    steps = json.loads((tmp_path / "out/gpu-check.json").read_text())["steps"]
    assert {step["status"] for step in steps} == {"skipped"}


def test_steps_that_fit_run_where_the_first_does_not(tmp_path: Path) -> None:
    found = results_of(tmp_path, "long,good", budget_s=20)
    assert "left out: it needs 100 s" in found["long"]["reason"]
    assert found["good"]["status"] == "passed"


def test_bad_options_are_refused_by_name() -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "scripts/gpu-check"), *options]
        env = {**os.environ, "PYTHON": sys.executable}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    done = run("--steps", "facts,nonsense")
    assert (done.returncode, "nonsense is not a step" in done.stderr) == (2, True)
    done = run("--wheels", "/nowhere")
    assert (done.returncode, "/nowhere is not a folder" in done.stderr) == (2, True)
    done = run("--budget", "0")
    assert (done.returncode, "--budget must be 1 to" in done.stderr) == (2, True)
    done = run("--time-factor", "0")
    assert (done.returncode, "--time-factor" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "prepare, first or second is missing"),
        (("third",), "third is not prepare, first or second"),
        (("prepare", "--out", "x"), "prepare takes no options"),
        (("first", "--nonsense", "x"), "--nonsense is not an option of first"),
        (("second", "--out"), "--out is not an option of second, or lacks its value"),
        (("second", "--budget", "soon"), "--budget soon is not a number of seconds"),
    ],
)
def test_bad_options_of_a_visit_are_one_line(options: tuple[str, ...], says: str) -> None:
    command = [str(ROOT / "scripts/gpu-day"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu-day: {says}; see scripts/gpu-day --help\n"
