"""TableCost: closed forms against loops over steps, and errors of invalid tables."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_sim.costs.catalog import cost_model, model_shape
from prism_sim.costs.checkpoint import read_shape
from prism_sim.costs.gpus import gpu_spec
from prism_sim.costs.grid import MUXSERVE
from prism_sim.costs.model import PromptChunk, prompt_s, slowdown
from prism_sim.costs.roofline import roofline
from prism_sim.costs.table import StepTable, TableCost
from tests.costs.tables import BENT

Measured = tuple[str, int, int, int, float, float, float, float]
MEASURED: tuple[Measured, ...] = (
    ("llama-7b", 1, 8, 128, 78.33, 11.9, 2.74, 1.46),
    ("llama-7b", 1, 128, 32, 306.6, 19.67, 2.65, 1.84),
    ("llama-13b", 2, 16, 256, 299, 16.58, 2.52, 1.31),
    ("llama-30b", 4, 8, 256, 210.3, 23.88, 2.40, 1.10),
    ("llama-65b", 4, 8, 128, 219.4, 34.52, 2.33, 1.22),
    ("llama-65b", 8, 16, 256, 471.2, 32.59, 2.30, 1.01),
)
batches = st.integers(1, 80)
contexts = st.integers(0, 200_000)


@given(batch=batches, context=contexts, steps=st.integers(0, 400))
def test_a_run_is_the_sum_of_its_steps(batch: int, context: int, steps: int) -> None:
    cost = TableCost(BENT)
    one_by_one = sum(cost.decode_s(batch, context + step * batch) for step in range(steps))
    assert cost.decode_run_s(batch, context, steps) == pytest.approx(one_by_one, rel=1e-9)


@given(batch=batches, context=contexts, seconds=st.floats(0, 500), limit=st.integers(0, 500))
def test_as_many_steps_as_fit_and_no_more(
    batch: int, context: int, seconds: float, limit: int
) -> None:
    cost = TableCost(BENT)
    steps = cost.decode_steps(batch, context, seconds, limit)
    assert 0 <= steps <= limit
    assert cost.decode_run_s(batch, context, steps) <= seconds * (1 + 1e-9) + 1e-9
    if steps < limit:
        assert cost.decode_run_s(batch, context, steps + 1) > seconds * (1 - 1e-9) - 1e-9


@given(batch=batches, context=contexts)
def test_a_mixed_step_without_chunks_is_a_decode_step(batch: int, context: int) -> None:
    cost = TableCost(BENT)
    assert cost.step_s((), batch, context) == pytest.approx(cost.decode_s(batch, context))


def test_points_of_the_table_are_met() -> None:
    cost = TableCost(BENT)
    assert cost.decode_s(4, 4 * 50) == pytest.approx(0.05 + 1.0 + 0.1 * 3 / 7 + 0.3)
    pairs = 100 * (1000 + 101 / 2)
    dense_s = 2.0 + 12.0 * (100 - 64) / (512 - 64)
    assert cost.prefill_s(100, 1000) == pytest.approx(0.05 + dense_s + 1e-4 * pairs + 0.5)
    assert cost.step_s((), 0, 0) == cost.decode_run_s(0, 0, 7) == 0.0


def test_beyond_its_points_a_table_goes_on_with_the_last_slope() -> None:
    cost = TableCost(BENT)
    growth = [cost.decode_s(32, 32 * context) for context in (2000, 3000, 4000)]
    assert growth[2] - growth[1] == pytest.approx(growth[1] - growth[0])
    assert growth[1] > growth[0]


@given(first=st.integers(1, 3000), cut=st.integers(1, 2999))
def test_a_mixed_step_beats_two_steps(first: int, cut: int) -> None:
    cost = cost_model("h100", "Llama-3.1-8B")
    together = cost.step_s((PromptChunk(first), PromptChunk(cut)), 8, 8000)
    assert together < cost.prefill_s(first) + cost.prefill_s(cut) + cost.decode_s(8, 8000)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    cost = TableCost(BENT)
    chunks = [(100, 30), (100, 130), (50, 230)]
    expected = sum(cost.prefill_s(tokens, context) for tokens, context in chunks)
    assert prompt_s(cost, 250, 100, context_tokens=30) == pytest.approx(expected)


def test_prefill_keeps_compute_busy_and_decode_bandwidth() -> None:
    cost = cost_model("a100-80", "llama-7b")
    prefill = cost.usage((PromptChunk(2048),), 0, 0)
    decode = cost.usage((), 16, 16 * 400)
    assert prefill.compute > 0.9
    assert prefill.bandwidth < 0.3
    assert decode.bandwidth > 0.6
    assert decode.compute < 0.3
    # MuxServe's measured steps of this model: 1000 tokens, and 16 requests of 512 tokens.
    for share, prefill_slower, decode_slower in ((0.3, 2.7, 1.41), (0.5, 1.67, 1.09), (1, 1, 1)):
        assert slowdown(prefill, share) == pytest.approx(prefill_slower, rel=0.05)
        assert slowdown(decode, share) == pytest.approx(decode_slower, rel=0.05)


@pytest.mark.parametrize("row", MEASURED)
def test_muxserves_steps_are_as_measured(row: Measured) -> None:
    """Compares with rows of MuxServe's profile: with all SMs, and factors with 30 % of them."""
    model, tp, batch, tokens, prefill_ms, decode_ms, *slower_30 = row
    cost, prompts = cost_model("a100-80", model, tp, files=(MUXSERVE,)), (PromptChunk(tokens),)
    found = 1000 * cost.step_s(prompts * batch, 0, 0), 1000 * cost.decode_s(batch, batch * tokens)
    assert found == (pytest.approx(prefill_ms, rel=0.1), pytest.approx(decode_ms, rel=0.1))
    usages = cost.usage(prompts * batch, 0, 0), cost.usage((), batch, batch * tokens)
    slower = [slowdown(usage, 0.3) for usage in usages]
    assert slower == pytest.approx(slower_30, rel=0.1)


