"""Hand-over of KV blocks between processes: `KVCache.offer_kv` offers, `fetch_kv` fetches."""
