"""Two stock SGLang servers share a GPU: the double of CUDA, which torch believes in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engines import on_gpu, sharing
from tests.engines.on_gpu import FRACTION, gpu_pair, on_double, static_bytes
from tests.engines.sharing import Pair
from tests.engines.stock import SGLangServer, until
from tests.sglang.models import LLAMA, QWEN3

# Two minutes, half of them imports.
pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(900)]

MODELS = (LLAMA, QWEN3)
ELASTIC_BYTES = 20 << 20
OWN = f"t{uuid4().hex[:10]}"

# The double lacks events that a graph records for streams outside of it. Graphs with overlapped
# steps need those, so one server has graphs and the other has overlapped steps.
STEPS = {
    LLAMA: ("--attention-backend", "torch_native", "--disable-cuda-graph"),
    QWEN3: (
        *("--attention-backend", "triton", "--disable-overlap-schedule"),
        *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "4"),
    ),
}


class OnGpu(SGLangServer):
    """Server with torch's kernels: SGLang's own require a GPU."""

    def command(self, environment: dict[str, str]) -> list[str]:
        environment |= on_double(environment) | {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
        environment.pop("SGLANG_PLATFORM", None)  # of Prism's engines in other tests
        command = [*super().command(environment), "--mem-fraction-static", str(FRACTION)]
        return [*command, "--sampling-backend", "pytorch", *STEPS[self.model]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        gpu_pair(dict.fromkeys(MODELS, OnGpu), Path(folder), ELASTIC_BYTES) as made,
    ):
        yield made


def test_what_a_server_takes_beside_its_kv_is_leased(pair: Pair) -> None:
    for model in MODELS:
        assert pair.of(model).static_bytes == static_bytes(model)
    assert pair.resident_bytes() <= pair.device.usage().reserved_bytes


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 4, 12)


def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(pair: Pair) -> None:
    pair.flush()
    pair.fill_with_prefixes(QWEN3)
    sharing.burst(pair, QWEN3, LLAMA)


@pytest.mark.parametrize(
    ("arguments", "said", "message"),
    [
        ((), {"STATIC": "512MiB"}, "KVCACHED_STATIC is 512 MiB, but CUDA alone takes up to 1 GiB"),
        # Of a ledger with room enough.
        (
            (),
            {"STATIC": "1025MiB", "NAMESPACE": OWN},
            "does not fit into the 1 GiB leased in addition to its KV: set",
        ),
        ((), {}, "needs 1.4 GiB in addition to its KV, but cuda:0 has .* available: stop or "),
        (("--base-gpu-id", "1"), {}, "base_gpu_id 1 is not the GPU of KVCACHED_DEVICE, cuda:0"),
    ],
    ids=["driver", "weights", "room", "index"],
)
def test_a_server_that_cannot_come_up_says_why_and_disturbs_nobody(
    pair: Pair, tmp_path: Path, arguments: tuple[str, ...], said: dict[str, str], message: str
) -> None:
    server = OnGpu(QWEN3, tmp_path, *arguments, **pair.said(**said))
    on_gpu.cannot_come_up(pair, server, said, message)


def test_a_killed_engine_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """Ends a server: the last test of the module."""
    pair.flush()
    print(sharing.kill_in_mid_load(pair, QWEN3, LLAMA))
    until(lambda: pair.resident_bytes() < static_bytes(LLAMA) + ELASTIC_BYTES)
