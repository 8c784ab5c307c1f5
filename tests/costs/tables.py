"""A table with bends, rows and columns that are all different."""

from __future__ import annotations

from prism_sim.costs.table import StepTable

BENT = StepTable(
    gpu="g",
    model="m",
    tp=1,
    source="test",
    dense_tokens=(1, 8, 64, 512),
    dense_s=(1.0, 1.1, 2.0, 14.0),
    pair_s=1e-4,
    prefill_tokens=(1, 100),
    prefill_context=(0, 1000),
    prefill_s=((0.0, 0.2), (0.1, 0.5)),
    decode_batch=(1, 4, 32),
    decode_context=(5, 50, 300, 2000),
    decode_s=((0.1, 0.1, 0.5, 1.5), (0.2, 0.3, 1.0, 9.0), (0.4, 1.3, 8.0, 70.0)),
    host_s=0.05,
)
