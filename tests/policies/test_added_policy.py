"""A package adds a policy: the example plans, serves a simulated cluster, and takes its knobs from
the YAML; one that is broken, or takes a name that is taken, is named and harms no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.policy_knobs import own_knobs
from prism.errors import ConfigError
from prism.policies import prism, registry
from prism.policies.data import Action, Activate, Evict, Refuse
from prism.policies.policy import Policy
from prism_replay.outcomes import PointOutcome
from prism_sim.api import run_scenario
from prism_sim.cluster.world import World
from prism_sim.scenario.scenario import load
from prism_sim.sweeps import points
from prism_sim.sweeps.points import Point
from tests.policies.clusters import SETTINGS, active, gpu, model, view
from tests.policies.installed import importable, install_example, write_package
from tests.sim.command import call

NAME = "least-loaded"
CONFIG = """
gpus: {type: h100, count: 2, memory: 40GiB}
models: [{name: a, shape: Llama-3.1-8B, count: 6}]
generate: {seconds: 60, rate: 2}
"""
GOOD = """
from functools import partial
from prism.policies import prism
from prism.policies.policy import Policy, PolicyKnobs

POLICY = Policy("good", prism.plan, frozenset())

class Knobs(PolicyKnobs, frozen=True):
    depth: int = 1

def other(knobs: Knobs) -> Policy:
    return Policy("other", prism.plan, frozenset({"wings"}))

def picky(knobs: Knobs) -> Policy:
    if knobs.depth > 1:
        raise ValueError("depth: at most 1")
    return Policy("picky", prism.plan, frozenset())

def no_policy(knobs: Knobs):
    return 5

def no_knobs(depth: int):
    return POLICY
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("package"))


@pytest.fixture
def policy(site: Path) -> Iterator[Policy]:
    with importable(site):
        yield registry.get(NAME)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def test_it_goes_where_least_is_to_do(policy: Policy) -> None:
    busy = active("x", "a", running=3)
    (action,) = policy.plan(view([busy, model("m", waiting=1)], [gpu("a"), gpu("b")]), SETTINGS)
    assert isinstance(action, Activate)
    assert action.device == "b"


def actions_when_full(policy: Policy, **waits: int) -> tuple[Action, ...]:
    resident = [active("x", "a", idle_s=20.0), active("y", "a", idle_s=30.0)]
    full = gpu("a", 100, free_bytes=0)
    return policy.plan(view([*resident, model("m", **waits)], [full]), SETTINGS)


def test_the_least_recently_used_model_makes_room_for_a_request(policy: Policy) -> None:
    (evict,) = actions_when_full(policy, waiting=1)
    assert isinstance(evict, Evict)
    assert evict.model == "y"
    (refuse,) = actions_when_full(registry.with_knobs(policy, own(keep_s=31)), waiting=1)
    assert isinstance(refuse, Refuse)


