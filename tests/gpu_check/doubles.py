"""The environment of a machine with a GPU, made of doubles: the driver's libraries under their own
names, and torch's CUDA front over them."""

from __future__ import annotations

from tests.torchcuda import cuda_environment

GIB = 1 << 30


def gpu_environment(gpu_bytes: int = GIB, **settings: str) -> dict[str, str]:
    """For subprocesses. The libraries are found by the dynamic linker, as on a real machine:
    tests/gpu refuses a driver that a variable names."""
    env = cuda_environment(devices=1, bytes=gpu_bytes, **settings)
    del env["KVCACHED_LIBCUDA"], env["KVCACHED_LIBNVML"]
    # The C++ tests as tests/kvcached/test_cpp.py builds them, rather than once more.
    return {**env, "KVCACHED_TEST_SANITIZERS": "address,undefined"}
