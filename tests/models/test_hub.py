"""Models by a hub's name: downloads from a hub of this machine, and the line of each failure."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from prism.errors import ConfigError, ModelSourceError, NotDownloadedError, PrismError
from prism.models.hub import download_progress
from prism.models.hub.hub_model import cached, check_format, fetched, pulled, split_name
from tests.disks import small_disk
from tests.frontend.tiny_model import make_model
from tests.models.hub_server import Hub, files_of, serving
from tests.ports import free_port

NAME, TOKEN = "org/tiny", "hf_NeverToBeWritten0123456789"
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def hub(model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves `NAME`. This process and its children use this hub, with an empty cache."""
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "SGLANG_USE_MODELSCOPE"):
        monkeypatch.delenv(variable, raising=False)
    made = Hub()
    made.add(NAME, model)
    with serving(made):
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        use(monkeypatch, made.url)
        yield made
    huggingface_hub.close_session()


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def ignore(_: str) -> None: ...


def refused(name: str, kind: type[PrismError] = ConfigError) -> str:
    """Returns the line of the error."""
    with pytest.raises(kind) as caught:
        pulled(name, ignore)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def prism_models(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prism.cli.models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None, "")),
        ("a/b@v1.0", ("a/b", "v1.0", "")),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1", "")),
        ("a/b/c.gguf", ("a/b", None, "c.gguf")),
        ("a/b/c/d.gguf@v1", ("a/b", "v1", "c/d.gguf")),
        ("a/b:Q4_K_M@v1", ("a/b", "v1", "*-Q4_K_M.gguf")),
        ("model", None),
        ("/a/b", None),
        ("./b", None),
        ("~/b", None),
        (".cache/b", None),
        ("a/b/c", None),
        ("a/../b", None),
        ("a/b@", None),
        ("a/b@../../x", None),
        ("a/b c", None),
    ],
)
def test_a_hubs_name_differs_from_a_folder(
    text: str, parts: tuple[str, str | None, str] | None
) -> None:
    assert split_name(text) == parts


def test_only_what_an_engine_needs_is_downloaded_once(hub: Hub, model: dict[str, bytes]) -> None:
    other = {
        "README.md": b"#",
        "pytorch_model.bin": b"b",
        "onnx/model.onnx": b"o",
        "onnx/config.json": b"{}",
        "original/params.json": b"{}",
        "consolidated.safetensors": b"c",
        "sub/model.safetensors": b"s",
        "model.gguf": b"g",
    }
    needed = {**model, "generation_config.json": b"{}", "chat_template.jinja": b"{{ 1 }}"}
    hub.add(NAME, {**needed, **other})
    folder = pulled(NAME, ignore)
    assert files_of(folder) == needed
    hub.requests.clear()
    assert fetched(NAME, ignore) == cached(NAME) == folder
    assert hub.requests == []
    assert pulled(NAME, ignore) == folder
    assert not [each for each in hub.requests if "resolve" in each]