def own(**values: object) -> registry.PolicyKnobs | None:
    return own_knobs(NAME, {NAME: values})


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({NAME: {"keep_s": "long"}}, r"knobs\.least-loaded\.keep_s: expected `float`, got `str`"),
        ({NAME: {"keep_s": -1}}, r"knobs\.least-loaded: must not be negative"),
        ({NAME: {"keeps": 1}}, r"knobs\.least-loaded\.keeps: unknown key; did you mean 'keep_s'"),
        ({"prism": {"tau": 1}}, r"knobs\.prism: this policy does not have knobs"),
        ({"mine": {}}, r"knobs\.mine: unknown policy; install its package"),
    ],
)
def test_wrong_knobs_are_named(
    policy: Policy, config: Path, knobs: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml: " + says):
        load(config, {"knobs": knobs})


def test_a_simulated_cluster_serves_with_it_and_its_knobs(policy: Policy, config: Path) -> None:
    evictions = []
    for keep_s in (1, 1000):
        given = {"policy": NAME, "knobs": {NAME: {"keep_s": keep_s}}, "gpus.count": 1}
        scenario = load(config, given)
        records = World(scenario.setup, scenario.work).run()
        assert records.ended == len(scenario.work)
        evictions.append(records.counts.get("evicted", 0))
    assert evictions[0] > evictions[1] == 0


def test_the_command_lists_it_and_takes_its_name(
    policy: Policy,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "policies") == 0
    assert "least-loaded: elastic memory (package prism-least-loaded)\n" in capsys.readouterr().out
    out = tmp_path / "out"
    both = ("--policies", f"{NAME},prism", "--set", f"knobs.{NAME}.keep_s=0.5")
    assert call(monkeypatch, "run", str(config), *both, "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "least-loaded, prism on 2 x h100" in said
    assert {path.name for path in out.iterdir()} == {NAME, "prism"}
    assert (out / NAME / "decisions.csv").read_text().count("the device has ") >= 6


def test_knobs_that_the_policy_itself_refuses_are_found_before_the_start(
    tmp_path: Path, config: Path
) -> None:
    write_package(tmp_path, "pkg", GOOD, "picky = pkg:picky")
    deep = {"policy": "picky", "knobs": {"picky": {"depth": 2}}}
    with importable(tmp_path):
        points.refuse_mistakes([Point(str(config), {"policy": "picky"})])
        with pytest.raises(ConfigError, match=r"knobs\.picky: depth: at most 1"):
            points.refuse_mistakes([Point(str(config), deep)])


RECORDS = (
    "",  # of a package whose files are not known
    "pkg.py,,\npkg_helper.py,,\npkg_table.json,,\npkg-1.dist-info/RECORD,,\n",
)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("file", ["pkg.py", "pkg_helper.py", "pkg_table.json"])
def test_an_edited_policy_is_simulated_again(
    tmp_path: Path, config: Path, *, file: str, record: str
) -> None:
    site = tmp_path / "site"
    write_package(site, "pkg", GOOD, "good = pkg:POLICY")
    (site / "pkg_helper.py").write_text("DEPTH = 1\n")
    (site / "pkg_table.json").write_text("{}\n")
    if record:
        (site / "pkg-1.dist-info" / "RECORD").write_text(record)
    point = Point(str(config), {"policy": "good"})
    keys = []
    for text in ("", "\n"):
        (site / file).write_text((site / file).read_text() + text)
        with importable(site):
            keys.append(points._key(point, PointOutcome))
    assert (keys[0] != keys[1]) == (bool(record) or file.endswith(".py"))


def test_other_packages_files_are_not_the_policys(tmp_path: Path) -> None:
    write_package(tmp_path, "pkg", GOOD, "good = pkg:POLICY")
    write_package(tmp_path, "other", "")
    listed = "pkg.py,,\n__pycache__/pkg.cpython-311.pyc,,\ngone.py,,\n"
    (tmp_path / "pkg-1.dist-info" / "RECORD").write_text(listed)
    with importable(tmp_path):
        assert registry.sources("good") == (tmp_path / "pkg.py",)


def test_what_a_policy_raises_while_it_runs_has_its_packages_name(
    tmp_path: Path, config: Path
) -> None:
    code = GOOD.replace("prism.plan, ", "lambda view, settings: {}['gpu:99'], ", 1)
    write_package(tmp_path, "pkg", code, "good = pkg:POLICY")
    with importable(tmp_path), pytest.raises(KeyError, match="gpu:99") as caught:
        run_scenario(load(config, {"policy": "good"}))
    assert caught.value.__notes__ == ["the policy was 'good' of the package pkg"]


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        ("1 / 0", "mine = bad:POLICY", r"\(bad:POLICY\): ZeroDivisionError: division by zero"),
        ("", "mine = bad:POLICY", r"AttributeError: module 'bad' has no attribute 'POLICY'"),
        ("", "mine = gone:POLICY", r"ModuleNotFoundError: No module named 'gone'"),
        (GOOD, "mine = bad:POLICY", r"its Policy has the name 'good'; use the same name"),
        (GOOD, "mine = bad:GOOD", r"AttributeError"),
        (GOOD, "mine = bad:other", r"needs 'wings'; the features are"),
        (GOOD, "mine = bad:no_policy", r"returns int, not a Policy"),
        (GOOD, "mine = bad:no_knobs", r"is neither a Policy nor a function of one PolicyKnobs"),
    ],
)
def test_a_broken_package_is_named_and_breaks_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    code: str,
    entry: str,
    says: str,
) -> None:
    write_package(tmp_path, "bad", code, entry)
    write_package(tmp_path, "pkg", GOOD, "good = pkg:POLICY")
    with importable(tmp_path):
        with pytest.raises(ConfigError, match=r"policy: 'mine' of the package bad.*" + says):
            registry.get("mine")
        assert registry.get("good").plan is prism.plan
        assert call(monkeypatch, "policies") == 0
    listed = capsys.readouterr()
    assert "good:" in listed.out
    assert "mine:" not in listed.out
    assert re.search(says, listed.err)


def test_a_name_that_is_taken_is_refused_by_name(
    tmp_path: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_package(tmp_path, "first", GOOD, "prism = first:POLICY", "good = first:POLICY")
    write_package(tmp_path, "second", GOOD, "good = second:POLICY")
    with importable(tmp_path):
        assert registry.get("prism").plan is prism.plan
        (line,) = registry.refused()
        assert "'prism' of the package first" in line
        assert call(monkeypatch, "run", str(config), "--rate-scale", "0.1") == 0
        assert line in capsys.readouterr().err
        with pytest.raises(ConfigError, match="'good' is in several packages: first, second"):
            registry.get("good")
