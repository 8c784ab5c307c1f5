"""Engine without a model, for tests: predictable tokens on real elastic memory.

The output is a pure function of the prompt and the position (`expected_tokens`), so a test knows it
beforehand. The memory is real: KV blocks from kvcached are reserved in the device's ledger, mapped,
written, and checked on every reuse, so that a page with two owners raises `CorruptKVError`. The
environment variable PRISM_FAKE sets speeds and faults, as a JSON object with the fields of
`FakeOptions`, for example

    PRISM_FAKE='{"decode_step_ms": 5, "prefill_tokens_per_s": 20000, "die_at_token": 40}'
"""

from prism.engines.fake.adapter import (
    create,
    lacks,
    parser_names,
    preload,
    refuses,
    traits,
    weight_key,
)
from prism.engines.fake.options import FakeOptions, needs
from prism.engines.fake.tokens import expected_embedding, expected_tokens

__all__ = [
    "FakeOptions",
    "create",
    "expected_embedding",
    "expected_tokens",
    "lacks",
    "needs",
    "parser_names",
    "preload",
    "refuses",
    "traits",
    "weight_key",
]
