"""Writes traces/demo.jsonl: arrivals laid out so that each of the cluster's moves is needed.

python traces/make_demo.py > traces/demo.jsonl
"""

from __future__ import annotations

import json
import random

SMALL, LARGE = (500.0, 40.0), (3000.0, 300.0)  # SLOs in ms: TTFT, TPOT
PHASES = (
    # model, its first and last arrival in s, requests, SLOs
    ("tiny-llama", 0.0, 18.0, 36, SMALL),  # two models share the smaller device
    ("tiny-qwen3", 0.0, 26.0, 48, SMALL),
    ("tiny-gpt2", 6.0, 16.0, 14, SMALL),  # its room is the idle smollm2-135m's, which is evicted
    # Then the smaller device is pressed and the larger one has room: a model migrates.
    ("smollm2-135m", 28.0, 40.0, 12, LARGE),  # comes back, on a warm engine
    ("tiny-llama", 34.0, 38.0, 8, SMALL),
)


def main() -> None:
    draw = random.Random(1)
    rows = []
    for model, first_s, last_s, count, (ttft_ms, tpot_ms) in PHASES:
        arrivals_s = [first_s, *sorted(draw.uniform(first_s, last_s) for _ in range(count - 1))]
        for arrival_s in arrivals_s:
            prompt, answer = draw.randint(8, 200), draw.randint(8, 48)
            row = {"timestamp": round(arrival_s * 1000), "model": model}
            row |= {"input_length": prompt, "output_length": answer}
            row |= {"slo_ttft_ms": ttft_ms, "slo_tpot_ms": tpot_ms}
            row |= {"slo_e2e_ms": ttft_ms + (answer - 1) * tpot_ms}
            rows.append(row)
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        print(json.dumps(row, separators=(",", ":")))


if __name__ == "__main__":
    main()
