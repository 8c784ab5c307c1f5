"""vLLM 0.32 as an engine on host devices: one process serves one model after another, in-process.

It runs in the Python environment that has vLLM (`engine.python`). The modules, in the order a model
meets them: `adapter`, `memory` (ledger and KV space), `loader` (weights in pages), `scheduler`,
`host` (build and tear down), `requests` (conversion), `core` (the EngineCore).
"""

from prism.engines.vllm.adapter import (
    create,
    lacks,
    needs,
    parser_names,
    preload,
    refuses,
    traits,
    weight_key,
)

__all__ = [
    "create",
    "lacks",
    "needs",
    "parser_names",
    "preload",
    "refuses",
    "traits",
    "weight_key",
]