def test_measured_shares_are_met_and_lie_on_lines_of_one_over_the_share() -> None:
    rows = ((2.5, 2.0, 1.0),) * 2 + ((3.0, 2.0, 1.0),) * 2
    measured = {"sm_shares": (0.25, 0.5, 1.0), "sm_prefill": rows, "sm_decode": ((1, 1, 1),) * 4}
    cost = TableCost(StepTable(**(msgspec.structs.asdict(BENT) | measured)))
    prompt, decode = cost.usage((PromptChunk(600),), 0, 0), cost.usage((), 8, 800)
    assert [slowdown(prompt, share) for share in (1.0, 0.5, 0.25)] == [1.0, 2.0, 3.0]
    assert slowdown(prompt, 1 / 3) == pytest.approx(2.5)
    assert slowdown(prompt, 0.125) == pytest.approx(5.0)
    assert slowdown(decode, 0.25) == 1.0
    between = cost.usage((PromptChunk(36),), 0, 0)
    assert slowdown(between, 0.25) == pytest.approx(2.75)


def test_a_step_with_prompts_has_its_own_host_time() -> None:
    cost = TableCost(StepTable(**(msgspec.structs.asdict(BENT) | {"prompt_s": 0.5})))
    chunks = (PromptChunk(10), PromptChunk(10))
    for of, batch in ((chunks[:1], 0), (chunks, 0), (chunks, 4)):
        less_s = TableCost(BENT).step_s(of, batch, 400)
        assert cost.step_s(of, batch, 400) == pytest.approx(less_s + 0.5)
    assert cost.decode_s(4, 400) == TableCost(BENT).decode_s(4, 400)


def test_roofline_against_arithmetic_done_by_hand() -> None:
    cost = TableCost(roofline(gpu_spec("a100-80"), model_shape("meta-llama/Llama-2-7B")))
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096  # with its norms
    read_bytes = (32 * layer + 4096 + 32000 * 4096) * 2
    kv_bytes = 500 * 2 * 32 * 4096 * 2
    assert cost.decode_s(1, 500) == pytest.approx((read_bytes + kv_bytes) / (2.039e12 * 0.8))
    flops = 1000 * 2 * 32 * layer + 4 * 32 * 4096 * 1000 * 1001 / 2
    assert cost.prefill_s(1000) == pytest.approx(flops / (312e12 * 0.65))


def test_a_step_reads_the_experts_that_its_tokens_need(tmp_path: Path) -> None:
    """Compares Mixtral 8x7B: 12.9 of 46.7 billion parameters for one token, all for many."""
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert shape.parameters / 1e9 == pytest.approx(46.70, abs=0.01)
    assert shape.decoder.active_parameters / 1e9 == pytest.approx(12.88, abs=0.01)
    table = roofline(gpu_spec("h200"), shape)
    seconds = dict(zip(table.dense_tokens, table.dense_s, strict=True))
    one_expert = 3 * 4096 * 14336 * 32
    tables = 32000 * 4096
    expected = (46.703e9 - tables - 6 * one_expert) / (46.703e9 - tables - 8 * one_expert * 0.75**8)
    assert seconds[1.0] / seconds[8.0] == pytest.approx(expected, rel=1e-3)
    assert list(table.dense_s) == sorted(table.dense_s)


