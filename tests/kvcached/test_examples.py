"""Runs the documents' programs, and checks that the tests that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcached.device import SHM_DIR

ROOT = Path(__file__).parent.parent.parent
GUARANTEES = ROOT / "docs" / "guarantees.md"


def run(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_engine_loop_shares_a_device_and_answers_rightly(namespace: str) -> None:
    said = run(str(ROOT / "examples" / "engine_loop.py"), namespace)
    shared, preempted, alone = (int(re.findall(r": (\d+)", line)[0]) for line in said[:3])
    assert shared < alone == 12
    assert preempted > 0
    assert said[3:] == [
        "12 of 12 answers are correct",
        "held when idle: 0 bytes in addition to the padding block",
    ]
    assert not list(SHM_DIR.glob(f"prism-kvcached.{namespace}.*"))


def documented() -> list[str]:
    """Returns the Python programs of the page."""
    document = (ROOT / "docs" / "kvcached.md").read_text()
    return re.findall(r"```python\n(.*?)```", document, re.DOTALL)


def test_the_weights_program_runs(namespace: str, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    tensors = {"w": np.zeros((300, 200), np.float32)}
    save_file(tensors, str(tmp_path / "my-model" / "model.safetensors"))
    (code,) = [code for code in documented() if "WeightStore" in code]
    for name in ("my-store", "my-model"):
        code = code.replace(f'open("{name}"', f"open({str(tmp_path / name)!r}")
    code = code.replace('"my-machine"', repr(namespace))
    assert run("-c", code) == ["(200, 300) True"]
    assert not list(SHM_DIR.glob(f"prism-kvcached.{namespace}.*"))


def test_the_thirty_lines_run(namespace: str) -> None:
    code = documented()[0]
    assert len([line for line in code.splitlines() if line]) <= 30
    assert code.count('"my-machine"') == 1
    checked = code.replace('"my-machine"', repr(namespace)).replace(
        "    kv.free_kv(blocks)",
        "    print(kv.live_blocks(), float(k[1][slots].sum()))\n    kv.free_kv(blocks)",
    )
    assert run("-c", checked) == [f"3 {48.0 * 2 * 64}"]
    assert not list(SHM_DIR.glob(f"prism-kvcached.{namespace}.*"))


def test_the_hybrid_example_keeps_a_window(namespace: str) -> None:
    document = (ROOT / "docs" / "kvcached.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "Hybrid" in c]
    checked = code.replace('"my-hybrid-machine"', repr(namespace))
    # 512 blocks and the padding one in 33 slabs of 16; a window of 32 blocks in 3 of 10 pages.
    mapped = [33 * 2 * 65536, 3 * 10 * 65536]
    assert run("-c", checked) == [" ".join(map(str, [{"full": 512, "window": 32}, *mapped]))]
    assert not list(SHM_DIR.glob(f"prism-kvcached.{namespace}.*"))


def test_the_idle_engine_gives_its_cache(namespace: str) -> None:
    (code,) = [code for code in documented() if "answer_requests" in code]
    checked = code.replace('"my-shared-machine"', repr(namespace))
    # 8 blocks are one slab of four pages.
    assert run("-c", checked) == [f"8 {8 * 16} {4 * 65536}"]
    assert not list(SHM_DIR.glob(f"prism-kvcached.{namespace}.*"))


def promised() -> list[tuple[str, str]]:
    text = GUARANTEES.read_text() + (ROOT / "docs" / "security.md").read_text()
    return re.findall(r"`(tests/[^`:]+)::(\w+)`", text)


@pytest.mark.parametrize(("path", "name"), promised())
def test_a_promised_test_exists(path: str, name: str) -> None:
    keyword = "void" if path.endswith(".cpp") else "def"
    assert re.search(rf"^(?:async )?{keyword} {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_every_guarantee_names_a_test() -> None:
    rows = [line for line in GUARANTEES.read_text().splitlines() if line.startswith("|")]
    lines = [row for row in rows if row not in {"| never | shown by |", "|---|---|"}]
    assert len(lines) > 20
    assert not [line for line in lines if not re.search(r"\| `tests/[^`]+::\w+`", line)]


def test_documents_link_to_files_that_exist() -> None:
    broken = [
        f"{document.name}: {target}"
        for document in (GUARANTEES, ROOT / "docs" / "kvcached.md")
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken
