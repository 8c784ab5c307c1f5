"""Hugging Face transformers on kvcached: KV memory that is mapped by page on demand.

    with device.client("chat") as client:
        cache = ElasticCache(client, model.config, num_tokens=1 << 16)
        model.generate(**inputs, past_key_values=cache)
        cache.reset()  # returns every page
        with elastic_batching(client, request_tokens=2048):
            model.generate_batch(prompts)

Written for transformers 5.19. `cache` is the cache of `generate`. `continuous` is continuous
batching, whose blocks are `sectors`.
"""

from kvcached.engines.transformers.cache import ElasticCache
from kvcached.engines.transformers.continuous import elastic_batching

__all__ = ["ElasticCache", "elastic_batching"]
