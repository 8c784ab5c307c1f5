"""Agreement of the ranks of a stock SGLang server, each with its own device.

SGLang's schedulers, one per rank, plan the same batches from the same requests. So whatever depends
on a device's memory is a vote of all ranks, through SGLang's own group for CPU tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

import torch
from sglang.srt.runtime_context import get_parallel

from kvcached import Client, KVCache, RankKV, ShrinkRequest, Shrunk
from kvcached.engines import wake_socket

_MOST = wake_socket.NUMBER_MAX
Evict = Callable[[int | None], int]


def least(value: int) -> int:
    """Returns the smallest value of all ranks: a collective. Raises RuntimeError once one is
    gone."""
    if get_parallel().tp_size == 1:
        return value
    smallest = torch.tensor(value, dtype=torch.int64)
    group = get_parallel().tp_group.cpu_group
    torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group)
    return int(smallest)


def all_true(ok: bool) -> bool:
    """Returns on every rank whether all ranks passed True: a collective."""
    return least(int(ok)) == 1


def most(value: int) -> int:
    """Returns the largest value of all ranks: a collective."""
    return -least(-value)


def _wanted_bytes(request: ShrinkRequest | None) -> int:
    if request is None:
        return 0
    return _MOST if request.size_bytes is None else max(1, request.size_bytes)


class Waking:
    """Wake-up of rank 0, which alone sleeps between requests; the others wait for it in a
    collective.

    Its construction is a collective. Thread rule: the scheduler's thread.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        first = get_parallel().tp_rank == 0
        number = least(secrets.randbelow(wake_socket.NUMBER_MAX) if first else _MOST)
        self.socket = wake_socket.bound_socket(number) if first else None
        self._watch = None if first else wake_socket.RequestWatch(client, number)

    def answer_together(self, pools: Iterable[KVCache], rank_kv: RankKV, evict: Evict) -> None:
        """Answers the largest request of other engines of any rank's device, on every rank, and
        lets the next ones wake rank 0.

        `pools` are all of the model's, and give their spare pages first. `evict` is that of
        `RankKV.shrink`. A collective.
        """
        if self.socket is not None:
            wake_socket.drain(self.socket)
        own = self._client.shrink_request()
        wanted_bytes = most(_wanted_bytes(own))
        if wanted_bytes > 0:
            shrunk = _shrink(wanted_bytes, pools, rank_kv, evict)
            if own is not None:
                self._client.answer(own, shrunk)
        if self._watch is not None:
            self._watch.notify_answered()


def _shrink(wanted_bytes: int, pools: Iterable[KVCache], rank_kv: RankKV, evict: Evict) -> Shrunk:
    shrunk = Shrunk()
    for kv in pools:
        shrunk += kv.shrink(0)
    while (left_bytes := most(wanted_bytes - shrunk.returned_bytes)) > 0:
        # A page may hold other blocks than the evicted ones, so there may be several rounds.
        part = rank_kv.shrink(None if wanted_bytes == _MOST else left_bytes, evict)
        shrunk += part
        if part.evicted_tokens == 0:
            break
    return shrunk
