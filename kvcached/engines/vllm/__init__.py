"""vLLM 0.32 on kvcached.

`plugin` makes vLLM choose the adapter's classes through its own options. `worker` lays out the KV
cache, on a CPU (`cpu_worker`), on one of several (`rank_worker`), or on a GPU (`gpu_worker`).
`scheduler` serves other engines between two steps, and its `block_pool` takes blocks from
kvcached. `memory` is shared by these. `contract` lists the parts of vLLM that they rely on, which
are checked on untested versions.
"""
