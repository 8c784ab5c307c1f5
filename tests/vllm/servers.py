"""vLLM's OpenAI server, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.engines.stock import CONTEXT, Server
from tests.sglang.models import path_of
from tests.vllm.environment import variables, vllm_python

BLOCK_TOKENS = 32


class VllmServer(Server):
    """`vllm serve`: the CPU wheel's command cannot be used, so its module is started."""

    def command(self, environment: dict[str, str]) -> list[str]:
        ours = {k: v for k, v in environment.items() if k.startswith("KVCACHED_")}
        environment.clear()
        environment.update(variables() | ours)
        command = [str(vllm_python()), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(path_of(self.model)), "--served-model-name", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", str(CONTEXT), "--block-size", str(BLOCK_TOKENS)]
        command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--enforce-eager"]
        return command

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = self.post(
            "v1/completions", model=self.model, prompt=prompt, return_token_ids=True, **asked
        )
        (choice,) = json.loads(body)["choices"]
        assert choice["finish_reason"] == "length", choice
        found: list[int] = choice["token_ids"]
        return found

    def flush(self) -> None:
        self.post("reset_prefix_cache")

    def engine(self) -> psutil.Process:
        (found,) = [one for one in self.children() if "EngineCore" in one.cmdline()[0]]
        return found

    @property
    def name(self) -> str:
        return f"{self.model}:{self.engine().pid}"


def without_prefixes(model: str, folder: Path, **said: str) -> VllmServer:
    """Starts a server without a prefix cache, so that requests alone hold memory."""
    return VllmServer(model, folder, "--no-enable-prefix-caching", **said)
