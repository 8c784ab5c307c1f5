"""Rules for GPUs that a CPU can check piece by piece."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import kvcached
from kvcached.errors import (
    ClosedError,
    InternalError,
    InvalidArgumentError,
    SystemCallError,
)
from prism.config.schema.cluster_config import EngineConfig
from prism.engines import cuda_toolkit
from prism.engines.sglang.platform import gpu
from prism.errors import ActivationError
from prism.messages.engine import ActivateEngine
from tests.sglang.models import LLAMA, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]

DEVICE = "cuda:0"
KERNELS = ("__init__.py", "flash_attn.py")


@pytest.mark.parametrize(
    ("files", "configured", "expected", "changed"),
    [
        ((), None, "triton", {}),
        (("__init__.py",), None, "triton", {}),
        (KERNELS, None, None, {}),
        ((), "flashinfer", "flashinfer", {}),
        (KERNELS, None, None, {"kv_dtype": "float8_e4m3fn"}),
        ((), None, "triton", {"kv_dtype": "float8_e4m3fn"}),
        (KERNELS, None, "triton", {"kv_dtype": "float8_e5m2"}),
        (KERNELS, None, "triton", {"kv_dtype": "bfloat16"}),
        (KERNELS, None, "triton", {"kv_dtype": "float8_e4m3fn", "latent_rope_dim": 8}),
        (KERNELS, "fa3", "fa3", {"kv_dtype": "float8_e4m3fn"}),
    ],
)
def test_attention_is_installed_and_reads_the_kv(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: tuple[str, ...],
    configured: str | None,
    expected: str | None,
    changed: dict[str, Any],
) -> None:
    for name in files:
        (tmp_path / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if files else None
    monkeypatch.setattr(gpu, "find_spec", lambda name: spec)
    model = msgspec.structs.replace(spec_of(LLAMA), **changed)
    assert gpu.attention_backend(configured, model) == expected


def test_kernels_are_compiled_with_a_whole_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Checks the search for a toolkit by SGLang and TVM, at their first kernel."""
    from sglang.kernels.jit.utils.compile import toolchain
    from tvm_ffi.cpp import extension

    local, whole = tmp_path / "local", tmp_path / "cuda"
    for folder in (local / "bin", whole / "bin", whole / "lib64"):
        folder.mkdir(parents=True)
    for nvcc in (local / "bin" / "nvcc", whole / "bin" / "nvcc"):
        nvcc.touch(0o755)
    (whole / "lib64" / "libcudart.so").touch()
    monkeypatch.setattr(cuda_toolkit, "_USUAL", whole)
    monkeypatch.setattr(os, "environ", {"PATH": str(local / "bin")})
    finders = (toolchain.cuda_home.__wrapped__, extension._find_cuda_home.__wrapped__)
    assert [find() for find in finders] == [str(local)] * 2
    gpu.prepare("host:0")
    assert "CUDA_HOME" not in os.environ
    gpu.prepare(DEVICE)
    assert [find() for find in finders] == [str(whole)] * 2


KERNEL = """
import sys
from prism.engines.sglang.platform import gpu
gpu.prepare("cuda:0")
from tvm_ffi import cpp
source = "__global__ void twice(float* x) { *x *= 2; } int next(int n) { return n + 1; }"
print(cpp.build_inline("k", cuda_sources=source, functions=["next"], build_directory=sys.argv[1]))
"""


def test_a_kernel_is_compiled_where_nvcc_is_a_wrapper(tmp_path: Path) -> None:
    """Compiles with the library that also compiles SGLang's kernels; needs no GPU."""
    found = cuda_toolkit.find()
    if found is None:
        pytest.skip("this machine lacks a CUDA toolkit")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\nexec {found}/bin/nvcc "$@"\n')
    nvcc.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "TVM_FFI_CUDA_ARCH_LIST": "9.0",
    }
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).exists()


def test_graphs_can_be_off() -> None:
    from sglang.srt.server_args import ServerArgs

    from prism.engines.sglang import server_args

    order = ActivateEngine(spec_of(LLAMA, 512), max_running=7)
    lazy = server_args.on_gpu(order, EngineConfig(attention_backend="triton"))
    off = server_args.on_gpu(order, EngineConfig(cuda_graphs="off", attention_backend="fa3"))
    assert server_args.on_gpu(order, EngineConfig(), captures=False)["disable_decode_cuda_graph"]
    assert (lazy["cuda_graph_max_bs_decode"], lazy["attention_backend"]) == (7, "triton")
    assert (off["disable_decode_cuda_graph"], off["attention_backend"]) == (True, "fa3")
    assert (lazy | off).keys() <= inspect.signature(ServerArgs).parameters.keys()


