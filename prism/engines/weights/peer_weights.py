"""Weights from another machine's store, if its link is faster than this machine's disk.

After any error the files are read from disk. A peer that is silent for STALL_S, or much slower than
the disk, is given up, and bytes with a wrong hash are not stored.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from threading import Event

import zmq

from kvcached import Checkpoint, KvcachedError, TensorSpec, WeightBuilder, WeightKey, WeightStore
from kvcached.errors import LoadCancelledError, WeightFileError
from kvcached.weights.entry import checkpoint_key
from kvcached.weights.exchange import Exchange, Sketch
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import PrismError
from prism.messages.model_spec import ModelSpec
from prism.messages.weight_exchange import (
    PART_BYTES_MAX,
    AskPart,
    AskWeights,
    Form,
    FromHolder,
    HeldForm,
    HeldWeights,
    Part,
    Tensor,
)
from prism.models.weight_source import weight_source
from prism.transport import ENGINE_MESSAGE_BYTES_MAX, BlockingChannel

QUERY_S = 2.0  # time for machines to answer what they have
STALL_S = 5.0
SKIP_S = 60.0  # time for which a silent or slow machine is not asked again
PARTS_AHEAD = 8
_POLL_MS = 100

log = logging.getLogger("prism.weights")

Keys = Callable[[str], Sequence[WeightKey]]


class PeerError(PrismError):
    """Another machine does not send weights that it has offered."""


class PeerWeights:
    """Client of other machines' weight stores. Thread rule: any thread; `fetch` blocks for a
    bounded time."""

    def __init__(self, store: WeightStore, config: ClusterConfig) -> None:
        here = config.here
        self._config = config
        self._exchange = Exchange(store)
        self._disk_bytes_s = here.disk_bytes_s if here else 0.0
        links = config.links_bytes_s()
        self._links = {n: rate for n, rate in links.items() if rate > self._disk_bytes_s}
        self._skipped_until_s: dict[str, float] = {}

    def fetch(self, spec: ModelSpec, keys: Keys, cancel: Event | None = None) -> str:
        """Fetches the model into the store from a peer, unless the store has it or the disk is
        faster. Returns the peer's name, or "".

        Raises LoadCancelledError, and WeightFileError if the model's files on this machine, which
        are needed in any case, are missing or damaged.

        Args:
            keys: returns the keys of the engine's own form for a content. A peer that does not have
                all of them sends the content of the model's files.
        """
        if not self._candidates():
            return ""
        checkpoint = Checkpoint.open(spec.path)
        with self._exchange.fetch_lock(spec.path):
            if self._has(checkpoint, keys):
                return ""
            try:
                return self._fetch(spec, keys, Sketch.of(checkpoint), cancel or Event())
            except LoadCancelledError:
                raise
            except (KvcachedError, PeerError, OSError, zmq.ZMQError) as error:
                log.warning("reading %s from disk: %s", spec.name, error)
                return ""

    def _has(self, checkpoint: Checkpoint, keys: Keys) -> bool:
        hashes = self._exchange.known_hashes(checkpoint)
        if hashes is None:
            return False
        content = self._exchange.content(checkpoint, hashes)
        wanted = keys(content)
        own = bool(wanted) and all(map(self._exchange.has, wanted))
        return own or self._exchange.has(checkpoint_key(content))

    def _fetch(self, spec: ModelSpec, keys: Keys, sketch: Sketch, cancel: Event) -> str:
        began_s = time.monotonic()
        forms = [Form(k.engine, k.dtype, k.rank, k.ranks) for k in keys("?")]
        with ExitStack() as opened:
            context = opened.enter_context(zmq.Context())
            links = {name: _Link(context, self._config, name) for name in self._candidates()}
            for each in links.values():
                opened.callback(each.channel.close)
            held = self._ask(links, AskWeights(spec.name, sketch.sha256, forms), cancel)
            rates = {name: self._links[name] for name in held}
            chosen = weight_source(False, rates, self._disk_bytes_s)
            if chosen.kind != "peer":
                return ""
            offer, link = held[chosen.node], links[chosen.node]
            content = self._exchange.content(sketch.checkpoint, offer.hashes)
            size_bytes = sum(_spec(t).size_bytes for form in offer.forms for t in form.tensors)
            link.until_s = time.monotonic() + 2 * size_bytes / self._disk_bytes_s + STALL_S
            with self._skipped_on_error(chosen.node):
                for form in offer.forms:
                    self._take(link, content, form, cancel)
        self._exchange.adopt(sketch, offer.hashes)
        seconds, megabytes = time.monotonic() - began_s, size_bytes / 1e6
        text = "%s came from the weight store of %s: %.1f MB in %.2f s"
        log.info(text, spec.name, chosen.node, megabytes, seconds)
        return chosen.node

    def _candidates(self) -> list[str]:
        """Returns the machines with a link faster than the disk that are not being skipped."""
        now_s = time.monotonic()
        return [name for name in self._links if self._skipped_until_s.get(name, now_s) <= now_s]

    @contextmanager
    def _skipped_on_error(self, node: str) -> Iterator[None]:
        try:
            yield
        except (PeerError, WeightFileError):
            self._skipped_until_s[node] = time.monotonic() + SKIP_S
            raise

    def _ask(
        self, links: Mapping[str, _Link], question: AskWeights, cancel: Event
    ) -> dict[str, HeldWeights]:
        """Returns the answers of machines that have the model. Stops once no machine that has not
        answered has a faster link."""
        silent, held = set(links), dict[str, HeldWeights]()
        until_s = time.monotonic() + QUERY_S
        poller = zmq.Poller()
        for link in links.values():
            link.channel.send(question)
            poller.register(link.channel.socket, zmq.POLLIN)
        while silent and time.monotonic() < until_s:
            _check(cancel)
            poller.poll(_POLL_MS)
            for name in list(silent):
                for answer in links[name].channel.receive(1):
                    silent.discard(name)
                    if isinstance(answer, HeldWeights) and answer.forms:
                        held[name] = answer
            best = max((self._links[name] for name in held), default=0.0)
            silent = {name for name in silent if self._links[name] > best}
        self._skipped_until_s |= dict.fromkeys(silent, time.monotonic() + SKIP_S)
        return held

    def _take(self, link: _Link, content: str, held: HeldForm, cancel: Event) -> None:
        form, named = held.form, {t.name: (_spec(t), t.blob) for t in held.tensors}

        def produce(builder: WeightBuilder) -> None:
            parts = link.parts(cancel, (p for spec, b in named.values() for p in _parts(spec, b)))
            for name, (spec, blob) in named.items():
                count = sum(1 for _ in _parts(spec, blob))
                builder.put_bytes(name, spec, islice(parts, count), sha256=blob)

        key = WeightKey(content, form.engine, form.dtype, form.rank, form.ranks)
        self._exchange.store.get(key, produce).close()


class _Link:
    """Connection to one machine, for one thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: ClusterConfig, node: str
    ) -> None:
        self._node = node
        key, most = config.cluster_key, ENGINE_MESSAGE_BYTES_MAX
        self.channel = BlockingChannel[FromHolder](
            context, zmq.DEALER, FromHolder, key, maxmsgsize=most
        )
        self.until_s = 0.0  # deadline, after which the disk would have been much faster
        self.channel.connect(config.weights_endpoint(node))

    def parts(self, cancel: Event, asked: Iterable[AskPart]) -> Iterator[bytes]:
        """Yields the parts in their order, with up to PARTS_AHEAD requests in flight. Raises
        PeerError, LoadCancelledError."""
        ahead: deque[AskPart] = deque()
        for each in asked:
            self.channel.send(each)
            ahead.append(each)
            if len(ahead) == PARTS_AHEAD:
                yield self._part(ahead.popleft(), cancel)
        while ahead:
            yield self._part(ahead.popleft(), cancel)

    def _part(self, asked: AskPart, cancel: Event) -> bytes:
        silent_s = time.monotonic() + STALL_S
        while not self.channel.socket.poll(_POLL_MS):
            _check(cancel)
            if time.monotonic() > silent_s:
                raise PeerError(f"{self._node} does not answer")
        _check(cancel)
        if time.monotonic() > self.until_s:
            raise PeerError(f"{self._node} sends more slowly than the disk reads")
        got = [a.data for a in self.channel.receive(1) if isinstance(a, Part)]
        if len(got) != 1 or len(got[0]) != asked.size_bytes:
            raise PeerError(f"{self._node} does not have the weights any more")
        return got[0]


def _check(cancel: Event) -> None:
    if cancel.is_set():
        raise LoadCancelledError("fetching weights from another machine was cancelled")


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tensor.shape)


def _parts(spec: TensorSpec, blob: str) -> Iterator[AskPart]:
    for at in range(0, spec.size_bytes, PART_BYTES_MAX):
        yield AskPart(blob, at, min(PART_BYTES_MAX, spec.size_bytes - at))
