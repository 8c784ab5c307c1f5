"""Mistakes of users: one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main
import yaml

from tests.frontend.tiny_model import make_whole_model


def prism_serve(*arguments: str, cwd: Path, tmp: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command. `tmp` is its temporary directory, so that it finds no other cluster."""
    command = [sys.executable, "-c", "from prism.cli.serve import main; main()", *arguments]
    environment = {**os.environ, "TMPDIR": str(tmp), "HOME": str(cwd)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_whole_model(tmp_path / "a")
    data = {
        "devices": [{"name": "host:0", "capacity": "16MiB", "page": "64KiB"}],
        "models": [{"name": "a", "path": "a"}],
        "engine": {"adapter": "fake", "static": "1MiB"},
        "frontend": {"port": 0},
    }
    (tmp_path / "prism.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def test_check_prints_what_fits(folder: Path, short_dir: Path) -> None:
    done = prism_serve("check", cwd=folder, tmp=short_dir)
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM float32" in done.stdout
    assert "host:0" in done.stdout


@pytest.mark.parametrize("command", ["check", "up"])
def test_the_yaml_is_an_argument_or_an_option(folder: Path, short_dir: Path, command: str) -> None:
    (folder / "other.yaml").write_text("devises: []\n")
    for given in (["other.yaml"], ["-c", "other.yaml"], ["./other.yaml", "-c", "other.yaml"]):
        done = prism_serve(command, *given, cwd=folder, tmp=short_dir)
        check_refused(done, "other.yaml: devises: unknown key", short_dir)
    done = prism_serve(command, "prism.yaml", "-c", "other.yaml", cwd=folder, tmp=short_dir)
    check_refused(done, "--config: other.yaml cannot be combined with prism.yaml", short_dir)


def test_stop_is_called_down(short_dir: Path, tmp_path: Path) -> None:
    for options in ([], ["--run-dir", "/tmp/a"]):
        done = prism_serve("stop", *options, cwd=tmp_path, tmp=short_dir)
        check_refused(done, "stop: is not a command; did you mean 'prism-serve down'?", short_dir)


def check_refused(done: subprocess.CompletedProcess[str], message: str, tmp: Path) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp.iterdir()) == []


def test_a_wrong_key(folder: Path, short_dir: Path) -> None:
    (folder / "prism.yaml").write_text("devises: []\nmodels: []\n")
    done = prism_serve(cwd=folder, tmp=short_dir)
    check_refused(done, "prism.yaml: devises: unknown key; did you mean 'devices'?", short_dir)


def test_no_file(short_dir: Path, tmp_path: Path) -> None:
    done = prism_serve(cwd=tmp_path, tmp=short_dir)
    check_refused(done, "--config: is missing, and prism.yaml does not exist here", short_dir)


def test_a_port_in_use(folder: Path, short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = prism_serve("--port", str(port), cwd=folder, tmp=short_dir)
    message = f"frontend.port: cannot listen on 127.0.0.1:{port}: Address already in use; choose"
    check_refused(done, message, short_dir)


def change(folder: Path, old: str, new: str) -> None:
    path = folder / "prism.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_check_finds_what_would_fail_at_the_start(folder: Path, short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = prism_serve("check", "--port", port, cwd=folder, tmp=short_dir)
    check_refused(done, f"frontend.port: cannot listen on 127.0.0.1:{port}", short_dir)
    done = prism_serve("check", "--host", "192.0.2.1", cwd=folder, tmp=short_dir)
    check_refused(done, "frontend.host: '192.0.2.1' is not an address", short_dir)
    whole = (folder / "prism.yaml").read_text()
    (folder / "prism.yaml").write_text(f"{whole}redis: redis://127.0.0.1:1\n")
    check_refused(
        prism_serve("check", cwd=folder, tmp=short_dir), "redis: Redis does not answer", short_dir
    )
    (folder / "prism.yaml").write_text(whole)


@pytest.mark.parametrize("command", ["check", "up"])
def test_a_weight_store_that_cannot_be(folder: Path, short_dir: Path, command: str) -> None:
    change(folder, "adapter: fake", "adapter: fake\n  weight_store: prism.yaml/store")
    done = prism_serve(command, cwd=folder, tmp=short_dir)
    check_refused(done, "engine.weight_store: ", short_dir)
    assert "is not a folder; choose another folder, auto or off" in done.stderr


@pytest.mark.parametrize("command", ["check", "up"])
def test_more_memory_than_the_machine_has(folder: Path, short_dir: Path, command: str) -> None:
    change(folder, "16MiB", "900TiB")
    done = prism_serve(command, cwd=folder, tmp=short_dir)
    check_refused(done, "devices[].capacity: 900TiB for host devices exceed the", short_dir)


@pytest.mark.parametrize("command", ["check", "up"])
def test_a_model_that_sglang_does_not_know(folder: Path, short_dir: Path, command: str) -> None:
    change(folder, "adapter: fake", "adapter: sglang")
    config = json.loads((folder / "a" / "config.json").read_text())
    for changes, message in (
        ({"model_type": "foo"}, 'model_type "foo", a family whose sizes are not known'),
        ({"model_type": "falcon"}, "model_type 'falcon', which SGLang engines do not serve"),
        ({"architectures": ["FooForCausalLM"]}, "names FooForCausalLM, which the installed SGLang"),
    ):
        (folder / "a" / "config.json").write_text(json.dumps(config | changes))
        done = prism_serve(command, cwd=folder, tmp=short_dir)
        check_refused(done, "models[0].path: ", short_dir)
        assert message in done.stderr


@pytest.mark.parametrize("command", ["check", "up"])
@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_sglang_does_not_have(
    folder: Path, short_dir: Path, command: str, key: str
) -> None:
    """Refuses a parser with which each request would fail."""
    change(folder, "adapter: fake", "adapter: sglang")
    change(folder, "name: a\n", f"name: a\n  {key}: qwen33\n")
    done = prism_serve(command, cwd=folder, tmp=short_dir)
    known = "qwen, qwen25, qwen3_coder" if key == "tool_parser" else "qwen3, qwen3-thinking"
    check_refused(
        done, f"models[0].{key}: 'qwen33' is unknown; give auto, none or one of", short_dir
    )
    assert f", {known}, " in done.stderr


def test_ctrl_c_leaves_no_traceback_at_any_time(folder: Path, short_dir: Path) -> None:
    # A traceback from before the command begins is this script's.
    code = (
        "import traceback\n"
        "from prism.cli.commands import serve\n"
        "try:\n    print(flush=True)\n    serve()\n"
        "except KeyboardInterrupt as error:\n"
        "    if any(f.name == '_run' for f in traceback.extract_tb(error.__traceback__)):\n"
        "        raise\n"
    )
    for later_s in (0.0, 0.1, 0.3, 0.6, 1.0):
        with subprocess.Popen(
            [sys.executable, "-c", code, "check"], cwd=folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(short_dir)},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(later_s)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, (later_s, errors)
        assert process.returncode in (0, -signal.SIGINT, 130)


def test_a_port_out_of_range(folder: Path, short_dir: Path) -> None:
    done = prism_serve("--port", "70000", cwd=folder, tmp=short_dir)
    check_refused(done, "--port: 70000 is not a valid port", short_dir)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_of_another_machine(folder: Path, short_dir: Path, host: str) -> None:
    done = prism_serve("--host", host, cwd=folder, tmp=short_dir)
    check_refused(done, f"frontend.host: '{host}' is not an address of this machine", short_dir)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://:sec/ret@h:1", "redis: is not a Redis URL"),
        ("redis://:sec/ret@h:1", "redis: the URL cannot be read; write redis://:PASSWORD@host"),
        ("redis://:sec-ret@h:1?pool=7", "redis: the URL cannot be read"),
    ],
)
def test_a_redis_url_that_cannot_be_read(
    folder: Path, short_dir: Path, url: str, message: str
) -> None:
    text = (folder / "prism.yaml").read_text()
    (folder / "prism.yaml").write_text(f"{text}redis: {url}\n")
    done = prism_serve(cwd=folder, tmp=short_dir)
    check_refused(done, message, short_dir)
    assert "sec" not in done.stdout + done.stderr


