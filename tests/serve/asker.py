"""Client that runs on a separate machine: `python -m tests.serve.asker RATE SEED`.

Sends requests until its standard input is closed, and prints a line of JSON for each answer. Like a
load balancer, the client skips a frontend that refuses or does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx

from prism.engines.fake import expected_tokens

PROMPTS = 50
_ROUNDS = 30


async def ask(client: httpx.AsyncClient, number: int, options: argparse.Namespace) -> None:
    prompt = [9 + options.seed, 8, 7 + number % PROMPTS]
    model = options.models[number % len(options.models)]
    body = {"model": model, "prompt": prompt, "max_tokens": options.tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "temperature": 0}
    found: dict[str, Any] = {"number": number, "model": model, "prompt": prompt}
    found |= {"began_s": time.monotonic(), "passed_over": 0, "status": 0}
    tokens: list[int] = []
    for turn in range(_ROUNDS if len(options.urls) > 1 else 1):
        url = options.urls[(number + turn) % len(options.urls)]
        if await answered(client, f"{url}/v1/completions", body, tokens, found):
            break
        found["passed_over"] += 1
        await asyncio.sleep(0.2)
    found["right"] = tokens == expected_tokens(prompt, options.tokens)
    found |= {"tokens": len(tokens), "ids": tokens, "ended_s": time.monotonic()}
    print(json.dumps(found), flush=True)


async def answered(
    client: httpx.AsyncClient, url: str, body: Any, tokens: list[int], found: dict[str, Any]
) -> bool:
    """Returns whether the frontend accepted the request."""
    found.pop("error", None)
    try:
        async with client.stream("POST", url, json=body) as answer:
            found["status"] = answer.status_code
            if answer.status_code == 503:
                return False
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += tokens_of(json.loads(line[6:]), found)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        found["error"] = repr(error)
        return False
    except httpx.HTTPError as error:
        found["error"] = repr(error)
    return True


def tokens_of(event: dict[str, Any], found: dict[str, Any]) -> list[int]:
    if "error" in event:
        found["error"] = event["error"]["code"]
    return [t for choice in event.get("choices", ()) for t in choice.get("token_ids") or ()]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rate", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("--urls", nargs="+", default=["http://127.0.0.1:8000"])
    parser.add_argument("--models", nargs="+", default=["a"])
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    patience = httpx.Timeout(170, connect=2)
    draw, asked = random.Random(options.seed), list[asyncio.Task[None]]()
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with httpx.AsyncClient(timeout=patience, trust_env=False) as client:
        while not over.done():
            asked.append(asyncio.create_task(ask(client, len(asked), options)))
            await asyncio.sleep(draw.expovariate(options.rate))
        await asyncio.gather(*asked)


if __name__ == "__main__":
    asyncio.run(main())