def test_one_file_in_gguf_is_downloaded(hub: Hub) -> None:
    files = {"config.json": b"{}", "m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"", "a.safetensors": b""}
    hub.add(NAME, {**files, "sub/m-Q4_0.gguf": b"G"})
    found = pulled(f"{NAME}/m-Q4_0.gguf", ignore)
    assert (found.name, found.read_bytes()) == ("m-Q4_0.gguf", b"GGUF")
    assert sorted(files_of(found.parent)) == ["config.json", "m-Q4_0.gguf"]
    hub.requests.clear()
    assert fetched(f"{NAME}/m-Q4_0.gguf", ignore) == found
    assert hub.requests == []
    assert pulled(f"{NAME}:Q8_0", ignore).name == "m-Q8_0.gguf"
    assert cached(f"{NAME}:Q8_0").name == "m-Q8_0.gguf"
    several = "m-Q4_0.gguf, m-Q8_0.gguf, sub/m-Q4_0.gguf"
    for name, file in ((":Q4_0", "*-Q4_0.gguf"), ("/other.gguf", "other.gguf")):
        assert refused(f"{NAME}{name}") == (
            f"{NAME} does not have one {file}; give ORG/NAME/FILE.gguf, with one of its files:"
            f" {several}"
        )
    with pytest.raises(NotDownloadedError, match=f"run prism-models pull {NAME}:Q5_0@v2$"):
        cached(f"{NAME}:Q5_0@v2")
    with pytest.raises(NotDownloadedError, match=f"run prism-models pull {NAME}/m-Q5_0.gguf$"):
        cached(f"{NAME}/m-Q5_0.gguf")
    part = f"{NAME}/m-00001-of-00002.gguf"
    assert refused(part) == f"{part} is a part of a model; give a model in one file"


def test_a_newer_commit_is_taken_by_a_pull_alone(hub: Hub, model: dict[str, bytes]) -> None:
    first = pulled(NAME, ignore)
    pinned = hub.add(NAME, {**model, "generation_config.json": b"{}"}, "v2")
    hub.add(NAME, {**model, "generation_config.json": b"{ }"})
    assert fetched(NAME, ignore) == first
    newer = pulled(NAME, ignore)
    assert newer != first
    assert cached(NAME) == newer
    hub.sent_bytes.clear()
    assert fetched(f"{NAME}@v2", ignore) == fetched(f"{NAME}@{pinned}", ignore)
    assert hub.sent_bytes == {"generation_config.json": 2}


def test_a_file_is_continued_where_it_was_cut(hub: Hub, model: dict[str, bytes]) -> None:
    """Asks for what is missing of the file, in the chunks of 10 MiB in which it is written."""
    weights = save({"x": np.zeros(25 * MIB, np.uint8)})
    hub.add(NAME, {**model, "model.safetensors": weights})
    hub.cuts["model.safetensors"] = [15 * MIB, 22 * MIB]
    folder = pulled(NAME, ignore)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.ranges == [
        f"model.safetensors bytes={10 * MIB}-",
        f"model.safetensors bytes={20 * MIB}-",
    ]
    sent_bytes = (15 + (22 - 10) - 20) * MIB + len(weights)
    assert hub.sent_bytes["model.safetensors"] == sent_bytes


def test_a_cut_pull_leaves_what_is_complete(hub: Hub, model: dict[str, bytes]) -> None:
    """Ends at once at Ctrl-C, without partial files. The next one fetches only the rest."""
    hub.stall_at = ("model.safetensors", 1000)
    command = [sys.executable, "-m", "prism.cli.models", "pull", NAME]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert hub.stalled.wait(30)
        [snapshot] = Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*")
        while len(list(snapshot.iterdir())) < len(model) - 1:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    with pytest.raises(NotDownloadedError, match=f"{NAME} is incomplete in the cache .*/hub; run"):
        cached(NAME)
    hub.stall_at = ("", 0)
    hub.sent_bytes.clear()
    done = prism_models("pull", NAME)
    assert (done.returncode, done.stdout) == (0, f"{cached(NAME)}\n")
    assert done.stderr.startswith(f"{NAME}: downloading 0.0 MB in 1 file from {hub.url} to ")
    assert done.stderr.count("\n") == 1
    assert hub.sent_bytes.keys() == {"model.safetensors"}


def test_a_terminal_shows_a_bar(hub: Hub) -> None:
    main_fd, terminal_fd = pty.openpty()
    termios.tcsetwinsize(terminal_fd, (24, 100))
    command = [sys.executable, "-m", "prism.cli.models", "pull", NAME]
    with subprocess.Popen(command, stderr=terminal_fd) as process:
        os.close(terminal_fd)
        shown = b""
        while chunk := read(main_fd):
            shown += chunk
        assert process.wait(30) == 0
    os.close(main_fd)
    assert b"100%" in shown


def read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # the last process with the terminal has ended
        return b""


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(download_progress, "_LINE_S", 0)
    huggingface_hub.utils.enable_progress_bars()  # importing transformers turns them off
    bars = download_progress.lines("a/b", 3_000_000_000, said.append)
    bar = bars(name="huggingface_hub.snapshot_download", total=0)
    bar.update(1_500_000_000)
    bar.refresh()
    bars(name="other").refresh()
    bar.close()
    assert said[-1] == "a/b: 1.5 GB of 3.0 GB"
    assert {line.partition(":")[0] for line in said} == {"a/b"}


def gated(hub: Hub) -> str:
    hub.gated.add(NAME)
    return f"{NAME} is gated; accept its licence at {hub.url}/{NAME}, and set HF_TOKEN"


def private(hub: Hub) -> str:
    hub.private.add(NAME)
    return f"{hub.url} does not have {NAME}, or it is private; correct the name, or set HF_TOKEN"


def forbidden(hub: Hub) -> str:
    hub.statuses["resolve"] = 403
    return f"{NAME} may not be read (403); ask for access at {hub.url}/{NAME}, and set HF_TOKEN"


def not_a_hub(hub: Hub) -> str:
    hub.statuses["models"] = 200
    return f"{hub.url} does not answer as a model hub; correct HF_ENDPOINT"


def gguf(hub: Hub) -> str:
    hub.add(NAME, {"config.json": b"{}", "model-Q4_0.gguf": b"GGUF", "a.bin": b""})
    return (
        f"{NAME} has its weights in GGUF; give ORG/NAME/FILE.gguf, with one of its files:"
        " model-Q4_0.gguf"
    )


def pickled(hub: Hub) -> str:
    hub.add(NAME, {"config.json": b"{}", "pytorch_model.bin": b""})
    return f"{NAME} has its weights as PyTorch's .bin, which is not served"


def mistral(hub: Hub) -> str:
    hub.add(NAME, {"params.json": b"{}", "consolidated.safetensors": b""})
    return f"{NAME} does not have config.json; give a model in the format of transformers"


REFUSALS = [gated, private, forbidden, not_a_hub, gguf, pickled, mistral]


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: fault.__name__)
def test_a_refusal_names_what_to_change(hub: Hub, fault: Callable[[Hub], str]) -> None:
    expected = fault(hub)
    assert refused(NAME).startswith(expected)
    assert not hub.sent_bytes["model.safetensors"]