def test_an_engine_that_is_not_installed(folder: Path) -> None:
    text = (folder / "prism.yaml").read_text()
    (folder / "prism.yaml").write_text(text.replace("adapter: fake", "adapter: sglang"))
    code = "import sys; sys.modules['sglang'] = None; import prism.cli.serve as c; c.main()"
    for command in ("check", "up"):
        done = subprocess.run(
            [sys.executable, "-c", code, command], cwd=folder, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("error: engine.adapter: SGLang is not installed")


SUBCOMMANDS = {
    "prism.cli.serve": ("", "up", "check", "status", "activate", "evict", "prefetch", "flush"),
    "prism_replay.cli.replay": ("run", "report", "generate", "stats", "convert"),
    "prism.cli.models": ("prepare", "list"),
    "lab.demo.__main__": ("",),
}


@pytest.mark.parametrize("module", SUBCOMMANDS)
def test_every_help_text_ends_with_an_example(module: str) -> None:
    command = typer.main.get_command(importlib.import_module(module).app)
    found = getattr(command, "commands", {}) | {"": command}
    assert set(SUBCOMMANDS[module]) <= set(found)
    for name in SUBCOMMANDS[module]:
        epilog = found[name].epilog or ""
        assert re.match(r"Examples?: (prism-|python -m )", epilog), name


def test_a_redis_that_does_not_answer(folder: Path, short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (folder / "prism.yaml").read_text()
    (folder / "prism.yaml").write_text(f"{text}redis: redis://127.0.0.1:{port}\n")
    done = prism_serve(cwd=folder, tmp=short_dir)
    check_refused(done, "redis: Redis does not answer", short_dir)


def test_a_tokenizer_that_cannot_be_loaded(folder: Path, short_dir: Path) -> None:
    """Leaves no process, although others run already when the frontend finds the mistake."""
    (folder / "a" / "tokenizer.json").write_text("{}")
    for command in ("check", "up"):
        done = prism_serve(command, cwd=folder, tmp=short_dir)
        check_refused(done, "cannot load", short_dir)
        assert done.stderr.endswith("save the fast tokenizer again\n")


def test_operating_without_a_cluster(tmp_path: Path, short_dir: Path) -> None:
    for command in (["status"], ["activate", "a"], ["evict", "a"], ["prefetch", "a"], ["flush"]):
        done = prism_serve(*command, cwd=tmp_path, tmp=short_dir)
        check_refused(done, "no running prism-serve was found; start one, or", short_dir)
