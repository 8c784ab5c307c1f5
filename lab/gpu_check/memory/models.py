"""Step "models": two models in turn through store, links and arena; a killed process.

These are random bfloat16 models of transformers, of two architectures. Their logits from weights in
kvcached's pages are compared with those from torch's own memory.
"""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lab.gpu_check.driver import Driver, open_or_skip
from lab.gpu_check.kv import CUDA, ledger, map_if_room, require_kvcached, torch_or_skip
from lab.gpu_check.memory.accounting import process_figures
from lab.gpu_check.memory.peers import Peer
from lab.gpu_check.memory.probe_memory import grant_limit_s
from lab.gpu_check.report import Report, Skip, run_as_step
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES, Sizes

if TYPE_CHECKING:
    from kvcached import Client, WeightArena, WeightLinks, WeightStore

CONTEXT_TOKENS = 8192
PROMPT_TOKENS = 48
BUSY_CYCLES = 500_000_000  # a quarter of a second at 2 GHz
SLACK_BYTES = 64 * MIB
ARENA_SHARE = 0.4
LEFT_FREE_BYTES = 12 * GIB  # for two processes; a filler takes the rest
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
LARGE: dict[str, dict[str, Any]] = {  # 1.1, 1.5, 0.7 and 1.0 billion parameters
    "llama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 32000,
    },
    "lfm2": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
FAMILIES = ("llama", "qwen2")
_SMALLER: dict[str, dict[str, Any]] = {  # what else is small in the small form
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 16},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
}


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("models", __doc__, body, arguments)


def body(report: Report) -> None:
    require_kvcached()
    driver = open_or_skip()
    sizes = Sizes.of(driver.free_bytes())
    with report.check("process_figures"):
        report.fact(process_memory=process_figures(driver, sizes))
    with report.check("a_killed_process"):
        killed = killed_process(driver, sizes)
        report.fact(killed=killed)
        report.figure("killed_process", killed["granted_ms_after_death"])
    with report.check("put_waits_for_the_stream"), TemporaryDirectory() as folder:
        put_unfinished_tensor(torch_or_skip(), Path(folder))
    with report.check("models_in_turn"), ExitStack() as stack:
        cross_model(report, stack, driver, sizes)


def prepare_transformers() -> None:
    """Makes transformers importable on this machine. Raises Skip where it is missing."""
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from kvcached.engines.stand_ins import declare_torchvision_operators

    declare_torchvision_operators()


def config_of(family: str, *, is_large: bool) -> Any:
    """Returns a configuration of transformers. Raises Skip where transformers is missing."""
    prepare_transformers()
    from transformers import AutoConfig

    settings = LARGE[family] if is_large else SMALL | _SMALLER.get(family, {})
    return AutoConfig.for_model(family, max_position_embeddings=CONTEXT_TOKENS, **settings)


