"""Exports latency tables from aiconfigurator-core to the file in prism-sim's wheel.

    pip install './prism_sim[costs-export]'
    python -m lab.calibration.export_aiconfigurator \\
        --out prism_sim/costs/data/aiconfigurator.json.gz

aiconfigurator-core (NVIDIA, Apache-2.0) has kernel latencies measured on GPUs, per operation, and
interpolates between them. The export evaluates all operations of each (GPU, model, TP) at the
points of a StepTable. A combination without data is left out and printed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from prism_sim.costs.gpus import GPUS
from prism_sim.costs.grid import Grid, write_grid
from prism_sim.costs.model import PromptChunk
from prism_sim.costs.shapes import CONFIGS, FP8, ModelShape, in_fp8, shape_named
from prism_sim.costs.table import StepTable, TableCost

Floats = NDArray[np.float64]
Operation = tuple[str, float, float, str]
"""Name, milliseconds, energy, source."""

SYSTEMS = {"a100-80": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}
BACKENDS = ("sglang", "vllm", "trtllm")
TP_DEGREES = (1, 2, 4, 8)
DIGITS = 4
FP8_GPUS = ("h100", "h200")
FP8_PARAMETERS_MIN = 7e9

# fmt: off
DENSE_TOKENS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 32768,
)
PREFILL_TOKENS = (
    1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 32768,
)
PREFILL_CONTEXT = (0, 512, 2048, 8192, 32768, 131072)
DECODE_BATCH = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
DECODE_CONTEXT = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
# fmt: on
LOGITS_BATCH_MAX = 256
"""Most tokens of a step that counts as a decode, which computes logits for every token."""


@dataclass(frozen=True)
class CompiledEngine:
    """Compiled model of aiconfigurator, which returns the time of its operations at a point."""

    handle: Any
    backend: str
    context_ops: int
    generation_ops: int

    def dense_s(self, tokens: int) -> float:
        decode = tokens <= LOGITS_BATCH_MAX
        values = self._decode(tokens, 1) if decode else self._prefill(tokens, 0)
        return _seconds(values, attention=False)

    def prefill_attention_s(self, tokens: int, context: int) -> float:
        return _seconds(self._prefill(tokens, context), attention=True)

    def decode_attention_s(self, batch: int, context: int) -> float:
        return _seconds(self._decode(batch, context), attention=True)

    def _prefill(self, tokens: int, context: int) -> list[Operation]:
        indices = list(range(self.context_ops))
        found: list[Operation] = self.handle.evaluate_context_ops(
            indices, batch_size=1, s=tokens, prefix=context
        )
        return found

    def _decode(self, batch: int, context: int) -> list[Operation]:
        indices = list(range(self.generation_ops))
        found: list[Operation] = self.handle.evaluate_generation_ops(
            indices, batch_size=batch, s=context
        )
        return found


def export(
    out: Annotated[Path, typer.Option(help="File to write, .json.gz.")],
    gpus: Annotated[str, typer.Option(help="GPU types, comma-separated.")] = ",".join(SYSTEMS),
) -> None:
    """Writes the tables of all models of prism_sim.costs.shapes on these GPUs."""
    tables, missing, errors = [], [], []
    for gpu, shape, tp in combinations(gpus.split(",")):
        try:
            table, error = export_table(gpu, shape, tp)
        except (RuntimeError, ValueError, KeyError) as problem:
            missing.append(f"{gpu} {shape.name} TP {tp}: {str(problem)[:120]}")
            continue
        tables.append(table)
        errors.append(error)
    write_grid(
        out,
        Grid(
            package="aiconfigurator-core",
            version=version("aiconfigurator-core"),
            license="Apache-2.0",
            tables=tuple(tables),
        ),
    )
    print(*missing, sep="\n")
    print(f"{out}: {len(tables)} tables, {out.stat().st_size} bytes, {len(missing)} without data")
    print(f"between points: median error {np.median(errors):.2%}, worst {np.max(errors):.2%}")


def combinations(gpus: list[str]) -> Iterator[tuple[str, ModelShape, int]]:
    """Yields each model geometry with the TP degrees that its heads and the GPU's memory allow."""
    for gpu in gpus:
        for shape in export_shapes(gpu):
            for tp in TP_DEGREES:
                fits = shape.weight_bytes(tp) < 0.9 * GPUS[gpu].memory_bytes
                gated = shape.decoder.model_type != "opt"
                if gated and shape.heads % tp == 0 and fits:
                    yield gpu, shape, tp


def export_shapes(gpu: str) -> list[ModelShape]:
    """Returns the models of prism_sim.costs.shapes, large ones also in FP8 on GPUs with FP8."""
    models = [shape_named(name) for name in CONFIGS]
    large = [shape for shape in models if shape.parameters > FP8_PARAMETERS_MIN]
    eight_bit = [in_fp8(shape) for shape in large] if gpu in FP8_GPUS else []
    shapes = [*models, *eight_bit]
    return list({shape.geometry: shape for shape in reversed(shapes)}.values())[::-1]


