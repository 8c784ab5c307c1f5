"""Parts of the vLLM adapter, each run by vLLM's own interpreter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kvcached.compiling import build_libcuda
from tests.sglang.test_families import write_config
from tests.vllm.environment import variables, vllm_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

POOLS = Path(__file__).with_name("pools.py")
UNKNOWN = "import vllm; vllm.__version__ = '0.99.1'\n"
INSTALL = "import kvcached_plugins\nkvcached_plugins.vllm_general()\nprint('serves')"
# Prints the size of blocks and the kernel of attention that vLLM chooses on a CPU with AMX.
KERNEL = """
import sys, torch
torch.cpu._is_amx_tile_supported = lambda: True
import kvcached_plugins
kvcached_plugins.vllm_general()
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
path, backend = sys.argv[1:]
attention = {"attention_backend": backend or None, "kv_cache_memory_bytes": 1 << 20}
config = EngineArgs(path, skip_tokenizer_init=True, **attention).create_engine_config()
class Layer:
    use_sparse, use_mla = False, config.model_config.use_mla
kernel = current_platform.get_attn_backend_cls(config.attention_config.backend, Layer)
print(config.cache_config.block_size, kernel.split(".")[-1])
"""


def run(*arguments: str, **said: str) -> subprocess.CompletedProcess[str]:
    said = {"DEVICE": "host:0", "CAPACITY": "1MiB"} | said
    return subprocess.run(
        [str(vllm_python()), "-W", "ignore", *arguments],
        cwd="/",  # not the checkout, which has no compiled core in it
        env=variables() | {f"KVCACHED_{name}": value for name, value in said.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_block_pool_finds_what_vllms_own_finds_and_gives_memory_back(seed: int) -> None:
    done = run(str(POOLS), str(seed))
    assert done.returncode == 0, done.stdout


def test_another_version_is_warned_of_and_looked_at() -> None:
    done = run("-c", UNKNOWN + INSTALL)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"tested with vLLM 0.32.0, not with 0.99.1", done.stdout)) == 1


def test_a_version_that_lacks_something_is_refused_by_its_name() -> None:
    lacks = "from vllm.v1.core.block_pool import BlockPool; del BlockPool.evict_blocks\n"
    done = run("-c", UNKNOWN + lacks + INSTALL)
    assert done.returncode != 0
    assert "BlockPool.evict_blocks(block_ids)" in done.stdout
    assert "serves" not in done.stdout.splitlines()


def test_the_cpu_build_is_refused_on_a_gpu() -> None:
    done = run("-c", INSTALL, DEVICE="cuda:0", LIBCUDA=str(build_libcuda()))
    assert done.returncode != 0
    assert "KVCACHED_DEVICE is cuda:0, but this vLLM runs on cpu: set" in done.stdout


def test_latents_have_the_kernel_that_reads_blocks_at_any_stride(tmp_path: Path) -> None:
    write_config(tmp_path, "deepseek_v2")
    done = run("-c", KERNEL, str(tmp_path), "")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "16 CPUMLABackend"
    refused = run("-c", KERNEL, str(tmp_path), "AMX_MLA")
    assert refused.returncode != 0
    assert "--attention-backend ('AMX_MLA') is not supported on kvcached" in refused.stdout


def test_without_the_variable_nothing_of_kvcached_is_imported() -> None:
    code = "import sys, vllm.plugins; vllm.plugins.load_general_plugins()\n"
    code += "print('kvcached' in sys.modules, 'kvcached_plugins' in sys.modules)"
    done = subprocess.run(
        [str(vllm_python()), "-W", "ignore", "-c", code],
        cwd="/",
        env=variables(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["False", "True"]
