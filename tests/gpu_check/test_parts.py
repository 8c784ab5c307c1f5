"""What the steps of scripts/gpu-check make of a driver's answers and of an engine's rounds."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engines.sglang import adapter, gpu
from scripts.gpu_check.machine import build, conformance
from scripts.gpu_check.memory import graphs, probe_capture
from scripts.gpu_check.report import Report
from scripts.gpu_check.serving import engine
from scripts.gpu_check.serving.engine_models import answers_of
from tests.kvcached.compiling import compiler
from tools import engine_check

MIB = 1 << 20


class Refusing:
    """A driver that refuses some calls, and a mapping where there is one."""

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.handles: set[int] = set()
        self.mapped = 0
        self._made = 0

    def reserve(self, _size_bytes: int) -> int:
        return 1 << 40

    def create_code(self, _size_bytes: int) -> tuple[int, int]:
        self._made += 1
        self.handles.add(self._made)
        return 0, self._made

    def allow_code(self, _address: int, _size_bytes: int) -> int:
        return 900 if self.refused == "cuMemSetAccess" else 0

    def code(self, name: str, *arguments: Any) -> int:
        if name == self.refused:
            return 900
        if name == "cuMemRelease":
            self.handles.remove(arguments[0].value)
            return 0
        wanted = 0 if name == "cuMemMap" else 1
        if self.mapped != wanted:
            return 1
        self.mapped = 1 - wanted
        return 0


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"])
def test_a_refused_call_spoils_no_later_capture(refused: str) -> None:
    driver: Any = Refusing(refused)
    page, tidy = probe_capture.page_calls(driver)
    assert page() == 900
    driver.refused = ""  # the capture is over
    tidy()
    assert (driver.handles, driver.mapped) == (set(), 0)
    assert page() == 0


@pytest.mark.parametrize(("code", "flags", "is_hole"), [(1, 0, True), (0, 0, True), (0, 3, False)])
def test_a_hole_is_what_nobody_has_access_to(code: int, flags: int, is_hole: bool) -> None:
    def answer(_name: str, found: Any, *_: Any) -> int:
        found._obj.value = flags
        return code

    driver: Any = SimpleNamespace(code=answer)
    assert graphs.is_hole(driver, 1 << 40) is is_hole


# --- compilers -------------------------------------------------------------------------------


def test_tests_are_compiled_by_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lenient = build.lenient_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(lenient))
    assert compiler() == str(lenient)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler() in (shutil.which("c++"), shutil.which("g++"))


@pytest.mark.parametrize("is_lenient", [True, False])
def test_conformance_takes_the_compiler_that_the_build_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_lenient: bool
) -> None:
    if is_lenient:
        build.lenient_compiler(tmp_path)
    given: list[Any] = []
    stand_in = SimpleNamespace(
        run=lambda *_, env, **__: (given.append(env), SimpleNamespace(returncode=0))[1]
    )
    monkeypatch.setattr(conformance, "subprocess", stand_in)
    monkeypatch.setattr(conformance, "require_kvcached", lambda: None)
    monkeypatch.setattr(conformance, "open_or_skip", lambda: None)
    conformance.body(report_in(tmp_path))
    cxx = [env and env["CXX"] for env in given]
    assert cxx == [str(tmp_path / build.LENIENT_NAME) if is_lenient else None]


def report_in(folder: Path) -> Report:
    return Report("a step", argparse.Namespace(result=None, work=folder, out=folder, wheels=None))


# --- the engine's rounds ---------------------------------------------------------------------


def round_of(model: str, *, stored: bool, total_s: float, free_mib: int) -> dict[str, Any]:
    return {
        "model": model,
        "from_store": stored,
        "stages_s": {"warm_up": 1.5, "total": total_s},
        "prompts": [[1], [2]],
        "tokens": [[5, 6, 7], [8, 9]],
        "tokens_graphs": [[5, 6, 7], [8, 9]],
        "captures_s": [0.5],
        "free_bytes_before": 1000 * MIB,
        "free_bytes_after": free_mib * MIB,
    }


@pytest.fixture
def rounds() -> list[dict[str, Any]]:
    return [
        round_of("llama", stored=False, total_s=9.5, free_mib=990),
        round_of("qwen2", stored=False, total_s=3.5, free_mib=900),
        round_of("llama", stored=True, total_s=2.5, free_mib=900),
        round_of("qwen2", stored=True, total_s=2.0, free_mib=836),
    ]


def test_rounds_that_are_right(rounds: list[dict[str, Any]]) -> None:
    rounds[2]["tokens"] = [[5, 6, 1], [8, 1]]  # a near tie
    engine.judge_rounds({"rounds": rounds})
    assert engine.same_from_store(rounds) == {"llama": [2, 1], "qwen2": [3, 2]}
    facts = engine.figures({"rounds": rounds, "imports_s": 1.0})
    assert (facts["activation_s"], facts["warm_up_s"]) == ([8.0, 1.0], [1.5, 1.5])
    assert facts["kept_bytes"] == [10 * MIB, 164 * MIB]
    assert "tokens_graphs" not in facts["rounds"][0]
    assert list(engine.figures({"rounds": rounds[:1]})["kept_bytes"]) == [10 * MIB, 10 * MIB]


WRONG: list[tuple[str, Callable[[list[dict[str, Any]]], object]]] = [
    ("did not come from the store", lambda rounds: rounds[3].update(from_store=False)),
    ("answers otherwise", lambda rounds: rounds[2].update(tokens=[[5, 6, 7], [1, 9]])),
    ("answers otherwise", lambda rounds: rounds[2].update(tokens=[[], [8, 9]])),
    ("no decode graph was captured for qwen2", lambda rounds: rounds[1].update(captures_s=[])),
    ("less is free", lambda rounds: rounds[3].update(free_bytes_after=835 * MIB)),
    ("are not back", lambda rounds: rounds[2].update(free_bytes_after=700 * MIB)),
    ("3 rounds of 4", lambda rounds: rounds.pop()),
]


@pytest.mark.parametrize(("says", "change"), WRONG)
def test_rounds_that_are_wrong(
    says: str, change: Callable[[list[dict[str, Any]]], object], rounds: list[dict[str, Any]]
) -> None:
    changed = deepcopy(rounds)
    change(changed)
    with pytest.raises(RuntimeError, match=says):
        engine.judge_rounds({"rounds": changed})


def test_every_round_is_judged_and_graphs_apart(rounds: list[dict[str, Any]]) -> None:
    rounds[2]["tokens_graphs"] = []
    found = answers_of([rounds[0], rounds[2]])
    assert {name: len(answers) for name, answers in found.items()} == {"": 4, ", with graphs": 2}
    assert found[""][3] == ([2], [8, 9])
    assert list(answers_of([rounds[2]])) == [""]


def test_the_step_has_served_before_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rounds: list[dict[str, Any]]
) -> None:
    """And keeps the rounds that were over when the check was killed."""
    (tmp_path / "said").write_text(json.dumps({"rounds": rounds[:1]}))
    monkeypatch.setenv("PRISM_GPU_CHECK_LIMIT_S", str(engine.JUDGE_S + 2))
    run = subprocess.run

    def check_that_hangs(_command: list[str], **given: Any) -> subprocess.CompletedProcess[bytes]:
        shutil.copy(tmp_path / "said", tmp_path / engine.SERVED)
        return run([sys.executable, "-c", "import time; time.sleep(1000)"], **given)

    monkeypatch.setattr(subprocess, "run", check_that_hangs)
    report = report_in(tmp_path)
    sizes: Any = SimpleNamespace(is_large=True, free_bytes=1 << 36)
    with report.check("served"):
        engine.serve(report, [tmp_path], sizes, {})
    assert "TimeoutExpired" in report.checks["served"]
    assert report.facts["activation_s"] == [8.0]


# --- the check that serves -------------------------------------------------------------------


def test_the_check_writes_each_round_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, seen = tmp_path / "rounds.json", []

    def serve(_run: engine_check.EngineRun, spec: Any) -> dict[str, Any]:
        seen.append(len(json.loads(file.read_text())["rounds"]) if file.exists() else 0)
        return {"model": spec.name}

    spec = SimpleNamespace(name="m", weight_bytes=1)
    monkeypatch.setattr(engine_check, "spec_of", lambda *_: spec)
    monkeypatch.setattr(engine_check.EngineRun, "serve", serve)
    monkeypatch.setattr(gpu, "lacks", lambda _: "")
    monkeypatch.setattr(adapter, "preload", lambda _: None)
    monkeypatch.setattr(adapter, "create", lambda _: SimpleNamespace(close=lambda: None))
    options = ["--model", "m", "--rounds", "3", "--capacity", "16MiB", "--json", str(file)]
    assert engine_check.main(options) == 0
    assert seen == [0, 1, 2]


def test_the_checks_store_is_in_memory_only_where_weights_fit() -> None:
    free_bytes = shutil.disk_usage("/dev/shm").free
    small: Any = SimpleNamespace(weight_bytes=1)
    large: Any = SimpleNamespace(weight_bytes=free_bytes)
    assert engine_check._fast_folder([small]) == "/dev/shm"
    assert engine_check._fast_folder([small, large]) is None


def test_warnings_are_kept_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {name: logging.getLogger(name).level for name in adapter._TALKATIVE}
    monkeypatch.setattr(
        adapter.importlib, "import_module", lambda _: SimpleNamespace(import_models=int)
    )
    monkeypatch.setattr(adapter.gpu, "prepare", lambda _: None)
    try:
        for said, level in ((None, logging.ERROR), ("sglang", logging.NOTSET)):
            for name in levels:
                logging.getLogger(name).setLevel(logging.NOTSET)
            if said:
                monkeypatch.setenv(adapter.WARNINGS_VARIABLE, said)
            adapter.preload()
            assert logging.getLogger("sglang").level == level
            assert logging.getLogger("transformers").level == logging.ERROR
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
