"""Who gives blocks back first when decodes find no room."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.common import release_kv_cache


def make_way(scheduler: Any, batch: Any) -> None:
    """Before decodes are retracted, the half-prefilled request gives its blocks back and waits
    again. Called where SGLang is about to update its running `batch`."""
    req = scheduler.chunked_req
    if req is None or batch.check_decode_mem():
        return
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()
    scheduler.chunked_req = None
    scheduler._add_request_to_queue(req, is_retracted=True)
