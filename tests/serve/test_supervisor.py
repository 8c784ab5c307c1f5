"""Children are started again a bounded number of times, and ended in order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from prism.errors import ConfigError
from prism.queueing.server import BundledRedis
from prism.serve.processes.children import Child, ChildSpec, RestartBackoff
from prism.serve.processes.redis_part import RedisPart
from prism.serve.processes.supervisor import ClusterFailedError, Supervisor

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
    """Provides children that run a script, and kills them at the end of the test."""
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


def test_pauses_double_up_to_half_a_minute_and_start_over_after_a_minute_of_peace() -> None:
    backoff, now_s, delays_s = RestartBackoff(), 0.0, []
    for _ in range(8):
        delays_s.append(backoff.died(now_s))
        now_s += delays_s[-1] + 59  # it dies before a minute is over
    assert delays_s == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.died(now_s + 61) == 0.5


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
    assert said == ["steady ended (signal SIGKILL); restarting in 0.5 s"]
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


# --- once the cluster has been up -----------------------------------------------------------

BEATING = """
import asyncio
from prism.process import beat
print("up", flush=True)
asyncio.run(beat())
"""
# The loop hangs while a thread of the process continues.
HANGING = """
import asyncio, threading, time
from prism.process import beat
async def main():
    beating = asyncio.create_task(beat())
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    await asyncio.sleep(0.1)
    print("up", flush=True)
    time.sleep(600)
