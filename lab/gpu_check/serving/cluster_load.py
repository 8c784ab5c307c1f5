"""Load of the step "cluster", in a process that has Prism's packages.

    python -m lab.gpu_check.serving.cluster_load PLAN.json OUT.json

Each model gets bursts alone, then both get bursts in turn, then an engine is killed under load.
OUT.json has all measurements so far at every moment, and "finished" at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from kvcached import ClientUsage, Device
from prism_replay.live.client import Endpoint, Sender, Stream, StreamEvent, connect
from prism_replay.trace import TraceRequest

FIRST_ID = 256  # of prompts: ids below are special tokens and bytes
LOOK_S = 0.002
STATUS_S = 0.25
CALM_S = 1.5  # without a new graph
REPORT_S = 12.0
CAPTURED = '"graph captured"'
KILL_AT = 0.25  # of the requested tokens
SAMPLE_S = 0.02
SERIES_S = 0.5
WATCH_S = 0.002
GONE_S = 30.0


@dataclass
class Peaks:
    """Peaks of the KV pages that a model held, and that its requests used."""

    held_bytes: int = 0
    used_bytes: int = 0

    def take(self, client: ClientUsage) -> None:
        self.held_bytes = max(self.held_bytes, client.committed_bytes)
        free_bytes = client.spare_bytes + client.evictable_bytes
        self.used_bytes = max(self.used_bytes, client.committed_bytes - free_bytes)


@dataclass
class KvMemory:
    """Samples of the KV memory of each model, taken by a thread between `start` and `stop`.

    Peaks are kept for each phase.
    """

    device: Device
    models: Mapping[str, str]  # name of the ledger's client -> model of its engine
    phase: str = ""  # of the load now
    peaks: dict[str, dict[str, Peaks]] = field(default_factory=dict)
    series: list[dict[str, Any]] = field(default_factory=list)
    _given: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Returns peaks by phase and model, the bytes that each model gave to the other, and KV
        bytes over time."""
        peaks = {
            phase: {model: vars(found) for model, found in sorted(models.items())}
            for phase, models in self.peaks.copy().items()
        }
        return {"peaks": peaks, "given_bytes": dict(self._given), "series": list(self.series)}

    def _run(self) -> None:
        began_s = shown_s = time.monotonic()
        while not self._over.wait(SAMPLE_S):
            clients = {
                self.models[client.name]: client
                for client in self.device.usage().clients
                if client.name in self.models
            }
            self._take(clients)
            if (now_s := time.monotonic()) >= shown_s:
                shown_s = now_s + SERIES_S
                held = {model: client.committed_bytes for model, client in clients.items()}
                self.series.append({"s": round(now_s - began_s, 2), "phase": self.phase, **held})

    def _take(self, clients: Mapping[str, ClientUsage]) -> None:
        found = self.peaks.setdefault(self.phase, {})
        for model, client in clients.items():
            found.setdefault(model, Peaks()).take(client)
            self._given[model] = max(self._given[model], client.given_bytes)


@dataclass
class Watch:
    """Watch for the memory of an engine. Create it while the engine lives, and call `run` in a
    thread once the engine is killed."""

    device: Device
    pid: int
    held_bytes: int = field(init=False)
    _free_bytes: int | None = field(init=False)
    _is_named: bool = field(init=False)

    def __post_init__(self) -> None:
        usage, memory = self.device.usage(), self.device.driver_memory()
        named = [p for p in memory.processes if p.pid == self.pid] if memory else []
        own = [c for c in usage.clients if c.pid == self.pid]
        leased_bytes = sum(c.committed_bytes + c.static_bytes for c in own)
        self._free_bytes = memory.free_bytes if memory else None
        self._is_named = bool(named)
        self.held_bytes = (named[0].used_bytes if named else None) or leased_bytes

    def run(self, killed_s: float) -> dict[str, Any]:
        """Returns the seconds from the kill until the ledger and the driver have the memory. None
        stands for what did not happen, or cannot be seen."""
        found: dict[str, Any] = dict.fromkeys(("ledger_s", "driver_s"))
        wanted = ["ledger_s", *(["driver_s"] if self._free_bytes is not None else [])]
        while wanted and time.monotonic() - killed_s < GONE_S:
            for name in tuple(wanted):
                if self._is_in_ledger() if name == "ledger_s" else self._is_in_driver():
                    found[name] = round(time.monotonic() - killed_s, 4)
                    wanted.remove(name)
            time.sleep(WATCH_S)
        return found | {"held_bytes": self.held_bytes, "is_named": self._is_named}

    def _is_in_ledger(self) -> bool:
        return all(client.pid != self.pid for client in self.device.usage().clients)

    def _is_in_driver(self) -> bool:
        """Returns whether the driver has the engine's memory.

        A driver that names processes has dropped the engine then. Otherwise a third of the lease
        must be free, before the next engine takes it. A lease is more than the memory held.
        """
        memory = self.device.driver_memory()
        if memory is None or self._free_bytes is None:
            return False
        if self._is_named:
            return all(process.pid != self.pid for process in memory.processes)
        return memory.free_bytes >= self._free_bytes + self.held_bytes // 3


