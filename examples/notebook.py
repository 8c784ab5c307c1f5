"""Notebook on `prism_sim`, as a script: comparison of policies on two GPUs.

Run it with `python examples/notebook.py`. In a notebook each `# %%` starts a cell. It needs the
package polars (`pip install 'prism-sim[frames]'`).
"""

# %% A setup has the keys of the YAML. A trace is a file, or rows.
import polars as pl

from prism.policies.data import Action, Activate, ClusterView, Settings
from prism.policies.policy import ELASTIC_MEMORY, Policy
from prism_sim import Results, simulate

setup = {
    "gpus": {"type": "h100", "count": 2, "memory": "40GiB"},
    "models": [
        {"name": "chat", "shape": "Llama-3.1-8B"},
        {"name": "tail", "shape": "Llama-3.2-3B", "count": 9},
    ],
    "slo": {"ttft": "500ms", "tpot": "50ms"},
    "generate": {"seconds": 300, "rate": 6},
    "seed": 1,
}
results = simulate(setup)
print(results.summary.total.attainment["1"])

# %% Each request is a row. These have the slowest first tokens.
slow = results.requests.sort("ttft_s", descending=True).head(5)
print(slow.select("model", "device", "arrival_s", "ttft_s"))

# %% Latency by minute.
minutes = (
    results.requests.group_by((pl.col("arrival_s") // 60).alias("minute"))
    .agg(pl.len().alias("requests"), pl.col("ttft_s").quantile(0.99).alias("ttft_p99_s"))
    .sort("minute")
)
print(minutes)


# %% A policy of your own needs no package here: the first device with room, permanently.
def first_fit(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Returns an action for one model. The next plan sees the remaining room."""
    for model in view.models:
        for gpu in view.gpus:
            need = model.weight_bytes + model.kv_floor_bytes
            if model.state == "absent" and gpu.engines_free and gpu.free_bytes >= need:
                return (Activate(model.name, gpu.name, "first that fits"),)
    return ()


mine = Policy("first-fit", first_fit, frozenset({ELASTIC_MEMORY}), evicts=False)
runs: dict[str, Results] = {
    "first-fit": simulate(setup, policy=mine),
    "static": simulate(setup, changes={"policy": "static"}),
    "prism": results,
}

# %% A table of all runs: attainment, busy GPUs and activations.
compared = pl.DataFrame(
    {
        "policy": list(runs),
        "within_slo": [r.requests["met_ttft"].mean() for r in runs.values()],
        "busy": [r.devices["busy"].mean() for r in runs.values()],
        "activations": [r.devices["activations"].sum() for r in runs.values()],
    }
)
print(compared)

# %% A trace can also be rows.
rows = [
    {"timestamp": 1000.0 * i, "model": "chat", "input_length": 200, "output_length": 50}
    for i in range(60)
]
alone = simulate(setup, rows, changes={"gpus.count": 1})
print(alone.models.select("model", "requests", "ttft_ms_p99", "costs"))
