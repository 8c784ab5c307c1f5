"""vLLM 0.32 as an engine on host devices: one process serves one model after another, in-process.

An engine runs in the Python environment that has vLLM (`engine.python`). The modules, in the order
in which a model uses them: `capabilities` and `adapter`, `memory` (ledger and KV space), `loader`
(weights in pages), `scheduler`, `host` (build and tear down), `request_conversion`, `core` (the
EngineCore).
"""

from prism.engines.vllm.adapter import create, preload
from prism.engines.vllm.capabilities import (
    lacks,
    needs,
    parser_names,
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
