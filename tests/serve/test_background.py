"""prism-serve in the background of another program, such as `prism-replay compare`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.serve.conftest import START_S, STOP_S, alive, descendants, until, write_yaml

PROGRAM = """
import sys, time
from pathlib import Path
from prism.serve.background import free_port, serving

folder = Path(sys.argv[1])
with serving(folder / "prism.yaml", free_port(), folder / "logs"):
    (folder / "ready").touch()
    time.sleep(600)
"""


def test_it_ends_with_a_program_that_gets_sigterm(tmp_path: Path) -> None:
    write_yaml(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as program:
        until((tmp_path / "ready").exists, "ready", START_S)
        below = descendants(program.pid)
        assert below
        program.send_signal(signal.SIGTERM)
        assert program.wait(STOP_S) == 128 + signal.SIGTERM
    assert not [pid for pid in below if alive(pid)]
