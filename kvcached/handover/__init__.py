"""KV of one process's blocks in another's: offered by `KVCache.offer_kv`, taken by `fetch_kv`."""
