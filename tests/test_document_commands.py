"""Commands of the README and of the how-to pages: each runs, or is skipped for a reason."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from prism.serve.background import free_port
from prism_replay.trace import write_trace
from tests.engines.subjects import prepared
from tests.replay.records import a_request

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
READY_S = 240.0
COMMAND_S = 280.0
ENDLESS_S = 3.0

SERVES = re.compile(r"(PRISM_FAKE='[^']*' )?prism-serve( --config \S+)?( --log-dir \S+)?( &)?")
ENDLESS = re.compile(r"--follow|prism-serve top$")

NO_GPU = "needs a GPU"
OF_A_CHECKOUT = "installs or tests a checkout, as CI does"
OTHERS_SERVER = "needs another program's server"


@dataclass(frozen=True)
class Page:
    """Document whose commands run.

    Attributes:
        skipped: Pattern of a command -> why it does not run.
        changed: Text of a command -> a shorter form of the same. URL is that of prism.yaml.
        served: Whether a cluster runs before the first command.
        is_long: Whether the commands take minutes.
    """

    path: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    served: bool = False
    is_long: bool = False


ON_FAKES = (
    Page("docs/operating.md"),
    Page("docs/adding-an-engine.md"),
    Page(
        "docs/prism-replay.md",
        {
            r"^OPENAI_API_KEY=": "tests/serve/test_access.py replays with a key and a certificate",
            r":30000": OTHERS_SERVER,
        },
        {
            "prism-replay generate --seed": "prism-replay generate --seconds 3 --seed",
            "base-slos prism.yaml": "base-slos --settle 0 --executions 2 prism.yaml",
            "--seeds 5": "--seeds 2",
            "0 1 2 3 4": "0 1",
            "run trace.jsonl --base": "run trace.jsonl --url URL --base",
        },
        served=True,
        is_long=True,
    ),
)
SKIPPED = {
    "docs/several-machines.md": "tests/serve/test_ray.py and its neighbours start several machines",
    "docs/adding-a-policy.md": "tests/serve/test_added_policy.py installs the example",
    "docs/deploying.md": "needs Docker or a cluster; tests/deploy checks and starts the parts",
    "docs/external-servers.md": "tests/acceptance/test_external_servers.py starts these servers",
    "docs/kvcached-adapters.md": "tests/sglang and tests/vllm start stock servers",
    "docs/kvcached-sglang.md": "tests/sglang/test_stock_servers.py starts these servers",
    "docs/kvcached-vllm.md": "tests/vllm/test_stock_servers.py starts these servers",
    "docs/quick-start.md": "has the commands of README.md, and those of init in test_new_config.py",
}
REAL = (
    Page(
        "README.md",
        {
            r"scripts/install|pip install": OF_A_CHECKOUT,
            r"^\./scripts/|^\. \.venv": OF_A_CHECKOUT,
            r"^prism-serve --config examples/demo.yaml$": "it runs already",
            r"^prism-serve down": "later commands need it",
            r"gpu": NO_GPU,
            r"lab\.parity": "takes half an hour: docs/parity.md",
        },
        {"--slo-scale 0.5,1,2": "--limit 20"},
    ),
    Page(
        "docs/prism-sim.md",
        {
            r"lab\.parity": "takes half an hour: docs/parity.md",
            r"lab\.papers all": "takes hours: lab/studies",
        },
        {"prism-table1 --out": "prism-table1 --quick --out"},
    ),
)


def commands(path: Path) -> Iterator[str]:
    """Yields the commands of the blocks of shell, without comments and with joined lines."""
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := " ".join(_without_comment(line).split()):
                yield command


def _without_comment(line: str) -> str:
    found = re.match(r"""((?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)#)*)""", line)
    return found[1] if found else line


@dataclass
class Shell:
    """Runs commands one after another, and servers until it is closed."""

    folder: Path
    environment: dict[str, str]
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, command: str) -> None:
        if SERVES.fullmatch(command):
            self._serve(command.removesuffix("&"))
        elif ENDLESS.search(command):
            self._interrupt(command)
        elif command.startswith("export "):
            self.environment |= dict(part.split("=", 1) for part in shlex.split(command)[1:])
        else:
            self._finish(command)

    def _start(self, command: str, out: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder, env=self.environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _serve(self, command: str) -> None:
        log = self.folder / f"served-{len(self.servers)}.log"
        process = self._start(command, log)
        self.servers.append(process)
        deadline_s = time.monotonic() + READY_S
        while "ready in" not in log.read_text():
            assert process.poll() is None, f"{command}\n{log.read_text()}"
            assert time.monotonic() < deadline_s, f"{command}\n{log.read_text()}"
            time.sleep(0.1)

    def _interrupt(self, command: str) -> None:
        out = self.folder / "endless.log"
        process = self._start(command, out)
        time.sleep(ENDLESS_S)
        assert process.poll() is None, f"{command}\n{out.read_text()}"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) in (0, 130, -signal.SIGINT), f"{command}\n{out.read_text()}"

    def _finish(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"

    def close(self) -> None:
        running = [process for process in self.servers if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGINT)
        for process in running:
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def shell(short_dir: Path) -> Iterator[Shell]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (short_dir / "home").mkdir()
    environment = {
        **os.environ,
        "PATH": path, "TMPDIR": str(short_dir), "HOME": str(short_dir / "home"),
    }  # fmt: skip
    found = Shell(short_dir, environment)
    try:
        yield found
    finally:
        found.close()


def run_page(page: Page, shell: Shell, url: str = "") -> None:
    ran = 0
    if page.served:
        shell.run("prism-serve --config prism.yaml")
    for command in commands(ROOT / page.path):
        if not any(re.search(pattern, command) for pattern in page.skipped):
            shell.run(_shortened(command, page.changed).replace("URL", url))
            ran += 1
    found = list(commands(ROOT / page.path))
    assert all(any(re.search(rule, each) for each in found) for rule in page.skipped)
    assert all(any(text in each for each in found) for text in page.changed)
    assert ran


def _shortened(command: str, changed: Mapping[str, str]) -> str:
    for text, shorter in changed.items():
        command = command.replace(text, shorter)
    return command


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.path, marks=[pytest.mark.long] if page.is_long else [])
        for page in ON_FAKES
    ],
)
def test_the_commands_of_a_page_run(page: Page, shell: Shell) -> None:
    (shell.folder / "a").symlink_to(prepared("tiny-llama"))
    names, port = ("tiny-llama", "a", "b"), free_port()
    data = {
        "devices": [
            {"name": f"host:{number}", "capacity": "128MiB", "page": "64KiB", "engines": 3}
            for number in range(2)
        ],
        "models": [{"name": name, "path": "a"} for name in names],
        "engine": {"adapter": "fake", "static": "1MiB"},
        "frontend": {"port": port},
    }
    for file in ("prism.yaml", "other.yaml", "fake.yaml"):
        (shell.folder / file).write_text(yaml.safe_dump(data))
    write_trace(shell.folder / "trace.jsonl", [a_request(0.1 * n, "ab"[n % 2]) for n in range(6)])
    run_page(page, shell, f"http://127.0.0.1:{port}")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", REAL, ids=lambda page: page.path)
def test_the_commands_of_a_page_run_on_real_engines(page: Page, shell: Shell) -> None:
    shutil.copytree(ROOT / "examples", shell.folder / "examples")
    for name in ("traces", "lab"):
        (shell.folder / name).symlink_to(ROOT / name)
    run_page(page, shell)


def test_every_how_to_page_with_commands_is_known() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    pages = next(part["How-to"] for part in site["nav"] if "How-to" in part)
    named = {f"docs/{page}" for page in pages if not page.startswith("project/")}
    with_commands = {page for page in named if any(commands(ROOT / page))}
    known = {page.path for page in (*ON_FAKES, *REAL)} | set(SKIPPED)
    assert with_commands <= known
