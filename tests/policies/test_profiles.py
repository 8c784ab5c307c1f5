"""Input of placement searches from a cluster's view."""

from __future__ import annotations

import pytest

from prism.policies import profiles
from prism.policies.data import Degree, Traffic
from prism.policies.placement import Hosted, Unit
from tests.policies.clusters import active, gpu, model, view


def traffic(requests: int, rps: float, prompt: float = 0.0, output: float = 0.0) -> Traffic:
    return Traffic(requests=requests, mean_rps=rps, prompt_tokens=prompt, output_tokens=output)


def test_sizes_are_of_the_whole_model_at_its_largest_degree() -> None:
    degrees = {1: Degree(105, 2, 10), 2: Degree(114, 3, 12)}
    spread = model("a", 105, 10, token_bytes=2, share_bytes=5, degrees=degrees)
    plain = model("b", 40, 7)
    gpus = [gpu("g0", node="n"), gpu("g1", engines_free=2), gpu("dead", alive=False)]
    found = profiles.problem(view([spread, plain], gpus))
    [a, b] = found.models
    assert (a.weight_bytes, a.share_bytes, a.held_bytes(2)) == (104, 5, 114)
    assert (a.token_bytes, a.kv_floor_bytes, a.tp_degrees) == (3, 12, (1, 2))
    assert (b.weight_bytes, b.share_bytes, b.tp_degrees) == (40, 0, (1,))
    devices = [(d.name, d.node, d.models_max) for d in found.devices]
    assert devices == [("g0", "n", 8), ("g1", "", 2)]


def test_measured_traffic_goes_before_what_was_expected() -> None:
    expected = traffic(0, 3.0, 100.0, 10.0)
    models = [
        active("busy", "g0", traffic=traffic(50, 2.0, 300.0, 30.0), expected=expected),
        active("new", "g0", traffic=traffic(1, 0.1, 7.0, 7.0), expected=expected),
        active("copied", "g0", traffic=traffic(50, 1.0, 200.0, 40.0)),
        active("copied", "g1", traffic=traffic(50, 1.5, 200.0, 40.0)),
        model("silent"),
    ]
    found = profiles.problem(view(models, [gpu("g0"), gpu("g1")]))
    loads = {m.name: (m.rate_rps, m.prompt_tokens, m.output_tokens) for m in found.models}
    assert loads == {
        "busy": (2.0, 300.0, 30.0),
        "new": (3.0, 100.0, 10.0),
        "copied": (2.5, 200.0, 40.0),
        "silent": (0.0, 200.0, pytest.approx(80 / 3)),
    }


def test_loads_have_the_spread_of_lengths() -> None:
    seen = Traffic(50, mean_rps=2.0, prompt_tokens=300.0, prompt_std_tokens=40.0)
    found = profiles.loads(view([active("a", "g0", traffic=seen)], [gpu("g0")]))["a"]
    assert (found.prompt_tokens, found.prompt_std_tokens) == (300.0, 40.0)
    assert (found.output_tokens, found.output_std_tokens) == (256.0, 0.0)


def test_without_any_traffic_all_models_are_equal() -> None:
    found = profiles.problem(view([model("a"), model("b", 90)], [gpu("g0")]))
    loads = {(m.rate_rps, m.prompt_tokens, m.output_tokens) for m in found.models}
    assert loads == {(profiles.EQUAL.mean_rps, 256.0, 256.0)}


def test_step_times_are_measured_or_in_relation_to_those() -> None:
    speed = Degree(100, 1, 1, prefill_tokens_per_s=500.0, step_s=0.02, request_s=0.001)
    models = [
        model("a", 100, degrees={1: speed}),
        model("twice", 200, token_bytes=2, degrees={1: Degree(200, 2, 1), 2: Degree(200, 2, 1)}),
    ]
    times = profiles.step_times(models)
    assert times.prefill_s("a", 1, 2, 250.0, 1.0) == pytest.approx(1.0)
    assert times.decode_s("a", 1, 4, 900.0, 1.0) == pytest.approx(0.024)
    assert 1.38 < times.decode_s("a", 1, 4, 900.0, 0.3) / 0.024 < 1.52  # as MuxServe measured
    assert times.prefill_s("twice", 1, 2, 250.0, 1.0) == pytest.approx(2.0)
    assert times.prefill_s("twice", 2, 2, 250.0, 1.0) == pytest.approx(1.0)
    assert times.decode_s("twice", 1, 0, 900.0, 1.0) == pytest.approx(0.04)


def test_the_present_placement_has_models_where_they_will_serve() -> None:
    models = [
        active("a", "g0", tp=2, peers=("g1",)),
        model("b", device="g0", state="activating", tp=2, peers=("g1",)),
        model("c", device="g0", state="migrating", moving_to=("g2",)),
        model("d", device="g2", state="draining"),
        model("e"),
    ]
    found = profiles.present(view(models, [gpu("g0"), gpu("g1"), gpu("g2")]))
    assert found.units == (
        Unit(("g0", "g1"), (Hosted("a"), Hosted("b"))),
        Unit(("g2",), (Hosted("c"),)),
    )
