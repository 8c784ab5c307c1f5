"""The command on a live cluster of fake engines, and its refusals. No time is asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import yaml

from lab.parity.__main__ import main
from lab.parity.parity_results import ParityResults
from prism_replay.trace import TraceRequest, write_trace
from tests.frontend.tiny_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.first]

FAKE = '{"decode_step_ms": 4, "prefill_tokens_per_s": 20000, "activation_s": 0.05}'


def live_parity(temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "PRISM_FAKE": FAKE}
    command = [sys.executable, "-m", "lab.parity", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )


Parity = Callable[..., tuple[int, str]]


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Parity:
    """Returns the command in this process as a function: arguments -> exit code and stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["parity", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@dataclass
class Recorded:
    folder: Path
    shown: str

    @property
    def files(self) -> list[str]:
        """Options of a comparison of the recorded run."""
        out = self.folder / "out"
        given = {"config": self.folder / "prism.yaml", "results": out / "results.json"}
        given |= {"journal": out / "logs", "costs": out / "costs.json"}
        return [text for name, path in given.items() for text in (f"--{name}", str(path))]


def found(out: Path) -> ParityResults:
    return msgspec.json.decode((out / "parity.json").read_bytes(), type=ParityResults)


def write_yaml(folder: Path) -> None:
    for name in ("a", "b"):
        make_model(folder / name)
    data = {
        "devices": [{"name": "host:0", "capacity": "8MiB", "page": "64KiB", "engines": 1}],
        "models": [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}],
        "engine": {"adapter": "fake", "static": "1MiB", "max_running": 2},
        "frontend": {"port": 0},
    }
    (folder / "prism.yaml").write_text(yaml.safe_dump(data))


def a_request(time_ms: float, model: str, prompt: int) -> TraceRequest:
    return TraceRequest(
        timestamp=time_ms,
        model=model,
        input_length=prompt,
        output_length=8,
        slo_ttft_ms=2000,
        slo_tpot_ms=200,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records six requests at once for the model that is up, then one that evicts it."""
    folder = tmp_path_factory.mktemp("parity")
    write_yaml(folder)
    trace = [a_request(0.0, "a", 20 + 5 * number) for number in range(6)]
    write_trace(folder / "trace.jsonl", [*trace, a_request(2500.0, "b", 30)])
    with TemporaryDirectory(prefix="prism-") as temporary:
        given = ("--config", str(folder / "prism.yaml"), "--trace", str(folder / "trace.jsonl"))
        more = ("--out", str(folder / "out"), "--token-ids", "1-200", "--repeats", "1")
        done = live_parity(Path(temporary), *given, *more)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert not list(Path(temporary).iterdir())
    return Recorded(folder, done.stdout)


def test_every_live_decision_comes_out_the_same_again(recorded: Recorded) -> None:
    checks = found(recorded.folder / "out").checks
    assert [check.name for check in checks] == [
        "plans of the cluster scheduler",
        "steps of host:0's local scheduler",
    ]
    for check in checks:
        assert check.equal == check.decisions > 0, check.first


def test_both_worlds_place_serve_and_evict_the_same(recorded: Recorded) -> None:
    results = found(recorded.folder / "out")
    assert (results.requests, results.failed_live, results.failed_simulated) == (7, 0, 0)
    placement = results.compared["placement"]
    assert placement.equal == 3  # a at the start; then a leaves for b
    assert placement.differences == []
    assert results.compared["device of a request"].share == 1.0


def test_every_sort_of_decision_and_both_worlds_latencies_are_there(recorded: Recorded) -> None:
    """Does not check how many requests wait together, which depends on the machine."""
    results = found(recorded.folder / "out")
    assert list(results.compared) == [
        "placement",
        "device of a request",
        "admission order",
        "turns",
        "pairs that waited together",
    ]
    order = results.compared["admission order"]
    assert order.total + sum(order.notes.values()) == results.requests
    figures = [f for f in results.figures if f.group != "attainment"]
    assert {f.group for f in figures} == {"all models", "a", "b"}
    assert all(f.live and f.simulated for f in figures)


def test_what_it_leaves(recorded: Recorded) -> None:
    out = recorded.folder / "out"
    assert "Repeated decisions" in recorded.shown
    page = (out / "parity.html").read_text()
    assert "https://" not in page
    assert "<svg" in page
    journals = sorted((out / "logs").glob("journal-*.jsonl"))
    assert [path.name for path in journals] == ["journal-cluster.jsonl", "journal-host0.jsonl"]
    assert {path.stat().st_mode & 0o777 for path in journals} == {0o600}
    assert not any(b"prompt_ids" in path.read_bytes() for path in journals)


def test_the_same_files_give_the_same_bytes(
    recorded: Recorded, tmp_path: Path, parity: Parity
) -> None:
    for name in ("one", "two"):
        assert parity(*recorded.files, "--out", str(tmp_path / name)) == (0, "")
    for file in ("parity.json", "parity.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


REFUSED: list[tuple[dict[str, str | None], str]] = [
    ({"costs": None}, "all of --results, --journal, --costs"),
    ({"trace": "trace.jsonl"}, "either --trace or all of"),
    ({"journal": "."}, "journal-cluster.jsonl is missing"),
    ({"journal": "out/calibration-logs"}, "does not have a request of --results"),
    ({"costs": "none.json"}, "none.json is missing"),
    ({"results": "trace.jsonl"}, "not a results file"),
    ({"config": "none.yaml"}, "none.yaml"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_bad_input_is_one_line_and_exit_2(
    recorded: Recorded, parity: Parity, changes: dict[str, str | None], message: str
) -> None:
    """Replaces recorded files by those in `changes`. None omits the option."""
    given: dict[str, str | None] = dict(zip(recorded.files[::2], recorded.files[1::2], strict=True))
    for name, path in changes.items():
        given[f"--{name}"] = None if path is None else str(recorded.folder / path)
    arguments = [text for name, path in given.items() if path for text in (name, path)]
    code, shown = parity(*arguments, "--out", str(recorded.folder / "refused"))
    assert code == 2
    assert message in shown
    assert shown.count("\n") == 1


def test_models_that_the_yaml_lacks(recorded: Recorded, tmp_path: Path, parity: Parity) -> None:
    write_trace(tmp_path / "t.jsonl", [a_request(0.0, "c", 10)])
    given = ("--config", str(recorded.folder / "prism.yaml"), "--out", str(tmp_path / "out"))
    code, shown = parity(*given, "--trace", str(tmp_path / "t.jsonl"))
    assert code == 2
    assert "--trace: c is not among the models of --config: a, b" in shown