class Hosted:
    """Model whose parameters move from torch's memory to the store, then into pages and out again.

    Buffers (tables of rotary embeddings) stay on the GPU.
    """

    def __init__(self, torch: Any, family: str, seed: int, *, is_large: bool) -> None:
        config = config_of(family, is_large=is_large)
        from transformers import AutoModelForCausalLM

        self.torch, self.name = torch, family
        torch.manual_seed(seed)
        with torch.device(CUDA):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model = model.eval()
        self.parameters = {n: p.requires_grad_(False) for n, p in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        size = (2, PROMPT_TOKENS)
        self.prompt = torch.randint(0, config.vocab_size, size, generator=generator).to(CUDA)
        self.size_bytes = sum(p.numel() * p.element_size() for p in self.parameters.values())

    def logits(self) -> Any:
        """Returns the logits of the last token of each prompt, in CPU memory."""
        with self.torch.inference_mode():
            return self.model(self.prompt, use_cache=False).logits[:, -1].float().cpu()

    def save(self, store: WeightStore) -> float:
        """Copies the parameters from GPU memory into the store. Returns seconds."""
        from kvcached import WeightBuilder

        def put_all(builder: WeightBuilder) -> None:
            for name, parameter in self.parameters.items():
                builder.put(name, parameter.data)

        began_s = time.monotonic()
        store.get(self.key(), put_all).close()
        return time.monotonic() - began_s

    def key(self) -> Any:
        from kvcached import WeightKey

        return WeightKey(self.name, "gpu-check", "bfloat16")

    def leave(self) -> None:
        """Frees the memory of all parameters, also what torch caches of it."""
        for parameter in self.parameters.values():
            parameter.data = self.torch.empty(0, dtype=parameter.dtype, device=CUDA)
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def enter(self, store: WeightStore, client: Client, links: WeightLinks) -> WeightArena:
        """Loads the parameters from the store into pages."""
        stored = store.find(self.key())
        if stored is None:
            raise RuntimeError(f"{self.name} is not in the store")
        with stored:
            arena = client.alloc_weights(stored.layout(), self.name)
            arena.load(stored, links=links)
        for name, parameter in self.parameters.items():
            parameter.data = self.torch.from_dlpack(arena[name])
        return arena


def put_unfinished_tensor(torch: Any, folder: Path) -> None:
    """Saves a tensor that a stream has yet to fill. The store must have the new content."""
    from kvcached import WeightKey, WeightStore

    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=CUDA)
    source = torch.full((1 << 20,), 7, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    key = WeightKey("unfinished", "gpu-check", "uint8")
    store = WeightStore.open(folder, max_bytes=64 * MIB)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        tensor.copy_(source, non_blocking=True)
        with store.get(key, lambda builder: builder.put("filled", tensor)) as stored:
            content = bytes(stored.buffer("filled"))
    torch.cuda.synchronize()
    if content != b"\x07" * len(content):
        raise RuntimeError(f"{content.count(0)} of {len(content)} bytes were saved too early")


def cross_model(report: Report, stack: ExitStack, driver: Driver, sizes: Sizes) -> None:
    """Activates llama, qwen2 and llama again. Logits stay the same, and evictions free memory."""
    from kvcached import WeightStore

    torch = torch_or_skip()
    models = [
        Hosted(torch, family, seed, is_large=sizes.is_large) for seed, family in enumerate(FAMILIES)
    ]
    stored_bytes = sum(model.size_bytes for model in models)
    folder = sizes.store_folder(report.work, stored_bytes)
    path = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
    store = WeightStore.open(path, max_bytes=2 * stored_bytes + 256 * MIB)
    expected = {model.name: model.logits() for model in models}
    report.fact(model_bytes={m.name: m.size_bytes for m in models}, store=str(folder))
    report.fact(save_s={m.name: round(m.save(store), 2) for m in models})
    for model in models:
        model.leave()
    device = stack.enter_context(ledger(int(sizes.free_bytes * ARENA_SHARE) // PAGE_BYTES))
    client = stack.enter_context(device.client("models"))
    links = client.open_weight_links(threads=8 if sizes.is_large else 2)
    stack.callback(links.close)
    links_bytes = client.usage().static_bytes
    turns: list[dict[str, Any]] = []
    answers = []
    for model in (models[0], models[1], models[0]):
        facts, logits = turn(model, store, client, links, driver)
        turns.append(facts | difference(logits, expected[model.name]))
        answers.append(logits)
        report.fact(turns=turns)
    report.figure("load", turns[-1]["load_ms"] / 1e3)
    judge(turns, min(SLACK_BYTES, stored_bytes // 4))
    if not torch.equal(answers[0], answers[2]):
        raise RuntimeError(f"{models[0].name} answers otherwise the second time")
    if client.usage().static_bytes > links_bytes:
        raise RuntimeError(f"{client.usage().static_bytes} bytes stay leased after all evictions")


def turn(
    model: Hosted, store: WeightStore, client: Client, links: WeightLinks, driver: Driver
) -> tuple[dict[str, Any], Any]:
    """Activates a model, computes logits and evicts it. Returns facts and the logits."""
    free_bytes = driver.free_bytes()
    began_s = time.monotonic()
    arena = model.enter(store, client, links)
    load_s = time.monotonic() - began_s
    logits = model.logits()
    first_s = time.monotonic() - began_s
    held_bytes = free_bytes - driver.free_bytes()
    model.leave()
    arena.free()
    facts = {
        "model": model.name,
        "load_ms": round(load_s * 1e3, 1),
        "gb_per_s": round(model.size_bytes / load_s / 1e9, 2),
        "first_logits_ms": round(first_s * 1e3, 1),
        "held_bytes": held_bytes,
        "kept_bytes": free_bytes - driver.free_bytes(),
    }
    return facts, logits


def difference(found: Any, expected: Any) -> dict[str, Any]:
    """Returns how logits differ from those of plain torch."""
    return {
        "equal": bool((found == expected).all()),
        "largest_difference": float((found - expected).abs().max()),
        "largest_logit": float(expected.abs().max()),
        "same_tokens": bool((found.argmax(-1) == expected.argmax(-1)).all()),
    }


def judge(turns: list[dict[str, Any]], slack_bytes: int) -> None:
    """Raises RuntimeError for other logits, and for memory that an eviction did not free."""
    for number, facts in enumerate(turns):
        # Kernels may be chosen by alignment: a last bit of bfloat16 may differ, and no more.
        if not facts["largest_difference"] <= 0.02 * facts["largest_logit"]:
            raise RuntimeError(f"turn {number}: other logits than plain torch: {facts}")
        # The first turn keeps what libraries take once: code, workspaces.
        if number and facts["kept_bytes"] > slack_bytes:
            raise RuntimeError(f"turn {number}: the eviction did not free all memory: {facts}")


def killed_process(driver: Driver, sizes: Sizes) -> dict[str, Any]:
    """Returns the time until a second process on a ledger maps the memory of a killed one, which
    held most of it."""
    filler = 0
    if sizes.free_bytes > 2 * LEFT_FREE_BYTES:
        filler = driver.allocate(sizes.free_bytes - LEFT_FREE_BYTES)
    free_pages = driver.free_bytes() // PAGE_BYTES
    capacity, wanted = int(0.9 * free_pages), int(0.6 * free_pages)
    namespace = f"gpu-check-{uuid4().hex[:8]}"
    try:
        with ledger(capacity, namespace) as device, device.client("second") as client:
            tensor = client.alloc_virtual_tensor(wanted * PAGE_BYTES)
            with Peer(namespace, str(wanted), module="lab.gpu_check.memory.holder") as peer:
                peer.answer()
                if map_if_room(tensor, wanted * PAGE_BYTES):
                    raise RuntimeError("the ledger granted what another process holds")
                death = peer.kill_until(
                    lambda: map_if_room(tensor, wanted * PAGE_BYTES),
                    grant_limit_s(wanted * PAGE_BYTES),
                )
            tensor.unmap(0, wanted * PAGE_BYTES)
    finally:
        if filler:
            driver.free(filler)
    return {"bytes": wanted * PAGE_BYTES, **death.facts()}


if __name__ == "__main__":
    sys.exit(main())
