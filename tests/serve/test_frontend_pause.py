"""Frontend that is suspended for longer than agents wait for its heartbeat.

Each open stream ends whole, or with an error code after a correct beginning.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from prism.engines.fake import expected_tokens
from tests.serve.conftest import Cluster, serving, until

COUNT = 200
SLOW = json.dumps({"decode_step_ms": 40})


def agent_log(cluster: Cluster) -> str:
    return (cluster.log.parent / "logs" / "agent-host0.log").read_text()


async def stream(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "a", "prompt": prompt, "max_tokens": COUNT, "ignore_eos": True, **more}
    body |= {"stream": True, "return_token_ids": True}
    got: dict[str, Any] = {"prompt": prompt, "ids": [], "error": None, "done": False}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            got["done"] |= line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                got["error"] = event.get("error")
                for choice in event.get("choices", []):
                    got["ids"] += choice["token_ids"]
    return got


async def pause_under_load(cluster: Cluster) -> list[dict[str, Any]]:
    """Suspends the frontend under twelve greedy and twelve sampled streams, some of which run."""
    frontend = cluster.child("prism.frontend")
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        prompts = [[20 + i] * 8 for i in range(24)]
        jobs = [
            asyncio.create_task(stream(client, prompt, temperature=i % 2))
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(1.0)
        os.kill(frontend, signal.SIGSTOP)
        try:
            gone = "does not have a heartbeat: its requests are cancelled"
            await asyncio.to_thread(until, lambda: gone in agent_log(cluster), gone)
        finally:
            os.kill(frontend, signal.SIGCONT)
        return list(await asyncio.gather(*jobs))


def test_no_stream_hangs_behind_a_pause(tmp_path: Path) -> None:
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path, Path(temporary), SLOW) as cluster,
    ):
        answers = asyncio.run(pause_under_load(cluster))
    for answer in answers:
        assert answer["done"]
        assert answer["error"] is None
        assert answer["ids"] == expected_tokens(answer["prompt"], COUNT)
