"""Draws of an activation, which compile kernels. A failure is a warning, and the engine serves."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prism.engines.ranks.group import ALONE, RankGroup
from prism.errors import RankLostError
from prism.messages.engine import ActivateEngine
from tests.engines.harness import request
from tests.sglang.conftest import run
from tests.sglang.models import LLAMA, greedy, spec_of
from tests.sglang.on_cuda import facts_of

pytestmark = pytest.mark.sglang

PROMPT = [5, 6, 7]
Sample = Callable[..., Any]
Said = Callable[[], list[str]]


class Voting(RankGroup):
    """Rank whose other ranks vote as given."""

    def __init__(self, *others: int) -> None:
        super().__init__(0, 1, ())
        self.others = list(others)

    def least(self, value: int) -> int:
        return min(value, self.others.pop(0))


@pytest.fixture
def draw(idle: Any) -> Iterator[Sample]:
    """Calls `warm_up.sample` on an active model, as an activation on a GPU does."""
    import torch

    from prism.engines.sglang.scheduling import warm_up

    idle.activate(ActivateEngine(spec_of(LLAMA)))

    def sample(ranks: RankGroup = ALONE) -> Any:
        warm_up.sample(idle._active.scheduler, idle._active.order, ranks)
        return idle

    with torch.compiler.set_stance("default"):
        yield sample


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles SGLang's draw, as on a GPU, by a compiler that fails."""
    import torch
    from sglang.srt.layers import sampler

    def broken(*_: object) -> Any:
        raise FileNotFoundError("no C compiler is here")

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    made = torch.compile(sampler.multinomial_with_seed, dynamic=True, backend=broken)
    monkeypatch.setattr(sampler, "multinomial_with_seed", made)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Returns the engine's warnings."""

    def warnings() -> list[str]:
        found = [record for record in caplog.records if record.name == "prism.engine"]
        assert {record.levelno for record in found} <= {logging.WARNING}
        return [record.getMessage() for record in found]

    return warnings


def answers(core: Any, temperature: float) -> None:
    """Asserts that requests are answered, and that the draw left no memory, which SGLang checks in
    an idle step."""
    scheduler, kv = core._active.scheduler, core._active.memory.kv
    assert scheduler.is_fully_idle()
    assert scheduler.req_to_token_pool.available_size() == scheduler.req_to_token_pool.size
    scheduler.step()
    chunks, failures = run(core, [request("r", LLAMA, PROMPT, 4, temperature=temperature)])
    assert not failures
    tokens = [token for chunk in chunks["r"] for token in chunk.token_ids]
    assert len(tokens) == 4
    assert temperature or tokens == greedy(LLAMA, PROMPT, 4)
    core.shrink()
    assert kv.live_blocks() == 0


def test_tokens_are_drawn_alone_and_in_a_batch(draw: Sample, core: Any) -> None:
    scheduler = core._active.scheduler
    sizes = []
    run_batch = scheduler.run_batch

    def noted(batch: Any) -> Any:
        sizes.append((batch.batch_size(), batch.sampling_info.is_all_greedy))
        return run_batch(batch)

    scheduler.run_batch = noted
    draw()
    del scheduler.run_batch
    assert sizes == [(1, False), (2, False), (2, False)]


