"""Simulation of 12 models with the requests of Azure's two LLM services, on 4 to 12 GPUs.

python -m lab.azure TRACES [--gpus 4,5,6,8,12] [--seeds 1,2,3,4,5,6,7,8]
    [--policies prism,muxserve++] [--minutes 20] [--out FOLDER]

TRACES is the folder of `AzureLLMInferenceTrace_conv.csv` and `..._code.csv`. A seed draws the
beginning and the models of each service: 3 of 1B, 3B and 8B each, and one of 14B, 32B and 70B are
divided evenly, in a random order. The requests of a service go to its models by a power law of
exponent 0.9. SLOs and columns are those of `lab.servegen`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from lab.servegen import options, print_table
from prism_replay.formats.reader import AZURE
from prism_replay.formats.rows import ReadOptions
from prism_replay.trace import TraceRequest
from prism_replay.transforms import window

SHAPES = (
    *("Llama-3.2-1B",) * 3, *("Llama-3.2-3B",) * 3, *("Llama-3.1-8B",) * 3,
    "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B",
)  # fmt: skip
SERVICES = ("conv", "code")
SECONDS = 3400.0
"""Length that both traces have."""


def drawn(traces: Path, seed: int, seconds: float, folder: Path) -> list[TraceRequest]:
    """Returns the requests of models m00 to m11. Writes nothing to `folder`."""
    rng = np.random.default_rng([seed, 9])
    begin_s = float(rng.uniform(0, SECONDS - seconds))
    order = rng.permutation(len(SHAPES))
    found: list[TraceRequest] = []
    for number, service in enumerate(SERVICES):
        trace = AZURE.read(traces / f"AzureLLMInferenceTrace_{service}.csv", ReadOptions())
        requests = window(trace, begin_s, begin_s + seconds)
        models = order[number :: len(SERVICES)]
        weights = 1 / np.arange(1, len(models) + 1) ** 0.9
        chosen = rng.choice(models, size=len(requests), p=weights / weights.sum())
        found += [
            msgspec.structs.replace(request, model=f"m{int(model):02}")
            for request, model in zip(requests, chosen, strict=True)
        ]
    return sorted(found, key=lambda request: request.timestamp)


def main() -> None:
    parser = options("lab.azure", str(__doc__))
    parser.add_argument("traces", type=Path)
    parser.set_defaults(gpus="4,5,6,8,12", seeds="1,2,3,4,5,6,7,8", policies="prism,muxserve++")
    asked = parser.parse_args()
    print_table(asked, [(shape, "auto") for shape in SHAPES], partial(drawn, asked.traces))


if __name__ == "__main__":
    main()