@dataclass
class Answer(Stream):
    """Stream with its tokens and the times of their events."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def take(self, event: StreamEvent, now_s: float) -> None:
        super().take(event, now_s)
        ids = [token for choice in event.choices for token in choice.token_ids or ()]
        if ids:
            self.token_ids += ids
            self.times_s.append(now_s)

    def facts(self, began_s: float) -> dict[str, Any]:
        return {
            "ttft_s": None if self.first_s is None else round(self.first_s - began_s, 4),
            "tpot_s": None if self.tpot_ms is None else round(self.tpot_ms / 1e3, 5),
            "tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "error": f"{self.error}: {self.message}" if self.error else None,
        }


Prompt = list[int]
Prompts = dict[str, list[Prompt]]  # by model
Answers = dict[str, list[Answer]]
Watching = asyncio.Task[dict[str, Any]]


class Load:
    """Requests for the cluster of a plan, and their results. For one event loop."""

    def __init__(self, plan: dict[str, Any], out: Path, http: httpx.AsyncClient) -> None:
        self.plan, self._out, self._http = plan, out, http
        self._sender = Sender(http, plan["request_s"])
        self._device = Device.open(plan["device"], namespace=plan["namespace"])
        self._memory = KvMemory(self._device, {})
        self.found: dict[str, Any] = {"bursts": []}

    async def run(self) -> None:
        """Runs all phases."""
        hosted = await self._hosted()
        self._memory.models = {report["engine_id"]: model for model, report in hosted.items()}
        self.found["activations"] = {name: each["stages_s"] for name, each in hosted.items()}
        usage = self._device.usage()
        self.found["kv_capacity_bytes"] = usage.capacity_bytes - usage.static_bytes
        self._memory.start()
        try:
            await self._alone()
            await self._in_turn()
            self.found["after_bursts"] = await self._agent()
            await self._death()
        finally:
            self._memory.stop()
        self.found["after_death"] = await self._replaced()
        self._write(finished=True)

    async def _alone(self) -> None:
        """Sends two bursts to each model. The first compiles and captures graphs, the second
        counts."""
        for model in self.plan["models"]:
            await self._burst("first", model)
            await self._calm()
            await self._burst("alone", model)

    async def _in_turn(self) -> None:
        until_s = time.monotonic() + self.plan["alternate_s"]
        while True:
            for model in self.plan["models"]:
                await self._burst("turn", model)
            if time.monotonic() >= until_s:
                return

    async def _burst(self, phase: str, model: str) -> None:
        """Sends all requests of a burst at once."""
        self._memory.phase = f"{phase} {model}"
        began_s = time.monotonic()
        prompts = self._prompts(f"{phase} {len(self.found['bursts'])}", model, "burst")
        answers = await asyncio.gather(*self._ask(model, "burst", prompts, []))
        last_s = max((answer.last_s or began_s) for answer in answers)
        self.found["bursts"].append(
            {
                "phase": phase,
                "model": model,
                "seconds": round(last_s - began_s, 4),
                "answers": [answer.facts(began_s) for answer in answers],
            }
        )
        self._write()

    async def _death(self) -> None:
        """Loads both models at once and kills the first one's engine. If the plan has it, the same
        load runs undisturbed before."""
        prompts = {model: self._prompts("death", model, "kill") for model in self.plan["models"]}
        victim = next(iter(prompts))
        undisturbed = await self._undisturbed(prompts) if self.plan["undisturbed"] else {}
        answers, death = await self._disturbed(prompts, victim)
        self.found["kill"] = death | {
            "victim": victim,
            "prompts": prompts[victim],
            "streams": {
                model: [
                    answer.facts(death["began_s"])
                    | {
                        "token_ids": answer.token_ids,
                        "undisturbed_ids": before.token_ids if before else None,
                        "times_s": [round(s - death["killed_s"], 4) for s in answer.times_s],
                    }
                    for answer, before in zip_longest(answers[model], undisturbed.get(model, []))
                ]
                for model in prompts
            },
        }
        self._write()

    async def _undisturbed(self, prompts: Prompts) -> Answers:
        self._memory.phase = "undisturbed"
        answers, asked = self._ask_both(prompts)
        await asyncio.gather(*asked)
        return answers

    async def _disturbed(self, prompts: Prompts, victim: str) -> tuple[Answers, dict[str, Any]]:
        self._memory.phase = "kill"
        began_s = time.monotonic()
        answers, asked = self._ask_both(prompts)
        death, watching = await self._kill(victim, answers[victim])
        await asyncio.gather(*asked)
        return answers, {"began_s": began_s} | death | await watching

    def _ask_both(self, prompts: Prompts) -> tuple[Answers, list[asyncio.Task[Answer]]]:
        answers: Answers = {model: [] for model in prompts}
        asked = [
            asyncio.create_task(one)
            for model in prompts
            for one in self._ask(model, "kill", prompts[model], answers[model])
        ]
        return answers, asked

    async def _kill(self, victim: str, answers: list[Answer]) -> tuple[dict[str, Any], Watching]:
        pid = (await self._hosted())[victim]["engine_pid"]
        watch = Watch(self._device, pid)
        wanted = KILL_AT * self.plan["kill"]["output_tokens"]
        while min(len(answer.token_ids) for answer in answers) < wanted:
            if all(answer.error or answer.finish_reason for answer in answers):
                raise RuntimeError(f"the streams of {victim} ended before its engine was killed")
            await asyncio.sleep(LOOK_S)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        watching = asyncio.create_task(asyncio.to_thread(watch.run, killed_s))
        tokens = [len(answer.token_ids) for answer in answers]
        return {"pid": pid, "killed_s": killed_s, "tokens_at_kill": tokens}, watching

    def _prompts(self, seed: str, model: str, kind: str) -> list[Prompt]:
        draw, size = random.Random(f"{seed} {model}"), self.plan[kind]
        ids = range(FIRST_ID, self.plan["models"][model])
        return [draw.choices(ids, k=size["prompt_tokens"]) for _ in range(size["streams"])]

    def _ask(
        self, model: str, kind: str, prompts: list[Prompt], answers: list[Answer]
    ) -> list[Coroutine[Any, Any, Answer]]:
        """Returns a coroutine for each prompt, and adds its answer to `answers` at once."""
        output_tokens = self.plan[kind]["output_tokens"]
        answers += [Answer() for _ in prompts]

        async def one(prompt: Prompt, answer: Answer) -> Answer:
            request = TraceRequest(
                timestamp=0, model=model, input_length=len(prompt), output_length=output_tokens
            )
            await self._sender.receive(request, prompt, answer)
            return answer

        return [one(*pair) for pair in zip(prompts, answers, strict=True)]

    async def _calm(self) -> None:
        """Waits until no graph was captured for a while, or for `settle_s`."""
        began_s = changed_s = time.monotonic()
        captured = -1
        while time.monotonic() - began_s < self.plan["settle_s"]:
            if (now := self._captured()) != captured:
                captured, changed_s = now, time.monotonic()
            if time.monotonic() - changed_s > CALM_S:
                break
            await asyncio.sleep(STATUS_S)
        self.found["graphs"] = self._captured()

    def _captured(self) -> int:
        trace = Path(self.plan["trace"])
        return trace.read_text().count(CAPTURED) if trace.exists() else 0

    async def _replaced(self) -> dict[str, Any]:
        """Returns the agent's report once it has the new engine, or after REPORT_S. The scheduler
        publishes reports that are seconds old."""
        kill, until_s = self.found["kill"], time.monotonic() + REPORT_S
        while True:
            agent = await self._agent()
            [victim] = [each for each in agent["models"] if each["model"] == kill["victim"]]
            is_there = victim["state"] == "active" and victim["engine_pid"] != kill["pid"]
            if is_there or time.monotonic() > until_s:
                return agent
            await asyncio.sleep(STATUS_S)

    async def _agent(self) -> dict[str, Any]:
        answer = await self._http.get("/status", timeout=10.0)
        answer.raise_for_status()
        [agent] = answer.json()["agents"]
        return dict(agent)

    async def _hosted(self) -> dict[str, dict[str, Any]]:
        """Returns the reports of the models by name."""
        return {report["model"]: report for report in (await self._agent())["models"]}

    def _write(self, *, finished: bool = False) -> None:
        content = self.found | self._memory.facts() | ({"finished": True} if finished else {})
        partial = self._out.with_suffix(".part")
        partial.write_text(json.dumps(content))
        os.replace(partial, self._out)


async def main(plan: dict[str, Any], out: Path) -> None:
    async with connect(Endpoint(plan["url"])) as http:
        await Load(plan, out, http).run()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
