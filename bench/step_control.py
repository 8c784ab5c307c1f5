"""Cost of step control, against the same cluster without it in the same run.

    python bench/step_control.py [--model DIR] [--streams 64] [--tokens 128] [--rounds 7]

A cluster of one device, one fake engine with steps of 10 ms and one model answers streams under
`muxserve`, whose agent starts each step, and under `muxserve++`, whose engine steps by itself. The
placement is the same. With `--turns 12` requests arrive one by one, each of which ends the run of
steps that the control has granted. The output has tokens per second, time per token, and CPU time
of the agent and the engine, as medians of the ratios of each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from serving import Run, bodies, cluster, measured, run, with_little_kv
from specs import model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=model_folder, default="tiny-llama")
    for name, value in {"streams": 64, "tokens": 128, "rounds": 7, "turns": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(with_little_kv(options.model))
        pair = [
            stack.enter_context(cluster(model, options.streams, policy))
            for policy in ("muxserve", "muxserve++")
        ]
        for url, pids in pair:
            run(url, pids, 4, bodies(8, 8))
        rounds = [
            tuple(measured(url, pids, options) for url, pids in pair) for _ in range(options.rounds)
        ]
    figures: dict[str, Callable[[Run], float]] = {
        "tokens per second": lambda each: each.tokens / each.seconds,
        "time per token": lambda each: each.token_s,
        "first token": lambda each: each.first_token_s,
        "CPU of the agent": lambda each: each.cpu_s["agent"],
        "CPU of the engine": lambda each: each.cpu_s["engine"],
    }
    for name, of in figures.items():
        ratios = [of(controlled) / max(of(free), 1e-9) for controlled, free in rounds]
        print(f"{name}, with step control over without: ratio {median(ratios):.2f}")


if __name__ == "__main__":
    main()