def export_table(gpu: str, shape: ModelShape, tp: int) -> tuple[StepTable, float]:
    """Returns the table and its worst relative error at points between its grid points."""
    engine = compile_engine(gpu, shape, tp)
    attention = _table(engine.prefill_attention_s, PREFILL_TOKENS, PREFILL_CONTEXT)
    pairs = _table(_pairs, PREFILL_TOKENS, PREFILL_CONTEXT)
    pair_s = float(f"{_fit_pair_s(pairs, attention):.{DIGITS}g}")
    decode = _table(engine.decode_attention_s, DECODE_BATCH, DECODE_CONTEXT)
    decode = np.maximum.accumulate(decode, axis=0)
    table = StepTable(
        gpu=gpu,
        model=shape.name,
        tp=tp,
        source=f"aiconfigurator-core {version('aiconfigurator-core')}, {engine.backend}",
        dense_tokens=DENSE_TOKENS,
        dense_s=_rising([engine.dense_s(tokens) for tokens in DENSE_TOKENS]),
        pair_s=pair_s,
        prefill_tokens=PREFILL_TOKENS,
        prefill_context=PREFILL_CONTEXT,
        prefill_s=tuple(_rounded(row) for row in attention - pair_s * pairs),
        decode_batch=DECODE_BATCH,
        decode_context=DECODE_CONTEXT,
        decode_s=tuple(_rising(row) for row in decode),
    )
    return table, _error_between(TableCost(table), engine)


def compile_engine(gpu: str, shape: ModelShape, tp: int) -> CompiledEngine:
    """Compiles the model with the first backend that has data.

    Raises aiconfigurator's error for the last backend if none has data.
    """
    from aiconfigurator_core.sdk.engine import EngineHandle

    with tempfile.TemporaryDirectory() as folder:
        quantization = "fp8" if shape.weight_dtype_bytes == 1 else None
        (Path(folder) / "config.json").write_text(json.dumps(llama_config(shape)))
        for backend in BACKENDS:
            try:
                handle = EngineHandle.compile(
                    folder, SYSTEMS[gpu], backend, tp_size=tp, gemm_quant_mode=quantization
                )
                engine = CompiledEngine(handle, backend, *_operations(handle))
                engine.prefill_attention_s(512, 0)
                engine.decode_attention_s(1, 512)
            except (RuntimeError, ValueError, KeyError):
                if backend == BACKENDS[-1]:
                    raise
            else:
                return engine
    raise AssertionError("BACKENDS is empty")


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """Returns the config.json of a Llama with this shape."""
    config = CONFIGS[shape.name.removesuffix(FP8.upper())]
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {**config, **llama, "torch_dtype": "bfloat16"}


def _operations(handle: Any) -> tuple[int, int]:
    context, generation = handle.run_static_per_op(batch_size=1, isl=64, osl=2)
    return len(context), len(generation)


def _seconds(values: list[Operation], attention: bool) -> float:
    """Returns the time of the attention operations, or of all others."""
    names = ("context_attention", "generation_attention")
    return sum(ms for name, ms, *_ in values if (name in names) is attention) / 1000


def _pairs(tokens: int, context: int) -> float:
    return tokens * (context + (tokens + 1) / 2)


def _table(
    value: Callable[[int, int], float], rows: tuple[int, ...], columns: tuple[int, ...]
) -> Floats:
    return np.array([[value(row, column) for column in columns] for row in rows])


def _fit_pair_s(pairs: Floats, seconds: Floats) -> float:
    """Fits the time per pair by the least squares of relative errors, from 512 tokens on."""
    large = np.array(PREFILL_TOKENS) >= 512
    ratio = pairs[large] / seconds[large]
    return float(ratio.sum() / np.square(ratio).sum())


def _rising(values: Any) -> tuple[float, ...]:
    """Returns the running maximum: more work never takes less time, but measurements scatter."""
    return _rounded(np.maximum.accumulate(np.asarray(values)))


def _rounded(values: Any) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


def _error_between(cost: TableCost, engine: CompiledEngine) -> float:
    """Returns the worst relative error of steps at points between the table's grid points."""
    errors = []
    for tokens, context in ((100, 0), (700, 1200), (1800, 0), (5000, 5000)):
        real_s = engine.dense_s(tokens) + engine.prefill_attention_s(tokens, context)
        errors.append(abs(cost.step_s((PromptChunk(tokens, context),), 0, 0) / real_s - 1))
    for batch, context in ((3, 700), (24, 1500), (100, 300), (200, 3000)):
        real_s = engine.dense_s(batch) + engine.decode_attention_s(batch, context)
        errors.append(abs(cost.decode_s(batch, batch * context) / real_s - 1))
    return max(errors)


if __name__ == "__main__":
    typer.run(export)
