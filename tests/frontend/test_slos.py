"""SLOs of requests: bounds of what they may ask for, and shedding while others are late."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from prism.queueing.server import BundledRedis
from tests.frontend.conftest import ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering

BODY = {"model": "base", "prompt": "x", "temperature": 0}


async def test_bounds_and_shedding(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, shed=True)
    models = [
        msgspec.structs.replace(m, slo_ttft_s=0.3, slo_least_ttft_s=0.05, slo_least_tpot_s=0.02)
        for m in config.models
    ]
    async with stack_of(msgspec.structs.replace(config, models=models)) as stack:
        post = stack.client.post
        refused = await post("/v1/completions", json=BODY | {"slo_ttft_ms": 49})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo_ttft_ms")
        assert "slo_ttft_ms: 49 is below the 50 that may be asked for" in refused.text
        refused = await post("/v1/completions", json=BODY | {"slo_tpot_ms": 19.5})
        assert "slo_tpot_ms: 19.5 is below the 20 that may be asked for" in refused.text
        # The agent is silent: this one misses its 60 ms, and is late after the model's 300 ms.
        tight = BODY | {"slo_ttft_ms": 60, "slo_tpot_ms": 20}
        late = asyncio.create_task(post("/v1/completions", json=tight))
        log = stack.services.dispatcher.log
        while not stack.agent.seen:
            await asyncio.sleep(0.01)
        [asked] = stack.agent.seen
        assert asked.slo_ttft_s == 0.06
        assert log.late("base", asked.arrival_unix_s + 0.29, 0.3) == 0
        while not log.late("base", time.time(), 0.3):
            await asyncio.sleep(0.01)
        shed = await post("/v1/completions", json=BODY)
        assert (shed.status_code, shed.headers["retry-after"]) == (429, "2")
        assert shed.json()["error"]["code"] == "shed"
        assert "1 requests for base wait beyond their TTFT SLO" in shed.text
        # Another model is served, and so is this one when nothing is late any more.
        stack.agent.script = answering([*ids_of("yes"), 0])
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
        assert (await post("/v1/chat/completions", json=chat)).status_code == 200
        late.cancel()
        while len(log):
            await asyncio.sleep(0.01)
        assert (await post("/v1/completions", json=BODY)).status_code == 200
        # The one that was late counts, though it never had a token; the one that was shed does not.
        missed = 'prism_slo_total{frontend="f0",met="false",model="base",slo="ttft"} 1.0'
        assert missed in (await stack.client.get("/metrics")).text
