"""What the worker loop asks of an engine adapter.

An adapter is a package `prism.engines.<name>` with eight functions:
  lacks(device: str) -> str                  what keeps it from serving there, "" if nothing does;
                                             imports nothing heavy
  traits() -> EngineTraits                   what its engines are like; imports nothing heavy
  needs(device: str) -> GpuNeeds             what its processes take there outside of kvcached, as
                                             planned; imports nothing heavy
  refuses(model: Path, embeds: bool) -> str  why it cannot serve the checkpoint in that folder, for
                                             text or for embeddings, "" if nothing is known against
                                             it; imports nothing heavy
  parser_names() -> dict[str, list[str]]     what a model's tool_parser and reasoning_parser may
                                             name; a key is missing where that is not known;
                                             imports nothing heavy
  preload(device: str) -> None               heavy imports, once, in the fork server before any fork
  create(context: EngineContext) -> EngineCore   in the forked engine process
  weight_key(content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0")
      -> WeightKey
      in any process: under what a rank of its engines keeps a model's weights in the machine's
      store; imports nothing heavy

Thread rule: the worker calls every method from one thread, and none of them may block on I/O
other than reading weights in `activate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import kvcached
from prism.config.schema import ClusterConfig
from prism.engines.ranks.group import ALONE, RankGroup
from prism.errors import ActivationError, SelfCheckError
from prism.messages.engine import Activated, ActivateEngine, ActivationFailed, EngineStatus
from prism.messages.requests import Chunk, Failure, Request

ShrinkCall = Callable[[int | None], kvcached.Shrunk]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine process is started with, or one rank of it."""

    # This rank's own.
    engine_id: str
    device: str
    config: ClusterConfig
    # Through which the ranks of a tensor-parallel engine agree.
    ranks: RankGroup = ALONE
    # Of all ranks.
    rank_devices: tuple[str, ...] = ()

    def open_device(self) -> kvcached.Device:
        """Attach to the device's ledger. Raises what `kvcached.Device.open` raises."""
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
    # There is more to compute: the worker steps again without waiting for messages.
    busy: bool = False


@dataclass(slots=True)
class RequestTotals:
    """What an engine has done since it began, over all its models."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    imported_tokens: int = 0


class EngineCore(Protocol):
    """One engine process serving at most one model at a time (Prism §5.2)."""

    def activate(self, order: ActivateEngine) -> Activated:
        """Reserve weights and static share in the ledger, lay out KV space, load the weights.

        Raises ActivationError (nothing stays reserved) when there is no room or the files are bad.
        REQUIRES: no model is active.
        """

    def deactivate(self) -> None:
        """Unmap everything and return it to the ledger. Running requests must be cancelled or
        are dropped; the worker fails them. The process stays ready for another model."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests for the next step. A request that can never run becomes a Failure."""

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; each yields a last Chunk with finish_reason "cancelled".
        Unknown ids are ignored."""

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        """Stop all requests that are not cancelled, and return them with their progress
        (`Request.resume`). Their KV is offered to an engine whose ranks lie on `targets`, or lies
        in files of `moves_dir`; None: it is lost. This engine forgets them."""

    def handing_over(self) -> bool:
        """Whether exported KV still waits to be fetched, which does not last long. A `deactivate`
        meanwhile loses it: it is computed again."""

    def step(self) -> StepOutput:
        """Run one continuous-batching step if there is work."""

    def fileno(self) -> int:
        """Readable while `answer_requests` may have something to do (`kvcached.Client.fileno`)."""

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        """Give memory back now: spare pages first, then pages of the prefix cache until so many
        bytes have gone (None: all that can). With several ranks: the same tokens on all of them."""

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        """Do with `shrink` (None: the method) what the ledger asks this engine for, and answer.
        Called before every step and when `fileno` is readable; whether there was anything."""

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        """Change the cap of this engine's elastic memory."""

    def status(self) -> EngineStatus:
        """A snapshot; cheap (under 100 us)."""

    def close(self) -> None:
        """Free everything; the process exits next."""


def activation_failed(model: str, error: ActivationError) -> ActivationFailed:
    return ActivationFailed(
        model=model,
        message=str(error),
        missing_bytes=error.missing_bytes,
        needs_fresh_engine=isinstance(error, SelfCheckError),
    )
