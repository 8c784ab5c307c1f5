"""Step "mps": two clients of one MPS server, with kvcached's pages and ledger.

They compute at the same time and read guarded holes as zeros. Then one is killed while it computes,
and the other one continues and gets its memory. Two processes without MPS do the same as reference.
NVIDIA promises nothing for clients that are killed while they compute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from lab.gpu_check.driver import Driver, open_or_skip
from lab.gpu_check.kv import ledger, require_kvcached
from lab.gpu_check.memory.mps_client import GRANT_S, PIPE
from lab.gpu_check.memory.peers import Peer
from lab.gpu_check.report import (
    PASSED,
    Report,
    Skip,
    end_of,
    is_quick,
    run_as_step,
    stretched,
)
from lab.gpu_check.sizes import MIB, Sizes, short_folder

PROGRAM = "nvidia-cuda-mps-control"
NAMES = "nvidia-cuda-mps"  # 15 characters, to which the kernel cuts the programs' names
LOG = "CUDA_MPS_LOG_DIRECTORY"
START_S, READY_S, ANSWER_S, END_S, QUIT_S = 8.0, 30.0, 8.0, 3.0, 8.0
LOOK_S = 0.05
BUSY_S = 0.3  # work of a client before it is killed
HELD, TAKEN = 0.7, 0.6  # shares of the ledger: held by the killed client, then by the other
PAGES_MIN = 32  # operands take some of them
SLACK_BYTES = 256 * MIB


class Asked(Protocol):
    """Process that answers a line with a line of JSON."""

    def answer(self, question: str = "", timeout_s: float = ANSWER_S) -> str: ...

    def send(self, question: str) -> None: ...

    def kill(self) -> float: ...


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("mps", __doc__, body, arguments)


def body(report: Report) -> None:
    require_kvcached()
    driver = open_or_skip()
    if find_spec("torch") is None:
        raise Skip("torch is not installed")
    if shutil.which(PROGRAM) is None:
        raise Skip(f"{PROGRAM} is not on the PATH; NVIDIA's driver comes with it")
    free_bytes = driver.free_bytes()
    pages = max(PAGES_MIN, Sizes.of(free_bytes).pages(1024, 0.05))
    daemon = Daemon(short_folder(report.work, "mps"))
    try:
        with report.check("daemon"):
            daemon.start()
        if report.checks["daemon"] != PASSED:
            return
        with report.check("clients"), ExitStack() as stack:
            clients(report, daemon, stack, pages)
        with report.check("quits"):
            report.fact(quit_s=daemon.quit())
    finally:
        daemon.kill()
    with report.check("gpu_afterwards"):
        kept(report, driver, free_bytes)


def kept(report: Report, driver: Driver, free_bytes: int) -> None:
    """Raises RuntimeError unless the memory of the clients comes back."""
    deadline_s = time.monotonic() + stretched(QUIT_S)
    while (kept_bytes := free_bytes - driver.free_bytes()) > SLACK_BYTES:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{kept_bytes} bytes are not back after MPS has ended")
        time.sleep(LOOK_S)
    report.fact(kept_bytes=kept_bytes)


def clients(report: Report, daemon: Daemon, stack: ExitStack, pages: int) -> None:
    """Starts two pairs of processes, with MPS and without, and checks them."""
    pairs = {
        name: [stack.enter_context(client_process(pipe, namespace, who, pages)) for who in "ab"]
        for name, pipe in (("plain", daemon.pipe.with_name("none")), ("mps", daemon.pipe))
        for namespace in [stack.enter_context(namespace_of(pages))]
    }
    for peer in (peer for pair in pairs.values() for peer in pair):
        peer.answer(timeout_s=stretched(READY_S))
    with report.check("side_by_side"):
        seconds = 0.5 if is_quick() else 1.0
        rates = {name: rates_of(pair, seconds) for name, pair in pairs.items()}
        report.fact(steps_per_s=rates, servers=daemon.servers())
        report.figure("side_by_side", rates["mps"]["both"], rates["plain"]["both"])
        if not daemon.servers():
            raise RuntimeError("the clients do not use MPS, since no server runs")
    with report.check("guarded_holes"):
        report.fact(holes=[holes(peer) for peer in pairs["mps"]])
    granted_s: dict[str, float] = {}
    with report.check("killed_without_mps"):
        granted_s["plain"] = killed(pairs["plain"], pages)
    with report.check("killed_client"):
        granted_s["mps"] = killed(pairs["mps"], pages)
        report.figure("killed_client", granted_s["mps"], granted_s.get("plain"))


# --- the daemon --------------------------------------------------------------------------------


class Daemon:
    """Control daemon of MPS with a separate pipe, from `start` to `quit`."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.pipe, self._log = folder / "pipe", folder / "log"
        for path in (self.pipe, self._log):
            path.mkdir(parents=True)
        self._env = {**os.environ, PIPE: str(self.pipe), LOG: str(self._log)}

    def start(self) -> None:
        """Starts the daemon. Raises RuntimeError with the end of its logs if that fails."""
        with (self._log / "start.log").open("wb") as log:  # the daemon may keep this open
            done = subprocess.run(
                [PROGRAM, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                timeout=stretched(START_S),
                check=False,
            )
        deadline_s = time.monotonic() + stretched(START_S)
        while done.returncode == 0 and time.monotonic() < deadline_s:
            if self._command("get_server_list").returncode == 0:
                return
            time.sleep(LOOK_S)
        raise RuntimeError(f"{PROGRAM} does not start: {self.said()}")

    def servers(self) -> list[int]:
        """Returns the pids of the servers, which compute for clients."""
        return [int(word) for word in self._command("get_server_list").stdout.split()]

    def quit(self) -> float:
        """Ends the daemon and its servers. Returns seconds. Raises RuntimeError if one stays."""
        began_s = time.monotonic()
        done = self._command("quit")
        while left := self.processes():
            if time.monotonic() - began_s > stretched(QUIT_S):
                said = f"{done.stderr.strip()} {self.said()}"
                raise RuntimeError(f"{PROGRAM} does not end, {left} are left: {said}")
            time.sleep(LOOK_S)
        return round(time.monotonic() - began_s, 2)

    def kill(self) -> None:
        """Kills the remaining processes of the daemon."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Returns the daemon and its servers, found by name and by the pipe in the environment."""
        found, variable = [], f"{PIPE}={self.pipe}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_mps = (path / "comm").read_text().startswith(NAMES)
                if is_mps and variable in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return sorted(found)

    def said(self) -> str:
        """Returns the ends of the logs."""
        return " ".join(map(end_of, sorted(self._log.glob("*.log"))))

    def _command(self, line: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [PROGRAM],
                input=f"{line}\n",
                env=self._env,
                capture_output=True,
                text=True,
                timeout=stretched(START_S),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([PROGRAM], 1, "", "it does not answer")


# --- questions to the clients ------------------------------------------------------------------


@contextmanager
def namespace_of(pages: int) -> Iterator[str]:
    """Yields the namespace of a ledger for one pair of clients."""
    name = f"gpu-check-{uuid4().hex[:8]}"
    with ledger(pages, name):
        yield name


@contextmanager
def client_process(pipe: Path, namespace: str, name: str, pages: int) -> Iterator[Peer]:
    """Yields a client, which ends by itself after the block. It is killed only if it hangs, since
    MPS should not lose a client that works."""
    arguments = (str(pipe), namespace, name, str(pages))
    with Peer(*arguments, module="lab.gpu_check.memory.mps_client") as peer:
        try:
            yield peer
        finally:
            if peer.process.stdin is not None:
                with suppress(BrokenPipeError):
                    peer.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(stretched(END_S))


def ask(peer: Asked, question: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(peer.answer(question, stretched(timeout_s)))
    return answer


def rates_of(pair: Sequence[Asked], seconds: float) -> dict[str, float]:
    """Returns steps per second of one client alone and of both at once. Raises RuntimeError for a
    wrong result."""
    alone = computed(ask(pair[0], f"compute {seconds}"))
    for peer in pair:
        peer.send(f"compute {seconds}")
    both = sum(computed(json.loads(peer.answer(timeout_s=stretched(ANSWER_S)))) for peer in pair)
    return {"alone": round(alone, 1), "both": round(both, 1)}


def computed(answer: dict[str, Any]) -> float:
    if not answer["right"]:
        raise RuntimeError("a client computes wrong results")
    rate: float = answer["steps"] / answer["seconds"]
    return rate


def holes(peer: Asked) -> dict[str, Any]:
    """Returns what a client reads from a hole and from a page. Raises RuntimeError unless these are
    zeros, and the written bytes."""
    found = ask(peer, "holes")
    if (found["hole"], found["page"]) != ([0, 0], [9, 9]):
        raise RuntimeError(f"holes and pages read as {found}, not as 0 and 9")
    return found


def killed(pair: Sequence[Asked], pages: int) -> float:
    """Kills the first of two busy clients. Returns the seconds until the second one has its memory.
    Raises RuntimeError for wrong results of the second one."""
    victim, other = pair
    ask(victim, f"hold {int(HELD * pages)}")
    other.send(f"take {2 * BUSY_S} {int(TAKEN * pages)}")
    ask(victim, "busy")
    time.sleep(BUSY_S)
    killed_s = time.monotonic()
    victim.kill()
    found = json.loads(other.answer(timeout_s=stretched(GRANT_S + ANSWER_S)))
    return granted_after_s(found, killed_s)


def granted_after_s(found: dict[str, Any], killed_s: float) -> float:
    computed(found)
    if found["granted_s"] is None:
        raise RuntimeError(f"the other client did not get its memory in {GRANT_S:.0f} s")
    if found["granted_s"] < killed_s:
        raise RuntimeError("the ledger granted what the other client held")
    seconds: float = found["granted_s"] - killed_s
    return seconds


if __name__ == "__main__":
    sys.exit(main())