def test_names_and_revisions_that_do_not_exist(hub: Hub) -> None:
    assert refused("org/none").startswith(f"{hub.url} does not have org/none, or it is private")
    assert refused(f"{NAME}@v9").startswith(f"{NAME} does not have the revision v9; correct the")
    assert refused("tiny").startswith("'tiny' is not a hub's name; write ORG/NAME")
    assert refused("org/a--b..c").startswith("org/a--b..c is not a valid name of a model")
    assert refused("org/m.gguf").startswith("org/m.gguf does not have a repository; write ORG/")


def test_a_token_is_used_and_never_written(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = [refused(NAME)]
    assert said[0] == f"{hub.url} rejects the token (401); set HF_TOKEN to a valid one"
    hub.tokens.add(TOKEN)
    said += [str(pulled(NAME, said.append)), refused("org/none"), refused(f"{NAME}@v9")]
    use(monkeypatch, f"http://user:{TOKEN}@127.0.0.1:{free_port()}")
    said.append(refused(NAME, ModelSourceError))
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\xfc")
    said.append(refused(NAME))
    assert said[-1] == "HF_TOKEN has characters that no token has; correct it"
    written = [*capfd.readouterr(), *said]
    written += [p.read_text() for p in Path(constants.HF_HUB_CACHE).rglob("*.json")]
    assert not [text for text in written if TOKEN in text]


def test_failures_of_the_network_and_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.statuses["api"] = 503
    said = refused(NAME, ModelSourceError)
    assert said == f"{NAME}: {hub.url} answered 503; try again later"
    url = f"http://127.0.0.1:{free_port()}"
    use(monkeypatch, url)
    said = refused(NAME, ModelSourceError)
    assert said.startswith(f"{NAME}: cannot reach {url}: ")
    assert said.endswith("; check the network, HF_ENDPOINT and HTTPS_PROXY")


def test_offline_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (cached, lambda name: fetched(name, ignore), lambda name: pulled(name, ignore)):
        with pytest.raises(NotDownloadedError) as caught:
            load(NAME)
        assert str(caught.value) == (
            f"{NAME} is not in the cache {constants.HF_HUB_CACHE}; unset HF_HUB_OFFLINE and run"
            f" prism-models pull {NAME}"
        )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = pulled(NAME, ignore)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert cached(NAME) == fetched(NAME, ignore) == pulled(NAME, ignore) == folder


def test_a_damaged_cache_is_incomplete(hub: Hub) -> None:
    """Finds what other programs did not download, or a disk lost."""
    folder = pulled(NAME, ignore)
    (folder / "model.safetensors").resolve().write_bytes(b"cut")
    with pytest.raises(NotDownloadedError, match=r"is incomplete: .*\.safetensors is damaged"):
        cached(NAME)
    (folder / "model.safetensors").resolve().unlink()
    assert fetched(NAME, ignore) == folder


ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": save({"lora_A": np.zeros((4, 8), np.float32)}),
}


