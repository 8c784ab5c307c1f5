"""SGLang 0.5.23 on kvcached.

`platform` brings the KV pool (`kv_pool`), its allocator (`allocator`, `radix_pages`) and admission
(`budget`) to SGLang; `memory` is what these need from their engine. A stock server is `server`
with the platforms of `server_platform`; `server_gpu` leases what it takes of a GPU, and `launch`
starts one where there is no Triton. Prism's engines
use the same modules with memory of their own.
"""
