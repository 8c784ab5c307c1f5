"""SGLang 0.5.23 on kvcached.

`platform` gives SGLang the KV pool (`kv_pool`), its allocator (`allocator`, `radix_pages`) and
admission (`budget`). `memory` is the interface to the engine that these need. A stock server is
`server` with the platforms of `server_platform`, and `rank_votes` if it has several ranks.
`server_gpu` leases its GPU memory other than KV, and `launch` starts a server without Triton.
Prism's engines use the same modules with their own memory.
"""