@pytest.mark.parametrize("gpu", ["a100-40", "a100-80", "h100", "h200", "l40s", "host"])
def test_more_work_never_takes_less_time(gpu: str) -> None:
    for tp in (1, 2, 4):
        cost = cost_model(gpu, "Llama-3.1-8B", tp)
        for low, high in pairwise((1, 2, 7, 64, 300, 5000)):
            assert cost.prefill_s(low) <= cost.prefill_s(high)
            assert cost.decode_s(low, low * 100) <= cost.decode_s(high, high * 100)
            assert cost.decode_s(16, low) < cost.decode_s(16, high)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dense_tokens": (1, 8, 8, 512)}, "dense_tokens"),
        ({"dense_s": (1.0, 0.9, 2.0, 3.0)}, "dense_s: more tokens"),
        ({"dense_s": (1.0, 2.0)}, "dense_s: must have"),
        ({"decode_s": ((0.1,),)}, "decode_s: must have 3 rows of 4"),
        ({"decode_batch": ()}, "decode_batch"),
        ({"dense_s": (1.0, 1.1, 2.0, float("inf"))}, "finite"),
        ({"prefill_s": ((0.0, 0.2),)}, "prefill_s"),
        ({"host_s": -1.0}, "host_s"),
        ({"tp": 0}, "tp"),
        ({"sm_shares": (0.5, 0.9)}, "end at 1"),
        ({"sm_shares": (0.5, 1.0), "sm_prefill": ((2.0, 1.0),)}, "sm_prefill: must have a row"),
        ({"sm_shares": (0.5, 1.0), "sm_prefill": ((1.0, 2.0),) * 4}, "sm_prefill: factors"),
    ],
)
def test_impossible_tables_are_named(change: dict[str, object], says: str) -> None:
    fields = msgspec.structs.asdict(BENT) | change
    with pytest.raises(ConfigError, match=says):
        StepTable(**fields)


HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
}
GEMMA = {**HYBRID, "model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024}
MISTRAL = {**GEMMA, "model_type": "mistral"}


def costs_of(folder: Path, **config: object) -> TableCost:
    (folder / "config.json").write_text(json.dumps(config))
    return TableCost(roofline(gpu_spec("h100"), read_shape(folder)))


@given(chunk=st.integers(1, 60), context=st.integers(0, 90), window=st.integers(1, 80))
def test_prefill_in_windows_counts_the_pairs_within(chunk: int, context: int, window: int) -> None:
    windows = ((float(window), 1.0),)
    table = msgspec.structs.replace(BENT, pair_s=0.0, prefill_s=(), prefill_tokens=())
    table = msgspec.structs.replace(table, prefill_context=())
    apart = TableCost(msgspec.structs.replace(table, window_pair_s=windows))
    added_s = apart.prefill_s(chunk, context) - TableCost(table).prefill_s(chunk, context)
    pairs = sum(min(context + token, window) for token in range(1, chunk + 1))
    assert added_s == pytest.approx(pairs, abs=1e-6)


@pytest.mark.parametrize(("config", "full_layers"), [(GEMMA, 1 / 6), (MISTRAL, 0)])
def test_windows_are_read_up_to_their_size(
    tmp_path: Path, config: dict[str, object], full_layers: float
) -> None:
    """Reads as much of longer contexts as the layers with full attention."""
    hybrid = costs_of(tmp_path, **config)
    full = costs_of(tmp_path, **{**config, "sliding_window": 1 << 20})
    times_s = [hybrid.decode_s(8, 8 * context) for context in (0, 512, 1024, 2048, 9000, 90_000)]
    assert times_s == sorted(times_s)
    for context in (0, 100, 1024):
        assert hybrid.decode_s(8, 8 * context) == pytest.approx(full.decode_s(8, 8 * context))
        assert hybrid.prefill_s(context + 1) <= full.prefill_s(context + 1) * (1 + 1e-9)
    grown, all_grown = (
        cost.decode_s(8, 8 * 9024) - cost.decode_s(8, 8 * 1024) for cost in (hybrid, full)
    )
    assert grown == pytest.approx(all_grown * full_layers, abs=1e-9)
    assert hybrid.prefill_s(8192, 90_000) < full.prefill_s(8192, 90_000)


def test_states_are_read_once_a_step_and_request(tmp_path: Path) -> None:
    cost = costs_of(tmp_path, **HYBRID)
    shape, spec = read_shape(tmp_path), gpu_spec("h100")
    read_s = shape.state_bytes() / (spec.bandwidth_bytes_s * spec.bandwidth_efficiency)
    table = cost.table
    assert table.decode_s == (
        (read_s, *table.decode_s[0][1:]),
        (2 * read_s, *table.decode_s[1][1:]),
    )
    one, two = (cost.decode_s(batch, 0) for batch in (1, 2))
    assert two - one == pytest.approx(read_s, rel=0.05)
    per_token_s = (cost.decode_s(1, 5000) - cost.decode_s(1, 0)) / 5000
    kept_bytes = 6 * 4 * 256 * 2 * 2  # each fourth layer keeps KV
    assert per_token_s == pytest.approx(read_s * kept_bytes / shape.state_bytes())
    steps_s = sum(cost.decode_s(3, 3 * (100 + step)) for step in range(50))
    assert cost.decode_run_s(3, 300, 50) == pytest.approx(steps_s)