def test_a_compiler_that_fails_is_left_off(compiled: None, draw: Sample, said: Said) -> None:
    core = draw()
    first, second = said()
    assert first.startswith(f"model {LLAMA} cannot draw tokens at random (BackendCompilerFailed: ")
    assert "no C compiler is here" in first
    assert second == f"model {LLAMA}: torch.compile is off in this engine from now on"
    answers(core, temperature=0.0)
    answers(core, temperature=1.0)
    draw()
    assert len(said()) == 2


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_draw_that_fails_without_the_compiler_too_is_a_warning(
    draw: Sample, said: Said, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    from sglang.srt.layers import sampler
    from torch._dynamo import eval_frame

    real, calls = sampler.multinomial_with_seed, []

    def broken(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) <= after:
            return real(*arguments)
        raise RuntimeError("no kernel\nfor this GPU")

    monkeypatch.setattr(sampler, "multinomial_with_seed", broken)
    core = draw()
    failed = f"model {LLAMA} cannot draw tokens at random (RuntimeError: no kernel for this GPU)"
    served = f"model {LLAMA} is served, but its requests with sampling may fail"
    assert said() == [failed, failed, served]
    assert eval_frame._stance.stance == "default"  # torch.compile stays on
    answers(core, temperature=0.0)


def test_a_draw_without_tokens_has_failed(
    draw: Sample, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.engines.sglang.scheduling import warm_up
    from prism.engines.sglang.scheduling.scheduler import Emission

    found = [Emission("warm-up/0", [], "abort", "broken logits")]
    monkeypatch.setattr(warm_up, "_answers", lambda *_: found)
    draw()
    reason = "SelfCheckError: the draw gave no tokens: broken logits"
    assert said()[0] == f"model {LLAMA} cannot draw tokens at random ({reason})"


def test_a_draw_without_memory_is_an_error(draw: Sample, said: Said, core: Any) -> None:
    import torch

    def no_memory(batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    core._active.scheduler.run_batch = no_memory
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory."):
        draw()
    assert core._active.scheduler.is_fully_idle()
    del core._active.scheduler.run_batch
    with pytest.raises(torch.OutOfMemoryError, match="another rank"):
        draw(Voting(1, -1))
    assert not said()


def test_all_ranks_repeat_the_draw_of_one(draw: Sample, said: Said) -> None:
    core = draw(ranks := Voting(1, 0, 1, 1, 1))
    assert not ranks.others
    assert said() == [f"model {LLAMA}: torch.compile is off in this engine from now on"]
    answers(core, temperature=0.0)


def test_a_rank_that_is_gone_ends_the_draw(draw: Sample, said: Said, core: Any) -> None:
    def gone(batch: Any) -> Any:
        raise RankLostError("rank 1 is gone")

    core._active.scheduler.run_batch = gone
    with pytest.raises(RankLostError):
        draw()
    assert not said()


PAIR = """
    import contextlib, json, os, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    import msgspec
    import kvcached
    from prism.engines import sglang
    sglang.preload()
    import torch
    from sglang.srt.layers import sampler
    from torch._dynamo import eval_frame
    from prism.engines.core import EngineContext
    from prism.engines.processes.rank_launch import launch_ranks
    from prism.engines.sglang.scheduling import warm_up
    from prism.messages.engine import ActivateEngine
    from tests.engines.harness import request
    from tests.sglang.conftest import DEVICE, config_of
    from tests.sglang.models import LLAMA, spec_of
    folder, prompt, real = Path(sys.argv[1]), [5, 6, 7], sampler.multinomial_with_seed

    def create(context):
        core, engine = sglang.create(context), context.engine_id
        activate = core.activate

        def broken(*arguments):
            if engine == "e0.1" and eval_frame._stance.stance == "default":
                raise RuntimeError("no compiler is here")
            (folder / engine).write_text(eval_frame._stance.stance)
            return real(*arguments)

        def activate_and_draw(order):
            made = activate(order)
            sampler.multinomial_with_seed = broken
            warm_up.sample(core._active.scheduler, order, context.ranks)
            return made

        core.activate = activate_and_draw
        return core

    config = config_of(folder, 256 << 20)
    [first] = config.devices
    devices = [first, msgspec.structs.replace(first, name="host:1")]
    config = msgspec.structs.replace(config, devices=devices)
    context = EngineContext("e0", DEVICE, config)
    core = launch_ranks(context, create, ["host:1"])(context)
    core.activate(ActivateEngine(spec_of(LLAMA)))
    answers = {}
    for rid, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        core.submit([request(rid, LLAMA, prompt, 4, temperature=temperature)])
        while True:
            output = core.step()
            for chunk in output.chunks:
                answers.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if not output.busy:
                break
    core.close()
    for device in devices:
        kvcached.Device.unlink(config.namespace, device.name)
    stances = [(folder / name).read_text() for name in ("e0", "e0.1")]
    print(json.dumps(answers | {"stances": stances}))
"""


def test_two_ranks_of_which_one_cannot_draw_stay_in_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PAIR), str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["stances"] == ["force_eager"] * 2
    assert facts["greedy"] == greedy(LLAMA, PROMPT, 4)
    assert len(facts["drawn"]) == 4


SCRIPT = """
    import logging, os
    from sglang.srt.layers import sampler
    warm_up.sample = sample
    handler, said = logging.Handler(), []
    handler.emit = lambda record: said.append([record.levelname, record.getMessage()])
    logging.getLogger("prism.engine").addHandler(handler)
    real = sampler.multinomial_with_seed

    def broken(*_):
        raise RuntimeError("no compiler is here")

    def answers(temperature):
        [prompt] = prompts(LLAMA, 1, (10, 14))
        core.submit([request(LLAMA, f"r{temperature}", prompt, temperature)])
        return len(life.run()[f"r{temperature}"])

    def lived(draw, *temperatures):
        said.clear()
        sampler.multinomial_with_seed = draw
        life.activate(LLAMA)
        scheduler, kv = core._active.scheduler, core._active.memory.kv
        idle, live = scheduler.is_fully_idle(), kv.live_blocks()
        made = [idle, live, [answers(t) for t in temperatures], list(said)]
        del scheduler
        core.deactivate()
        usage = life.ledger.usage()
        return made + [torch.cuda.memory_reserved(0), usage.committed_bytes]

    facts["sound"] = lived(real, 0.0, 1.0)
    facts["always"] = lived(broken, 0.0)
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    facts["once"] = lived(torch.compile(real, dynamic=True, backend=broken), 0.0, 1.0)
"""


def test_an_activation_on_a_gpu_outlives_its_draw(tmp_path: Path) -> None:
    facts = facts_of(SCRIPT, tmp_path, "torch_native", "off")
    idle, live, lengths, warnings, *left = facts["sound"]
    assert (idle, lengths, warnings) == (True, [12, 12], [])
    failed = f"model {LLAMA} cannot draw tokens at random (RuntimeError: no compiler is here)"
    served = f"model {LLAMA} is served, but its requests with sampling may fail"
    both = [["WARNING", text] for text in (failed, failed, served)]
    assert facts["always"] == [True, live, [12], both, *left]
    *same, (first, second), reserved_bytes, committed_bytes = facts["once"]
    assert same == [True, live, [12, 12]]
    assert [reserved_bytes, committed_bytes] == left
    assert first[1].startswith(failed.partition("RuntimeError")[0])
    assert second == ["WARNING", f"model {LLAMA}: torch.compile is off in this engine from now on"]
