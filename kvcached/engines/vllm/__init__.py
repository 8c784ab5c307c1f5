"""vLLM 0.32 on kvcached.

`plugin` makes vLLM choose the classes of ours at the points where it lets one choose: `worker` lays
out the KV cache, `scheduler` deals with other engines between two steps, and its `block_pool` takes
blocks from kvcached. `memory` is what these share; `contract` checks the parts of vLLM that they
rely on, where its version is not one that was tested.
"""
