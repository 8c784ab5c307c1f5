"""A mistake in a file, an option or a trace is one line that names it, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.command import CONFIG, call, line

MISTAKES = (
    ("scheduler: {migrate_running: stop}", "migrate_running: 'stop' is not one of finish, move"),
    ("policy: magic", "policy: 'magic' is not a policy; choose one of aegaeon"),
    ("policy: prsm", "policy: 'prsm' is not a policy; did you mean 'prism'?"),
    ("trace: none.jsonl", "trace: set either"),
    ("slo_scale: 0", "slo_scale: 0 must be > 0"),
    ("gpus: {type: h100, count: 1, nodes: 2}", "gpus.count: 1 GPUs on 2 nodes"),
    ("gpus: {type: h1000}", "gpus.type: gpu 'h1000': did you mean 'h100'?"),
    ("gpus: {type: mi300}", "gpus.type: gpu 'mi300': known types are a100-40"),
    ("gpus: {kind: h100}", "gpus.kind: unknown key"),
    ("engine: {kv_layout: odd}", "engine.kv_layout: 'odd'"),
    (
        "baselines: {search_rates: odd}",
        "baselines.search_rates: 'odd' is not one of mean, peak, equal",
    ),
    (
        "baselines: {static_kv: odd}",
        "baselines.static_kv: 'odd' is not one of equal, tokens, rates",
    ),
    ("baselines: {qlm_group: 0}", "baselines.qlm_group and seallm_services: must be >= 1"),
    ("baselines: {muxserve_prefill: 0}", "baselines.muxserve_prefill must be in (0, 1]"),
    ("baselines: {muxserve_adapt: 0s}", "baselines.muxserve_adapt"),
    ("baselines: {seallm_starvation: 0}", "seallm_starvation > 0"),
    ("models: []", "models: add at least one model"),
    (
        "models: [{name: a, shape: Llama-3.1-8B}, {name: b, shape: Llama-3.2-1B, device: 'gpu:2'}]",
        "models[1].device: 'gpu:2' does not exist; the GPUs are gpu:0 to gpu:1",
    ),
    ("models: [{name: a, device: ''}]", "models[0].device: '' does not exist"),
    (
        "models: [{name: a, tp: 2, device: 'gpu:0'}]",
        "models[0].device: cannot be combined with tp 2; remove the key",
    ),
    ("models: [{name: a}]", "a.shape: model 'a': known models are"),
    (
        "models: [{name: a, shape: Llama-3.1-8}]",
        "a.shape: model 'Llama-3.1-8': did you mean 'Llama-3.1-8B'?",
    ),
    (
        "models: [{name: a, shape: Llama-3.1-8B, kv_cache_dtype: fp8}]",
        "a.kv_cache_dtype: must be one of auto, bf16, fp8_e4m3, fp8_e5m2",
    ),
    ("models: [{name: a, shape: Llama-3.1-70B}]", "a: weights, engine and one request"),
    ("models: [{name: a, shape: Llama-3.1-8B, tp: 3}]", "a.tp: needs 3 GPUs"),
    ("models: [{name: a, shape: Llama-3.1-8B, tp: 0}]", "a.tp: 0 must be >= 1"),
    ("generate: {kind: odd}", "generate.kind: 'odd' is not one of production, bursty, steady"),
    (
        "generate: {preset: novita}",
        "generate.preset: needs kind bursty, and the kind is production",
    ),
    ("generate: {kind: bursty, preset: novita}", "models: preset novita needs 16 models, not 4"),
    ("generate: {kind: bursty, preset: odd}", "generate: preset 'odd' is not one of"),
    ("generate: {kind: steady, active_fraction: 1}", "generate.active_fraction: needs kind prod"),
    ("generate: {kind: steady, rate: 0}", "generate: rate: 0 must be > 0"),
    ("slo: {ttft: soon}", "slo.ttft: 'soon' is not a time"),
    ("slo: {e2e: soon}", "slo.e2e: 'soon' is not a time"),
    ("seed: -1", "seed: -1 must be >= 0"),
    ("generate: {input_median: 0}", "generate: input_median: 0 must be between 1"),
    ("generate: {output_median: -1}", "generate: output_median: -1 must be between 1"),
    ("generate: {input_median: .nan}", "generate.input_median: nan is not a finite number"),
    ("generate: {input_max: 0}", "generate: input_max: 0 must be between 1"),
    ("generate: {rate: 1.0e+30}", "more than 20,000,000 requests, the maximum"),
    ("generate: {seconds: 1.0e+30}", "generate: seconds: 1e+30 must be <= 1e+09"),
    ("generate: {gap_cv: 1.0e+200}", "generate: gap_cv: 1e+200 must be between"),
    ("generate: {kind: steady, gap_cv: 1.0e-200}", "generate: gap_cv: 1e-200 must be between"),
    ("generate: {kind: steady, alpha: 1000}", "generate: alpha: 1000 must be between 0"),
    ("rate_scale: 1.0e+30", "240 requests become more than the maximum of 20,000,000"),
    ("models: [{name: a, share: .nan}]", "models[0].share: nan is not a finite number"),
    ("models: [{name: '', shape: Llama-3.2-1B}]", "models[0].name: must not be empty"),
    ("models: [{name: a, static_share: 0}]", "models[0].static_share: 0.0 is not in (0, 1]"),
    ("models: [{name: a, static_share: 1.5}]", "models[0].static_share: 1.5 is not in (0, 1]"),
    ("models: [{name: a, static_share: .nan}]", "models[0].static_share: nan is not a finite"),
    ("models: [{name: a, kv_reserve_tokens: -1}]", "models[0].kv_reserve_tokens: -1 must be"),
    ("engine: {headroom_tokens: -1}", "engine.headroom_tokens: -1 must be >= 0"),
    ("scheduler: {migration_threshold: -0.5}", "scheduler.migration_threshold: -0.5 must be >= 0"),
    ("scheduler: {contended_requests: .nan}", "scheduler.contended_requests: nan is not a finite"),
    ("source: {format: csv}", "source: cannot be combined with generate:"),
    ("gpus: {1: 2}", "gpus.1: a key must be text"),
    (f"gpus: {'[' * 3000}", "values are nested too deeply"),
    ("models: &all [*all]", "aliases expand it to more than 1000000 values"),
    ("policy: 2026-13-45", "a value cannot be read: month must be in 1..12"),
    (f"slo: {{ttft: {'9' * 400}s}}", "s' is out of range, such as 500ms"),
    (f"gpus: {{memory: {'9' * 400}GiB}}", "GiB' is out of range, such as 512MiB"),
    ("slo: {e2e: 5}", 'slo.e2e: expected `str`, got `int`; write it as "500ms"'),
)


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    *,
    text: str,
    message: str,
) -> None:
    key = text.partition(":")[0]
    kept = [old for old in CONFIG.splitlines() if not old.startswith(key + ":")]
    if key == "models":
        kept = [old for old in kept if not old.startswith("  -")]
    config.write_text("\n".join([*kept, text]))
    assert call(monkeypatch, "run", str(config)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert str(config) in said


OPTIONS = (
    (("run", "--seed", "-1"), "seed: -1 must be >= 0"),
    (("run", "--set", "generate.seconds=["), "--set 'generate.seconds=[': line 1, column 2"),
    (("trace", "stats", "t.jsonl", "--seconds", "nan"), "--seconds nan: must be > 0"),
    (("run", "--judge", "0"), "--judge '0': every scale must be > 0"),
    (("sweep", "--out", "o", "--vary", "seed=1", "--judge", "x"), "--judge 'x': write numbers"),
    (
        ("sweep", "--out", "o", "--vary", "gpus=1,2", "--vary", "gpus.count=3"),
        "--vary 'gpus.count=3': gpus.count is given twice",
    ),
    (("sweep", "--out", "o", "--vary", "rate_scale=[1"), "--vary 'rate_scale=[1': line 1"),
    (("trace", "generate", "--models", "a", "--out", "t", "--rate", "1e30"), "20,000,000 requests"),
    (
        ("trace", "generate", "--models", "a", "--out", "t", "--input-tokens", "nan:5"),
        "token counts 'nan:5', '211:1024': must be between 1",
    ),
    (("trace", "generate", "--models", "a:nan", "--out", "t"), "models: shares must be > 0"),
)


@pytest.mark.parametrize(("asked", "message"), OPTIONS)
def test_a_wrong_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    *,
    asked: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_a_seed_below_0_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    given = ("--models", "a") if command == "generate" else ("t.jsonl",)
    assert call(monkeypatch, "trace", command, *given, "--seed", "-1", "--out", "u.jsonl") == 2
    assert "--seed" in capsys.readouterr().err


TRACES = (
    ("", "the trace is empty"),
    (line(5, model="x"), "request 1: model: 'x'"),
    (line(5, prompt=0), ":1: input_length"),
    (line(5, prompt=2**31), "request 1: input_length: 2147483648 must be <= 2147483647"),
    (line(5).replace('"output_length": 1', '"output_length": 0'), ":1: output_length"),
    (line(-5), ":1: timestamp"),
    (f"{line(5)}\n{line(4)}", ":2: timestamp: 4 is before"),
)


@pytest.mark.parametrize(("content", "message"), TRACES)
def test_a_bad_trace_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    *,
    content: str,
    message: str,
) -> None:
    (config.parent / "bad.jsonl").write_text(content)
    config.write_text(CONFIG.replace("generate: {seconds: 60, rate: 4}", "trace: bad.jsonl"))
    assert call(monkeypatch, "run", str(config)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
