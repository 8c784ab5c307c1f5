"""What the user sees while a cluster starts: on a terminal a table, elsewhere a line per change."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from prism.config.admin import host_and_port
from prism.config.schema import ClusterConfig
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus

_PROBE_TIMEOUT_S = 2.0


def url_of(config: ClusterConfig) -> str:
    """Where this machine reaches the frontend."""
    return _url(config, config.host, config.port)


def admin_url_of(config: ClusterConfig) -> str:
    """Where it reaches the pages of operators; for a Unix socket the host says nothing."""
    if not config.admin:
        return url_of(config)
    found = host_and_port(config.admin)
    return _url(config, *found) if found is not None else "http://localhost"


def _url(config: ClusterConfig, host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    kind = "https" if config.frontend.tls_certificate else "http"
    return f"{kind}://{f'[{host}]' if ':' in host else host}:{port}"


def _trusted(certificate: str | None) -> ssl.SSLContext | bool:
    """The cluster's own certificate, whatever name it has and whoever signed it."""
    if certificate is None:
        return True
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Probe:
    """Asks a frontend how the cluster is."""

    def __init__(self, config: ClusterConfig) -> None:
        self._http = _client(config, url_of(config))
        path = config.admin if host_and_port(config.admin) is None else ""
        self._admin = _client(config, admin_url_of(config), path or None)

    def reason(self) -> str | None:
        """Why the cluster is not ready; None when it is."""
        try:
            answer = self._http.get("/health")
        except httpx.TransportError:
            return "starting: waiting for the frontend"
        return None if answer.status_code == 200 else str(answer.json().get("reason"))

    def status(self) -> ClusterStatus | None:
        try:
            answer = self._admin.get("/status")
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            return None
        return msgspec.convert(answer.json(), ClusterStatus)

    def close(self) -> None:
        self._http.close()
        self._admin.close()


def _client(config: ClusterConfig, url: str, path: str | None = None) -> httpx.Client:
    """`path`: of a Unix socket."""
    verify = _trusted(config.frontend.tls_certificate)
    transport = httpx.HTTPTransport(uds=path, verify=verify, trust_env=False)
    return httpx.Client(base_url=url, timeout=_PROBE_TIMEOUT_S, transport=transport)


Show = Callable[[str, ClusterStatus | None], None]


@contextmanager
def display(console: Console) -> Iterator[Show]:
    """Gives what shows the reason why the cluster is not ready, and its status."""
    if not console.is_terminal:
        yield _lines(console)
        return
    live = Live(console=console, auto_refresh=False, transient=True)
    with live:
        yield lambda reason, status: live.update(_table(reason, status), refresh=True)


def _lines(console: Console) -> Show:
    """For logs and pipes: one line whenever the reason changes."""
    last = ""

    def show(reason: str, _status: ClusterStatus | None) -> None:
        nonlocal last
        if reason != last:
            last = reason
            console.print(reason, markup=False, highlight=False, soft_wrap=True)

    return show


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
