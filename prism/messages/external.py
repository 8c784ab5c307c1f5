"""External servers: OpenAI-compatible servers of others, to which frontends pass requests on."""

from __future__ import annotations

import msgspec

from prism.messages import Wire


class ExternalModel(Wire, frozen=True):
    """A model with the adapter "external"."""

    name: str
    servers: tuple[str, ...]  # URLs
    slo_ttft_s: float
    slo_tpot_s: float
    aliases: tuple[str, ...] = ()
    key_variable: str = ""  # environment variable with the servers' API key
    sleep_after_s: float | None = None  # time without requests after which a server is put to sleep

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Sleep(Wire, frozen=True):
    """Sleep of one server, from before it is put to sleep until after it was woken.

    `phase` is "paused" while its memory is certainly not released, "asleep" from just before the
    release, and "waking" from just before the one call that resumes it.
    """

    phase: str
    api: str  # name of the server's API
    process: str = ""  # differs after a restart of the server
    problem: str = ""  # why it cannot be woken


class ServerLoad(Wire, frozen=True):
    """Open requests that a frontend has passed on to one server."""

    requests: int = 0
    tokens: int = 0  # of prompts (four bytes of the body each) and of answers so far


class ClientShare(Wire, frozen=True):
    """Memory of one kvcached client of a server: of one rank."""

    namespace: str
    device: str
    client: str
    number: int  # unique on the device
    pid: int
    held_bytes: int  # pages
    evictable_bytes: int  # part of them that holds prefix cache alone
    static_bytes: int
    min_bytes: int
    limit_bytes: int | None
    # Minimum and limit that the server's operator gave it.
    own_min_bytes: int
    own_limit_bytes: int | None


class ExternalServer(Wire, frozen=True):
    """State of one server in the cluster's status."""

    model: str
    url: str
    problem: str = ""  # why it does not answer; empty: it does
    load: ServerLoad = ServerLoad()
    clients: list[ClientShare] = []
    unmanaged: str = ""  # why its memory is not managed; empty: it is
    reason: str = ""  # of its present minimum and limit
    asleep: bool = False
    no_sleep: str = ""  # why it is not put to sleep, although its model has `sleep_after`

    @property
    def limit_bytes(self) -> int | None:
        """Limit of all ranks together. None: one of them is limited by its device alone."""
        limits = [c.limit_bytes for c in self.clients if c.limit_bytes is not None]
        return sum(limits) if limits and len(limits) == len(self.clients) else None


class ModelCard(msgspec.Struct):
    """A server's own description of its model, in the answer to GET /v1/models."""

    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[ModelCard]


def first_card(body: bytes) -> ModelCard | None:
    """Returns the first model of an answer to GET /v1/models, or None."""
    try:
        return msgspec.json.decode(body, type=_Cards).data[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return None
