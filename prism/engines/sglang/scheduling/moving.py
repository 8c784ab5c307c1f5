"""Export of running requests to other engines with their KV, and their resumption there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from prism.engines.kv_moves import kv_file
from prism.engines.kv_moves.kv_direct import DirectMoves
from prism.engines.sglang.grammars import grammar_manager as grammars
from prism.engines.sglang.scheduling import logprobs
from prism.engines.sglang.scheduling.scheduler import InProcessScheduler
from prism.messages.requests import Resume

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def export_request(
    scheduler: InProcessScheduler,
    direct: DirectMoves,
    req: Req,
    targets: Sequence[str],
    folder: str,
) -> Resume:
    """Returns the progress of `req`. Its KV is offered to an engine on `targets`, or is saved to a
    file in `folder` ("" for no file)."""
    output = [int(token) for token in req.output_ids]
    tokens = int(req.kv.kv_committed_len) if req.kv.holds_kv else 0
    if not tokens:
        return Resume(output)
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    if direct.reaches(targets):
        offers = direct.offer(_blocks_of(scheduler, slots))
        return Resume(output, "", tokens if offers else 0, offers)
    if not folder:
        return Resume(output)
    buffers = list(_buffers(scheduler))
    rows = (_bytes_of(buffer[slots]).cpu().numpy() for buffer in buffers)
    path = kv_file.save(folder, rows, len(buffers))
    return Resume(output, path, tokens if path else 0)


def resume_request(
    scheduler: InProcessScheduler, direct: DirectMoves, req: Req, resume: Resume
) -> int:
    """Resumes `req`, which waits and has computed nothing, from the progress in `resume`.

    The KV that came with it is inserted into the prefix cache, where its prefill finds it. Returns
    the number of these tokens. A collective of the ranks.
    """
    req.output_ids = array("q", resume.output_ids)
    req.send_token_offset = len(resume.output_ids)
    if resume.output_ids and req.return_logprob:
        logprobs.without_prompt(req)
    grammars.set_prior_output(req)
    allocator = scheduler.token_to_kv_pool_allocator
    whole = resume.kv_tokens // allocator.page_size * allocator.page_size
    rows = _take_file(scheduler, resume) if resume.kv_path else None
    if not whole or (rows is None and not resume.kv_offers):
        return 0
    slots = allocator.alloc(whole)
    if slots is None:
        return 0
    if rows is not None:
        _fill(scheduler, slots, rows)
    elif not direct.fetch(resume, _blocks_of(scheduler, slots)):
        allocator.free(slots)
        return 0
    known = array("q", [*req.origin_input_ids, *resume.output_ids])
    # The insertion frees blocks whose tokens the cache already has.
    key = RadixKey(known[:whole], req.extra_key, cache_salt=req.cache_salt)
    scheduler.tree_cache.insert(InsertParams(key=key, value=slots.to(torch.int64)))
    return int(whole)


def _take_file(scheduler: InProcessScheduler, resume: Resume) -> kv_file.Rows | None:
    buffers = list(_buffers(scheduler))
    token_bytes = _bytes_of(buffers[0][:1]).shape[1]
    return kv_file.take(resume.kv_path, len(buffers), resume.kv_tokens, token_bytes)


def _fill(scheduler: InProcessScheduler, slots: torch.Tensor, rows: kv_file.Rows) -> None:
    for buffer, row in zip(_buffers(scheduler), rows, strict=True):
        part = torch.from_numpy(row[: len(slots)]).view(buffer.dtype)
        buffer[slots] = part.view(len(slots), *buffer.shape[1:]).to(buffer.device)


def _blocks_of(scheduler: InProcessScheduler, slots: torch.Tensor) -> NDArray[np.int64]:
    """Returns kvcached's blocks of a request's slots, which fill whole blocks in order."""
    size = scheduler.token_to_kv_pool_allocator.page_size
    blocks: NDArray[np.int64] = (slots[::size] // size).to(torch.int64).cpu().numpy()
    return blocks


def _buffers(scheduler: InProcessScheduler) -> Iterator[torch.Tensor]:
    """Yields K and V of every layer, (tokens, heads, head_dim)."""
    pool: Any = scheduler.token_to_kv_pool_allocator.get_kvcache()
    yield from pool.k_buffer
    yield from pool.v_buffer


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows as bytes, (tokens, bytes)."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)
