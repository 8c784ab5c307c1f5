"""SGLang 0.5.23 as an engine: one process serves one model after another, in-process.

The modules, in the order in which a model uses them: `platform/` and `platform_cuda` (before the
import of sglang), `memory` (ledger and KV space), `server_args`, `loader` (weights in pages),
`host` (build and tear down), `scheduling/` (SGLang's scheduler, fed in-process, and its requests;
its KV pool and allocator are in `kvcached.engines.sglang`), `decode_graphs`, `lora_adapters`,
`grammars/` (structured output and parsers), `active` (the model being served), `core` (the
EngineCore).
"""

from prism.engines.sglang.adapter import create, preload, traits
from prism.engines.sglang.platform.gpu import lacks, needs, weight_key
from prism.engines.sglang.platform.supported_models import parser_names, refuses

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
