"""KV memory of one request: what it takes, shares with cached prefixes and gives back."""

from __future__ import annotations

from prism.sim.kv import KvSpace
from prism.sim.prefix import HASH_TOKENS, PrefixCache
from prism.sim.request import Request


def take(kv: KvSpace, request: Request, now_s: float, spare_blocks: int = 0) -> bool:
    """KV for all of it that is not cached, if `spare_blocks` fit as well."""
    cache, need = kv.cache, kv.blocks(request.kv_tokens)
    if cache is None:
        return (not spare_blocks or kv.fits(need + spare_blocks)) and kv.take(need)
    if request.hashes:
        # at least its last token is computed
        request.prefix = cache.use(request.hashes, (request.kv_tokens - 1) // HASH_TOKENS)
        need -= len(request.prefix) * cache.kv_blocks
    if (spare_blocks and not kv.fits(need + spare_blocks)) or not kv.take(need):
        cache.leave(request.prefix, now_s)
        return False
    cached_tokens = len(request.prefix) * HASH_TOKENS
    request.todo_tokens = request.kv_tokens - cached_tokens
    if not request.retractions:
        request.cached_tokens = cached_tokens
    return True


def keep_prompt(kv: KvSpace, request: Request, cache: PrefixCache) -> None:
    """Its blocks are the cache's now; what others computed at the same time is given back."""
    if twice := cache.extend(request.prefix, request.hashes):
        kv.give(twice * cache.kv_blocks)


def give(kv: KvSpace, request: Request, now_s: float) -> None:
    """What is its own; the cache keeps the rest."""
    blocks, cache = kv.blocks(request.kv_tokens), kv.cache
    if cache is not None:
        blocks -= len(request.prefix) * cache.kv_blocks
        cache.leave(request.prefix, now_s)
    kv.give(blocks)
