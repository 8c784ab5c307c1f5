"""Export of running requests to other engines with their KV, and their resumption there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from prism.engines.kv_moves.kv_file import Rows
from prism.engines.kv_moves.moves import Ids, KVMoves
from prism.engines.sglang.grammars import grammar_manager
from prism.engines.sglang.scheduling import token_logprobs
from prism.engines.sglang.scheduling.scheduler import InProcessScheduler
from prism.messages.requests import Resume


def export_request(
    scheduler: InProcessScheduler, moves: KVMoves, req: Req, targets: Sequence[str] | None
) -> Resume:
    """Returns the progress of `req`, with its KV for an engine on `targets`."""
    output = [int(token) for token in req.output_ids]
    if targets is None or not req.kv.holds_kv:
        return Resume(output)
    tokens = int(req.kv.kv_committed_len)
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    return moves.export(output, tokens, _blocks_of(scheduler, slots), targets)


def resume_request(scheduler: InProcessScheduler, moves: KVMoves, req: Req, resume: Resume) -> int:
    """Resumes `req`, which waits and has computed nothing, from the progress in `resume`.

    The KV that came with it is inserted into the prefix cache, where its prefill finds it. Returns
    the number of these tokens. A collective of the ranks.
    """
    req.output_ids = array("q", resume.output_ids)
    req.send_token_offset = len(resume.output_ids)
    if resume.output_ids and req.return_logprob:
        token_logprobs.without_prompt(req)
    grammar_manager.set_prior_output(req)
    allocator = scheduler.token_to_kv_pool_allocator
    whole = resume.kv_tokens // allocator.page_size * allocator.page_size
    fill = moves.importer(resume)
    slots = allocator.alloc(whole) if fill is not None and whole else None
    if fill is None or slots is None:
        return 0
    if not fill(_blocks_of(scheduler, slots), 0):
        allocator.free(slots)
        return 0
    known = array("q", [*req.origin_input_ids, *resume.output_ids])
    # The insertion frees blocks whose tokens the cache already has.
    key = RadixKey(known[:whole], req.extra_key, cache_salt=req.cache_salt)
    scheduler.tree_cache.insert(InsertParams(key=key, value=slots.to(torch.int64)))
    return int(whole)


def _blocks_of(scheduler: InProcessScheduler, slots: torch.Tensor) -> Ids:
    """Returns kvcached's blocks of a request's slots, which fill whole blocks in order."""
    size = scheduler.token_to_kv_pool_allocator.page_size
    blocks: Ids = (slots[::size] // size).to(torch.int64).cpu().numpy()
    return blocks


def read_rows(view: Any, slots: Ids) -> Rows:
    """Implements `moves.Read`. Returns bytes, since numpy does not have all dtypes of KV."""
    rows: Rows = _bytes_of(view)[torch.from_numpy(slots)].cpu().numpy()
    return rows


def write_rows(view: Any, slots: Ids, rows: Rows) -> None:
    """Implements `moves.Write`."""
    buffer = _bytes_of(view)
    tokens = torch.from_numpy(rows).view(-1, *buffer.shape[1:])
    buffer[torch.from_numpy(slots)] = tokens.to(buffer.device)


def _bytes_of(view: Any) -> torch.Tensor:
    return torch.from_dlpack(view).view(torch.uint8)
