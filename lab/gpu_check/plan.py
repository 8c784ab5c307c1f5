"""Steps of scripts/gpu-check, in order of what is learned per second."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Step:
    """Module with `main`, which runs in a separate process."""

    name: str
    module: str
    limit_s: float  # wall-clock time after which its processes are killed
    needs_s: float  # least time of a useful run; the step is left out where less is left
    about: str
    quick_s: float = 0.0  # limit in a quick run; 0: the step does not run there
    in_background: bool = False  # runs at the same time as the others, since it uses no GPU

    def stretched(self, factor: float) -> Step:
        """Returns the step with its times multiplied."""
        return replace(self, limit_s=factor * self.limit_s, needs_s=factor * self.needs_s)


def _step(name: str, module: str, about: str, *times_s: float) -> Step:
    limit_s, needs_s, quick_s = (*times_s, 0.0)[:3]
    return Step(name, f"lab.gpu_check.{module}", limit_s, needs_s, about, quick_s)


FACTS = _step("facts", "machine.facts", "driver, GPU, compilers, packages, limits", 60, 5, 45)
PROBE = _step("probe", "memory.probe", "what the driver grants, what each call costs", 60, 10, 40)
UNPACK = _step("unpack", "machine.unpack", "carried wheels, installed", 90, 10, 90)
BUILD = _step("build", "machine.build", "this checkout, built", 150, 20, 150)
ENGINE = _step("engine", "serving.engine", "SGLang serves two models in turn", 200, 80, 150)
ELASTIC = _step("elastic", "serving.elastic", "KV memory of an engine follows its load", 90, 60, 70)
CLUSTER = _step(
    "cluster", "serving.cluster", "prism-serve: two engines share one GPU", 170, 65, 110
)
OVERHEAD = _step("overhead", "serving.overhead", "elastic KV against a static pool", 100, 45, 60)
BENCHES = _step("benches", "memory.benches", "map and unmap, weights, attention layouts", 120, 20)
LARGE = _step("large", "serving.large", "a model of 8 billion parameters", 170, 130)
FP8 = _step("fp8", "serving.float8", "FP8 weights, and KV in FP8", 170, 90)
HYBRID = _step("hybrid", "serving.hybrid", "pools of windows and of states", 150, 90)
GRAPHS = _step("graphs", "memory.graphs", "CUDA graphs over pages that come and go", 60, 10, 30)
MODELS = _step("models", "memory.models", "two models in turn; a killed process", 90, 15, 60)
FORK = _step("fork", "memory.fork", "preload, fork, CUDA in the child", 40, 8, 30)
MPS = _step("mps", "memory.mps", "two clients of one MPS server, one killed", 60, 10, 45)
CONFORMANCE = _step("conformance", "machine.conformance", "tests/gpu", 120, 20, 60)
FAULTS = _step("faults", "memory.faults", "accesses that the GPU must refuse", 30, 5, 20)


def steps(*, carried: bool, quick: bool) -> list[Step]:
    """Returns all steps in order. The probe needs no build, so that it runs while carried wheels
    are unpacked.

    Args:
        carried: kvcached and prism come as wheels of this checkout's state. The build then checks
            only itself and comes last.
        quick: short forms of the steps, to find faults. Steps without one are left out, and a build
            that comes last runs in the background. Steps of seconds that need kvcached alone run
            while SGLang is unpacked, and what has the most parts comes before what has figures.
    """
    unpack = replace(UNPACK, in_background=True)
    build = replace(BUILD, in_background=quick and carried)
    first, last = ((), (build,)) if carried else ((build,), ())
    head, tail = (FACTS, PROBE, *first), (*last, CONFORMANCE, FAULTS)
    if quick:
        mission = (ENGINE, CLUSTER, ELASTIC, OVERHEAD, MODELS, MPS)
        order = (*head, GRAPHS, FORK, unpack, *mission, *tail)
        return [replace(step, limit_s=step.quick_s) for step in order]
    rest = (HYBRID, FP8, OVERHEAD, BENCHES, LARGE, GRAPHS, MODELS, FORK, MPS)
    return [*head, unpack, ENGINE, ELASTIC, CLUSTER, *rest, *tail]
