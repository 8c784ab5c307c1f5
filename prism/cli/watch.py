"""`prism-serve top` and `logs`: a running cluster, live."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.units import format_size
from prism.errors import ConfigError
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.console import report

_BAR = 40
_ASK_S = 10.0
# Parts of a device's memory, and their colours.
_PARTS = {"weights": "cyan", "KV": "green", "other": "yellow", "free": "bright_black"}


def show(config: ClusterConfig, console: Console, every_s: float, times: int | None) -> None:
    """Draws the cluster until Ctrl-C, or `times` times. Raises OperatorError."""
    drawn = 0
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while times is None or drawn < times:
            live.update(picture(_status(config)), refresh=True)
            drawn += 1
            if times is None or drawn < times:
                time.sleep(every_s)


def _status(config: ClusterConfig) -> ClusterStatus:
    result = operator.ask(config, OperatorCommand("status"), _ASK_S)
    return msgspec.json.decode(result.message, type=ClusterStatus)


def picture(status: ClusterStatus) -> RenderableType:
    """Returns bars of each device's memory, then models and waiting requests."""
    legend = Text("  ").join(Text(f"■ {name}", style=style) for name, style in _PARTS.items())
    table = Table(
        "device", "memory", "used", "waiting", "running", "KVPR", box=None, pad_edge=False
    )
    for agent in status.agents:
        table.add_row(
            report.device_name(status, agent.device),
            _bar(agent),
            f"{format_size(agent.reserved_bytes)} of {format_size(agent.capacity_bytes)}",
            str(sum(model.waiting for model in agent.models)),
            str(sum(model.running for model in agent.models)),
            f"{status.kvpr.get(agent.device, 0):.3g}",
        )
    return Group(table, legend, report.cluster(status))


def _bar(agent: AgentReport) -> Text:
    bar = Text()
    for name, size_bytes in shares(agent).items():
        cells = round(_BAR * size_bytes / max(1, agent.capacity_bytes))
        bar.append("█" * cells, style=_PARTS[name])
    bar.truncate(_BAR)
    bar.append("█" * (_BAR - len(bar)), style=_PARTS["free"])
    return bar


def shares(agent: AgentReport) -> dict[str, int]:
    """Returns the bytes of each part of a device's memory. Their sum is its capacity."""
    weights = sum(model.static_bytes for model in agent.models)
    kv = sum(model.kv_mapped_bytes for model in agent.models)
    other = max(0, agent.reserved_bytes - weights - kv)
    free = max(0, agent.capacity_bytes - max(agent.reserved_bytes, weights + kv))
    return {"weights": weights, "KV": kv, "other": other, "free": free}


def logs(config: ClusterConfig, parts: list[str], lines: int, *, follow: bool) -> int:
    """Prints the ends of these parts' logs, or of all. Returns the exit code of tail(1). Raises
    ConfigError that lists the parts."""
    folder = Path(config.run_dir) / "logs"
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    for part in parts:
        if part not in found:
            raise ConfigError(f"PART: unknown log {part!r}; logs: {', '.join(found)}")
    wanted = [str(found[part]) for part in parts or found]
    options = ["-n", str(lines), *(["-F"] if follow else [])]
    return subprocess.run(["tail", *options, *wanted], check=False).returncode