def test_noise_is_ours_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on meta stand for any device whose content a CPU cannot read."""
    import torch

    from prism.engines.sglang.platform import noise

    asked = []
    monkeypatch.setattr(noise, "_hash_on_gpu", lambda *tensors: asked.append(tensors))
    seeds, columns = torch.tensor([1, 2]), torch.arange(5)
    assert noise.random_bits(seeds, seeds, columns).shape == (2, 5)
    assert asked == []
    away = seeds.to("meta")
    noise.random_bits(away, away, columns)
    assert len(asked) == 1


class _Kv:
    """KV cache whose blocks are numbered from 1; records freed blocks."""

    num_blocks = 128

    def __init__(self) -> None:
        self.next = 1
        self.freed: list[int] = []

    def alloc_kv(self, count: int) -> Any:
        ids = np.arange(self.next, self.next + count, dtype=np.int64)
        self.next += count
        return ids

    def free_kv(self, ids: Any) -> None:
        self.freed += list(ids)

    def available_blocks(self) -> int:
        return 1 << 20


def _allocator(monkeypatch: pytest.MonkeyPatch, kv: _Kv, tokens: int, device: str) -> Any:
    import torch

    from kvcached.engines.sglang import allocator
    from kvcached.engines.sglang.kv_pool import KvcachedPool

    pool = object.__new__(KvcachedPool)
    pool.kv = kv
    memory = SimpleNamespace(
        rank_kv=lambda of: of, least=int, find_room=lambda of, count: of.alloc_kv(count)
    )
    monkeypatch.setattr(allocator, "active_memory", lambda: memory)
    return allocator.KvcachedAllocator(tokens, 16, torch.bfloat16, device, pool, False)


def test_blocks_beyond_sglangs_count_are_used_but_no_more_of_them_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holds for a pool that is not a multiple of a slab: kvcached has 128 blocks, SGLang counts
    100."""
    kv = _Kv()
    made = _allocator(monkeypatch, kv, 1600, "cpu")
    first = made.alloc(90 * 16)
    made.free(first)
    second = made.alloc(37 * 16)  # blocks 91 to 127
    assert int(second.max()) // 16 == kv.num_blocks - 1
    assert made.attainable_tokens() == 63 * 16
    assert not made.reserve_blocks(64, None)
    assert made.available_size() == 63 * 16


def test_a_decode_step_reads_no_ids_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on meta cannot be copied to the CPU: any attempt raises."""
    import torch

    kv = _Kv()
    made = _allocator(monkeypatch, kv, 1024, "meta")
    lengths = torch.tensor([17, 33, 40])  # two requests begin a block
    slots = made.alloc_decode(lengths.to("meta"), lengths, torch.empty(3, device="meta"))
    assert slots is not None
    assert (made._held.tolist(), made._live.nonzero().flatten().tolist()) == ([], [1, 2])
    assert made.reserve_blocks(3, None)
    made.return_held_blocks()
    assert kv.freed == [3, 4, 5]
    made.alloc(32)
    made.clear()
    assert kv.freed == [3, 4, 5, 1, 2, 6, 7]


def test_a_copy_that_cannot_be_kept_is_no_failed_activation(
    namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_copy(namespace, SystemCallError("write: input/output error"))
    assert "cannot store a copy of tiny-llama: write: input/output error" in caplog.text


@pytest.mark.parametrize("kind", [InternalError, ClosedError, InvalidArgumentError])
def test_a_bug_in_keeping_a_copy_is_not_hidden(namespace: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="a bug"):
        save_copy(namespace, kind("a bug"))


def save_copy(namespace: str, error: Exception) -> None:
    import torch

    from prism.engines.weights.model_weights import ModelWeights, StoreAccess

    def fail(*_arguments: object) -> None:
        raise error

    device = kvcached.Device.open(
        "host:0", capacity_bytes=1 << 20, page_bytes=64 << 10, namespace=namespace
    )
    with device.client("e0") as client:
        access = StoreAccess(SimpleNamespace(get=fail))  # type: ignore[arg-type]
        weights = ModelWeights(client, access, spec_of(LLAMA))
        weights.lay_out({"a": torch.empty(8, device="meta")})
        weights.back()
        weights._key, weights.may_store = kvcached.WeightKey("c", "l", "float32", 0, 1), True
        try:
            weights.save_copy((5, 6))
        finally:
            weights.release()
            client.close()
            device.destroy()


def test_what_was_not_written_is_found(namespace: str) -> None:
    """Finds a whole tensor of any type, and a part of one if its type has NaN."""
    import torch

    from prism.engines.parameters import check_written
    from prism.engines.weights.model_weights import ModelWeights, StoreAccess

    shapes = {"bf16": (64, 64), "fp8": (64, 64), "int8": (64, 64), "norm": (64,)}
    types = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    specs = {
        name: torch.empty(shape, dtype=types.get(name, torch.float32), device="meta")
        for name, shape in shapes.items()
    }
    device = kvcached.Device.open(
        "host:0", capacity_bytes=1 << 20, page_bytes=64 << 10, namespace=namespace
    )
    with device.client("e0") as client:
        weights = ModelWeights(client, StoreAccess(), spec_of(LLAMA))
        weights.lay_out(specs)
        weights.back()
        tensors = {
            name: weights.pages.arena_of(name).view(name, "uint8", (spec.nbytes,))
            for name, spec in specs.items()
        }
        whole = {name: torch.from_dlpack(view) for name, view in tensors.items()}
        real = {name: whole[name].view(specs[name].dtype) for name in specs}
        assert weights.fingerprint() == ()
        with pytest.raises(ActivationError, match="do not have values for bf16, fp8, int8"):
            check_written(real, weights.pages)
        for tensor in whole.values():
            tensor.zero_()
        check_written(real, weights.pages)
        for name in ("bf16", "fp8"):
            whole[name][64:].fill_(0xFF)
            with pytest.raises(ActivationError, match=f"only a part of {name}"):
                check_written(real, weights.pages)
            whole[name].zero_()
        whole["norm"].fill_(0xFF)
        with pytest.raises(ActivationError, match="do not have values for norm"):
            check_written(real, weights.pages)
        del tensors, whole, real
        weights.release()
    device.destroy()


class Captures:
    """SGLang's runner without SGLang: records its captures, and fails on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        from prism.engines.sglang.decode_graphs import DecodeGraphs, LazyGraphRunner

        self.sizes: list[int] = []
        self.error: Exception | None = None
        monkeypatch.setattr(DecodeCudaGraphRunner, "capture", self._capture)
        monkeypatch.setattr(DecodeCudaGraphRunner, "can_run_graph", lambda *_: True)
        monkeypatch.setattr(DecodeCudaGraphRunner, "warmup", lambda _: None)
        self.runner = LazyGraphRunner.__new__(LazyGraphRunner)
        self.runner.capture_bs = [1, 2, 4]
        self.runner.capture()
        model_runner = SimpleNamespace(decode_cuda_graph_runner=self.runner)
        self.scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=model_runner))
        self.graphs = DecodeGraphs(self.scheduler)
        captured = self

        def capture(runner: Any) -> None:
            if captured.error is not None:
                raise captured.error
            captured.sizes += runner.capture_bs

        monkeypatch.setattr(DecodeCudaGraphRunner, "capture", capture)

    def _capture(self) -> None:
        raise AssertionError("SGLang's own capture of all sizes")


