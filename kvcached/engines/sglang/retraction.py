"""Retraction of a partly prefilled request before decodes are retracted."""

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
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()
    scheduler.chunked_req = None
    scheduler._add_request_to_queue(req, is_retracted=True)
