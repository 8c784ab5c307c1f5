"""Stock servers, as a user starts them, for the tests of every engine's adapter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port
from tests.sglang.models import path_of

CONTEXT = 512


class Server(ABC):
    """Server on the device that the variables name; without variables, on none."""

    def __init__(self, model: str, folder: Path, *arguments: str, **said: str) -> None:
        self.model = model
        self.port = free_port()
        self._log = folder / f"{model}.{self.port}.log"
        ours = ("SGLANG_", "KVCACHED_", "VLLM_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment |= {f"KVCACHED_{name}": value for name, value in said.items()}
        environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command(environment), *arguments],
                cwd=folder,  # not the checkout, which has no compiled core in it
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @abstractmethod
    def command(self, environment: dict[str, str]) -> list[str]:
        """Returns the command that starts the server; adds variables to `environment`."""

    @abstractmethod
    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Returns `tokens` greedy tokens after the prompt."""

    @abstractmethod
    def flush(self) -> None:
        """Drops cached prefixes."""

    @abstractmethod
    def engine(self) -> psutil.Process:
        """Returns the process that has the model and its KV."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The client's."""

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=900) as answer:
            return answer.read()

    def answers(self, asked: list[list[int]], tokens: int) -> list[list[int]]:
        """Returns the outputs of prompts that are sent at the same time."""
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens), asked))

    def await_ready(self) -> None:
        def ready() -> bool:
            assert not self.ended(), self.log()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60)
            except OSError:
                return False
            return True

        until(ready, 600)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def end(self) -> None:
        """Engines remove their own files in shared memory if they are asked to end."""
        processes: list[Any] = [self._process]
        if self._process.poll() is None:
            processes += self.children()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, condition
        time.sleep(0.01)


class SGLangServer(Server):
    """`python -m sglang.launch_server`, on a machine without Triton."""

    def command(self, environment: dict[str, str]) -> list[str]:
        command = [sys.executable, "-W", "ignore", "-m", "kvcached.engines.sglang.launch"]
        command += ["--model-path", str(path_of(self.model)), "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        command += ["--context-length", str(CONTEXT), "--chunked-prefill-size", "64"]
        return [*command, "--skip-server-warmup"]

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(self.post("generate", input_ids=prompt, sampling_params=sampling))
        assert answer["meta_info"]["finish_reason"]["type"] == "length", answer
        found: list[int] = answer["output_ids"]
        return found

    def flush(self) -> None:
        self.post("flush_cache")

    def engine(self) -> psutil.Process:
        (found,) = [one for one in self.children() if "sglang::scheduler" in one.cmdline()[0]]
        return found

    @property
    def name(self) -> str:
        return f"{self.model}:{self.port}"
