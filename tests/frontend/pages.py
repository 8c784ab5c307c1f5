"""Example status of a cluster: two devices, models in all states, one with a hostile name.
External servers may be added."""

from __future__ import annotations

import time

from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus, Decision
from prism.messages.external import ClientShare, ExternalServer, ServerLoad

GIB = 1 << 30
HOSTILE = '<img src="x" onerror="document.title=1">'


def model(name: str, gib: float, used: float, cached: float = 0.0, **more: object) -> ModelReport:
    kv_gib = used + cached + 0.4
    return ModelReport(
        name,
        "active",
        static_bytes=int(gib * GIB),
        kv_mapped_bytes=int(kv_gib * GIB),
        kv_cached_bytes=int(cached * GIB),
        kv_idle_bytes=int(0.4 * GIB),
        **more,  # type: ignore[arg-type]
    )


def device(name: str, *models: ModelReport, held: float = 1.5) -> AgentReport:
    shown = sum(m.static_bytes + m.kv_mapped_bytes for m in models)
    return AgentReport(
        device=name,
        epoch=1,
        time_unix_s=time.time(),
        capacity_bytes=80 * GIB,
        page_bytes=2 << 20,
        reserved_bytes=shown + int(held * GIB),
        committed_bytes=shown,
        resident_bytes=shown,
        engines_free=1,
        engines_starting=0,
        engines_total=4,
        models=list(models),
    )


def busy(llama_used_gib: float = 12.0) -> ClusterStatus:
    now_s = time.time()
    agents = [
        device(
            "cuda:0",
            model("llama-3.1-8b", 15.6, llama_used_gib, 4.2, running=17, waiting=3),
            model("qwen2.5-7b", 14.3, 5.0, 1.5, running=6),
            model("gemma-2-2b", 5.2, 0.8, running=1),
        ),
        device(
            "cuda:1",
            model("mistral-nemo-12b", 23.1, 9.0, 2.2, running=9),
            model("phi-4-mini", 7.7, 1.1, 0.6, running=2),
            ModelReport("deepseek-r1-7b", "activating", static_bytes=6 * GIB),
            model(HOSTILE, 2.0, 0.5),
        ),
    ]
    loaded, room = "it is to be resident", "idle for 182 s; mistral-nemo-12b needs 24.6 GiB"
    relief, waits = "KVPR falls from 0.84 to 0.41", "2 requests wait for it"
    decisions = [
        Decision(now_s - 640, "activate", "llama-3.1-8b", "cuda:0", "", loaded, "", 3.1),
        Decision(now_s - 300, "evict", "smollm2-1.7b", "cuda:1", "", room, "", 0.4),
        Decision(now_s - 297, "migrate", "phi-4-mini", "cuda:0", "cuda:1", relief, "", 2.2),
        Decision(now_s - 65, "activate", HOSTILE, "cuda:1", "", HOSTILE, HOSTILE, 0.9),
        Decision(now_s - 2, "activate", "deepseek-r1-7b", "cuda:1", "", waits),
    ]
    return ClusterStatus(
        time_unix_s=now_s,
        policy="prism",
        placement={m.model: a.device for a in agents for m in a.models},
        agents=agents,
        models=["base", *(m.model for a in agents for m in a.models), "deepseek-v3"],
        kvpr={"cuda:0": 0.41, "cuda:1": 0.23},
        unplaced={"deepseek-v3": 4},
        refusals={"deepseek-v3": "its weights (671 GiB) are larger than any device"},
        ready=True,
        decisions=decisions,
        degraded={"cuda:1": "engine e2 was replaced: it held more memory than it leased"},
    )


def share(device: str, held: float, limit: float | None = None) -> ClientShare:
    return ClientShare(
        namespace="gpus",
        device=device,
        client="rank",
        number=1,
        pid=1,
        held_bytes=int(held * GIB),
        evictable_bytes=int(held * GIB / 4),
        static_bytes=16 * GIB,
        min_bytes=2 * GIB,
        limit_bytes=None if limit is None else int(limit * GIB),
        own_min_bytes=2 * GIB,
        own_limit_bytes=None,
    )


def external() -> list[ExternalServer]:
    """Returns a limited server of two ranks, one that fails, and one that is not managed."""
    llama = "meta-llama/Llama-3.3-70B-Instruct"
    reason = "its 14 open requests want 21.5GiB with a TPOT SLO of 50 ms, and get up to 12GiB"
    return [
        ExternalServer(
            llama,
            "http://127.0.0.1:30001",
            load=ServerLoad(14, 9000),
            clients=[share("cuda:0", 5.8, 6.0), share("cuda:1", 5.8, 6.0)],
            reason=reason,
        ),
        ExternalServer(llama, "http://127.0.0.1:30002", HOSTILE, clients=[share("cuda:2", 1.0)]),
        ExternalServer(
            "qwen3-coder",
            "https://gpu-7.lab.example.org:8443",
            load=ServerLoad(3, 700),
            unmanaged="it is on another machine",
        ),
        ExternalServer("phi-4", "http://127.0.0.1:30003", asleep=True),
    ]
