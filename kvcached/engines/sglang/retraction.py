"""Retraction of requests that SGLang itself does not retract."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.common import release_kv_cache


def retract_chunked_request(scheduler: Any, batch: Any) -> None:
    """Frees the blocks of the partly prefilled request if decodes find no room, and queues it
    again.

    Called before SGLang updates its running `batch`.
    """
    req = scheduler.chunked_req
    if req is None or batch.check_decode_mem():
        return
    scheduler.chunked_req = None
    retract(scheduler, req)


def retract(scheduler: Any, req: Any) -> None:
    """Frees the blocks of a request between two steps and queues it again. REQUIRES: it is in no
    batch."""
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()
    scheduler._add_request_to_queue(req, is_retracted=True)
