"""lm-eval against a served model: python with_lm_eval.py URL MODEL TASKS TOKENIZER OUT. TASKS is a
folder of tasks; of each, its samples are written to OUT as JSON."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model, tasks, tokenizer, out = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": model,
        "base_url": f"{url}/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 512,
        "batch_size": 2,
    },
    tasks=sorted(path.stem for path in Path(tasks).glob("*.yaml")),
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    bootstrap_iters=0,
)
samples = {
    task: [{"doc": sample["doc"], "resps": sample["filtered_resps"]} for sample in found]
    for task, found in results["samples"].items()
}
Path(out).write_text(json.dumps(samples))
