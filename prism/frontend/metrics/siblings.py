"""Metrics of all frontends of a machine, collected by the frontend that is scraped."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq
import zmq.asyncio

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.requests import FrontendMetrics, MetricsWanted
from prism.transport import Channel

Names = tuple[str, ...]
ANSWER_S = 1.0  # frontends that answer later are left out
_HELP = "# HELP "


class Siblings:
    """Other frontends of the machine. For one event loop.

    `own` returns this frontend's metrics of these names, or all, as text for Prometheus.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: ClusterConfig,
        frontend_id: str,
        own: Callable[[Names], str],
    ) -> None:
        self._context = context
        self._config = config
        self._id = frontend_id.partition("@")[0]  # the name of its socket
        self._own = own
        self._channels: dict[str, Channel[None]] = {}
        self._answers: dict[tuple[str, Names], asyncio.Future[str]] = {}

    async def metrics(self, names: Names = ()) -> list[str]:
        """Returns the metrics of this frontend, and of the others that answer in time."""
        asked = [self._asked(other, names) for other in self._others()]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_S)
        return [self._own(names), *(each.result() for each in asked if each.done())]

    def take(self, message: MetricsWanted | FrontendMetrics) -> None:
        if isinstance(message, MetricsWanted):
            answer = FrontendMetrics(self._id, self._own(message.names), message.names)
            self._send(message.frontend_id, answer)
        elif asked := self._answers.pop((message.frontend_id, message.names), None):
            asked.set_result(message.text)

    def _others(self) -> set[str]:
        """Returns the ids of the other frontends. They are found by their sockets, without Redis;
        the launcher removes the sockets of dead frontends."""
        prefix = Path(self._config.frontend_endpoint("").removeprefix("ipc://"))
        found = {path.name.removeprefix(prefix.name) for path in prefix.parent.glob("frontend-*")}
        for gone in self._channels.keys() - found:
            self._channels.pop(gone).close()
        for key in [key for key in self._answers if key[0] not in found]:
            del self._answers[key]
        return found - {self._id}

    def _asked(self, frontend_id: str, names: Names) -> asyncio.Future[str]:
        """Requests metrics and returns their future, which concurrent scrapes share."""
        key = (frontend_id, names)
        if key not in self._answers:
            self._answers[key] = asyncio.get_running_loop().create_future()
        self._send(frontend_id, MetricsWanted(self._id, names))
        return self._answers[key]

    def _send(self, frontend_id: str, message: MetricsWanted | FrontendMetrics) -> None:
        if frontend_id not in self._channels:
            channel = self._channels[frontend_id] = Channel[None](self._context, zmq.PUSH)
            channel.connect(self._config.frontend_endpoint(frontend_id))
        try:
            self._channels[frontend_id].send(message)
        except zmq.ZMQError:  # the frontend hangs
            return


def labelled(text: str, frontend_id: str) -> str:
    """Adds the label `frontend` to each sample. REQUIRES: all samples have labels."""
    return re.sub(r"^(\w+)\{", rf'\1{{frontend="{frontend_id}",', text, flags=re.MULTILINE)


def merged(texts: Iterable[str]) -> str:
    """Merges texts for Prometheus: samples of a metric are grouped after its name and type."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in f"\n{text}".split(f"\n{_HELP}")[1:]:
            text_of_help, kind, *samples = family.splitlines()
            families.setdefault(f"{_HELP}{text_of_help}\n{kind}", []).extend(samples)
    return "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items())
