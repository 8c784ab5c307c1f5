"""Two stock vLLM servers share a GPU: the double of CUDA, which torch believes in.

Run by scripts/test --long: their environment takes minutes to install.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engines import on_gpu, sharing
from tests.engines.on_gpu import FRACTION, gpu_pair, on_double, static_bytes
from tests.engines.sharing import Pair
from tests.engines.stock import until
from tests.sglang.models import LLAMA, QWEN3, path_of, prompts
from tests.torchcuda import SITE
from tests.vllm.environment import variables, vllm_python
from tests.vllm.servers import BLOCK_TOKENS, VllmServer

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1800)]

MODELS = (LLAMA, QWEN3)
ELASTIC_BYTES = 8 << 20
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
OWN = f"t{uuid4().hex[:10]}"
# Checks a configuration once more, as vLLM does after a change.
CHANGED = """
import kvcached_plugins
kvcached_plugins.vllm_general()
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
config = EngineArgs("{path}", skip_tokenizer_init=True).create_engine_config()
config.{change}
current_platform.check_and_update_config(config)
"""


class OnGpu(VllmServer):
    """Server with attention in Triton, which the double runs. vLLM's other kernels are those of its
    CPU build (tests/torchcuda/site/torchcuda_vllm.py)."""

    def command(self, environment: dict[str, str]) -> list[str]:
        command = super().command(environment)
        if self.model == QWEN3:
            # vLLM's newer model runner, with graphs and its warm-up of kernels. The other server
            # has the older one, and neither.
            command.remove("--enforce-eager")
            command += ["--compilation-config", json.dumps(GRAPHS)]
        else:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        environment |= on_double(environment) | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        environment["PYTHONPATH"] = str(SITE)  # not the checkout, which has no compiled core in it
        command += ["--gpu-memory-utilization", str(FRACTION)]
        return [*command, "--attention-backend", "TRITON_ATTN"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        gpu_pair(dict.fromkeys(MODELS, OnGpu), Path(folder), ELASTIC_BYTES) as made,
    ):
        yield made


def test_kv_is_virtual_at_the_start_and_the_rest_is_leased(pair: Pair) -> None:
    for model in MODELS:
        usage = pair.of(model)
        assert usage.static_bytes == static_bytes(model)
        block_bytes = BLOCK_TOKENS * sharing.token_bytes(model)  # that of padding
        assert usage.committed_bytes - usage.spare_bytes == block_bytes
    assert pair.resident_bytes() <= pair.device.usage().reserved_bytes


def test_both_answer_as_transformers_do_at_the_same_time(pair: Pair) -> None:
    sharing.both_answer(pair, 4, 12)


def test_memory_comes_with_requests_and_goes_with_the_cache(pair: Pair) -> None:
    pair.flush()
    pair.servers[LLAMA].answers(prompts(LLAMA, 4, (200, 300), seed=3), 2)
    assert pair.of(LLAMA).committed_bytes > 4 * 192 * sharing.token_bytes(LLAMA)
    pair.flush()


def test_a_burst_takes_an_idle_servers_prefixes_and_comes_out_right(pair: Pair) -> None:
    pair.flush()
    pair.fill_with_prefixes(QWEN3)
    sharing.burst(pair, QWEN3, LLAMA, 6, 24)


@pytest.mark.parametrize(
    ("arguments", "said", "message"),
    [
        ((), {"STATIC": "512MiB"}, "KVCACHED_STATIC is 512 MiB, but CUDA alone takes up to 1 GiB"),
        ((), {}, "needs 1.4 GiB in addition to its KV, but cuda:0 has .* available: stop or "),
        # Of a ledger with room enough.
        (
            ("--attention-backend", "FLEX_ATTENTION"),
            {"NAMESPACE": OWN},
            "layouts BLNHC and BLHNC, but this model's attention has .*LBNHC",
        ),
        ((), {"DEVICE": "host:0"}, "KVCACHED_DEVICE is host:0, but this vLLM runs on cuda: set"),
    ],
    ids=["driver", "room", "layout", "device"],
)
def test_a_server_that_cannot_come_up_says_why_and_disturbs_nobody(
    pair: Pair, tmp_path: Path, arguments: tuple[str, ...], said: dict[str, str], message: str
) -> None:
    server = OnGpu(QWEN3, tmp_path, *arguments, **pair.said(**said))
    on_gpu.cannot_come_up(pair, server, said, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "parallel_config.tensor_parallel_size = 2",
            "--tensor-parallel-size (2) is not supported on kvcached (ranks have run on host",
        ),
        (
            "model_config.enable_cumem_allocator = True",
            "--enable-cumem-allocator (True) is not supported on kvcached (vLLM's allocator would",
        ),
        (
            "parallel_config.assigned_physical_gpu_ids = [1]",
            "--device-ids [1] is not the GPU of KVCACHED_DEVICE, cuda:0: leave it out",
        ),
    ],
)
def test_arguments_are_refused_that_the_double_cannot_have(change: str, message: str) -> None:
    environment = variables() | {"KVCACHED_DEVICE": "cuda:0", "KVCACHED_CAPACITY": "2GiB"}
    environment |= on_double(environment) | {"PYTHONPATH": str(SITE)}
    done = subprocess.run(
        [str(vllm_python()), "-c", CHANGED.format(path=path_of(LLAMA), change=change)],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_killed_engine_leaves_its_memory_to_the_other(pair: Pair) -> None:
    """Ends a server: the last test of the module."""
    pair.flush()
    print(sharing.kill_in_mid_load(pair, QWEN3, LLAMA, 5, 8))
    until(lambda: pair.resident_bytes() < static_bytes(LLAMA) + ELASTIC_BYTES)
