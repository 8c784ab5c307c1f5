"""Parts of the vLLM adapter, each run by vLLM's own interpreter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.vllm.environment import variables, vllm_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

POOLS = Path(__file__).with_name("pools.py")
UNKNOWN = "import vllm; vllm.__version__ = '0.99.1'\n"
INSTALL = "import kvcached_plugins\nkvcached_plugins.vllm_general()\nprint('serves')"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(vllm_python()), "-W", "ignore", *arguments],
        cwd="/",  # not the checkout, which has no compiled core in it
        env=variables() | {"KVCACHED_DEVICE": "host:0", "KVCACHED_CAPACITY": "1MiB"},
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
