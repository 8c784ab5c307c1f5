"""Two stock servers on a GPU: the double of CUDA, which torch believes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvcached import Device
from tests import torchcuda
from tests.engines import sharing
from tests.engines.sharing import PAGE, Pair
from tests.engines.stock import Server
from tests.kvcached.compiling import restart_libnvml
from tests.sglang.models import path_of

GPU_BYTES = 4 << 30
FRACTION = 0.65  # of the GPU's memory for weights and KV, says the engine; it keeps the rest


def static_bytes(model: str) -> int:
    """Returns what a server leases in addition to KV: weights' files, and the engine's reserve."""
    files_bytes = sum(path.stat().st_size for path in path_of(model).glob("*.safetensors"))
    return files_bytes + int((1 - FRACTION) * GPU_BYTES)


def on_double(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a server on the double, except those of kvcached that `environment`
    has."""
    double = torchcuda.variables(
        devices=1,
        bytes=GPU_BYTES,
        KVCACHED_TEST_CUDA_GRANULARITY=str(PAGE),
        KVCACHED_TEST_CUDA_PROGRESS="1",
    )
    return double | {k: v for k, v in environment.items() if k.startswith("KVCACHED_")}


@contextmanager
def gpu_pair(
    classes: Mapping[str, Callable[..., Server]], folder: Path, elastic_bytes: int
) -> Iterator[Pair]:
    """Starts two servers with `elastic_bytes` for the KV of both."""
    made = torchcuda.variables(devices=1, bytes=GPU_BYTES)
    needs_bytes = sum(static_bytes(model) for model in classes) + elastic_bytes
    with pytest.MonkeyPatch.context() as here:
        for variable in ("KVCACHED_LIBCUDA", "KVCACHED_LIBNVML", "KVCACHED_TEST_CUDA_BYTES"):
            here.setenv(variable, made[variable])
        restart_libnvml()
        with closing(Pair(classes, folder, -(-needs_bytes // PAGE) * PAGE, "cuda:0")) as pair:
            yield pair


def cannot_come_up(pair: Pair, server: Server, said: Mapping[str, str], message: str) -> None:
    """Starts a server with the variables `said`, which fails with `message`. Others serve on."""
    pair.flush()
    try:
        sharing.cannot_come_up(pair, server, message)
    finally:
        if "NAMESPACE" in said:
            Device.unlink(said["NAMESPACE"], "cuda:0", force=True)
