"""Actor that Ray runs on a machine, without Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from prism.curve import new_secret
from prism.serve.node.run_dir import LOCK_FILE, lock
from prism.serve.on_ray.node_actor import NodeActor, NodeReport
from tests.serve.conftest import until

KEY = new_secret()


def end_of(actor: NodeActor) -> NodeReport:
    lines: list[str] = []
    code: list[int | None] = [None]

    def ended() -> bool:
        said = actor.poll()
        lines.extend(said.lines)
        code[0] = said.code
        return said.code is not None

    until(ended, "its end", 60)
    actor._console.close()
    return NodeReport(tuple(lines), code[0])


def test_folders_of_killed_launchers_are_swept_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletes its own folder as well. A refused file is one line and exit code 2."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, living, strange = (tmp_path / f"prism-node-{name}" for name in ("a", "b", "c"))
    for folder in (left, living, strange):
        folder.mkdir(mode=0o700)
    (left / LOCK_FILE).touch()
    held = lock(living)
    assert held is not None
    actor = NodeActor("nodes: []", KEY, "a", [])
    assert not left.exists()
    own = set(tmp_path.iterdir()) - {living, strange}
    assert len(own) == 1
    said = end_of(actor)
    assert said.code == 2, said
    assert len(said.lines) == 1
    assert "error: " in said.lines[0]
    assert set(tmp_path.iterdir()) == {living, strange}
    os.close(held)


SLEEPER = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
print("one", flush=True)
while not (Path(sys.argv[1]) / "more").exists():
    time.sleep(0.05)
print("two", flush=True)
time.sleep(600)
"""


def test_the_next_actor_of_a_node_finds_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continues the lines of the launcher and keeps its folder, after Ray killed the first one."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("prism.serve.on_ray.node_actor._LAUNCHER", "sleeper")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = NodeActor("nodes: []", KEY, "a", [])
    until(lambda: first.poll().lines == ("one",), "its first line")
    assert first._process is not None
    first._process.terminate()  # as Ray does; its signals do not reach the launcher
    first._process.kill()
    first._process.wait()
    (folder,) = tmp_path.glob("prism-node-*")
    other = NodeActor("nodes: []", KEY, "b", [])
    second = NodeActor("nodes: []", KEY, "a", [])
    assert len(list(tmp_path.glob("prism-node-*"))) == 2
    (folder / "more").touch()
    until(lambda: second.poll().lines == ("two",), "the next line, and no other")
    for actor in (second, other):
        actor.signal(signal.SIGTERM)
        end_of(actor)
    first._console.close()
    assert list(tmp_path.glob("prism-node-*")) == []


FOLLOWER = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def reload(*_):
    text = (folder / "cluster.yaml").read_text()
    print(f"reload: {text!r}" if "bad" in text else "reloaded: x", flush=True)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
(folder / "pid").write_text(str(os.getpid()))
print("starts", flush=True)
while not (folder / "hears").exists():
    time.sleep(0.05)
signal.signal(signal.SIGHUP, reload)
print("hears", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_launcher_takes_other_nodes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats the request to a launcher that was just starting.

    The next actor also repeats it if the launcher has not answered, or has another file.
    """
    (tmp_path / "follower.py").write_text(FOLLOWER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("prism.serve.on_ray.node_actor._LAUNCHER", "follower")
    monkeypatch.setattr("prism.serve.on_ray.node_actor._RESEND_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    actor = NodeActor("nodes: [a]", KEY, "a", [])
    assert actor.poll().follows
    until(lambda: actor.poll().lines == ("starts",), "its start")
    (folder,) = tmp_path.glob("prism-node-*")
    actor.follow("nodes: [a, b]")
    assert actor.poll().follows is None
    next_one = NodeActor("nodes: [a, b]", KEY, "a", [])
    assert next_one.poll().follows is None, "it has not answered"
    (folder / "hears").touch()
    until(lambda: next_one.poll().follows, "its answer")
    assert (folder / "cluster.yaml").read_text().startswith("nodes: [a, b]\n")
    third = NodeActor("nodes: [a, b]", KEY, "a", [])
    assert third.poll().follows, "nothing is asked"
    other = NodeActor("nodes: [bad]", KEY, "a", [])
    until(lambda: other.poll().follows is False, "it refuses")
    other.follow("nodes: [a]")
    until(lambda: other.poll().follows, "it follows")
    other.signal(signal.SIGTERM)
    end_of(actor)
    for each in (next_one, third, other):
        each._console.close()
