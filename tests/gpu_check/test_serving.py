"""Checks and figures of the serving steps of scripts/gpu-check. Whole steps run on the doubles in
test_whole.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.gpu_check import sizes as gpu_sizes
from lab.gpu_check.driver import Driver
from lab.gpu_check.processes import is_alive
from lab.gpu_check.report import DOUBLES_VARIABLE, Report
from lab.gpu_check.serving import (
    elastic,
    engine,
    large,
    overhead,
    process,
    reference,
)
from lab.gpu_check.serving.engine_models import answers_of, verdict
from lab.gpu_check.sizes import GIB, MIB, Sizes
from tests.gpu_check.steps import LARGE, report_in
from tests.kvcached.compiling import ROOT

POPEN = subprocess.Popen


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replaces /dev/shm by a folder that is removed after the test."""
    monkeypatch.setattr(gpu_sizes, "SHM", tmp_path / "shm")


def process_that(does: Callable[[dict[str, str]], str]) -> Callable[..., Any]:
    """Returns a replacement of subprocess.Popen. `does` maps the environment to a program."""

    def start(_command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        return POPEN([sys.executable, "-c", does(given["env"])], **given)

    return start


def round_of(model: str, *, stored: bool, total_s: float, free_mib: int) -> dict[str, Any]:
    return {
        "model": model,
        "from_store": stored,
        "weight_bytes": 1000,
        "stages_s": {"weights": 0.25, "warm_up": 1.5, "total": total_s},
        "prompts": [[1], [2]],
        "tokens": [[5, 6, 7], [8, 9]],
        "tokens_graphs": [[5, 6, 7], [8, 9]],
        "captures_s": [0.5],
        "first_token_s": 0.1,
        "seconds": 0.14,
        "first_token_graphs_s": 0.1,
        "seconds_graphs": 0.11,
        "free_bytes_before": 1000 * MIB,
        "free_bytes_after": free_mib * MIB,
    }


@pytest.fixture
def rounds() -> list[dict[str, Any]]:
    return [
        round_of("llama", stored=False, total_s=9.5, free_mib=990),
        round_of("qwen2", stored=False, total_s=3.5, free_mib=900),
        round_of("llama", stored=True, total_s=2.5, free_mib=900),
        round_of("qwen2", stored=True, total_s=2.0, free_mib=870),
        round_of("llama", stored=True, total_s=2.25, free_mib=850),
        round_of("qwen2", stored=True, total_s=2.0, free_mib=836),
    ]


def test_rounds_that_are_right(rounds: list[dict[str, Any]]) -> None:
    rounds[2]["tokens"] = [[5, 6, 1], [8, 1]]  # a near tie
    rounds[4]["tokens"] = [[5, 1, 1], [8, 9]]
    engine.judge_rounds({"rounds": rounds}, 3)
    assert engine.same_from_store(rounds) == {"llama": [1, 1], "qwen2": [3, 2]}
    facts = engine.figures({"rounds": rounds, "imports_s": 1.0})
    assert (facts["activation_s"], facts["warm_up_s"]) == ([8.0, 1.0, 0.75], [1.5] * 3)
    assert facts["kept_bytes"] == [10 * MIB, 164 * MIB]
    assert "tokens_graphs" not in facts["rounds"][0]
    assert list(engine.figures({"rounds": rounds[:1]})["kept_bytes"]) == [10 * MIB, 10 * MIB]
    assert engine.same_from_store(rounds[:2]) == {}


WRONG: list[tuple[str, Callable[[list[dict[str, Any]]], object]]] = [
    ("did not come from the store", lambda rounds: rounds[3].update(from_store=False)),
    (
        "another first token",
        lambda rounds: rounds[2].update(tokens=[[5, 6, 7], [1, 9]]),
    ),
    ("another first token", lambda rounds: rounds[4].update(tokens=[[], [8, 9]])),
    ("no decode graph was captured for qwen2", lambda rounds: rounds[1].update(captures_s=[])),
    ("less is free", lambda rounds: rounds[5].update(free_bytes_after=835 * MIB)),
    ("are not back", lambda rounds: rounds[2].update(free_bytes_after=700 * MIB)),
    ("5 rounds of 6", lambda rounds: rounds.pop()),
]


@pytest.mark.parametrize(("says", "change"), WRONG)
def test_rounds_that_are_wrong(
    says: str, change: Callable[[list[dict[str, Any]]], object], rounds: list[dict[str, Any]]
) -> None:
    changed = deepcopy(rounds)
    change(changed)
    with pytest.raises(RuntimeError, match=says):
        engine.judge_rounds({"rounds": changed}, 3)


def test_every_round_is_judged_and_graphs_apart(rounds: list[dict[str, Any]]) -> None:
    rounds[2]["tokens_graphs"] = []
    rounds[2]["tokens"][0] = []  # its request was cut
    found = answers_of([rounds[0], rounds[2]])
    assert {name: len(answers) for name, answers in found.items()} == {"": 3, ", with graphs": 2}
    assert found[""][2] == ([2], [8, 9])
    assert list(answers_of([rounds[2]])) == [""]


@pytest.mark.parametrize("gap", [0.3, float("nan")])
def test_a_wrong_token_fails_its_check(
    gap: float, rounds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    found = {"llama": verdict(torch, [(torch.tensor([0.0, gap]), 1.0), (torch.tensor([0.0]), 1.0)])}
    assert (found["llama"]["tokens"], found["llama"]["equal"]) == (3, 2)
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps({"rounds": rounds}))
    monkeypatch.setattr(engine, "helper", lambda *_: found)
    with pytest.raises(RuntimeError, match="tokens are wrong by transformers"):
        engine.judge_tokens({}, file, [])


def test_figures_come_beside_the_links_time(
    rounds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference, "link_s", lambda _driver, size_bytes: size_bytes / 5000)
    monkeypatch.setattr(Driver, "open", lambda: None)
    report = report_in(tmp_path, "engine")
    engine.record(report, [rounds[0], rounds[2], rounds[4]], 3 * MIB)
    found = report.facts["figures"]
    values = {name: (figure["value"], figure["reference"]) for name, figure in found.items()}
    assert values == {
        "activation_cold": (8.0, 0.2),
        "activation_store": (1.0, 0.2),
        "activation_again": (0.75, 0.2),
        "weights": (0.25, 0.2),
        "warm_up": (1.5, None),
        "kept": (3.0, None),
        "decode_graphs": (5.0, 20.0),  # two steps after the first
    }


def test_the_step_has_served_before_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rounds: list[dict[str, Any]]
) -> None:
    """Rounds that ended before the check was killed are kept."""
    monkeypatch.setenv("PRISM_GPU_CHECK_LIMIT_S", str(engine.JUDGE_S + 2))
    file = tmp_path / "engine.json"
    text = json.dumps({"rounds": rounds[:1]})
    hangs = f"import time; open({str(file)!r}, 'w').write({text!r}); time.sleep(1000)"
    monkeypatch.setattr(subprocess, "Popen", process_that(lambda _: hangs))
    report = report_in(tmp_path, "engine")
    engine.serve(report, [tmp_path], LARGE, {})
    assert "TimeoutExpired" in report.checks["compiled"]
    assert "1 rounds of 6" in report.checks["served"]
    assert report.facts["activation_s"] == [8.0]