asyncio.run(main())
"""
HANG_S = 5.0


def settled(groups: list[list[Child]], hang_s: float = HANG_S) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    supervisor = Supervisor(groups, None, said.append, hang_s)
    supervisor.start()
    supervisor.settled = True
    return supervisor, said


@pytest.mark.parametrize("code", [1, 2])
def test_one_that_keeps_dying_leaves_the_others_running(make: Make, code: int) -> None:
    broken, steady = make("broken", f"raise SystemExit({code})"), make("steady", STEADY)
    supervisor, said = settled([[broken], [steady]])
    now_s = 0.0
    while len(said) < 9:
        until(lambda: not broken.running())
        supervisor.watch(now_s)
        now_s += 0.25
    assert steady.running()
    assert said[8] == f"broken ended (exit code {code}); restarting in 30 s"
    assert supervisor.troubles == {"broken": f"ended (exit code {code}); restarting"}


def test_deaths_in_a_row_are_reported_while_the_part_runs_again(make: Make) -> None:
    child = make("frail", STEADY)
    supervisor, _ = settled([[child]], hang_s=float("inf"))
    now_s = 0.0
    for deaths in range(1, 4):
        child.kill()
        supervisor.watch(now_s)
        now_s += 30
        supervisor.watch(now_s)
        assert child.running()
        known = {"frail": "ended 3 times in a row (last: signal SIGKILL)"}
        assert supervisor.troubles == (known if deaths == 3 else {})
    supervisor.watch(now_s + 61)
    assert supervisor.troubles == {}


def test_one_that_cannot_be_started_is_tried_again(make: Make, tmp_path: Path) -> None:
    child, steady = make("late", STEADY), make("steady", STEADY)
    supervisor, said = settled([[child], [steady]])
    child.kill()
    supervisor.watch(0.0)
    child.log = tmp_path / "missing" / "late.log"
    supervisor.watch(1.0)
    assert "cannot be started: [Errno 2]" in said[1]
    (tmp_path / "missing").mkdir()
    supervisor.watch(2.0)
    assert child.running()
    assert supervisor.troubles == {}
    assert steady.running()


def test_restart_arguments_are_for_restarts_alone(make: Make, tmp_path: Path) -> None:
    child = make("words", "import sys; print(*sys.argv[1:])", "first")
    object.__setattr__(child.spec, "restart_arguments", ("again",))
    supervisor, _ = settled([[child]])
    for now_s in (0.0, 1.0):
        until(lambda: not child.running())
        supervisor.watch(now_s)
    until(lambda: child.log.read_text() == "first\nfirst again\n")


def stop_answering(child: Child) -> None:
    until(lambda: child.beats() > 0)
    child.send(signal.SIGSTOP)


def run_supervisor(supervisor: Supervisor, from_s: float, to_s: float, step_s: float) -> None:
    now_s = from_s
    while now_s <= to_s:
        supervisor.watch(now_s)
        now_s += step_s


def watch_until_said(supervisor: Supervisor, said: list[str], from_s: float, to_s: float) -> None:
    """Watches until the first line. A killed process may be gone at the next look."""
    now_s = from_s
    while not said and now_s <= to_s:
        supervisor.watch(now_s)
        now_s += 0.2


def test_one_that_hangs_is_killed_and_started_again(make: Make) -> None:
    hung, well = make("hung", BEATING), make("well", BEATING)
    supervisor, said = settled([[hung], [well]], hang_s=HANG_S)
    stop_answering(hung)
    first = hung.pid
    run_supervisor(supervisor, 0, 4, 0.2)
    assert hung.running()
    beats = well.beats()
    until(lambda: well.beats() > beats)
    watch_until_said(supervisor, said, 4.2, 6)
    assert said == ["hung did not answer for 5 s and was killed"]
    until(lambda: not hung.running())
    supervisor.watch(10)
    assert said[1:] == ["hung ended (did not answer for 5 s); restarting in 0.5 s"]
    assert supervisor.troubles == {"hung": "ended (did not answer for 5 s); restarting"}
    supervisor.watch(11)
    until(lambda: hung.beats() > 0)
    assert hung.pid != first
    assert well.running()


def test_a_thread_beside_a_hanging_loop_does_not_count(make: Make) -> None:
    child = make("loop", HANGING)
    supervisor, said = settled([[child]])
    until(lambda: is_up(child))
    watch_until_said(supervisor, said, 0, 6)
    assert said == ["loop did not answer for 5 s and was killed"]


def test_time_in_which_the_supervisor_did_not_run_counts_for_nobody(make: Make) -> None:
    child = make("asleep", BEATING)
    supervisor, said = settled([[child]])
    stop_answering(child)
    for hour in range(4):  # each look finds that an hour has passed
        supervisor.watch(3600.0 * hour)
    assert said == []
    child.send(signal.SIGCONT)
    beats = child.beats()
    until(lambda: child.beats() > beats)
    run_supervisor(supervisor, 14400, 14404, 0.2)
    assert said == []
    assert child.running()


def test_imports_before_the_first_beat_may_take_longer(make: Make) -> None:
    child = make("slow", STEADY)
    supervisor, said = settled([[child]])
    run_supervisor(supervisor, 0, 299, 0.5)
    assert said == []
    watch_until_said(supervisor, said, 299.5, 302)
    assert said == ["slow did not answer for 300 s and was killed"]


# --- Redis ----------------------------------------------------------------------------------


@pytest.fixture
def redis(short_dir: Path) -> Iterator[BundledRedis]:
    with BundledRedis(short_dir) as server:
        yield server


def test_redis_is_started_again_without_waiting_for_it(redis: BundledRedis) -> None:
    said: list[str] = []
    supervisor = Supervisor([], redis, said.append, HANG_S)
    supervisor.settled = True
    for deaths, now_s in enumerate((0.0, 40.0, 80.0, 120.0, 160.0, 200.0, 240.0), start=1):
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGKILL)
        until(lambda: not redis.running)
        supervisor.watch(now_s)
        supervisor.watch(now_s + 0.1)
        assert not redis.running
        supervisor.watch(now_s + 31)
        assert redis.running
        assert len(said) == deaths
    assert said[-1] == "redis ended (signal SIGKILL); restarting in 30 s"
    supervisor.stop(lambda: False)


def test_a_redis_whose_directory_was_removed_gets_it_again(redis: BundledRedis) -> None:
    supervisor = Supervisor([], redis, lambda _: None, HANG_S)
    supervisor.settled = True
    shutil.rmtree(redis.directory)
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)
    until(lambda: not redis.running)
    supervisor.watch(0.0)
    supervisor.watch(1.0)
    assert redis.running
    supervisor.stop(lambda: False)


def test_a_redis_that_cannot_load_its_data_starts_empty(redis: BundledRedis) -> None:
    """Starts empty after one failed start. The status shows the reason for 10 minutes."""
    said: list[str] = []
    supervisor = Supervisor([], redis, said.append, HANG_S)
    supervisor.settled = True
    now_s = 0.0

    def looked() -> str:
        nonlocal now_s
        now_s += 0.2
        supervisor.watch(now_s)
        return supervisor.troubles.get("redis", "")

    with Redis.from_url(redis.url) as client:
        client.set("key", "value")
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)
    until(lambda: not redis.running)
    [manifest] = redis.directory.glob("*/*.manifest")
    manifest.write_bytes(b"")
    until(lambda: looked() and "started empty" in said[-1])
    [place] = redis.directory.glob("damaged-*")
    why = (
        "could not load its data (Found an empty AOF manifest) and started empty;"
        f" the data are in {place}"
    )
    assert said == [
        "redis ended (signal SIGKILL); restarting in 0.5 s",
        "redis ended (exit code 1); restarting in 0 s",
        f"redis {why}",
    ]
    assert (place / manifest.name).exists()
    until(lambda: looked() == why and redis._answers())
    with Redis.from_url(redis.url) as client:
        assert client.get("key") is None
    supervisor._redis._damaged_s -= 601  # type: ignore[union-attr]
    assert not looked()
    supervisor.stop(lambda: False)


def test_a_redis_whose_data_cannot_be_put_aside_is_started_all_the_same(
    redis: BundledRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    part = RedisPart(redis, said.append)
    redis.kill()
    shutil.rmtree(redis.directory / "appendonlydir")
    monkeypatch.setattr(redis, "load_failure", lambda: "no reason")
    part.start()
    until(redis._answers)
    [line] = said
    assert line.startswith(
        "redis could not load its data (no reason), and they could not be moved: "
    )


def test_a_redis_that_hangs_is_killed_and_started_again(redis: BundledRedis) -> None:
    said: list[str] = []
    supervisor = Supervisor([], redis, said.append, HANG_S)
    supervisor.settled = True
    now_s = 0.0

    def looked(step_s: float = 0.01) -> int:
        nonlocal now_s
        now_s += step_s
        supervisor.watch(now_s)
        return supervisor._watched[0].part.beats()

    until(lambda: looked() > 2)
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    until(lambda: looked(0.2) >= 0 and len(said) == 2)
    assert said == [
        "redis did not answer for 5 s and was killed",
        "redis ended (did not answer for 5 s); restarting in 0.5 s",
    ]
    until(lambda: looked() > 1 and redis.running)
    assert len(said) == 2
    supervisor.stop(lambda: False)


PARENT = """
import sys, time
from pathlib import Path
from prism.queueing.server import BundledRedis
from prism.serve.processes.children import Child, ChildSpec
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
