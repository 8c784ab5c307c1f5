"""LoRA adapters: the outputs with each, on demand, together in a batch and with the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from prism.config.schema.lora import LoraConfig, lora_spec
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request
from prism.models.files import inspect_model
from prism.models.lora_files import WEIGHTS
from tests.engines.harness import request
from tests.sglang.adapters import ATTENTION, make_adapter, merged
from tests.sglang.conftest import run
from tests.sglang.models import LLAMA, QWEN3, TIE, gap_of, network, path_of, prompts, spec_of

pytestmark = pytest.mark.sglang
TOKENS = 12


def with_adapters(model: str, adapters: dict[str, Path], slots: int = 4) -> ModelSpec:
    files = inspect_model(path_of(model), model)
    where = (path_of(model), files, "float32")
    lora = lora_spec(
        [(name, folder, "") for name, folder in adapters.items()],
        where,
        "lora",
        LoraConfig(slots=slots),
    )
    return msgspec.structs.replace(spec_of(model), lora=lora)


def asked(name: str, model: str, prompt: list[int], adapter: str) -> Request:
    return msgspec.structs.replace(request(name, model, prompt, TOKENS), lora=adapter)


def tokens(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_each_adapter_says_what_its_merged_model_says(
    idle: Any, tmp_path: Path, model: str
) -> None:
    """Runs four adapters in one queue with two slots: other ranks, some modules, some layers. Equal
    prompts do not share a prefix cache."""
    adapters = {
        "all": make_adapter(tmp_path / "all", model),
        "part": make_adapter(tmp_path / "part", model, rank=2, targets=("v_proj", "o_proj")),
        "gates": make_adapter(tmp_path / "gates", model, rank=3, targets=("gate_proj",), seed=2),
        "one-layer": make_adapter(tmp_path / "one-layer", model, layers=[1], seed=3),
    }
    idle.activate(ActivateEngine(with_adapters(model, adapters, slots=2)))
    asks, names = prompts(model, 2, (20, 60)), ("", *adapters)
    said = []
    for cached in (False, True):
        chunks, failures = run(
            idle,
            [asked(f"{name} {i}", model, p, name) for i, p in enumerate(asks) for name in names],
        )
        assert failures == []
        assert {of_one[0].cached_tokens > 0 for of_one in chunks.values()} == {cached}
        said.append({key: tokens(of_one) for key, of_one in chunks.items()})
    assert said[0] == said[1]
    for name in names:
        path = merged(adapters[name], model, tmp_path / f"m-{name}") if name else path_of(model)
        judge = network(path)
        for i, prompt in enumerate(asks):
            output = said[0][f"{name} {i}"]
            assert len(output) == TOKENS
            assert gap_of(judge, prompt, output) < TIE
    assert len({str(output) for output in said[0].values()}) == len(said[0])


def test_slots_are_leased_with_the_model_and_return_with_it(idle: Any, tmp_path: Path) -> None:
    adapters = {
        "a": make_adapter(tmp_path / "a", LLAMA, rank=8, targets=ATTENTION),
        "b": make_adapter(tmp_path / "b", LLAMA, rank=2, targets=("down_proj",)),
    }
    page_bytes = idle._client.page_bytes
    plain = idle.activate(ActivateEngine(spec_of(LLAMA)))
    idle.deactivate()
    assert idle._client.usage().static_bytes == 0
    spec = with_adapters(LLAMA, adapters)
    activated = idle.activate(ActivateEngine(spec))
    pool = idle._active.scheduler.tp_worker.model_runner.lora_manager.memory_pool
    buffers = [b for part in (pool.A_buffer, pool.B_buffer) for per in part.values() for b in per]
    slots_bytes = sum(b.numel() * b.element_size() for b in buffers)
    assert spec.lora.size_bytes == slots_bytes
    extra_bytes = activated.static_bytes - plain.static_bytes
    assert 0 <= extra_bytes - slots_bytes < page_bytes
    assert idle._client.usage().static_bytes == activated.static_bytes
    idle.deactivate()
    assert idle._client.usage().static_bytes == 0


def test_adapters_come_when_they_are_asked_for_and_go_unused(idle: Any, tmp_path: Path) -> None:
    """Adapters of open requests are in host memory, and as many others as there are slots."""
    adapters = {
        f"a{i}": make_adapter(tmp_path / f"a{i}", LLAMA, targets=("o_proj",), seed=i)
        for i in range(4)
    }
    idle.activate(ActivateEngine(with_adapters(LLAMA, adapters, slots=2)))
    held, [prompt] = idle._active.adapters.loaded, prompts(LLAMA, 1, (20, 20))
    assert [*held] == []
    for name, expected in (("a0", "0"), ("a1", "01"), ("a0", "10"), ("a2", "02"), ("a1", "21")):
        run(idle, [asked("r", LLAMA, prompt, name)])
        assert "".join(name[1] for name in held) == expected
    chunks, _ = run(idle, [asked(name, LLAMA, prompt, name) for name in adapters])
    assert {len(tokens(of_one)) for of_one in chunks.values()} == {TOKENS}
    assert len(held) == 4
    run(idle, [asked("r", LLAMA, prompt, "a3"), asked("s", LLAMA, prompt, "a0")])
    assert {*held} == {*adapters}, "nothing had to go"


def test_what_cannot_be_loaded_fails_its_own_request(idle: Any, tmp_path: Path) -> None:
    names = ("gone", "other", "rank", "broken", "good")
    adapters = {name: make_adapter(tmp_path / name, LLAMA) for name in names}
    idle.activate(ActivateEngine(with_adapters(LLAMA, adapters)))
    (adapters["gone"] / WEIGHTS).unlink()
    (adapters["broken"] / WEIGHTS).write_bytes(b"no tensors")
    other = {f"{n}x": t for n, t in load_file(adapters["other"] / WEIGHTS).items()}
    save_file(other, adapters["other"] / WEIGHTS)
    longer = make_adapter(tmp_path / "longer", LLAMA, rank=6)
    (longer / WEIGHTS).replace(adapters["rank"] / WEIGHTS)
    [prompt] = prompts(LLAMA, 1, (20, 20))
    chunks, failures = run(idle, [asked(n, LLAMA, prompt, n) for n in (*names, "unknown")])
    assert [*chunks] == ["good"]
    assert {f.request_id for f in failures} == {*names[:4], "unknown"}
    assert {(f.code, f.retryable) for f in failures} == {("adapter_unavailable", False)}
    assert all(f.request_id in f.message for f in failures)
    [expected] = run(idle, [asked("good", LLAMA, prompt, "good")])[0].values()
    assert tokens(chunks["good"]) == tokens(expected)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_another_rank_cannot_load_none_holds(
    idle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Ranks would otherwise run different batches and wait for each other forever."""
    idle.activate(ActivateEngine(with_adapters(LLAMA, {"a": make_adapter(tmp_path / "a", LLAMA)})))
    [prompt], votes = prompts(LLAMA, 1, (20, 20)), list[bool]()

    def all_true(ok: bool) -> bool:
        votes.append(ok)
        return ok and len(votes) != fails_at

    monkeypatch.setattr(idle._context.ranks, "all_true", all_true)
    chunks, [failure] = run(idle, [asked("r", LLAMA, prompt, "a")])
    assert (chunks, failure.code, votes) == ({}, "adapter_unavailable", [True] * fails_at)
    assert "on another rank's device" in failure.message
    assert not idle._active.adapters.loaded
    chunks, failures = run(idle, [asked("s", LLAMA, prompt, "a")])
    assert (len(tokens(chunks["s"])), failures) == (TOKENS, [])


def test_a_request_goes_on_with_its_adapter(idle: Any, tmp_path: Path) -> None:
    """Keeps the adapter after a move or an engine's death."""
    adapters = {"a": make_adapter(tmp_path / "a", LLAMA)}
    idle.activate(ActivateEngine(with_adapters(LLAMA, adapters)))
    [prompt] = prompts(LLAMA, 1, (40, 40))
    undisturbed = tokens(run(idle, [asked("r", LLAMA, prompt, "a")])[0]["r"])
    idle.deactivate()
    idle.activate(ActivateEngine(with_adapters(LLAMA, adapters)))
    idle.submit([asked("r", LLAMA, prompt, "a")])
    before = [chunk for _ in range(5) for chunk in idle.step().chunks]
    [leaving] = idle.export()
    assert (leaving.lora, leaving.resumed_tokens) == ("a", len(tokens(before)))
    while idle.step().busy:
        pass
    after, failures = run(idle, [leaving])
    assert failures == []
    assert 0 < leaving.resumed_tokens < TOKENS
    assert tokens([*before, *after["r"]]) == undisturbed
