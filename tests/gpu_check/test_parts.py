"""Parts of the steps of scripts/gpu-check, and lab/engine_check.py."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import engine_check
from lab.gpu_check.machine import build, conformance
from lab.gpu_check.memory import graphs, probe_capture
from prism.engines.sglang import adapter
from prism.engines.sglang.platform import gpu
from tests.gpu_check.steps import report_in
from tests.kvcached.compiling import compiler

MIB = 1 << 20


class Refusing:
    """Driver that refuses one call, and a mapping at an address that has one."""

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
    conformance.body(report_in(tmp_path, "conformance"))
    cxx = [env and env["CXX"] for env in given]
    assert cxx == [str(tmp_path / build.LENIENT_NAME) if is_lenient else None]


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
    stores: list[Path] = []

    def create(context: Any) -> Any:
        stores.append(Path(context.config.engine.weight_store))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(adapter, "create", create)
    options = ["--model", "m", "--rounds", "3", "--capacity", "16MiB", "--json", str(file)]
    assert engine_check.main([*options, "--store-in", str(tmp_path)]) == 0
    assert seen == [0, 1, 2]
    assert [(path.parent, path.exists()) for path in stores] == [(tmp_path, False)]


def test_the_checks_store_is_in_memory_only_where_weights_fit() -> None:
    free_bytes = shutil.disk_usage("/dev/shm").free
    small: Any = SimpleNamespace(weight_bytes=1)
    large: Any = SimpleNamespace(weight_bytes=free_bytes)
    assert engine_check._fast_folder([small]) == "/dev/shm"
    assert engine_check._fast_folder([small, large]) is None


def test_warnings_are_kept_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {name: logging.getLogger(name).level for name in adapter._VERBOSE_LOGGERS}
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
