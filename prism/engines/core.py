"""Interface between the worker loop and an engine adapter.

An adapter is a package with eight functions, which an entry point of the group `prism.engines`
names. `preload` does the heavy imports, `create` runs after them; the other six import nothing
heavy.
  lacks(device: str) -> str                  Returns the reason why the adapter cannot serve on the
                                             device, "" if it can.
  traits() -> EngineTraits                   Returns properties that all its engines share.
  needs(device: str) -> GpuNeeds             Returns the planned memory of an engine process on the
                                             device outside of kvcached.
  refuses(model: Path, embeds: bool) -> str  Returns the reason why the checkpoint in the folder
                                             cannot be served, for text or for embeddings, "" if
                                             none is known. If its traits have families that take
                                             images, with images=True for one that does.
  parser_names() -> dict[str, list[str]]     Returns the valid values of a model's tool_parser and
                                             reasoning_parser, without a key whose values are not
                                             known.
  preload(device: str) -> None               Imports the engine, once, in the fork server before any
                                             fork.
  create(context: EngineContext) -> EngineCore
                                             Creates the core, in the forked engine process.
  weight_key(content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0")
      -> WeightKey                           Returns the key of a rank's weights in the machine's
                                             store, in any process.

Thread rule: the worker calls every method from one thread, and none of them may block on I/O
other than reading weights in `activate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import kvcached
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.ranks.group import ALONE, RankGroup
from prism.errors import ActivationError, SelfCheckError
from prism.messages.engine import Activated, ActivateEngine, ActivationFailed, EngineStatus
from prism.messages.requests import Chunk, Failure, Request

ShrinkCall = Callable[[int | None], kvcached.Shrunk]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Parameters of an engine process, or of one rank of it."""

    # Id and device of this rank.
    engine_id: str
    device: str
    config: ClusterConfig
    # Connection to the other ranks of a tensor-parallel engine.
    ranks: RankGroup = ALONE
    # Devices of all ranks.
    rank_devices: tuple[str, ...] = ()

    def open_device(self) -> kvcached.Device:
        """Attaches to the device's ledger. Raises the errors of `kvcached.Device.open`."""
        place = self.config.device(self.device)
        return kvcached.Device.open(
            self.device,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=self.config.namespace,
        )


@dataclass(slots=True)
class StepOutput:
    chunks: list[Chunk] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    # True if there is more to compute: the worker steps again without waiting for messages. False
    # if all open requests are paused.
    busy: bool = False


@dataclass(slots=True)
class RequestTotals:
    """Counters of an engine since its start, over all its models."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    imported_tokens: int = 0


class EngineCore(Protocol):
    """One engine process serving at most one model at a time (Prism §5.2)."""

    def activate(self, order: ActivateEngine) -> Activated:
        """Reserves weights and static share in the ledger, lays out KV space, loads the weights.

        Raises ActivationError if memory is short or the files are bad; nothing stays reserved then.
        REQUIRES: no model is active.
        """

    def deactivate(self) -> None:
        """Unmaps all memory and returns it to the ledger. The process stays ready for another
        model. Requests that still run are dropped; the worker fails them."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests for the next step. A request that can never run becomes a Failure."""

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Stops these requests; each yields a last Chunk with finish_reason "cancelled".
        Unknown ids are ignored."""

    def pause(self, request_ids: Sequence[str]) -> None:
        """Takes these requests out of the next steps, until they are resumed. Unknown ids are
        ignored.

        A paused request keeps its KV, and its place among the `max_running`. Its prompt is not
        started, or not continued. It can be cancelled and exported. If a step finds no room, paused
        requests are retracted before running ones, the one paused last first; so they are if
        nothing runs, and a prompt finds no room. They then compute their KV again once resumed.
        """

    def resume(self, request_ids: Sequence[str]) -> None:
        """Continues paused requests; their tokens are those without a pause. Others are ignored."""

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        """Stops and forgets all requests that are not cancelled, and returns them with their
        progress (`Request.resume`).

        Args:
            targets: devices of the ranks of the next engine. KV is offered to these devices, or is
                saved to files in `moves_dir` for an engine that cannot fetch it. None: KV is lost.
        """

    def handing_over(self) -> bool:
        """Returns whether exported KV is still to be fetched; this state is short. A `deactivate`
        before its end loses that KV, which is then computed again."""

    def step(self) -> StepOutput:
        """Runs one continuous-batching step if there is work."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `answer_requests` may have something to do
        (`kvcached.Client.fileno`)."""

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        """Frees `size_bytes` of memory now (None: as much as possible): spare pages first, then
        pages of the prefix cache. All ranks of an engine evict the same tokens."""

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        """Answers the ledger's requests for memory. Returns whether there were any.

        Called before every step, and when `fileno` is readable. `shrink` frees the memory (None:
        this object's `shrink`).
        """

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        """Changes the cap of this engine's elastic memory."""

    def status(self) -> EngineStatus:
        """Returns a snapshot; takes under 100 us."""

    def close(self) -> None:
        """Frees everything; the process exits next."""


def activation_failed(model: str, error: ActivationError) -> ActivationFailed:
    return ActivationFailed(
        model=model,
        message=str(error),
        missing_bytes=error.missing_bytes,
        needs_fresh_engine=isinstance(error, SelfCheckError),
    )