def test_an_adapter_is_downloaded_like_a_model(hub: Hub) -> None:
    commit = hub.add("org/adapter", {**ADAPTER, "README.md": b"#", "optimizer.pt": b"o"}, "v2")
    done = prism_models("pull", "org/adapter@v2")
    folder = Path(done.stdout.strip())
    assert (done.returncode, folder.name, files_of(folder)) == (0, commit, ADAPTER)
    hub.requests.clear()
    assert fetched("org/adapter@v2", ignore) == folder
    assert hub.requests == []
    with pytest.raises(NotDownloadedError, match="org/adapter is not in the cache"):
        cached("org/adapter")
    (folder / "adapter_model.safetensors").resolve().write_bytes(b"cut")
    with pytest.raises(NotDownloadedError, match=r"is incomplete: cannot read .*; remove damaged"):
        cached("org/adapter@v2")


def test_an_adapter_without_its_weights_is_refused_in_one_line(hub: Hub) -> None:
    hub.add("org/bin", {**ADAPTER, "adapter_model.bin": b"b"} | {"adapter_model.safetensors": b""})
    assert "org/bin is incomplete: cannot read " in refused("org/bin", NotDownloadedError)
    files = {name: ADAPTER[name] for name in ("adapter_config.json",)}
    hub.add("org/old", {**files, "adapter_model.bin": b"b"})
    assert refused("org/old") == (
        "org/old has its weights as PyTorch's .bin, which is not served; give a model with"
        " *.safetensors"
    )
    assert "does not have org/none, or it is private" in refused("org/none")


def test_a_full_disk(hub: Hub, model: dict[str, bytes]) -> None:
    """Refuses what cannot fit before the first byte, and reports a disk that fills up later."""
    hub.add(NAME, {**model, "model.safetensors": bytes(8 * MIB)})
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True)
    with small_disk(cache, 2 * MIB):
        said = refused(NAME, ModelSourceError)
        assert said.startswith(f"{NAME} needs 8.4 MB, and 2.1 MB are free in {cache}; free some")
        assert not hub.sent_bytes
        hub.size_shown = 1000
        said = refused(NAME, ModelSourceError)
        assert said.startswith(f"{NAME}: {cache} is full; free some space, or set HF_HOME to a")
        assert not list(cache.rglob("*.incomplete"))


def test_modelscope_is_selected_as_in_sglang(
    hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="modelscope is not installed; run pip install modelsc"):
        cached(NAME)
    monkeypatch.delitem(sys.modules, "modelscope")
    monkeypatch.syspath_prepend(str(modelscope(tmp_path / "packages", tmp_path / "ms")))
    with pytest.raises(NotDownloadedError, match=f"{NAME}@v1 is not in the cache of ModelScope"):
        cached(f"{NAME}@v1")
    with pytest.raises(ModelSourceError, match="ModelScope's download failed: no such repository"):
        fetched(NAME, ignore)
    make_model(tmp_path / "ms" / NAME)
    assert cached(NAME) == fetched(NAME, ignore) == tmp_path / "ms" / NAME
    assert hub.requests == []
    for name in [name for name in sys.modules if name.startswith("modelscope")]:
        monkeypatch.delitem(sys.modules, name)


def modelscope(packages: Path, cache: Path) -> Path:
    """Writes the part of modelscope that is used. Returns the folder of its packages."""
    code = f"""
from pathlib import Path
from modelscope_hub.errors import HubError

def snapshot_download(model_id, revision, local_files_only=False, **_):
    folder = Path({str(cache)!r}) / model_id
    if not folder.exists():
        raise HubError("no such\\nrepository")
    return str(folder)
"""
    for file, text in (
        ("modelscope/__init__.py", ""),
        ("modelscope/hub/__init__.py", ""),
        ("modelscope/hub/snapshot_download.py", code),
        ("modelscope_hub/__init__.py", ""),
        ("modelscope_hub/errors.py", "class HubError(Exception): ..."),
    ):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_text(text)
    return packages


def test_formats_of_a_folder() -> None:
    check_format(["config.json"], "x")
    check_format(["a.gguf", "model.safetensors"], "x")
    check_format(["a.gguf", "a.bin"], "x")
    with pytest.raises(ConfigError, match=r"x has its weights as PyTorch's .bin, which is not"):
        check_format(["config.json", "a.bin"], "x")


def test_the_help_has_examples() -> None:
    done = prism_models("pull", "--help")
    assert "prism-models pull Qwen/Qwen3-0.6B" in " ".join(done.stdout.split())


def test_commands_start_without_huggingface_hub() -> None:
    code = "import sys, prism.cli.serve, prism.config.resolve, prism.cli.models as m; sys.exit("
    code += "'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
