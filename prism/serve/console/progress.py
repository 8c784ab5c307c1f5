"""Progress of a start on the console: a table on a terminal, otherwise a line per change."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from prism.config.schema.admin import host_and_port
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus

_PROBE_TIMEOUT_S = 2.0


def url_of(config: ClusterConfig) -> str:
    """Returns the URL of the frontend for this machine."""
    return _url(config, config.host, config.port)


def admin_url_of(config: ClusterConfig) -> str:
    """Returns the URL of the pages for operators. The host is irrelevant for a Unix socket."""
    if not config.admin:
        return url_of(config)
    found = host_and_port(config.admin)
    return _url(config, *found) if found is not None else "http://localhost"


def _url(config: ClusterConfig, host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    kind = "https" if config.frontend.tls_certificate else "http"
    return f"{kind}://{f'[{host}]' if ':' in host else host}:{port}"


def _trusted(certificate: str | None) -> ssl.SSLContext | bool:
    """Returns a context that trusts the cluster's own certificate, whatever its name and issuer."""
    if certificate is None:
        return True
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Probe:
    """Client that asks a frontend for the state of the cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self._http = _client(config, url_of(config))
        path = config.admin if host_and_port(config.admin) is None else ""
        self._admin = _client(config, admin_url_of(config), path or None)

    def reason(self) -> str | None:
        """Returns why the cluster is not ready, or None if it is."""
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
    """Returns a client. `path` is that of a Unix socket."""
    verify = _trusted(config.frontend.tls_certificate)
    transport = httpx.HTTPTransport(uds=path, verify=verify, trust_env=False)
    return httpx.Client(base_url=url, timeout=_PROBE_TIMEOUT_S, transport=transport)


Show = Callable[[str, ClusterStatus | None], None]


@contextmanager
def display(console: Console) -> Iterator[Show]:
    """Yields a function that shows why the cluster is not ready, and its status."""
    if not console.is_terminal:
        yield _lines(console)
        return
    live = Live(console=console, auto_refresh=False, transient=True)
    with live:
        yield lambda reason, status: live.update(_table(reason, status), refresh=True)


def _lines(console: Console) -> Show:
    """Returns a function for logs and pipes, which prints the reason when it changes."""
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
