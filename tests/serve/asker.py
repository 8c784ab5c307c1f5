"""A client in a machine of its own: `python -m tests.serve.asker RATE SEED` asks the frontend of
that machine until its standard input is closed, and prints a line of JSON for each answer."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx

from prism.engines.fake import expected_tokens

URL = "http://127.0.0.1:8000/v1/completions"
TOKENS = 40


async def ask(client: httpx.AsyncClient, number: int, seed: int) -> None:
    prompt = [9 + seed, 8, 7 + number % 50]
    body = {"model": "a", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    found: dict[str, Any] = {"number": number, "began_s": time.monotonic(), "status": 0}
    try:
        tokens: list[int] = []
        async with client.stream("POST", URL, json=body) as answer:
            found["status"] = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += tokens_of(json.loads(line[6:]), found)
        found["right"] = tokens == expected_tokens(prompt, TOKENS)
        found["tokens"] = len(tokens)
    except httpx.HTTPError as error:
        found["error"] = repr(error)
    found["ended_s"] = time.monotonic()
    print(json.dumps(found), flush=True)


def tokens_of(event: dict[str, Any], found: dict[str, Any]) -> list[int]:
    if "error" in event:
        found["error"] = event["error"]["code"]
    return [t for choice in event.get("choices", ()) for t in choice.get("token_ids") or ()]


async def main(rate: float, seed: int) -> None:
    draw, asked = random.Random(seed), []
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with httpx.AsyncClient(timeout=170, trust_env=False) as client:
        while not over.done():
            asked.append(asyncio.create_task(ask(client, len(asked), seed)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*asked)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2])))
