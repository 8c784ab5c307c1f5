"""SGLang's own capture and replay of decode graphs, at our time, on the double of torch's front:
its graphs record kernels and run them at replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.on_cuda import facts_of

pytestmark = pytest.mark.sglang

SCRIPT = """
    import msgspec
    from prism.messages.engine import ActivateEngine
    from tests.sglang.models import greedy, spec_of
    core.activate(ActivateEngine(spec_of(LLAMA), max_running=2))
    graphs = core._active.graphs
    runner = graphs._runner
    replays, replay = [], runner.backend.replay

    def counted(key, batch, **named):
        replays.append(key.size)
        return replay(key, batch, **named)

    runner.backend.replay = counted

    def serve(count):
        asked = prompts(LLAMA, count, (5, 30))
        for index, prompt in enumerate(asked):
            item = request(LLAMA, f"r{index}", prompt, 0.0)
            sampling = msgspec.structs.replace(item.sampling, max_tokens=4)
            core.submit([msgspec.structs.replace(item, sampling=sampling)])
        output = life.run()
        return [greedy(LLAMA, p, 4) == output[f"r{i}"] for i, p in enumerate(asked)]

    facts["at_activation"] = [list(runner.capture_bs), len(graphs.captures_s)]
    facts["eager"] = [serve(2), len(replays)]
    facts["captured"] = [runner.capture_bs, len(core.status().captures_s)]
    facts["by_graph"] = [serve(2), sorted(set(replays))]
    core.shrink()
    usage = life.ledger.usage()
    facts["returned"] = usage.committed_bytes == core._active.memory.kv.floor_bytes()
    facts["on_other_pages"] = [serve(2), serve(1), sorted(set(replays))]
    del graphs, runner, replay, counted
    core.deactivate()
    facts["left"] = torch.cuda.memory_reserved(0)
"""


def test_answers_by_graphs_are_the_same_on_whatever_pages(tmp_path: Path) -> None:
    facts = facts_of(SCRIPT, tmp_path, "triton", "lazy")
    assert facts["at_activation"] == [[], 0]
    assert facts["eager"] == [[True, True], 0]
    assert facts["captured"] == [[1, 2], 2]
    assert facts["by_graph"][0] == [True, True]
    assert 2 in facts["by_graph"][1]
    assert facts["returned"]
    assert facts["on_other_pages"] == [[True, True], [True], [1, 2]]
    assert facts["left"] <= 4 << 20  # two of the smallest segments, of modules and generators
