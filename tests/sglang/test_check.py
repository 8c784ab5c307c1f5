"""The check that serves models in one process: several in turn, and all figures as JSON."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.sglang.models import LLAMA, QWEN3, greedy, path_of

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]

SMALL = ["--streams", "2", "--tokens", "6", "--prompt-tokens", "20", "--capacity", "256MiB"]


def check(*arguments: str) -> int:
    from lab.engine_check import main

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main([*SMALL, *arguments])


def test_models_in_turn_from_files_and_from_the_store(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    models = [word for name in (LLAMA, QWEN3) for word in ("--model", str(path_of(name)))]
    assert check(*models, "--compare", "--json", str(report)) == 0
    facts = json.loads(report.read_text())
    rounds = facts["rounds"]
    assert [(r["model"], r["from_store"]) for r in rounds] == [
        (LLAMA, False),
        (QWEN3, False),
        (LLAMA, True),
        (QWEN3, True),
    ]
    for facts_of_round in rounds:
        name, prompts = facts_of_round["model"], facts_of_round["prompts"]
        assert facts_of_round["tokens"] == [greedy(name, prompt, 6) for prompt in prompts]
        assert facts_of_round["equal"] == [6, 6]
        assert facts_of_round["free_bytes_before"] == facts_of_round["free_bytes_after"]
        held = facts_of_round["memory"]["activated"]
        assert held["static_bytes"] > path_of(name).stat().st_size
        assert set(facts_of_round["stages_s"]) >= {"store", "weights", "warm_up", "total"}
    assert (facts["error"], facts["imports_s"] >= 0) == ("", True)


def test_what_is_wrong_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    model = ["--model", str(path_of(LLAMA)), "--json", str(report)]
    assert check(*model, "--capacity", "20MiB") == 2
    facts = json.loads(report.read_text())
    assert (facts["rounds"], "are missing on" in facts["error"]) == ([], True)
    assert check(*model, "--dtype", "float7") == 2
    assert "--dtype: float7 is not one of" in capsys.readouterr().err