def test_an_idle_engine_captures_graphs_one_by_one_after_a_decode_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures the largest graph first; no batch uses a graph that was not captured."""
    captures = Captures(monkeypatch)
    graphs, runner = captures.graphs, captures.runner
    assert (captures.sizes, runner.capture_bs, runner.can_run_graph(None)) == ([], [], False)
    assert not graphs.between_steps(is_idle=True)
    assert not graphs.pending
    graphs.decoded()
    assert graphs.pending
    assert not graphs.between_steps(is_idle=False)
    for sizes in ([4], [2, 4], [1, 2, 4]):
        assert graphs.between_steps(is_idle=True)
        assert (runner.capture_bs, runner.can_run_graph(None)) == (sizes, True)
    assert captures.sizes == [4, 2, 1]
    assert not graphs.pending
    assert not graphs.between_steps(is_idle=True)
    assert len(graphs.captures_s) == 3


def test_a_busy_engine_captures_the_first_graph_soon_and_the_others_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prism.engines.sglang.decode_graphs import BUSY_STEPS_PER_CAPTURE, FIRST_CAPTURE_STEPS

    captures = Captures(monkeypatch)
    captured_after = []
    for step in range(1, FIRST_CAPTURE_STEPS + BUSY_STEPS_PER_CAPTURE + 2):
        captures.graphs.decoded()
        if captures.graphs.between_steps(is_idle=False):
            captured_after.append(step)
    assert captured_after == [FIRST_CAPTURE_STEPS, FIRST_CAPTURE_STEPS + BUSY_STEPS_PER_CAPTURE]
    assert captures.sizes == [4, 2]


def test_a_capture_that_fails_leaves_the_graphs_that_are_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import gc

    import torch

    captures = Captures(monkeypatch)
    captures.graphs.decoded()
    captures.graphs.between_steps(is_idle=True)
    captures.error = torch.OutOfMemoryError("CUDA out of memory.")
    assert captures.graphs.between_steps(is_idle=True)
    assert (captures.runner.capture_bs, captures.graphs.pending) == ([4], False)
    assert "raise engine.static or set engine.cuda_graphs: off" in caplog.text
    assert "in _capture" in caplog.text  # where
    assert gc.isenabled()


def test_a_capture_that_fails_on_a_rank_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from prism.engines.sglang.decode_graphs import DecodeGraphs

    captures = Captures(monkeypatch)
    graphs = DecodeGraphs(captures.scheduler, ranks=2)
    graphs.decoded()
    captures.error = RuntimeError("invalidated")
    with pytest.raises(RuntimeError, match="invalidated"):
        graphs.between_steps(is_idle=True)


def test_fp8_latents_are_read_by_triton_alone() -> None:
    """Refuses backends that convert the whole pool, of which most pages do not exist."""
    from kvcached.engines.sglang.kv_pool import check_fp8_attention

    check_fp8_attention(("triton", "triton"))
    with pytest.raises(NotImplementedError, match="attention by fa3 and triton on FP8 latents is"):
        check_fp8_attention(("fa3", "triton"))
