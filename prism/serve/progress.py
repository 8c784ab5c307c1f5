"""What the user sees while a cluster starts: a live table on a terminal, else a line a change."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from prism.messages import AgentReport, ClusterStatus

_PROBE_TIMEOUT_S = 2.0


class Probe:
    """Asks a frontend how the cluster is."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_PROBE_TIMEOUT_S, trust_env=False)

    def reason(self) -> str | None:
        """Why the cluster is not ready; None when it is."""
        try:
            answer = self._http.get("/health")
        except httpx.TransportError:
            return "starting: waiting for the frontend"
        return None if answer.status_code == 200 else str(answer.json().get("reason"))

    def status(self) -> ClusterStatus | None:
        try:
            answer = self._http.get("/status")
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            return None
        return msgspec.convert(answer.json(), ClusterStatus)

    def close(self) -> None:
        self._http.close()


class Display(Protocol):
    """Shows the start-up. Use as a context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, reason: str, status: ClusterStatus | None) -> None: ...


class Lines:
    """For logs and pipes: one line whenever the reason changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, reason: str, status: ClusterStatus | None) -> None:
        if reason != self._last:
            self._last = reason
            self._console.print(reason, markup=False, highlight=False, soft_wrap=True)


class LiveTable:
    """For a terminal: devices and their models, drawn over itself (no thread of its own)."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, reason: str, status: ClusterStatus | None) -> None:
        self._live.update(_table(reason, status), refresh=True)


def make_display(console: Console) -> Display:
    return LiveTable(console) if console.is_terminal else Lines(console)


def _table(reason: str, status: ClusterStatus | None) -> Table:
    table = Table("device", "engines", "models", title="starting", title_justify="left")
    if status is None or not status.agents:
        table.add_row("-", "-", reason)
        return table
    for agent in status.agents:
        up = agent.engines_total - agent.engines_starting
        table.add_row(agent.device, f"{up}/{agent.engines_total} up", _models(agent))
    return table


def _models(agent: AgentReport) -> str:
    return ", ".join(f"{m.model} {m.state}" for m in agent.models) or "-"