def served_by(
    does: Callable[[dict[str, str]], str], monkeypatch: pytest.MonkeyPatch, folder: Path, **env: str
) -> Report:
    monkeypatch.setattr(subprocess, "Popen", process_that(does))
    report = report_in(folder, "engine")
    engine.serve(report, [folder], LARGE, env)
    return report


def test_an_engine_that_fails_is_tried_without_compiling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rounds: list[dict[str, Any]]
) -> None:
    """Runs later steps without torch.compile too."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    file, text = str(tmp_path / "engine.json"), json.dumps({"rounds": rounds})

    def tried(env: dict[str, str]) -> str:
        if not env.get("TORCHDYNAMO_DISABLE"):
            return "import sys; sys.exit('Inductor cannot')"
        return f"open({file!r}, 'w').write({text!r})"

    report = served_by(tried, monkeypatch, tmp_path)
    assert "ended with 1: Inductor cannot" in report.checks["compiled"]
    assert report.checks["served"] == "passed"
    monkeypatch.setattr(process, "require_kvcached", lambda: None)
    monkeypatch.setattr(process, "find_spec", lambda _: object())
    driver = SimpleNamespace(free_bytes=lambda: 70 * GIB)
    monkeypatch.setattr(process, "open_or_skip", lambda: driver)
    assert process.sizes_and_environment(report)[1]["TORCHDYNAMO_DISABLE"] == "1"


def test_an_engine_that_fails_again_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    tries: list[str] = []

    def tried(env: dict[str, str]) -> str:
        tries.append(env.get("TORCHDYNAMO_DISABLE", ""))
        return f"import sys; sys.exit('fault {len(tries)}')"

    report = served_by(tried, monkeypatch, tmp_path)
    assert tries == ["", "1"]
    assert "fault 1" in report.checks["compiled"]
    assert "fault 2" in report.checks["served"]
    assert not (tmp_path / process.EAGER).exists()
    report = served_by(tried, monkeypatch, tmp_path, TORCHDYNAMO_DISABLE="1")
    assert tries == ["", "1", "1"]
    assert "fault 3" in report.checks["served"]


def test_an_engine_that_does_without_compiling_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rounds: list[dict[str, Any]]
) -> None:
    file, text = str(tmp_path / "engine.json"), json.dumps({"rounds": rounds})
    says = f"print('model x: {engine.COMPILE_IS_OFF} from now on')"
    report = served_by(
        lambda _: f"{says}; open({file!r}, 'w').write({text!r})", monkeypatch, tmp_path
    )
    assert engine.COMPILE_IS_OFF in report.checks["compiled"]
    assert report.checks["served"] == "passed"


def test_the_warning_that_is_looked_for_is_the_engines() -> None:
    text = (ROOT / "prism/engines/sglang/scheduling/warm_up.py").read_text()
    assert engine.COMPILE_IS_OFF in text
    assert "cannot draw tokens at random" in text


@pytest.mark.parametrize("free_gib", [20, 25, 70, 139])
def test_every_size_that_options_name_is_of_whole_pages(
    free_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DOUBLES_VARIABLE, raising=False)
    sizes = Sizes(int((free_gib + 0.123) * GIB), 60 * GIB)
    given = [
        *engine.options_of([tmp_path], sizes),
        *elastic.options_of(sizes),
        *overhead.options_of(sizes),
        *large.options_of(tmp_path, sizes),
    ]
    found = [text for text in given if text.endswith("MiB")]
    assert len(found) == 4
    assert all(int(text.removesuffix("MiB")) % 2 == 0 for text in found)


def test_a_killed_checks_store_goes_with_the_run(tmp_path: Path) -> None:
    report = report_in(tmp_path, "engine")
    option, folder = process.store_options(report, Sizes(GIB, 0))
    assert (option, Path(folder).is_dir()) == ("--store-in", True)
    assert Path(folder) == process.run_folder(report, Sizes(GIB, 0))


def test_an_engine_that_hangs_says_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Processes of the engine write their stacks too, and all have ended."""
    inner = "import time\ndef the_child_hangs(): time.sleep(1000)\nthe_child_hangs()"
    outer = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {inner!r}])"
    outer += (
        "\nprint(child.pid, flush=True)\ndef the_parent_hangs(): child.wait()\nthe_parent_hangs()"
    )
    report, env = report_in(tmp_path, "engine"), {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with pytest.raises(subprocess.TimeoutExpired):
        process.logged(report, env, "engine", ["-c", outer], 1.5)
    said = process.log_of(report, "engine")
    assert "in the_parent_hangs" in said
    assert "in the_child_hangs" in said
    assert "in the_child_hangs" in capfd.readouterr().out
    assert not is_alive(int(said.split()[0]))
