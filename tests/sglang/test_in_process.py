"""An engine in the test's own process, where its steps and files can be made to fail."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.engines.sglang.grammars import grammar_client
from prism.errors import ActivationError, RequestsFailedError
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Grammar
from tests.engines.harness import request
from tests.sglang.conftest import DEVICE, config_of
from tests.sglang.models import GEMMA3, LLAMA, QWEN3, path_of, spec_of

pytestmark = pytest.mark.sglang
CAPACITY_BYTES = 256 << 20


@pytest.fixture
def core(preloaded: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens an engine. Its parameter: tokens of a prefill chunk."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prism.engines.sglang import create

        chunk_tokens = getattr(request, "param", 64)
        config = config_of(Path(directory), CAPACITY_BYTES, chunk_tokens)
        core = create(EngineContext("e0", DEVICE, config))
        yield core
        core.close()
        kvcached.Device.unlink(config.namespace, DEVICE)


def without(name: str, tensor: str, folder: Path) -> ActivateEngine:
    """Returns an order for a model whose files lack `tensor`."""
    from safetensors.torch import load_file, save_file

    path = folder / tensor
    shutil.copytree(path_of(name), path)
    tensors = load_file(path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return ActivateEngine(msgspec.structs.replace(spec_of(name), path=str(path)))


def test_a_checkpoint_that_lacks_something_is_refused(core: Any, tmp_path: Path) -> None:
    """Refuses a checkpoint that lacks a part of a fused matrix, too."""
    up = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ActivationError, match=r"part of model.layers.1.mlp.gate_up_proj.weight"):
        core.activate(without(QWEN3, up, tmp_path))
    with pytest.raises(ActivationError, match=r"do not have values for lm_head.weight"):
        core.activate(without(QWEN3, "lm_head.weight", tmp_path))
    core.activate(ActivateEngine(spec_of(QWEN3)))


def test_kv_is_as_large_as_planned_however_little_is_free(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *a, **k: 1e-4)
    core.activate(ActivateEngine(spec_of(LLAMA)))
    active = core._active
    pool = active.scheduler.token_to_kv_pool_allocator.get_kvcache()
    assert pool.size == active.memory.plan.pool_tokens


def test_input_buffers_are_for_a_prefill_and_not_for_all_tokens(core: Any) -> None:
    from sglang.srt.model_executor.input_buffers import _forward_input_buffer_pool as buffers

    core.activate(ActivateEngine(spec_of(LLAMA)))
    arguments = core._active.scheduler.server_args
    assert core._active.memory.plan.pool_tokens > 4 * arguments.max_prefill_tokens
    assert max(size for _, size, *_ in buffers) <= 3 * 2 * arguments.max_prefill_tokens


def test_vectors_of_images_go_with_the_model(core: Any) -> None:
    import torch
    from sglang.srt.managers import mm_schedule
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    core.activate(ActivateEngine(spec_of(LLAMA)))
    vectors = torch.zeros(16, 64)
    assert mm_schedule.embedding_cache.set(1, EmbeddingResult(embedding=vectors))
    kept = weakref.ref(vectors)
    del vectors
    core.deactivate()
    assert kept() is None


def test_process_groups_that_outlive_their_model_write_into_no_file(core: Any) -> None:
    """Checks what an error's traceback may keep. torch's rendezvous was a descriptor, which was
    another file's by then: it wrote there, or read a large file on and on."""
    core.activate(ActivateEngine(spec_of(LLAMA)))
    core.deactivate()
    core.activate(ActivateEngine(spec_of(LLAMA)))
    kept = [core._active.scheduler]
    core.deactivate()
    files = [os.memfd_create("another") for _ in range(32)]
    kept.clear()
    gc.collect()
    assert [os.fstat(file).st_size for file in files] == [0] * len(files)
    for file in files:
        os.close(file)


@pytest.mark.parametrize("core", [16, 64, 256], indirect=True)
def test_a_window_holds_what_is_planned_however_long_the_answer_becomes(core: Any) -> None:
    spec = spec_of(GEMMA3.name)
    core.activate(ActivateEngine(spec))
    active = core._active
    window, held = active.scheduler.token_to_kv_pool_allocator.swa_attn_allocator, []
    cache = active.scheduler.tree_cache
    core.submit([request("r", spec.name, list(range(20, 110)), max_tokens=400)])
    while core.step().busy:
        held.append(window._live_pages * window.page_size - cache.swa_evictable_size())
    assert len(held) >= 400
    assert max(held) <= active.memory.plan.side["window"].tokens


