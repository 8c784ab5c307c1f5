"""Requests that stand aside of SGLang's batches and queue with their KV, until they are resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from kvcached.engines.sglang.retraction import retract
from prism.engines.sglang.scheduling.penalties import count_earlier_output


class Place(Enum):
    """Place that a request was taken from."""

    QUEUE = "queue"
    # A part of its prompt is computed.
    CHUNKS = "chunks"
    # It decodes.
    BATCH = "batch"


class _Aside(NamedTuple):
    req: Req
    place: Place


class PausedRequests:
    """Paused requests of one scheduler. Thread rule: the engine's thread.

    A resumed request stays here until the next step that has a place for it: SGLang computes one
    prompt in chunks at a time, and a batch has a limited number of LoRA adapters.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._rids: set[str] = set()  # includes those whose grammar is being compiled
        self._aside: dict[str, _Aside] = {}  # the one paused last is last

    def __iter__(self) -> Iterator[Req]:
        """Yields the requests that stand aside."""
        return (aside.req for aside in self._aside.values())

    def __bool__(self) -> bool:
        return bool(self._aside)

    def awaiting_prefill(self) -> list[Req]:
        return [a.req for a in self._aside.values() if a.place is not Place.BATCH]

    def any_resumed(self) -> bool:
        """Returns whether any request waits for a step that has a place for it."""
        return any(rid not in self._rids for rid in self._aside)

    def pause(self, rids: Sequence[str]) -> None:
        """Takes requests out of the batches and the queue. Those that finish with their next step
        may not be among them."""
        named = set(rids)
        self._rids |= named
        scheduler = self._scheduler
        if not named.isdisjoint(req.rid for req in _stepping(scheduler)):
            _merge_prefilled(scheduler)
            running = [req for req in scheduler.running_batch.reqs if req.rid in named]
            scheduler.running_batch.filter_batch(reqs_to_exclude=running)
            self._put(running, Place.BATCH)
            chunked = scheduler.chunked_req
            if chunked is not None and chunked.rid in named:
                scheduler.chunked_req = None
                self._put([chunked], Place.CHUNKS)
        waiting = [req for req in scheduler.waiting_queue if req.rid in named]
        if waiting:
            rest = [req for req in scheduler.waiting_queue if req.rid not in named]
            scheduler.waiting_queue = rest
            self._put(waiting, Place.QUEUE)

    def _put(self, reqs: Sequence[Req], place: Place) -> None:
        self._aside.update((req.rid, _Aside(req, place)) for req in reqs)

    def resume(self, rids: Sequence[str]) -> None:
        """Lets the next step continue these requests."""
        self._rids.difference_update(rids)

    def keep(self, req: Req) -> bool:
        """Takes a request instead of the queue if it is paused. Returns whether it did."""
        if req.rid in self._rids:
            self._put([req], Place.QUEUE)
        return req.rid in self._rids

    def put_back(self) -> None:
        """Puts resumed requests back, as far as there are places. Called before each step."""
        decodes: list[Req] = []
        resumed = [(rid, aside) for rid, aside in self._aside.items() if rid not in self._rids]
        for rid, (req, place) in resumed:
            if place is Place.CHUNKS and self._scheduler.chunked_req is not None:
                continue
            if place is not Place.QUEUE and not self._has_adapter_slot(req, decodes):
                continue
            del self._aside[rid]
            if place is Place.BATCH:
                decodes.append(req)
            elif place is Place.CHUNKS:
                self._scheduler.chunked_req = req
            else:
                self._scheduler._add_request_to_queue(req)
        if decodes:
            _merge_prefilled(self._scheduler)
            _merge(self._scheduler, _decode_batch(self._scheduler, decodes))

    def _has_adapter_slot(self, req: Req, others: Sequence[Req]) -> bool:
        if not self._scheduler.enable_lora:
            return True
        stepping = (*_stepping(self._scheduler), *others)
        running = {other.lora_id for other in stepping if not other.finished()}
        return bool(self._scheduler.can_schedule_lora_req(req, running))

    def retract_last(self) -> bool:
        """Frees the KV of the request that was paused last. Returns False if none has KV."""
        for rid, aside in reversed(self._aside.items()):
            if aside.place is not Place.QUEUE:
                del self._aside[rid]
                retract(self._scheduler, aside.req)
                return True
        return False

    def drop(self, rid: str) -> bool:
        """Forgets a request and frees its KV. Returns False if it does not stand aside."""
        self._rids.discard(rid)
        aside = self._aside.pop(rid, None)
        if aside is None:
            return False
        self._scheduler._release_aborted_request(aside.req)
        if aside.req.kv.holds_kv or aside.req.kv.holds_mamba:
            release_kv_cache(aside.req, self._scheduler.tree_cache, checkpoint=False)
        return True

    def clear(self) -> None:
        """Forgets all requests. REQUIRES: their KV is freed."""
        self._rids.clear()
        self._aside.clear()


def _stepping(scheduler: Any) -> Iterator[Req]:
    """Yields the requests in batches, some of them twice."""
    for batch in (scheduler.running_batch, scheduler.last_batch):
        yield from batch.reqs if batch is not None else ()
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _merge_prefilled(scheduler: Any) -> None:
    """Merges the requests of the last step's prefill into the running batch, as SGLang does at the
    begin of its next step."""
    last = scheduler.last_batch
    if last is None or not last.forward_mode.is_extend():
        return
    chunked = {scheduler.chunked_req, last.chunked_req} - {None}
    last.filter_batch(reqs_to_exclude=list(chunked))
    scheduler.last_batch = None
    if not last.is_empty():
        _merge(scheduler, last)


def _merge(scheduler: Any, batch: ScheduleBatch) -> None:
    running = scheduler.running_batch
    running.filter_batch()  # without finished requests
    if running.is_empty():
        scheduler.running_batch = batch
    else:
        running.merge_batch(batch)


def _decode_batch(scheduler: Any, reqs: list[Req]) -> ScheduleBatch:
    """Returns the batch of requests that decode, as SGLang's `_build_hisparse_decode_batch` does.

    Each request's last token is where its last step stored it: in its row of SGLang's future map.
    """
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    rows = torch.tensor([req.kv.req_pool_idx for req in reqs], dtype=torch.int64)
    lengths = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
    batch.req_pool_indices_cpu, batch.req_pool_indices = rows, rows.to(batch.device)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(batch.device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.multimodal_inputs = [req.multimodal_inputs for req in reqs]
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    vocab_size = scheduler.model_config.vocab_size
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    count_earlier_output(batch, besides_last=1)
    return batch
