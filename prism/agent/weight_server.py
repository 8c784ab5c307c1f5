"""Weights for other machines: what this one's store has, and the bytes of tensors.

One agent of each machine serves, in a thread with an event loop of its own: it reads parts of at
most a mebibyte, one at a time and no faster than the machine's `network_rate`, and keeps nothing
about who takes them. What may stop half-way is the taker's concern; it has its disk.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
import zmq.asyncio

from kvcached import Checkpoint, KvcachedError, WeightKey
from kvcached.weights.entry import checkpoint_key
from kvcached.weights.exchange import Exchange, Sketch, StoredForm
from kvcached.weights.hashing import identity
from prism.config.endpoints import node_of
from prism.config.schema import ClusterConfig
from prism.engines.weight_store import open_store
from prism.messages.weights import (
    AskPart,
    AskWeights,
    Form,
    FromHolder,
    FromTaker,
    HeldForm,
    HeldWeights,
    Part,
    Tensor,
)
from prism.transport import Channel

STOP_S = 5.0
_BURST_S = 0.02  # of its rate; sleeps are too long by a millisecond
_AGAIN_S = 1.0  # until a port that a predecessor has is tried again

log = logging.getLogger(__name__)


@contextmanager
def serving_weights(config: ClusterConfig, device: str) -> Iterator[None]:
    """While the block runs, if it is the agent of `device` that serves its machine's store."""
    here = [each.name for each in config.devices if node_of(each.name) == config.node]
    store = open_store(config.local()) if config.node and here[0] == device else None
    if store is None:
        yield
        return
    server = WeightServer(config, Exchange(store))
    server.start()
    try:
        yield
    finally:
        server.stop()


class WeightServer:
    """`start` and `stop` from any thread, once each."""

    def __init__(self, config: ClusterConfig, exchange: Exchange) -> None:
        self._config = config
        self._exchange = exchange
        self._bytes_s = config.place(config.node).network_bytes_s
        self._sketches: dict[str, Sketch] = {}  # by model
        self._thread = threading.Thread(target=self._run, name="weights-for-peers", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Who takes weights at present gets no more."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(STOP_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except asyncio.CancelledError:
                log.debug("weights are served no more")

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        context = zmq.asyncio.Context()
        channel = Channel[FromTaker](context, zmq.ROUTER, FromTaker, self._config.cluster_key)
        try:
            await self._bind(channel)
            await self._answer_all(channel)
        finally:
            channel.close()
            context.term()

    async def _bind(self, channel: Channel[FromTaker]) -> None:
        endpoint = self._config.weights_endpoint(self._config.node)
        while True:
            try:
                channel.bind(endpoint)
                return
            except zmq.ZMQError as error:
                log.warning("no weights for other machines yet: %s: %s", endpoint, error)
                await asyncio.sleep(_AGAIN_S)

    async def _answer_all(self, channel: Channel[FromTaker]) -> None:
        free_s = time.monotonic()  # when the link has carried what was sent
        while True:
            sender, message = await channel.receive()
            answer = self._answer(message)
            try:
                channel.send(answer, to=sender)
            except zmq.ZMQError as error:
                log.debug("weights are not taken: %s", error)
            if isinstance(answer, Part):
                now_s = time.monotonic()
                free_s = max(free_s, now_s - _BURST_S) + len(answer.data) / self._bytes_s
                await asyncio.sleep(max(0.0, free_s - now_s))

    def _answer(self, message: FromTaker) -> FromHolder:
        if isinstance(message, AskPart):
            asked = (message.blob, message.offset_bytes, message.size_bytes)
            return Part(self._exchange.read(*asked))
        try:
            return self._held(message)
        except (KvcachedError, OSError, StopIteration) as error:
            log.warning("%.100s is not offered to another machine: %s", message.model, error)
            return HeldWeights()

    def _held(self, message: AskWeights) -> HeldWeights:
        """Raises StopIteration for what is no model."""
        checkpoint = Checkpoint.open(self._config.model(message.model).path)
        hashes = self._exchange.known_hashes(checkpoint)
        if hashes is None:
            return HeldWeights()
        content = self._exchange.content(checkpoint, hashes)
        forms = self._forms(content, message.forms)
        if not forms or self._sketch(message.model, checkpoint) != message.sketch:
            return HeldWeights()
        return HeldWeights(list(hashes), list(map(_wire, forms)))

    def _forms(self, content: str, wanted: list[Form]) -> list[StoredForm]:
        """All that are wanted, or else what the model's files have."""
        keys = [WeightKey(content, f.engine, f.dtype, f.rank, f.ranks) for f in wanted]
        for choice in (keys, [checkpoint_key(content)]):
            found = [form for key in choice if (form := self._exchange.form(key)) is not None]
            if len(found) == len(choice) > 0:
                return found
        return []

    def _sketch(self, model: str, checkpoint: Checkpoint) -> str:
        known = self._sketches.get(model)
        if known is None or known.identities != tuple(map(identity, checkpoint.files)):
            known = self._sketches[model] = Sketch.of(checkpoint)
        return known.sha256


def _wire(form: StoredForm) -> HeldForm:
    key, named = form.key, zip(form.specs.items(), form.blobs, strict=True)
    tensors = [Tensor(name, spec.dtype, spec.shape, blob) for (name, spec), blob in named]
    return HeldForm(Form(key.engine, key.dtype, key.rank, key.ranks), tensors)