def test_another_number_of_tokens_than_planned_is_refused(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    monkeypatch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda *_: 1 << 20)
    with pytest.raises(ActivationError, match=r"tokens of KV where \d+ were planned"):
        core.activate(ActivateEngine(spec_of(LLAMA)))


def test_torch_out_of_memory_ends_the_requests_and_the_engine_by_name(core: Any) -> None:
    """Checks that the failure is not retryable: the next engine would run out of memory, too."""
    import torch

    core.activate(ActivateEngine(spec_of(LLAMA)))

    def no_memory(batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 ...")

    core._active.scheduler.run_batch = no_memory
    core.submit([request(f"r{i}", LLAMA, [5, 6, 7 + i]) for i in range(2)])
    output = core.step()
    assert [(f.request_id, f.code, f.retryable) for f in output.failures] == [
        ("r0", "engine_memory", False),
        ("r1", "engine_memory", False),
    ]
    assert "raise engine.static" in output.failures[0].message
    assert output.busy
    text = r"Tried to allocate 2.00 GiB.\); raise engine.static"
    with pytest.raises(RequestsFailedError, match=text):
        core.step()


@pytest.mark.parametrize("stage", ["before the queue", "after it"])
def test_torch_out_of_memory_while_planning_blames_who_was_next(
    core: Any, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Fails neither the batch that ran before nor the requests that wait."""
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    core.activate(ActivateEngine(spec_of(LLAMA)))
    core.submit([request("runs", LLAMA, [5, 6, 7])])
    core.step()

    def no_memory(*_arguments: object, **_named: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if stage == "after it":
        monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", no_memory)
    else:
        core._active.scheduler.get_next_batch_to_run = no_memory
    core.submit([request(f"r{i}", LLAMA, [5, 6, 7 + i]) for i in range(2)])
    blamed = [f.request_id for f in core.step().failures]
    assert blamed == (["r0", "r1"] if stage == "after it" else ["r0"])
    with pytest.raises(RequestsFailedError):
        core.step()


def test_an_activation_without_room_settles_the_share(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = []
    monkeypatch.setattr(core._share, "settle", lambda **how: settled.append(how))
    with pytest.raises(ActivationError, match="KV limit"):
        core.activate(ActivateEngine(spec_of(LLAMA), kv_limit_bytes=1))
    assert settled == [{"served": False}]


def test_torch_out_of_memory_fails_an_activation_by_name(
    core: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks that the log has the traceback: the error itself does not."""
    import torch

    from prism.engines.sglang import host

    def build_without_memory(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(host, "build", build_without_memory)
    with pytest.raises(ActivationError, match=r"could not be loaded: .* raise engine.static"):
        core.activate(ActivateEngine(spec_of(LLAMA)))
    assert "in build_without_memory" in caplog.text
    assert all(record.exc_info is None for record in caplog.records)  # which would keep tensors


def test_a_grammar_that_comes_too_late_may_be_tried_again(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts as late in SGLang; the grammar is not cached as invalid."""
    core.activate(ActivateEngine(spec_of(LLAMA)))
    manager = core._active.scheduler.grammar_manager
    polls, poll_s = "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS", manager.SGLANG_GRAMMAR_POLL_INTERVAL
    assert getattr(manager, polls) * poll_s == pytest.approx(50)
    setattr(manager, polls, 1)
    monkeypatch.setattr(grammar_client, "COMPILING_MAX", 0)
    asked: Any = {"grammar": Grammar("regex", "(cat|dog)!")}
    core.submit([request("late", LLAMA, [5, 6, 7], 4, **asked)])
    while not (failures := core.step().failures):
        pass
    [late] = failures
    assert (late.code, late.retryable) == ("engine_error", True)
    assert late.message == "its grammar could not be compiled in time"
    setattr(manager, polls, 60_000)
    monkeypatch.setattr(grammar_client, "COMPILING_MAX", 1)
    core.submit([request("again", LLAMA, [5, 6, 7], 4, **asked)])
    while not (output := core.step()).chunks:
        assert not output.failures
