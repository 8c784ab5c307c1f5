"""Server of this machine's stored weights for other machines.

One agent of each machine runs it, in a thread with its own event loop. It reads parts of at most a
mebibyte, one at a time and no faster than the machine's `network_rate`, and keeps no state about
receivers. A receiver whose transfer stops reads the weights from its disk.
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
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import node_of
from prism.engines.weights.weight_store import open_store
from prism.messages.weight_exchange import (
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
_BURST_S = 0.02  # burst allowed by the rate limit; sleeps are a millisecond too long
_AGAIN_S = 1.0  # pause before a port that a predecessor still has is tried again

log = logging.getLogger(__name__)


@contextmanager
def serving_weights(config: ClusterConfig, device: str) -> Iterator[None]:
    """Serves weights during the block if `device` is the first one of its machine.

    Does nothing without a store, or in a cluster of one machine.
    """
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
    """Server of weights. Call `start` and `stop` once each, from any thread."""

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
        """Stops the server and all transfers."""
        with suppress(RuntimeError):  # the loop has ended by itself
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
                log.debug("weights are not served any more")

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
                log.warning("cannot serve weights to other machines yet: %s: %s", endpoint, error)
                await asyncio.sleep(_AGAIN_S)

    async def _answer_all(self, channel: Channel[FromTaker]) -> None:
        free_s = time.monotonic()  # when the link has carried what was sent
        while True:
            sender, message = await channel.receive()
            answer = self._answer(message)
            try:
                channel.send(answer, to=sender)
            except zmq.ZMQError as error:
                log.debug("cannot send weights: %s", error)
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
        """Returns the stored forms of a model. Raises StopIteration if the model is unknown."""
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
        """Returns all wanted forms if stored, or else the form of the model's files, if any."""
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
